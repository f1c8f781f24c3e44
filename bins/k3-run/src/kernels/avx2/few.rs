//! Two to sixteen vectors: still near memory speed, so weights are not unpacked into a panel first but decoded in registers,
//! once for four vectors. The tile and its sums are those of [`many`](super::many); even lanes take the low half of each word
//! or byte, odd lanes the high half, so each pass decodes only what it uses.

#![expect(
    clippy::needless_range_loop,
    reason = "a tile is indexed by row and vector alike"
)]

use std::arch::x86_64::{
    __m128i, __m256, _MM_HINT_T0, _mm_and_si128, _mm_loadu_si128, _mm_prefetch, _mm_set1_epi8,
    _mm_setr_epi8, _mm_shuffle_epi8, _mm_srli_epi16, _mm_unpackhi_epi64, _mm256_and_si256,
    _mm256_castsi256_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_fmadd_ps,
    _mm256_loadu_si256, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_slli_epi32,
};
use std::hint::black_box;

use super::super::activations::{Activations, BLOCK, BlockLines, LANES};
use super::super::weights::{GROUP, NanScales, half_factors};
use super::many::{Sums, TILE_ROWS, TILE_TOKENS, carry, half, load_lanes};

/// The most vectors this is faster for.
pub(super) const MOST: usize = 16;

/// How far ahead of the block in hand a row's bytes are asked for.
const AHEAD: usize = 1024;

const BF16: usize = BLOCK * 2;
const PACKED: usize = BLOCK / 2;
const GROUPS: usize = BLOCK / GROUP;

