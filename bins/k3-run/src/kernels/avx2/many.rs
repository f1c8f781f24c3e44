//! Several vectors: bound by arithmetic, so a panel of weights is unpacked to f32 once and used for every vector.
//!
//! - A register tile is 3 rows by 4 vectors: twelve sums of eight lanes. Even and odd lanes take turns, since no lane ever
//!   meets another before the final tree.
//! - A panel is 6 rows by 1,024 inputs and stays in the first-level cache beside the piece of the vectors it meets.
//! - Panels of 24 rows in turn meet the same 1,024 inputs of up to 64 vectors, which so stay in the second-level cache; the f64
//!   lanes of all these results wait there too.

#![expect(
    clippy::needless_range_loop,
    reason = "a tile is indexed by row and vector alike"
)]

use std::arch::x86_64::{
    __m256, _mm256_add_pd, _mm256_fmadd_ps, _mm256_loadu_pd, _mm256_loadu_ps, _mm256_mul_ps,
    _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_pd, _mm256_storeu_ps,
};
use std::hint::black_box;
use std::ops::Range;

use super::super::activations::{Activations, BLOCK, BlockLines, LANES, Line};
use super::super::weights::{GROUP, Weights, bf16_lines, f32_lines, half_factors, mxfp4_lines};
use super::{Lanes, Pair, dense_pair, high_pd, low_pd, mxfp4_pairs};

/// Rows of a register tile.
pub(super) const TILE_ROWS: usize = 3;
/// Vectors of a register tile.
pub(super) const TILE_TOKENS: usize = 4;
/// Tiles of a panel.
const PANEL_TILES: usize = 2;
/// Rows of a panel.
const PANEL_ROWS: usize = PANEL_TILES * TILE_ROWS;
/// Blocks of a panel.
const DEPTH: usize = 8;
/// Panels whose sums are kept while the vectors stay in cache.
const PANELS: usize = 4;
/// Rows of these panels.
const ROWS: usize = PANELS * PANEL_ROWS;
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

/// Running f64 lanes of a tile's rows for one vector.
pub(super) type Sums = [[f64; LANES]; TILE_ROWS];

type Panel = [[TileBlock; DEPTH]; PANEL_TILES];

/// What a call works in: 230 KB of stack, so that nothing is allocated.
struct Scratch {
    panel: Panel,
    sums: [[[Sums; TOKENS]; PANEL_TILES]; PANELS],
}

