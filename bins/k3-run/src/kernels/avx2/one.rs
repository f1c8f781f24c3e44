//! One vector: bound by memory, so weights are read once, in order, a few rows at a time.
//!
//! Blocks start from zero, so the sums of one block do not wait for those of the block before it, and the processor
//! overlaps them by itself.

use std::arch::x86_64::*;

use super::super::activations::{Activations, BLOCK, BlockLines, LANES};
use super::super::weights::{GROUP, Weights, half_factors};
use super::{Lanes, Pair, dense_pair, mxfp4_pairs};

/// Rows read side by side.
const ROWS: usize = 2;

/// Bytes of MXFP4 weights in a block, and of their scales.
const PACKED: usize = BLOCK / 2;
const SCALES: usize = BLOCK / GROUP;

#[target_feature(enable = "avx2,fma")]
pub(super) fn matvec(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    match w {
        Weights::Bf16(bytes) => dense::<2>(bytes, x, out),
        Weights::F32(bytes) => dense::<4>(bytes, x, out),
        Weights::Mxfp4 {
            packed,
            scale,
            nan_scales,
        } => {
            mxfp4(packed, scale, half_factors(nan_scales), x, out);
        }
    }
}

#[target_feature(enable = "avx2,fma")]
fn dense<const WIDTH: usize>(bytes: &[u8], x: &Activations, out: &mut [f32]) {
    let (blocks, row_bytes) = (x.row(0), x.cols() * WIDTH);
    let (groups, rest) = out.as_chunks_mut::<ROWS>();
    let (head, tail) = bytes.split_at(groups.len() * ROWS * row_bytes);
    for (out, bytes) in groups.iter_mut().zip(head.chunks_exact(ROWS * row_bytes)) {
        *out = dense_rows::<WIDTH, ROWS>(bytes, row_bytes, blocks);
    }
    for (out, bytes) in rest.iter_mut().zip(tail.chunks_exact(row_bytes)) {
        [*out] = dense_rows::<WIDTH, 1>(bytes, row_bytes, blocks);
    }
}

/// `N` adjacent rows times one vector.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense_rows<const WIDTH: usize, const N: usize>(
    bytes: &[u8],
    row_bytes: usize,
    x: &[BlockLines],
) -> [f32; N] {
    let block_bytes = BLOCK * WIDTH;
    let whole = row_bytes / block_bytes;
    let rows: [&[u8]; N] = std::array::from_fn(|r| &bytes[r * row_bytes..(r + 1) * row_bytes]);
    let mut sums = [Lanes::zero(); N];
    for (b, x) in x[..whole].iter().enumerate() {
        for (row, sum) in rows.iter().zip(&mut sums) {
            sum.carry(dense_block::<WIDTH>(
                &row[b * block_bytes..(b + 1) * block_bytes],
                x,
            ));
        }
    }
    if let Some(x) = x.get(whole) {
        for (row, sum) in rows.iter().zip(&mut sums) {
            // Zero weights times zero inputs leave every lane as it was: a lane is never -0, since it starts at +0.
            let mut padded = [0; BLOCK * 4];
            padded[..row_bytes - whole * block_bytes].copy_from_slice(&row[whole * block_bytes..]);
            sum.carry(dense_block::<WIDTH>(&padded[..block_bytes], x));
        }
    }
    finish(sums)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense_block<const WIDTH: usize>(bytes: &[u8], x: &BlockLines) -> Pair {
    let mut sum = Pair::zero();
    for (bytes, x) in bytes.chunks_exact(LANES * WIDTH).zip(x) {
        sum = sum.fma(dense_pair::<WIDTH>(bytes), Pair::load(x));
    }
    sum
}

#[target_feature(enable = "avx2,fma")]
fn mxfp4(packed: &[u8], scale: &[u8], factors: &[f32; 256], x: &Activations, out: &mut [f32]) {
    let (blocks, cols) = (x.row(0), x.cols());
    let (row_bytes, row_scales) = (cols / 2, cols / GROUP);
    let (groups, rest) = out.as_chunks_mut::<ROWS>();
    let first = groups.len() * ROWS;
    let (head, tail) = packed.split_at(first * row_bytes);
    let (head_scale, tail_scale) = scale.split_at(first * row_scales);
    for ((out, packed), scale) in groups
        .iter_mut()
        .zip(head.chunks_exact(ROWS * row_bytes))
        .zip(head_scale.chunks_exact(ROWS * row_scales))
    {
        *out = mxfp4_rows::<ROWS>(packed, scale, factors, cols, blocks);
    }
    for ((out, packed), scale) in rest
        .iter_mut()
        .zip(tail.chunks_exact(row_bytes))
        .zip(tail_scale.chunks_exact(row_scales))
    {
        [*out] = mxfp4_rows::<1>(packed, scale, factors, cols, blocks);
    }
}

/// `N` adjacent rows times one vector.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_rows<const N: usize>(
    packed: &[u8],
    scale: &[u8],
    factors: &[f32; 256],
    cols: usize,
    x: &[BlockLines],
) -> [f32; N] {
    let (row_bytes, row_scales) = (cols / 2, cols / GROUP);
    let rows: [&[u8]; N] = std::array::from_fn(|r| &packed[r * row_bytes..(r + 1) * row_bytes]);
    let scales: [&[u8]; N] = std::array::from_fn(|r| &scale[r * row_scales..(r + 1) * row_scales]);
    let mut sums = [Lanes::zero(); N];
    for (b, x) in x.iter().enumerate() {
        for ((row, scale), sum) in rows.iter().zip(&scales).zip(&mut sums) {
            let row = &row[b * PACKED..row_bytes.min((b + 1) * PACKED)];
            let scale = &scale[b * SCALES..row_scales.min((b + 1) * SCALES)];
            // A block cut short by the end of the row has fewer groups; an absent group would add nothing.
            sum.carry(mxfp4_block(row, scale, factors, x));
        }
    }
    finish(sums)
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

#[inline]
#[target_feature(enable = "avx2,fma")]
fn finish<const N: usize>(sums: [Lanes; N]) -> [f32; N] {
    let mut out = [0.0; N];
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = sum.reduce();
    }
    out
}
