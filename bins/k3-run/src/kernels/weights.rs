//! Stored weights as the kernels see them: bytes, read in place.

use std::ops::{Range, RangeInclusive};

use super::activations::{BLOCK, BlockLines, LANES, Line};

/// Inputs that share one MXFP4 scale byte.
pub const GROUP: usize = 32;

/// What an MXFP4 scale byte of 255 (NaN in the format) means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NanScales {
    /// NaN: every output that uses the group is NaN, and the step stops.
    Propagate,
    /// Factor 0 (`--allow-nan-scales`).
    Zero,
}

/// A row-major `[rows, cols]` matrix of little-endian stored weights, at any alignment.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// bf16, `rows * cols * 2` bytes.
    Bf16(&'a [u8]),
    /// f32, `rows * cols * 4` bytes.
    F32(&'a [u8]),
    /// MXFP4 (specification 2.4); `cols` is a multiple of [`GROUP`].
    Mxfp4 {
        /// `rows * cols / 2` bytes, low nibble first.
        packed: &'a [u8],
        /// `rows * cols / 32` E8M0 bytes.
        scale: &'a [u8],
        /// Meaning of scale byte 255.
        nan_scales: NanScales,
    },
}

/// Twice the E2M1 value of each nibble: small integers, so that a byte shuffle looks them up. [`half_factors`] makes up
/// for the two.
pub(super) const TWICE_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Scale bytes whose factors a kernel may multiply into the weights for inputs that [are in range], `2^-40` to `2^40`.
///
/// [are in range]: super::activations::Activations::are_in_range
pub(super) const SCALES: RangeInclusive<u8> = 128 - 40..=128 + 40;

/// Half of `2^(byte - 127)` for every scale byte. Built by bits: bytes 0 and 1 give subnormals, which no arithmetic mode
/// of the processor can flush because none is used.
const fn half_factor_table(nan: f32) -> [f32; 256] {
    let mut table = [nan; 256];
    let mut byte = 0;
    while byte < 255 {
        let bits = if byte < 2 {
            1 << (21 + byte)
        } else {
            (byte - 1) << 23
        };
        table[byte as usize] = f32::from_bits(bits);
        byte += 1;
    }
    table
}

static HALF_FACTORS_NAN: [f32; 256] = half_factor_table(f32::NAN);
static HALF_FACTORS_ZERO: [f32; 256] = half_factor_table(0.0);

/// The factor that turns a group's sum over [`TWICE_E2M1`] values into the sum over weights, by scale byte.
pub(super) fn half_factors(nan_scales: NanScales) -> &'static [f32; 256] {
    match nan_scales {
        NanScales::Propagate => &HALF_FACTORS_NAN,
        NanScales::Zero => &HALF_FACTORS_ZERO,
    }
}

impl Weights<'_> {
    /// How many rows of `cols` there are.
    ///
    /// # Panics
    /// If the bytes are not whole rows, or MXFP4 groups do not divide `cols`.
    pub fn num_rows(&self, cols: usize) -> usize {
        let whole = |bytes: &[u8], row_bytes: usize| {
            assert!(
                row_bytes > 0 && bytes.len().is_multiple_of(row_bytes),
                "{} bytes of weights are not rows of {cols}",
                bytes.len()
            );
            bytes.len() / row_bytes
        };
        match self {
            Self::Bf16(bytes) => whole(bytes, cols * 2),
            Self::F32(bytes) => whole(bytes, cols * 4),
            Self::Mxfp4 { packed, scale, .. } => {
                assert!(
                    cols.is_multiple_of(GROUP),
                    "MXFP4 rows of {cols} are not whole groups of {GROUP}"
                );
                let rows = whole(packed, cols / 2);
                assert_eq!(
                    scale.len(),
                    rows * (cols / GROUP),
                    "scale bytes for {rows} rows of {cols}"
                );
                rows
            }
        }
    }

    /// Rows `range` of a matrix of `cols` columns.
    ///
    /// # Panics
    /// If the rows are not there.
    #[must_use]
    pub fn rows(self, range: Range<usize>, cols: usize) -> Self {
        fn cut(bytes: &[u8], range: Range<usize>, row_bytes: usize) -> &[u8] {
            &bytes[range.start * row_bytes..range.end * row_bytes]
        }
        match self {
            Self::Bf16(bytes) => Self::Bf16(cut(bytes, range, cols * 2)),
            Self::F32(bytes) => Self::F32(cut(bytes, range, cols * 4)),
            Self::Mxfp4 {
                packed,
                scale,
                nan_scales,
            } => Self::Mxfp4 {
                packed: cut(packed, range.clone(), cols / 2),
                scale: cut(scale, range, cols / GROUP),
                nan_scales,
            },
        }
    }

    /// Bytes of all weights and scales.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Bf16(bytes) | Self::F32(bytes) => bytes.len(),
            Self::Mxfp4 { packed, scale, .. } => packed.len() + scale.len(),
        }
    }
}

