//! A few vectors: weights are decoded in registers, once for up to four vectors, and never written back.
//!
//! Even lanes take the low half of each word or byte, odd lanes the high half, so each pass decodes only what it uses.

use std::arch::x86_64::{
    __m256, _mm_and_si128, _mm_loadu_si128, _mm_set1_epi8, _mm_setr_epi8, _mm_shuffle_epi8,
    _mm_srli_epi16, _mm_unpackhi_epi64, _mm256_and_si256, _mm256_castsi256_ps,
    _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_fmadd_ps, _mm256_loadu_si256, _mm256_mul_ps,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32,
};
use std::array;
use std::hint::black_box;

use super::super::activations::{Activations, BLOCK, BlockLines, LANES};
use super::super::weights::{GROUP, NanScales, half_factors};
use super::tile::{BlockSums, CARRIED, GROUPS, NO_SUM, Sums, carry, half, store_half};
use super::{Next, block_of, load_lanes};

/// Rows of a tile.
const ROWS: usize = 3;

/// The most vectors of bf16 this is faster for.
pub(super) const BF16_MOST: usize = 16;
/// The most vectors of MXFP4 this is faster for.
pub(super) const MXFP4_MOST: usize = 4;

/// Blocks that all vectors meet before the next ones: shorter runs of a vector are not fetched ahead by the processor.
const DEPTH: usize = 8;

const BF16: usize = BLOCK * 2;
const PACKED: usize = BLOCK / 2;

/// `out[row][t] = w[row] . x[t]` for up to [`BF16_MOST`] vectors.
#[target_feature(enable = "avx2,fma")]
pub(super) fn bf16(bytes: &[u8], x: &Activations, out: &mut [f32]) {
    let (num_tokens, row_bytes) = (x.num_rows(), x.cols() * 2);
    let mut padded = [[[0; BF16]; ROWS]; DEPTH];
    for ((tile, out), rows) in (0..)
        .zip(out.chunks_mut(ROWS * num_tokens))
        .zip(bytes.chunks(ROWS * row_bytes))
    {
        let rows = tile_rows(rows, row_bytes);
        let mut sums = [[[0.0; LANES]; ROWS]; BF16_MOST];
        for first in (0..x.blocks_per_row()).step_by(DEPTH) {
            let count = DEPTH.min(x.blocks_per_row() - first);
            let blocks = tile_blocks(rows, first, count, &mut padded);
            let next = Next::after(
                bytes,
                [row_bytes, BF16],
                ROWS,
                tile * ROWS..(tile + 1) * ROWS,
                first..first + DEPTH,
            );
            let mut at = 0;
            while at < num_tokens {
                let place = Place { x, at, first, next };
                let sums = &mut sums[at..];
                at += match num_tokens - at {
                    1 => bf16_blocks::<1>(&blocks[..count], place, sums),
                    2 => bf16_blocks::<2>(&blocks[..count], place, sums),
                    3 => bf16_blocks::<3>(&blocks[..count], place, sums),
                    _ => bf16_blocks::<4>(&blocks[..count], place, sums),
                };
            }
        }
        finish(&sums, num_tokens, out);
    }
}

/// `out[row][t] = w[row] . x[t]` for up to [`MXFP4_MOST`] vectors.
#[target_feature(enable = "avx2,fma")]
pub(super) fn mxfp4(
    packed: &[u8],
    scale: &[u8],
    nan_scales: NanScales,
    x: &Activations,
    out: &mut [f32],
) {
    let table = half_factors(nan_scales);
    let (num_tokens, row_bytes, row_scales) = (x.num_rows(), x.cols() / 2, x.cols() / GROUP);
    let mut padded = [[[0; PACKED]; ROWS]; DEPTH];
    let rows = packed
        .chunks(ROWS * row_bytes)
        .zip(scale.chunks(ROWS * row_scales));
    for ((tile, out), (rows, scales)) in (0..).zip(out.chunks_mut(ROWS * num_tokens)).zip(rows) {
        let (rows, scales) = (tile_rows(rows, row_bytes), tile_rows(scales, row_scales));
        let mut sums = [[[0.0; LANES]; ROWS]; MXFP4_MOST];
        for first in (0..x.blocks_per_row()).step_by(DEPTH) {
            let count = DEPTH.min(x.blocks_per_row() - first);
            let blocks = tile_blocks(rows, first, count, &mut padded);
            let factors = tile_factors(scales, first, table);
            let (blocks, factors) = (&blocks[..count], &factors[..count]);
            let next = Next::after(
                packed,
                [row_bytes, PACKED],
                ROWS,
                tile * ROWS..(tile + 1) * ROWS,
                first..first + DEPTH,
            );
            let mut at = 0;
            while at < num_tokens {
                let place = Place { x, at, first, next };
                let sums = &mut sums[at..];
                at += match num_tokens - at {
                    1 => mxfp4_blocks::<1>(blocks, factors, place, sums),
                    2 => mxfp4_blocks::<2>(blocks, factors, place, sums),
                    3 => mxfp4_blocks::<3>(blocks, factors, place, sums),
                    _ => mxfp4_blocks::<4>(blocks, factors, place, sums),
                };
            }
        }
        finish(&sums, num_tokens, out);
    }
}

