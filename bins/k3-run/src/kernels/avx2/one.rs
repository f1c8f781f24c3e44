//! One vector: bound by memory, so weights are read once and in order, as one stream a thread.
//!
//! One row at a time is enough: each block starts from zero, so its sums do not wait for those of the block before, and
//! the processor works on several blocks at once by itself. (Four rows side by side measured a fifth slower than one.)

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm256_mul_ps, _mm256_set1_ps};

use super::super::activations::{Activations, BLOCK, BlockLines, LANES};
use super::super::weights::{GROUP, Weights, half_factors};
use super::{Lanes, Pair, dense_pair, mxfp4_pairs};

/// How far ahead of the block in hand bytes are asked for: rows are adjacent, so this runs into the next row.
const AHEAD: usize = 2048;

#[target_feature(enable = "avx2,fma")]
pub(super) fn matvec(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    let (blocks, cols) = (x.row(0), x.cols());
    match w {
        Weights::Bf16(bytes) => {
            for (out, row) in out.iter_mut().zip(bytes.chunks_exact(cols * 2)) {
                *out = dense_row::<{ BLOCK * 2 }>(row, blocks);
            }
        }
        Weights::F32(bytes) => {
            for (out, row) in out.iter_mut().zip(bytes.chunks_exact(cols * 4)) {
                *out = dense_row::<{ BLOCK * 4 }>(row, blocks);
            }
        }
        Weights::Mxfp4 {
            packed,
            scale,
            nan_scales,
        } => {
            let factors = half_factors(nan_scales);
            let rows = packed
                .chunks_exact(cols / 2)
                .zip(scale.chunks_exact(cols / GROUP));
            for (out, (packed, scale)) in out.iter_mut().zip(rows) {
                *out = mxfp4_row(packed, scale, factors, blocks);
            }
        }
    }
}

/// One row of bf16 or f32, `BYTES` a block, times one vector.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense_row<const BYTES: usize>(row: &[u8], x: &[BlockLines]) -> f32 {
    let (whole, rest) = row.as_chunks::<BYTES>();
    let mut sum = Lanes::zero();
    for (bytes, x) in whole.iter().zip(x) {
        ask_ahead(bytes);
        sum.carry(dense_block(bytes, x));
    }
    if let Some(x) = x.get(whole.len()) {
        // Zero weights times zero inputs leave every lane as it was: a lane starts at +0, so it is never -0.
        let mut padded = [0; BYTES];
        padded[..rest.len()].copy_from_slice(rest);
        sum.carry(dense_block(&padded, x));
    }
    sum.reduce()
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense_block<const BYTES: usize>(bytes: &[u8; BYTES], x: &BlockLines) -> Pair {
    let mut sum = Pair::zero();
    for (bytes, x) in bytes.chunks_exact(BYTES / BLOCK * LANES).zip(x) {
        sum = sum.fma(dense_pair(bytes), Pair::load(x));
    }
    sum
}

/// One row of MXFP4 times one vector.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_row(packed: &[u8], scale: &[u8], factors: &[f32; 256], x: &[BlockLines]) -> f32 {
    let (packed, packed_rest) = packed.as_chunks::<{ BLOCK / 2 }>();
    let (scale, scale_rest) = scale.as_chunks::<{ BLOCK / GROUP }>();
    let mut sum = Lanes::zero();
    for ((packed, scale), x) in packed.iter().zip(scale).zip(x) {
        ask_ahead(packed);
        sum.carry(mxfp4_block(packed, scale, factors, x));
    }
    if let Some(x) = x.get(packed.len()) {
        // Fewer groups; an absent one would add zeros, which change nothing.
        sum.carry(mxfp4_block(packed_rest, scale_rest, factors, x));
    }
    sum.reduce()
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_block(packed: &[u8], scale: &[u8], factors: &[f32; 256], x: &BlockLines) -> Pair {
    let mut sum = Pair::zero();
    for ((bytes, byte), x) in packed
        .as_chunks::<{ GROUP / 2 }>()
        .0
        .iter()
        .zip(scale)
        .zip(x.as_chunks::<2>().0)
    {
        let [w0, w1] = mxfp4_pairs(bytes);
        let (x0, x1) = (Pair::load(&x[0]), Pair::load(&x[1]));
        let first = Pair {
            even: _mm256_mul_ps(w0.even, x0.even),
            odd: _mm256_mul_ps(w0.odd, x0.odd),
        };
        let factor = _mm256_set1_ps(factors[usize::from(*byte)]);
        sum = sum.fma(
            Pair {
                even: factor,
                odd: factor,
            },
            first.fma(w1, x1),
        );
    }
    sum
}

/// Asks for the bytes [`AHEAD`] of these; past the end of the weights that does nothing.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn ask_ahead<const BYTES: usize>(bytes: &[u8; BYTES]) {
    for line in bytes.chunks_exact(64) {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
    }
}