/// Widens stored weights to f32, exactly: bf16 by a shift, f32 by a copy, MXFP4 by value times factor.
///
/// # Panics
/// If `out` does not hold exactly the weights.
pub fn widen(w: Weights<'_>, out: &mut [f32]) {
    match w {
        Weights::Bf16(bytes) => {
            let (pairs, rest) = bytes.as_chunks::<2>();
            assert!(
                rest.is_empty() && pairs.len() == out.len(),
                "{} bf16 bytes into {} f32",
                bytes.len(),
                out.len()
            );
            for (value, pair) in out.iter_mut().zip(pairs) {
                *value = bf16(*pair);
            }
        }
        Weights::F32(bytes) => {
            let (words, rest) = bytes.as_chunks::<4>();
            assert!(
                rest.is_empty() && words.len() == out.len(),
                "{} f32 bytes into {} f32",
                bytes.len(),
                out.len()
            );
            for (value, word) in out.iter_mut().zip(words) {
                *value = f32::from_le_bytes(*word);
            }
        }
        Weights::Mxfp4 {
            packed,
            scale,
            nan_scales,
        } => {
            assert_eq!(packed.len() * 2, out.len(), "packed bytes into f32");
            assert_eq!(scale.len() * GROUP, out.len(), "scale bytes into f32");
            let factors = half_factors(nan_scales);
            for ((values, bytes), scale) in out
                .as_chunks_mut::<GROUP>()
                .0
                .iter_mut()
                .zip(packed.as_chunks::<{ GROUP / 2 }>().0)
                .zip(scale)
            {
                let factor = factors[usize::from(*scale)];
                for (pair, byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                    *pair = nibbles(*byte).map(|twice| twice * factor);
                }
            }
        }
    }
}

/// bf16 is the upper half of an f32.
pub(super) fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Twice the values of the two weights in a byte, in order.
pub(super) fn nibbles(byte: u8) -> [f32; 2] {
    [byte & 15, byte >> 4].map(|nibble| f32::from(TWICE_E2M1[usize::from(nibble)]))
}

/// Spreads up to a block of bf16 weights over `lines`, the rest zero.
pub(super) fn bf16_lines(bytes: &[u8], lines: &mut BlockLines) {
    fill_lines(
        bytes.as_chunks::<2>().0.iter().map(|pair| bf16(*pair)),
        lines,
    );
}

/// Spreads up to a block of f32 weights over `lines`, the rest zero.
pub(super) fn f32_lines(bytes: &[u8], lines: &mut BlockLines) {
    fill_lines(
        bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| f32::from_le_bytes(*word)),
        lines,
    );
}

/// Spreads up to a block of doubled MXFP4 values over `lines`, the rest zero.
pub(super) fn mxfp4_lines(packed: &[u8], lines: &mut BlockLines) {
    fill_lines(packed.iter().flat_map(|byte| nibbles(*byte)), lines);
}

fn fill_lines(values: impl Iterator<Item = f32>, lines: &mut BlockLines) {
    *lines = BlockLines::default();
    for (i, value) in values.take(BLOCK).enumerate() {
        lines[i / LANES].0[Line::position(i % LANES)] = value;
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::*;

    const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    #[test]
    fn row_33_all_bf16_patterns_widen_by_a_shift() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut out = vec![0.0; 65_536];
        widen(Weights::Bf16(&bytes), &mut out);
        for (pattern, value) in (0u32..).zip(&out) {
            assert_eq!(value.to_bits(), pattern << 16);
        }
    }

    #[test]
    fn row_29_every_byte_and_scale_decodes_to_value_times_power_of_two() {
        for scale in 0..=254u8 {
            let packed: Vec<u8> = (0..=255).collect();
            let scales = [scale; 16];
            let mut out = vec![0.0; 512];
            widen(
                Weights::Mxfp4 {
                    packed: &packed,
                    scale: &scales,
                    nan_scales: NanScales::Propagate,
                },
                &mut out,
            );
            for (byte, pair) in packed.iter().zip(out.as_chunks::<2>().0) {
                for (nibble, got) in [byte & 15, byte >> 4].into_iter().zip(pair) {
                    let sign = if nibble < 8 { 1.0 } else { -1.0 };
                    let want = sign
                        * f64::from(E2M1[usize::from(nibble & 7)])
                        * 2f64.powi(i32::from(scale) - 127);
                    #[expect(
                        clippy::cast_possible_truncation,
                        reason = "6 * 2^127 is infinite in f32, and so here"
                    )]
                    let want = want as f32;
                    assert_eq!(*got, want, "byte {byte} scale {scale}");
                }
            }
        }
    }

    #[test]
    fn row_29_mxfp4_low_nibble_is_the_even_element() {
        let packed = [0x1F; 16];
        let mut out = [0.0; 32];
        widen(
            Weights::Mxfp4 {
                packed: &packed,
                scale: &[128],
                nan_scales: NanScales::Propagate,
            },
            &mut out,
        );
        assert_eq!(out[..2], [-12.0, 1.0]);
    }

    #[test]
    fn row_32_scale_byte_0_is_two_to_the_minus_127_and_255_follows_the_policy() {
        let packed = [0x22; 16];
        let mut out = [0.0; 32];
        widen(
            Weights::Mxfp4 {
                packed: &packed,
                scale: &[0],
                nan_scales: NanScales::Propagate,
            },
            &mut out,
        );
        assert_eq!(out[0].to_bits(), 1 << 22);
        widen(
            Weights::Mxfp4 {
                packed: &packed,
                scale: &[255],
                nan_scales: NanScales::Propagate,
            },
            &mut out,
        );
        assert!(out[0].is_nan());
        widen(
            Weights::Mxfp4 {
                packed: &packed,
                scale: &[255],
                nan_scales: NanScales::Zero,
            },
            &mut out,
        );
        assert_eq!(out[0], 0.0);
    }

    #[test]
    #[should_panic(expected = "are not rows of 7")]
    fn bytes_that_are_not_whole_rows_are_refused() {
        Weights::Bf16(&[0; 15]).num_rows(7);
    }
}