/// Up to three rows; past the last row the first one stands in, and its sums are dropped.
fn tile_rows(bytes: &[u8], row_bytes: usize) -> [&[u8]; ROWS] {
    array::from_fn(|r| {
        bytes
            .get(r * row_bytes..(r + 1) * row_bytes)
            .unwrap_or(&bytes[..row_bytes])
    })
}

/// Blocks `first..first + count` of the rows of a tile, the rest empty.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tile_blocks<'a, const BYTES: usize>(
    rows: [&'a [u8]; ROWS],
    first: usize,
    count: usize,
    padded: &'a mut [[[u8; BYTES]; ROWS]; DEPTH],
) -> [[&'a [u8; BYTES]; ROWS]; DEPTH] {
    let mut blocks = [[&[0; BYTES]; ROWS]; DEPTH];
    for ((b, blocks), padded) in (first..first + count).zip(&mut blocks).zip(padded) {
        for ((block, row), padded) in blocks.iter_mut().zip(rows).zip(padded) {
            *block = block_of(row, b, padded);
        }
    }
    blocks
}

/// The factors of [`tile_blocks`]. An absent group has factor 0, as its weights are.
fn tile_factors(
    scales: [&[u8]; ROWS],
    first: usize,
    table: &[f32; 256],
) -> [[[f32; GROUPS]; ROWS]; DEPTH] {
    let mut factors = [[[0.0; GROUPS]; ROWS]; DEPTH];
    for (r, scales) in scales.into_iter().enumerate() {
        let groups = scales[first * GROUPS..].chunks(GROUPS);
        for (factors, bytes) in factors.iter_mut().zip(groups) {
            for (factor, byte) in factors[r].iter_mut().zip(bytes) {
                *factor = table[usize::from(*byte)];
            }
        }
    }
    factors
}

#[target_feature(enable = "avx2,fma")]
fn finish(sums: &[Sums<ROWS>], num_tokens: usize, out: &mut [f32]) {
    for (r, out) in out.chunks_exact_mut(num_tokens).enumerate() {
        for (out, sums) in out.iter_mut().zip(sums) {
            *out = load_lanes(&sums[r]).reduce();
        }
    }
}

/// Which vectors, from which block on, and what is needed after that.
#[derive(Clone, Copy)]
struct Place<'a> {
    x: &'a Activations,
    at: usize,
    first: usize,
    next: Next<'a>,
}

