//! Several vectors: bound by arithmetic, so a panel of weights is unpacked to f32 once and used for every vector.
//!
//! A panel is [`ROWS`] rows by [`DEPTH`] blocks and fits the first-level cache beside the piece of the vectors it meets.
//! Tiles of 3 rows by 4 vectors keep twelve sums in registers; even and odd lanes take turns, since no lane ever meets
//! another before the final tree.

use std::arch::x86_64::*;

use super::super::activations::{Activations, BLOCK, BlockLines, LANES, Line};
use super::super::weights::{GROUP, Weights, bf16_lines, f32_lines, half_factors, mxfp4_lines};
use super::{Lanes, Pair, dense_pair, mxfp4_pairs};

/// Rows of a register tile.
const TILE_ROWS: usize = 3;
/// Vectors of a register tile.
const TILE_TOKENS: usize = 4;
/// Tiles of rows in a panel.
const TILES: usize = 2;
/// Rows of a panel.
const ROWS: usize = TILES * TILE_ROWS;
/// Blocks of a panel.
const DEPTH: usize = 8;
/// Vectors that share one unpacking of the weights.
const TOKENS: usize = 64;

const GROUPS: usize = BLOCK / GROUP;

/// One block of the rows of a tile, unpacked.
#[derive(Clone, Copy)]
struct TileBlock {
    lines: [BlockLines; TILE_ROWS],
    /// MXFP4 only.
    factors: [[f32; GROUPS]; TILE_ROWS],
}

/// Running sums of a tile's rows for one vector.
type Sums = [[f64; LANES]; TILE_ROWS];

type Panel = [[TileBlock; DEPTH]; TILES];

#[target_feature(enable = "avx2,fma")]
pub(super) fn matmul(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    let empty = TileBlock {
        lines: [[Line([0.0; LANES]); BLOCK / LANES]; TILE_ROWS],
        factors: [[0.0; GROUPS]; TILE_ROWS],
    };
    let mut panel: Panel = [[empty; DEPTH]; TILES];
    let mut sums = [[[[0.0; LANES]; TILE_ROWS]; TOKENS]; TILES];
    let num_tokens = x.num_rows();
    for first_token in (0..num_tokens).step_by(TOKENS) {
        let tokens = first_token..num_tokens.min(first_token + TOKENS);
        for (first_row, out) in (0..).step_by(ROWS).zip(out.chunks_mut(ROWS * num_tokens)) {
            for tile in &mut sums {
                tile[..tokens.len()].fill([[0.0; LANES]; TILE_ROWS]);
            }
            let rows = first_row..first_row + out.len() / num_tokens;
            for first_block in (0..x.blocks_per_row()).step_by(DEPTH) {
                let blocks = first_block..x.blocks_per_row().min(first_block + DEPTH);
                let depth = blocks.len();
                for (t, tile) in panel.iter_mut().enumerate() {
                    for (r, row) in rows.clone().skip(t * TILE_ROWS).take(TILE_ROWS).enumerate() {
                        for (b, block) in blocks.clone().zip(tile.iter_mut()) {
                            unpack(w, row, b, x.cols(), block, r);
                        }
                    }
                }
                let tiles = rows.len().div_ceil(TILE_ROWS);
                let scaled = matches!(w, Weights::Mxfp4 { .. });
                let mut token = tokens.start;
                while token < tokens.end {
                    let at = token - tokens.start;
                    let count = TILE_TOKENS.min(tokens.end - token);
                    for (tile, sums) in panel[..tiles].iter().zip(&mut sums) {
                        let (tile, sums) = (&tile[..depth], &mut sums[at..at + count]);
                        match count {
                            1 => tile_sums::<1>(tile, x, token, blocks.start, sums, scaled),
                            2 => tile_sums::<2>(tile, x, token, blocks.start, sums, scaled),
                            3 => tile_sums::<3>(tile, x, token, blocks.start, sums, scaled),
                            _ => tile_sums::<4>(tile, x, token, blocks.start, sums, scaled),
                        }
                    }
                    token += count;
                }
            }
            for (r, out) in out.chunks_exact_mut(num_tokens).enumerate() {
                for (out, sums) in out[tokens.clone()].iter_mut().zip(&sums[r / TILE_ROWS]) {
                    *out = load_lanes(&sums[r % TILE_ROWS]).reduce();
                }
            }
        }
    }
}