/// The blocks of vectors four at a time; past the last vector the last one stands in, and its sums are dropped.
fn tile_inputs(x: &Activations, first: usize, b: usize) -> [&BlockLines; TILE_TOKENS] {
    std::array::from_fn(|t| &x.row((first + t).min(x.num_rows() - 1))[b])
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn bf16(bytes: &[u8], x: &Activations, out: &mut [f32]) {
    let (num_tokens, row_bytes) = (x.num_rows(), x.cols() * 2);
    let mut padded = [[0; BF16]; TILE_ROWS];
    for (out, rows) in out
        .chunks_mut(TILE_ROWS * num_tokens)
        .zip(bytes.chunks(TILE_ROWS * row_bytes))
    {
        let rows = tile_rows(rows, row_bytes);
        let mut sums = [[[0.0; LANES]; TILE_ROWS]; MOST];
        for b in 0..x.blocks_per_row() {
            let mut block = [&[0; BF16]; TILE_ROWS];
            for ((block, padded), row) in block.iter_mut().zip(&mut padded).zip(rows) {
                *block = block_of(row, b, padded);
                ask_ahead(block);
            }
            for (first, sums) in (0..num_tokens)
                .step_by(TILE_TOKENS)
                .zip(sums.chunks_mut(TILE_TOKENS))
            {
                let inputs = tile_inputs(x, first, b);
                match num_tokens - first {
                    1 => bf16_block::<1>(block, inputs, sums),
                    2 => bf16_block::<2>(block, inputs, sums),
                    3 => bf16_block::<3>(block, inputs, sums),
                    _ => bf16_block::<4>(block, inputs, sums),
                }
            }
        }
        finish(&sums, num_tokens, out);
    }
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn mxfp4(
    packed: &[u8],
    scale: &[u8],
    nan_scales: NanScales,
    x: &Activations,
    out: &mut [f32],
) {
    let mut padded = [[0; PACKED]; TILE_ROWS];
    let table = half_factors(nan_scales);
    let (num_tokens, row_bytes, row_scales) = (x.num_rows(), x.cols() / 2, x.cols() / GROUP);
    let rows = packed
        .chunks(TILE_ROWS * row_bytes)
        .zip(scale.chunks(TILE_ROWS * row_scales));
    for (out, (rows, scales)) in out.chunks_mut(TILE_ROWS * num_tokens).zip(rows) {
        let (rows, scales) = (tile_rows(rows, row_bytes), tile_rows(scales, row_scales));
        let mut sums = [[[0.0; LANES]; TILE_ROWS]; MOST];
        for b in 0..x.blocks_per_row() {
            let mut block = [&[0; PACKED]; TILE_ROWS];
            let mut factors = [[0.0; GROUPS]; TILE_ROWS];
            for (r, padded) in padded.iter_mut().enumerate() {
                block[r] = block_of(rows[r], b, padded);
                ask_ahead(block[r]);
                for (factor, byte) in factors[r].iter_mut().zip(&scales[r][b * GROUPS..]) {
                    *factor = table[usize::from(*byte)];
                }
            }
            for (first, sums) in (0..num_tokens)
                .step_by(TILE_TOKENS)
                .zip(sums.chunks_mut(TILE_TOKENS))
            {
                let inputs = tile_inputs(x, first, b);
                match num_tokens - first {
                    1 => mxfp4_block::<1>(block, &factors, inputs, sums),
                    2 => mxfp4_block::<2>(block, &factors, inputs, sums),
                    3 => mxfp4_block::<3>(block, &factors, inputs, sums),
                    _ => mxfp4_block::<4>(block, &factors, inputs, sums),
                }
            }
        }
        finish(&sums, num_tokens, out);
    }
}

/// Up to three rows; past the last row the first one stands in, and its sums are dropped.
fn tile_rows(bytes: &[u8], row_bytes: usize) -> [&[u8]; TILE_ROWS] {
    std::array::from_fn(|r| {
        bytes
            .get(r * row_bytes..(r + 1) * row_bytes)
            .unwrap_or(&bytes[..row_bytes])
    })
}

/// Block `b` of a row, from `padded` when the row ends inside it. `padded` is zero past the end of every row, since all rows
/// end alike.
#[inline]
fn block_of<'a, const BYTES: usize>(
    row: &'a [u8],
    b: usize,
    padded: &'a mut [u8; BYTES],
) -> &'a [u8; BYTES] {
    let (whole, rest) = row.as_chunks::<BYTES>();
    whole.get(b).unwrap_or_else(|| {
        padded[..rest.len()].copy_from_slice(rest);
        padded
    })
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn ask_ahead<const BYTES: usize>(bytes: &[u8; BYTES]) {
    for line in bytes.chunks_exact(64) {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
    }
}

#[target_feature(enable = "avx2,fma")]
fn finish(sums: &[Sums; MOST], num_tokens: usize, out: &mut [f32]) {
    for (r, out) in out.chunks_exact_mut(num_tokens).enumerate() {
        for (out, sums) in out.iter_mut().zip(sums) {
            *out = load_lanes(&sums[r]).reduce();
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn bf16_block<const N: usize>(
    w: [&[u8; BF16]; TILE_ROWS],
    x: [&BlockLines; TILE_TOKENS],
    sums: &mut [Sums],
) {
    // As in `many`: unrolled, the sums would not stay in registers.
    let steps = black_box(BLOCK / LANES).min(BLOCK / LANES);
    bf16_half_block::<N, 0>(w, x, sums, steps);
    bf16_half_block::<N, 8>(w, x, sums, steps);
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn bf16_half_block<const N: usize, const HALF: usize>(
    w: [&[u8; BF16]; TILE_ROWS],
    x: [&BlockLines; TILE_TOKENS],
    sums: &mut [Sums],
    steps: usize,
) {
    let mut tile = [[_mm256_setzero_ps(); N]; TILE_ROWS];
    for i in 0..steps {
        let w = w.map(|w| bf16_half::<HALF>(&w.as_chunks().0[i]));
        for t in 0..N {
            let input = half::<HALF>(&x[t][i]);
            for r in 0..TILE_ROWS {
                tile[r][t] = _mm256_fmadd_ps(w[r], input, tile[r][t]);
            }
        }
    }
    carry::<N, HALF>(&tile, sums);
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

#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_block<const N: usize>(
    w: [&[u8; PACKED]; TILE_ROWS],
    factors: &[[f32; GROUPS]; TILE_ROWS],
    x: [&BlockLines; TILE_TOKENS],
    sums: &mut [Sums],
) {
    let groups = black_box(GROUPS).min(GROUPS);
    mxfp4_half_block::<N, 0>(w, factors, x, sums, groups);
    mxfp4_half_block::<N, 8>(w, factors, x, sums, groups);
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_half_block<const N: usize, const HALF: usize>(
    w: [&[u8; PACKED]; TILE_ROWS],
    factors: &[[f32; GROUPS]; TILE_ROWS],
    x: [&BlockLines; TILE_TOKENS],
    sums: &mut [Sums],
    groups: usize,
) {
    let mut tile = [[_mm256_setzero_ps(); N]; TILE_ROWS];
    for g in 0..groups {
        for r in 0..TILE_ROWS {
            let [w0, w1] = mxfp4_half::<HALF>(&w[r].as_chunks().0[g]);
            let factor = _mm256_set1_ps(factors[r][g]);
            for t in 0..N {
                let first = _mm256_mul_ps(w0, half::<HALF>(&x[t][2 * g]));
                let group = _mm256_fmadd_ps(w1, half::<HALF>(&x[t][2 * g + 1]), first);
                tile[r][t] = _mm256_fmadd_ps(factor, group, tile[r][t]);
            }
        }
    }
    carry::<N, HALF>(&tile, sums);
}

/// The doubled even (`HALF` 0) or odd weights of a group: of elements 0-15, of 16-31.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_half<const HALF: usize>(bytes: &[u8; GROUP / 2]) -> [__m256; 2] {
    let table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    // SAFETY: 16 readable bytes, and the load allows any alignment.
    let packed: __m128i = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let nibbles = if HALF == 0 {
        packed
    } else {
        _mm_srli_epi16::<4>(packed)
    };
    let values = _mm_shuffle_epi8(table, _mm_and_si128(nibbles, _mm_set1_epi8(15)));
    let widen = |v| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
    [widen(values), widen(_mm_unpackhi_epi64(values, values))]
}