/// Adds the blocks `w` times `N` vectors to their sums. Returns `N`.
#[target_feature(enable = "avx2,fma")]
fn bf16_blocks<const N: usize>(
    w: &[[&[u8; BF16]; ROWS]],
    Place { x, at, first, next }: Place<'_>,
    sums: &mut [Sums<ROWS>],
) -> usize {
    let x_rows = x.num_rows();
    let x: [&[BlockLines]; N] = array::from_fn(|t| &x.row(at + t)[first..first + w.len()]);
    let mut blocks = [[[NO_SUM; ROWS]; N]; CARRIED];
    for (i, w) in w.chunks(CARRIED).enumerate() {
        let shares = x_rows.div_ceil(N) * (DEPTH / CARRIED);
        next.ask(at / N * (DEPTH / CARRIED) + i, shares);
        for (k, (w, block)) in w.iter().zip(&mut blocks).enumerate() {
            let x = x.map(|x| &x[i * CARRIED + k]);
            bf16_half_block::<N, 0>(*w, x, block);
            bf16_half_block::<N, 8>(*w, x, block);
        }
        carry(&blocks, w.len(), sums);
    }
    N
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn bf16_half_block<const N: usize, const HALF: usize>(
    w: [&[u8; BF16]; ROWS],
    x: [&BlockLines; N],
    sums: &mut BlockSums<ROWS, N>,
) {
    let mut tile = [[_mm256_setzero_ps(); N]; ROWS];
    // As in `tile`: unrolled, the sums would not stay in registers.
    for i in 0..black_box(BLOCK / LANES) {
        let i = i % (BLOCK / LANES);
        // Twelve sums, three weights and one input at a time are all sixteen registers.
        let w = w.map(|w| bf16_half::<HALF>(&w.as_chunks().0[i]));
        for t in 0..N {
            let x = half::<HALF>(&x[t][i]);
            for r in 0..ROWS {
                tile[r][t] = _mm256_fmadd_ps(w[r], x, tile[r][t]);
            }
        }
    }
    store_half::<ROWS, N, HALF>(&tile, sums);
}

/// The even (`HALF` 0) or odd weights of sixteen.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn bf16_half<const HALF: usize>(bytes: &[u8; 2 * LANES]) -> __m256 {
    // SAFETY: 32 readable bytes, and the load allows any alignment.
    let words = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    _mm256_castsi256_ps(if HALF == 0 {
        _mm256_slli_epi32::<16>(words)
    } else {
        _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()))
    })
}

/// [`bf16_blocks`] for MXFP4.
#[target_feature(enable = "avx2,fma")]
fn mxfp4_blocks<const N: usize>(
    w: &[[&[u8; PACKED]; ROWS]],
    factors: &[[[f32; GROUPS]; ROWS]],
    Place { x, at, first, next }: Place<'_>,
    sums: &mut [Sums<ROWS>],
) -> usize {
    let x_rows = x.num_rows();
    let x: [&[BlockLines]; N] = array::from_fn(|t| &x.row(at + t)[first..first + w.len()]);
    let mut blocks = [[[NO_SUM; ROWS]; N]; CARRIED];
    for (i, w) in w.chunks(CARRIED).enumerate() {
        let shares = x_rows.div_ceil(N) * (DEPTH / CARRIED);
        next.ask(at / N * (DEPTH / CARRIED) + i, shares);
        for (k, (w, block)) in w.iter().zip(&mut blocks).enumerate() {
            let x = x.map(|x| &x[i * CARRIED + k]);
            mxfp4_half_block::<N, 0>(w, &factors[i * CARRIED + k], x, block);
            mxfp4_half_block::<N, 8>(w, &factors[i * CARRIED + k], x, block);
        }
        carry(&blocks, w.len(), sums);
    }
    N
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_half_block<const N: usize, const HALF: usize>(
    w: &[&[u8; PACKED]; ROWS],
    factors: &[[f32; GROUPS]; ROWS],
    x: [&BlockLines; N],
    sums: &mut BlockSums<ROWS, N>,
) {
    let mut tile = [[_mm256_setzero_ps(); N]; ROWS];
    for g in 0..black_box(GROUPS).min(GROUPS) {
        for r in 0..ROWS {
            let [w0, w1] = mxfp4_half::<HALF>(&w[r].as_chunks().0[g]);
            let factor = _mm256_set1_ps(factors[r][g]);
            for t in 0..N {
                let first = _mm256_mul_ps(w0, half::<HALF>(&x[t][2 * g]));
                let group = _mm256_fmadd_ps(w1, half::<HALF>(&x[t][2 * g + 1]), first);
                tile[r][t] = _mm256_fmadd_ps(factor, group, tile[r][t]);
            }
        }
    }
    store_half::<ROWS, N, HALF>(&tile, sums);
}

/// The doubled even (`HALF` 0) or odd weights of a group: of elements 0-15, of 16-31.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_half<const HALF: usize>(bytes: &[u8; GROUP / 2]) -> [__m256; 2] {
    let table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    // SAFETY: 16 readable bytes, and the load allows any alignment.
    let packed = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let nibbles = if HALF == 0 {
        packed
    } else {
        _mm_srli_epi16::<4>(packed)
    };
    let values = _mm_shuffle_epi8(table, _mm_and_si128(nibbles, _mm_set1_epi8(15)));
    let widen = |v| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
    [widen(values), widen(_mm_unpackhi_epi64(values, values))]
}