/// Unpacks block `b` of `row` as row `r` of a tile; inputs past `cols` become zero weights.
#[target_feature(enable = "avx2,fma")]
fn unpack(w: Weights<'_>, row: usize, b: usize, cols: usize, block: &mut TileBlock, r: usize) {
    let (start, end) = (
        row * cols + b * BLOCK,
        row * cols + cols.min((b + 1) * BLOCK),
    );
    let lines = &mut block.lines[r];
    match w {
        Weights::Bf16(bytes) => match bytes[start * 2..end * 2].as_array::<{ BLOCK * 2 }>() {
            Some(bytes) => dense_lines::<2>(bytes, lines),
            None => bf16_lines(&bytes[start * 2..end * 2], lines),
        },
        Weights::F32(bytes) => match bytes[start * 4..end * 4].as_array::<{ BLOCK * 4 }>() {
            Some(bytes) => dense_lines::<4>(bytes, lines),
            None => f32_lines(&bytes[start * 4..end * 4], lines),
        },
        Weights::Mxfp4 {
            packed,
            scale,
            nan_scales,
        } => {
            let table = half_factors(nan_scales);
            block.factors[r] = [0.0; GROUPS];
            for (factor, byte) in block.factors[r]
                .iter_mut()
                .zip(&scale[start / GROUP..end / GROUP])
            {
                *factor = table[usize::from(*byte)];
            }
            let packed = &packed[start / 2..end / 2];
            if packed.len() == BLOCK / 2 {
                for (bytes, lines) in packed
                    .as_chunks::<{ GROUP / 2 }>()
                    .0
                    .iter()
                    .zip(lines.as_chunks_mut::<2>().0)
                {
                    let [first, second] = mxfp4_pairs(bytes);
                    store(first, &mut lines[0]);
                    store(second, &mut lines[1]);
                }
            } else {
                mxfp4_lines(packed, lines);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense_lines<const WIDTH: usize>(bytes: &[u8], lines: &mut BlockLines) {
    for (bytes, line) in bytes.chunks_exact(LANES * WIDTH).zip(lines) {
        store(dense_pair::<WIDTH>(bytes), line);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn store(pair: Pair, line: &mut Line) {
    let (even, odd) = line.0.split_at_mut(LANES / 2);
    // SAFETY: both halves are eight f32.
    unsafe {
        _mm256_storeu_ps(even.as_mut_ptr(), pair.even);
        _mm256_storeu_ps(odd.as_mut_ptr(), pair.odd);
    }
}

/// Adds the blocks of a tile times `N` vectors from `token` on to their sums.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tile_sums<const N: usize>(
    tile: &[TileBlock],
    x: &Activations,
    token: usize,
    first_block: usize,
    sums: &mut [Sums],
    scaled: bool,
) {
    let vectors: [&[BlockLines]; N] =
        std::array::from_fn(|t| &x.row(token + t)[first_block..][..tile.len()]);
    let sums: &mut [Sums; N] = sums.try_into().expect("one sum per vector");
    for (b, block) in tile.iter().enumerate() {
        let vectors: [&BlockLines; N] = std::array::from_fn(|t| &vectors[t][b]);
        if scaled {
            half_block_mxfp4::<N, 0>(block, vectors, sums);
            half_block_mxfp4::<N, 8>(block, vectors, sums);
        } else {
            half_block::<N, 0>(block, vectors, sums);
            half_block::<N, 8>(block, vectors, sums);
        }
    }
}

/// The eight lanes from `HALF` on of one block.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn half_block<const N: usize, const HALF: usize>(
    block: &TileBlock,
    x: [&BlockLines; N],
    sums: &mut [Sums; N],
) {
    let mut tile = [[_mm256_setzero_ps(); N]; TILE_ROWS];
    for i in 0..BLOCK / LANES {
        let mut inputs = [_mm256_setzero_ps(); N];
        for (input, x) in inputs.iter_mut().zip(x) {
            *input = half::<HALF>(&x[i]);
        }
        for (tile, lines) in tile.iter_mut().zip(&block.lines) {
            let w = half::<HALF>(&lines[i]);
            for (sum, x) in tile.iter_mut().zip(inputs) {
                *sum = _mm256_fmadd_ps(w, x, *sum);
            }
        }
    }
    carry::<N, HALF>(&tile, sums);
}

/// The same for MXFP4: the two products of a group first, then the group's factor.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn half_block_mxfp4<const N: usize, const HALF: usize>(
    block: &TileBlock,
    x: [&BlockLines; N],
    sums: &mut [Sums; N],
) {
    let mut tile = [[_mm256_setzero_ps(); N]; TILE_ROWS];
    for g in 0..GROUPS {
        for ((tile, lines), factors) in tile.iter_mut().zip(&block.lines).zip(&block.factors) {
            let (w0, w1) = (half::<HALF>(&lines[2 * g]), half::<HALF>(&lines[2 * g + 1]));
            let factor = _mm256_set1_ps(factors[g]);
            for (sum, x) in tile.iter_mut().zip(x) {
                let first = _mm256_mul_ps(w0, half::<HALF>(&x[2 * g]));
                let group = _mm256_fmadd_ps(w1, half::<HALF>(&x[2 * g + 1]), first);
                *sum = _mm256_fmadd_ps(factor, group, *sum);
            }
        }
    }
    carry::<N, HALF>(&tile, sums);
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn half<const HALF: usize>(line: &Line) -> __m256 {
    const { assert!(HALF == 0 || HALF == LANES / 2) };
    let eight: &[f32] = &line.0[HALF..HALF + 8];
    // SAFETY: eight readable f32.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn carry<const N: usize, const HALF: usize>(tile: &[[__m256; N]; TILE_ROWS], sums: &mut [Sums; N]) {
    for (r, row) in tile.iter().enumerate() {
        for (block, sums) in row.iter().zip(sums.iter_mut()) {
            let eight: &mut [f64] = &mut sums[r][HALF..HALF + 8];
            let (low, high) = eight.split_at_mut(4);
            // SAFETY: both are four f64.
            unsafe {
                _mm256_storeu_pd(
                    low.as_mut_ptr(),
                    _mm256_add_pd(_mm256_loadu_pd(low.as_ptr()), super::low_pd(*block)),
                );
                _mm256_storeu_pd(
                    high.as_mut_ptr(),
                    _mm256_add_pd(_mm256_loadu_pd(high.as_ptr()), super::high_pd(*block)),
                );
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_lanes(sums: &[f64; LANES]) -> Lanes {
    let mut lanes = Lanes::zero();
    for (lane, four) in lanes.0.iter_mut().zip(sums.as_chunks::<4>().0) {
        // SAFETY: four readable f64.
        *lane = unsafe { _mm256_loadu_pd(four.as_ptr()) };
    }
    lanes
}
