//! Stored weights to f32 lines, four rows at a time.

use std::arch::x86_64::{_mm256_mul_ps, _mm256_set1_ps, _mm256_storeu_ps};
use std::ops::Range;

use super::super::activations::{BLOCK, BlockLines, LANES, Line};
use super::super::weights::{GROUP, NanScales, SCALES, Weights, half_factors};
use super::tile::{Form, GROUPS, ROWS, TileBlock};
use super::{Pair, block_of, dense_pair, mxfp4_pairs};

/// Bytes of a packed block.
const PACKED: usize = BLOCK / 2;

/// Unpacks `blocks` of up to four `rows` of `cols` weights into `tile`; what a row lacks becomes zero weights, and what the
/// tile has more of is left as it is.
///
/// `in_range` says that the inputs allow scaled MXFP4 weights.
#[target_feature(enable = "avx2,fma")]
pub(super) fn unpack(
    w: Weights<'_>,
    cols: usize,
    rows: Range<usize>,
    blocks: Range<usize>,
    in_range: bool,
    tile: &mut [TileBlock],
) -> Form {
    match w {
        Weights::Bf16(bytes) => {
            dense::<{ BLOCK * 2 }>(bytes, cols * 2, rows, blocks, tile);
            Form::Dense
        }
        Weights::F32(bytes) => {
            dense::<{ BLOCK * 4 }>(bytes, cols * 4, rows, blocks, tile);
            Form::Dense
        }
        Weights::Mxfp4 {
            packed,
            scale,
            nan_scales,
        } => {
            let row_scales = cols / GROUP;
            let groups = blocks.start * GROUPS..row_scales.min(blocks.end * GROUPS);
            let scales: [&[u8]; ROWS] = std::array::from_fn(|r| {
                let row = (rows.start + r).min(rows.end - 1);
                &scale[row * row_scales..][groups.clone()]
            });
            let in_range = in_range
                && scales
                    .iter()
                    .all(|scales| scales.iter().all(|byte| SCALES.contains(byte)));
            for ((r, row), scales) in rows.enumerate().zip(scales) {
                let packed = &packed[row * cols / 2..(row + 1) * cols / 2];
                let row = PackedRow {
                    packed,
                    scales,
                    nan_scales,
                };
                if in_range {
                    row.unpack::<true>(r, blocks.clone(), tile);
                } else {
                    row.unpack::<false>(r, blocks.clone(), tile);
                }
            }
            if in_range {
                Form::Scaled
            } else {
                Form::Factors
            }
        }
    }
}

/// bf16 or f32, `BYTES` a block.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense<const BYTES: usize>(
    bytes: &[u8],
    row_bytes: usize,
    rows: Range<usize>,
    blocks: Range<usize>,
    tile: &mut [TileBlock],
) {
    for (r, row) in rows.enumerate() {
        let row = &bytes[row * row_bytes..(row + 1) * row_bytes];
        for (b, into) in blocks.clone().zip(tile.iter_mut()) {
            let mut padded = [0; BYTES];
            let bytes = block_of(row, b, &mut padded);
            dense_lines(bytes, &mut into.lines[r]);
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

#[derive(Clone, Copy)]
struct PackedRow<'a> {
    packed: &'a [u8],
    /// Of the blocks wanted only.
    scales: &'a [u8],
    nan_scales: NanScales,
}

impl PackedRow<'_> {
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn unpack<const SCALED: bool>(self, r: usize, blocks: Range<usize>, tile: &mut [TileBlock]) {
        let table = half_factors(self.nan_scales);
        for ((b, into), scales) in blocks.zip(tile).zip(self.scales.chunks(GROUPS)) {
            let mut padded = [0; PACKED];
            let bytes = block_of(self.packed, b, &mut padded);
            // An absent group has factor 0, as its weights are.
            let mut factors = [0.0; GROUPS];
            for (factor, byte) in factors.iter_mut().zip(scales) {
                *factor = table[usize::from(*byte)];
            }
            let groups = bytes.as_chunks::<{ GROUP / 2 }>().0.iter();
            let lines = into.lines[r].as_chunks_mut::<2>().0;
            for ((bytes, lines), factor) in groups.zip(lines).zip(factors) {
                let factor = _mm256_set1_ps(factor);
                for (pair, line) in mxfp4_pairs(bytes).into_iter().zip(lines) {
                    let pair = if SCALED {
                        Pair {
                            even: _mm256_mul_ps(pair.even, factor),
                            odd: _mm256_mul_ps(pair.odd, factor),
                        }
                    } else {
                        pair
                    };
                    store(pair, line);
                }
            }
            into.factors[r] = factors;
        }
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
