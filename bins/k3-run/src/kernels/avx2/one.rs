//! One vector: bound by memory, so weights are read once and in order, as one stream a thread.
//!
//! One row at a time is enough: each block starts from zero, so its sums do not wait for those of the block before, and
//! the processor works on several blocks at once by itself. (Four rows side by side measured a fifth slower than one.)

use std::arch::x86_64::{_mm256_mul_ps, _mm256_set1_ps};

use super::super::activations::{Activations, BLOCK, BlockLines, LANES};
use super::super::prefetch::{self, ROWS, SPAN, STREAM_AHEAD, WHOLE};
use super::super::weights::{GROUP, Weights, half_factors};
use super::{Lanes, Pair, dense_pair, mxfp4_pairs};

#[target_feature(enable = "avx2,fma")]
pub(super) fn matvec(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    let (blocks, cols) = (x.row(0), x.cols());
    match w {
        Weights::Bf16(bytes) => dense::<{ BLOCK * 2 }>(bytes, cols * 2, blocks, out),
        Weights::F32(bytes) => dense::<{ BLOCK * 4 }>(bytes, cols * 4, blocks, out),
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

/// Rows of bf16 or f32, `row_bytes` each and `BYTES` a block, times one vector.
///
/// A vector that leaves the first-level cache no room is taken in spans, each by several rows before the next.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense<const BYTES: usize>(bytes: &[u8], row_bytes: usize, x: &[BlockLines], out: &mut [f32]) {
    let blocks = if x.len() > WHOLE { SPAN } else { x.len() };
    for (out, rows) in out.chunks_mut(ROWS).zip(bytes.chunks(row_bytes * ROWS)) {
        let mut sums = [Lanes::zero(); ROWS];
        for (span, x) in x.chunks(blocks).enumerate() {
            let first = span * blocks * BYTES;
            let last = row_bytes.min(first + x.len() * BYTES);
            for (sum, row) in sums.iter_mut().zip(rows.chunks_exact(row_bytes)) {
                add_span::<BYTES>(&row[first..last], x, row_bytes - (last - first), sum);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum.reduce();
        }
    }
}

/// Adds the products of a row's span. What follows it in the order of the work is `jump` bytes past its end.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_span<const BYTES: usize>(row: &[u8], x: &[BlockLines], jump: usize, sum: &mut Lanes) {
    let (whole, rest) = row.as_chunks::<BYTES>();
    let mut own = *sum;
    let near = whole.len().saturating_sub(STREAM_AHEAD / BYTES);
    for (blocks, x, jump) in [
        (&whole[..near], &x[..near], 0),
        (&whole[near..], &x[near..], jump),
    ] {
        for (bytes, x) in blocks.iter().zip(x) {
            prefetch::stream(bytes, jump);
            own.carry(dense_block(bytes, x));
        }
    }
    if let Some(x) = x.get(whole.len()) {
        // Zero weights times zero inputs leave every lane as it was: a lane starts at +0, so it is never -0.
        let mut padded = [0; BYTES];
        padded[..rest.len()].copy_from_slice(rest);
        own.carry(dense_block(&padded, x));
    }
    *sum = own;
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
        prefetch::stream(packed, 0);
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