impl Scratch {
    #[expect(
        clippy::large_stack_arrays,
        reason = "threads have 2 MB of stack, and the decode loop must not allocate"
    )]
    fn new() -> Self {
        let zero = Line([0.0; LANES]);
        let block = TileBlock {
            lines: [[zero; BLOCK / LANES]; TILE_ROWS],
            factors: [[0.0; GROUPS]; TILE_ROWS],
        };
        Self {
            panel: [[block; DEPTH]; PANEL_TILES],
            sums: [[[[[0.0; LANES]; TILE_ROWS]; TOKENS]; PANEL_TILES]; PANELS],
        }
    }
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn matmul(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    let mut scratch = Scratch::new();
    let (num_tokens, num_blocks) = (x.num_rows(), x.blocks_per_row());
    for first_token in (0..num_tokens).step_by(TOKENS) {
        let tokens = first_token..num_tokens.min(first_token + TOKENS);
        for (first_row, out) in (0..).step_by(ROWS).zip(out.chunks_mut(ROWS * num_tokens)) {
            let rows = first_row..first_row + out.len() / num_tokens;
            for tile in scratch.sums.as_flattened_mut() {
                tile[..tokens.len()].fill([[0.0; LANES]; TILE_ROWS]);
            }
            for first_block in (0..num_blocks).step_by(DEPTH) {
                let blocks = first_block..num_blocks.min(first_block + DEPTH);
                for (first, sums) in rows.clone().step_by(PANEL_ROWS).zip(&mut scratch.sums) {
                    let rows = first..rows.end.min(first + PANEL_ROWS);
                    unpack_panel(
                        w,
                        rows.clone(),
                        blocks.clone(),
                        x.cols(),
                        &mut scratch.panel,
                    );
                    let tiles = rows.len().div_ceil(TILE_ROWS);
                    let scaled = matches!(w, Weights::Mxfp4 { .. });
                    multiply_panel(
                        &scratch.panel[..tiles],
                        x,
                        tokens.clone(),
                        blocks.clone(),
                        sums,
                        scaled,
                    );
                }
            }
            let tiles = scratch.sums.as_flattened();
            for (r, out) in out.chunks_exact_mut(num_tokens).enumerate() {
                for (out, sums) in out[tokens.clone()].iter_mut().zip(&tiles[r / TILE_ROWS]) {
                    *out = load_lanes(&sums[r % TILE_ROWS]).reduce();
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
fn unpack_panel(
    w: Weights<'_>,
    rows: Range<usize>,
    blocks: Range<usize>,
    cols: usize,
    panel: &mut Panel,
) {
    for (r, row) in rows.enumerate() {
        for (b, block) in blocks.clone().zip(&mut panel[r / TILE_ROWS]) {
            unpack(w, row, b, cols, block, r % TILE_ROWS);
        }
    }
}

/// Adds `blocks` of a panel's tiles times `tokens` to their sums.
#[target_feature(enable = "avx2,fma")]
fn multiply_panel(
    panel: &[[TileBlock; DEPTH]],
    x: &Activations,
    tokens: Range<usize>,
    blocks: Range<usize>,
    sums: &mut [[Sums; TOKENS]; PANEL_TILES],
    scaled: bool,
) {
    let mut at = 0;
    while at < tokens.len() {
        let count = TILE_TOKENS.min(tokens.len() - at);
        // Past the last vector the last one stands in; its sums are not used.
        let mut vectors: [&[BlockLines]; TILE_TOKENS] = [&[]; TILE_TOKENS];
        for (t, vector) in vectors.iter_mut().enumerate() {
            *vector = &x.row((tokens.start + at + t).min(tokens.end - 1))[blocks.clone()];
        }
        for (tile, sums) in panel.iter().zip(sums.iter_mut()) {
            let (tile, sums) = (&tile[..blocks.len()], &mut sums[at..at + count]);
            match (count, scaled) {
                (1, false) => tile_dense::<1>(tile, &vectors, sums),
                (2, false) => tile_dense::<2>(tile, &vectors, sums),
                (3, false) => tile_dense::<3>(tile, &vectors, sums),
                (_, false) => tile_dense::<4>(tile, &vectors, sums),
                (1, true) => tile_mxfp4::<1>(tile, &vectors, sums),
                (2, true) => tile_mxfp4::<2>(tile, &vectors, sums),
                (3, true) => tile_mxfp4::<3>(tile, &vectors, sums),
                (_, true) => tile_mxfp4::<4>(tile, &vectors, sums),
            }
        }
        at += count;
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
            Some(bytes) => dense_lines(bytes, lines),
            None => bf16_lines(&bytes[start * 2..end * 2], lines),
        },
        Weights::F32(bytes) => match bytes[start * 4..end * 4].as_array::<{ BLOCK * 4 }>() {
            Some(bytes) => dense_lines(bytes, lines),
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
fn dense_lines<const BYTES: usize>(bytes: &[u8; BYTES], lines: &mut BlockLines) {
    for (bytes, line) in bytes.chunks_exact(BYTES / BLOCK * LANES).zip(lines) {
        store(dense_pair(bytes), line);
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

/// Adds a tile's blocks times the first `N` vectors to their sums.
#[target_feature(enable = "avx2,fma")]
fn tile_dense<const N: usize>(
    tile: &[TileBlock],
    x: &[&[BlockLines]; TILE_TOKENS],
    sums: &mut [Sums],
) {
    let sums = &mut sums[..N];
    // A loop count the compiler cannot see: unrolled, it would load far ahead and spill the sums.
    let steps = black_box(BLOCK / LANES).min(BLOCK / LANES);
    for (b, block) in tile.iter().enumerate() {
        let x = [&x[0][b], &x[1][b], &x[2][b], &x[3][b]];
        half_dense::<N, 0>(block, x, sums, steps);
        half_dense::<N, 8>(block, x, sums, steps);
    }
}

/// The eight lanes from `HALF` on of one block.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn half_dense<const N: usize, const HALF: usize>(
    block: &TileBlock,
    x: [&BlockLines; TILE_TOKENS],
    sums: &mut [Sums],
    steps: usize,
) {
    let mut tile = [[_mm256_setzero_ps(); N]; TILE_ROWS];
    for i in 0..steps {
        // Twelve sums, three weights and one input at a time are all sixteen registers.
        let w = [0, 1, 2].map(|r: usize| half::<HALF>(&block.lines[r][i]));
        for t in 0..N {
            let input = half::<HALF>(&x[t][i]);
            for r in 0..TILE_ROWS {
                tile[r][t] = _mm256_fmadd_ps(w[r], input, tile[r][t]);
            }
        }
    }
    carry::<N, HALF>(&tile, sums);
}

/// [`tile_dense`] for MXFP4.
#[target_feature(enable = "avx2,fma")]
fn tile_mxfp4<const N: usize>(
    tile: &[TileBlock],
    x: &[&[BlockLines]; TILE_TOKENS],
    sums: &mut [Sums],
) {
    let sums = &mut sums[..N];
    let groups = black_box(GROUPS).min(GROUPS);
    for (b, block) in tile.iter().enumerate() {
        let x = [&x[0][b], &x[1][b], &x[2][b], &x[3][b]];
        half_mxfp4::<N, 0>(block, x, sums, groups);
        half_mxfp4::<N, 8>(block, x, sums, groups);
    }
}

/// The two products of a group first, then the group's factor.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn half_mxfp4<const N: usize, const HALF: usize>(
    block: &TileBlock,
    x: [&BlockLines; TILE_TOKENS],
    sums: &mut [Sums],
    groups: usize,
) {
    let mut tile = [[_mm256_setzero_ps(); N]; TILE_ROWS];
    for g in 0..groups {
        for r in 0..TILE_ROWS {
            let (w0, w1) = (
                half::<HALF>(&block.lines[r][2 * g]),
                half::<HALF>(&block.lines[r][2 * g + 1]),
            );
            let factor = _mm256_set1_ps(block.factors[r][g]);
            for t in 0..N {
                let first = _mm256_mul_ps(w0, half::<HALF>(&x[t][2 * g]));
                let group = _mm256_fmadd_ps(w1, half::<HALF>(&x[t][2 * g + 1]), first);
                tile[r][t] = _mm256_fmadd_ps(factor, group, tile[r][t]);
            }
        }
    }
    carry::<N, HALF>(&tile, sums);
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn half<const HALF: usize>(line: &Line) -> __m256 {
    const { assert!(HALF == 0 || HALF == LANES / 2) };
    let eight: &[f32] = &line.0[HALF..HALF + 8];
    // SAFETY: eight readable f32.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn carry<const N: usize, const HALF: usize>(
    tile: &[[__m256; N]; TILE_ROWS],
    sums: &mut [Sums],
) {
    for t in 0..N {
        for r in 0..TILE_ROWS {
            let (block, eight) = (tile[r][t], &mut sums[t][r][HALF..HALF + 8]);
            let (low, high) = eight.split_at_mut(4);
            // SAFETY: both are four f64.
            unsafe {
                _mm256_storeu_pd(
                    low.as_mut_ptr(),
                    _mm256_add_pd(_mm256_loadu_pd(low.as_ptr()), low_pd(block)),
                );
                _mm256_storeu_pd(
                    high.as_mut_ptr(),
                    _mm256_add_pd(_mm256_loadu_pd(high.as_ptr()), high_pd(block)),
                );
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn load_lanes(sums: &[f64; LANES]) -> Lanes {
    let mut lanes = Lanes::zero();
    for (lane, four) in lanes.0.iter_mut().zip(sums.as_chunks::<4>().0) {
        // SAFETY: four readable f64.
        *lane = unsafe { _mm256_loadu_pd(four.as_ptr()) };
    }
    lanes
}
