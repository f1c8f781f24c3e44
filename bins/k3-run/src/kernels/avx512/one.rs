//! One vector: bound by memory, so weights are read once and in order, as one stream a thread.
//!
//! One row at a time is enough: each block starts from zero, so its sums do not wait for those of the block before, and
//! the processor works on several blocks at once by itself.
//!
//! MXFP4 would be bound by latency: from a byte to its block sum it takes fifteen instructions one after the other, and the
//! scheduler fills with those that wait. So a block is unpacked while the one before is multiplied and the sum before that
//! carried, which measured a third faster (34 instead of 25 G weights/s a thread, from memory).

use std::arch::x86_64::{
    __m512, _mm512_fmadd_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps,
};

use super::super::activations::{Activations, BLOCK, BlockLines, LANES, Line};
use super::super::prefetch::{self, ROWS, SPAN, STREAM_AHEAD, WHOLE};
use super::super::weights::{GROUP, Weights, half_factors};
use super::{Lanes, dense_line, load, mxfp4_lines};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dense_block<const BYTES: usize>(bytes: &[u8; BYTES], x: &BlockLines) -> __m512 {
    let mut sum = _mm512_setzero_ps();
    for (bytes, x) in bytes.chunks_exact(BYTES / BLOCK * LANES).zip(x) {
        sum = _mm512_fmadd_ps(dense_line(bytes), load(x), sum);
    }
    sum
}

/// One row of MXFP4 times one vector, in three stages that work on neighbouring blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn mxfp4_row(packed: &[u8], scale: &[u8], factors: &[f32; 256], x: &[BlockLines]) -> f32 {
    let (packed, packed_rest) = packed.as_chunks::<{ BLOCK / 2 }>();
    let (scale, scale_rest) = scale.as_chunks::<{ BLOCK / GROUP }>();
    let mut sum = Lanes::zero();
    let mut part = _mm512_setzero_ps();
    if let Some((first, following)) = packed.split_first() {
        let mut lines = unpack(first);
        for ((next, scale), x) in following.iter().zip(scale).zip(x) {
            prefetch::stream(next, 0);
            sum.carry(part);
            let groups = multiply(&lines, x);
            lines = unpack(next);
            part = scaled(groups, *scale, factors);
        }
        sum.carry(part);
        let last = packed.len() - 1;
        part = scaled(multiply(&lines, &x[last]), scale[last], factors);
    }
    sum.carry(part);
    if let Some(x) = x.get(packed.len()) {
        // Fewer groups; an absent one would add zeros, which change nothing.
        let mut part = _mm512_setzero_ps();
        let groups = packed_rest.as_chunks().0.iter().zip(scale_rest);
        for ((bytes, byte), x) in groups.zip(x.as_chunks().0) {
            part = add_scaled(multiply_group(mxfp4_lines(bytes), x), *byte, factors, part);
        }
        sum.carry(part);
    }
    sum.reduce()
}

/// The doubled values of a block, two lines a group.
type Unpacked = [[__m512; 2]; BLOCK / GROUP];

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn unpack(packed: &[u8; BLOCK / 2]) -> Unpacked {
    let groups = packed.as_chunks::<{ GROUP / 2 }>().0;
    [
        mxfp4_lines(&groups[0]),
        mxfp4_lines(&groups[1]),
        mxfp4_lines(&groups[2]),
        mxfp4_lines(&groups[3]),
    ]
}

/// The sums of products of every group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn multiply(w: &Unpacked, x: &BlockLines) -> [__m512; BLOCK / GROUP] {
    let x = x.as_chunks::<2>().0;
    [
        multiply_group(w[0], &x[0]),
        multiply_group(w[1], &x[1]),
        multiply_group(w[2], &x[2]),
        multiply_group(w[3], &x[3]),
    ]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn multiply_group(w: [__m512; 2], x: &[Line; 2]) -> __m512 {
    _mm512_fmadd_ps(w[1], load(&x[1]), _mm512_mul_ps(w[0], load(&x[0])))
}

/// The block sum: every group's sum times its factor.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scaled(
    groups: [__m512; BLOCK / GROUP],
    scale: [u8; BLOCK / GROUP],
    factors: &[f32; 256],
) -> __m512 {
    let mut sum = _mm512_setzero_ps();
    for (group, byte) in groups.into_iter().zip(scale) {
        sum = add_scaled(group, byte, factors, sum);
    }
    sum
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn add_scaled(group: __m512, byte: u8, factors: &[f32; 256], sum: __m512) -> __m512 {
    _mm512_fmadd_ps(_mm512_set1_ps(factors[usize::from(byte)]), group, sum)
}
