//! AVX2 and FMA bodies. Each reproduces the scalar order bit for bit.
//!
//! Storage order puts the even lanes of sixteen inputs in one register and the odd lanes in the next, so a block sum is
//! two registers of f32 and a running sum four of f64.

mod few;
mod many;
mod one;
mod tile;
mod unpack;

use std::arch::x86_64::{
    __m256, __m256d, _MM_HINT_T0, _mm_add_pd, _mm_add_sd, _mm_and_si128, _mm_cvtsd_ss,
    _mm_cvtss_f32, _mm_loadu_si128, _mm_prefetch, _mm_set1_epi8, _mm_setr_epi8, _mm_setzero_ps,
    _mm_shuffle_epi8, _mm_srli_epi16, _mm_unpackhi_epi64, _mm_unpackhi_pd, _mm256_add_pd,
    _mm256_and_si256, _mm256_castpd_ps, _mm256_castpd256_pd128, _mm256_castps_pd,
    _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtps_pd, _mm256_extractf128_pd, _mm256_extractf128_ps, _mm256_fmadd_ps,
    _mm256_loadu_pd, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_permute4x64_pd, _mm256_set1_epi32,
    _mm256_setzero_pd, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_slli_epi32,
};
use std::ops::Range;

use super::activations::{Activations, LANES, Line};
use super::weights::Weights;

/// `out[row][t] = w[row] . x[t]` on this thread.
#[target_feature(enable = "avx2,fma")]
pub(super) fn matmul(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    match (x.num_rows(), w) {
        (1, _) => one::matvec(w, x, out),
        (..=few::BF16_MOST, Weights::Bf16(bytes)) => few::bf16(bytes, x, out),
        (
            ..=few::MXFP4_MOST,
            Weights::Mxfp4 {
                packed,
                scale,
                nan_scales,
            },
        ) => few::mxfp4(packed, scale, nan_scales, x, out),
        (..=many::FEW, _) => many::few(w, x, out),
        _ => many::many(w, x, out),
    }
}

/// The two registers of a block sum: even lanes, odd lanes.
#[derive(Clone, Copy)]
struct Pair {
    even: __m256,
    odd: __m256,
}

impl Pair {
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn zero() -> Self {
        Self {
            even: _mm256_setzero_ps(),
            odd: _mm256_setzero_ps(),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn load(line: &Line) -> Self {
        let (even, odd) = (&line.0[..8], &line.0[8..]);
        // SAFETY: both halves are eight f32.
        unsafe {
            Self {
                even: _mm256_loadu_ps(even.as_ptr()),
                odd: _mm256_loadu_ps(odd.as_ptr()),
            }
        }
    }

    /// `self + w * x`, fused.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn fma(self, w: Self, x: Self) -> Self {
        Self {
            even: _mm256_fmadd_ps(w.even, x.even, self.even),
            odd: _mm256_fmadd_ps(w.odd, x.odd, self.odd),
        }
    }
}

/// The f64 lanes of one output: even 0-3, even 4-7, odd 0-3, odd 4-7.
#[derive(Clone, Copy)]
struct Lanes([__m256d; 4]);

impl Lanes {
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn zero() -> Self {
        Self([_mm256_setzero_pd(); 4])
    }

    /// Adds a block sum.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn carry(&mut self, block: Pair) {
        let Self([e0, e1, o0, o1]) = self;
        *e0 = _mm256_add_pd(*e0, low_pd(block.even));
        *e1 = _mm256_add_pd(*e1, high_pd(block.even));
        *o0 = _mm256_add_pd(*o0, low_pd(block.odd));
        *o1 = _mm256_add_pd(*o1, high_pd(block.odd));
    }

    /// The tree: neighbours, distance 4, 2, 1, one rounding.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn reduce(self) -> f32 {
        let Self([e0, e1, o0, o1]) = self;
        let quads = _mm256_add_pd(_mm256_add_pd(e0, o0), _mm256_add_pd(e1, o1));
        let pairs = _mm_add_pd(
            _mm256_castpd256_pd128(quads),
            _mm256_extractf128_pd::<1>(quads),
        );
        let total = _mm_add_sd(pairs, _mm_unpackhi_pd(pairs, pairs));
        _mm_cvtss_f32(_mm_cvtsd_ss(_mm_setzero_ps(), total))
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

/// Block `b` of a row, copied into `padded`, which is zero, when the row ends inside it.
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

/// The weights that a tile's rows need next, to be asked for a share at a time: all at once, the processor would do nothing else
/// until they are there.
#[derive(Clone, Copy)]
struct Next<'a> {
    /// The matrix.
    bytes: &'a [u8],
    /// Of the first row's bytes wanted.
    start: usize,
    row_bytes: usize,
    num_rows: usize,
    lines_per_row: usize,
}

impl<'a> Next<'a> {
    /// As many blocks as `blocks` are, from their end on, of the `num_rows` rows that `rows` start with; past the end of a row the first
    /// blocks of those after `rows`.
    fn after(
        bytes: &'a [u8],
        [row_bytes, block_bytes]: [usize; 2],
        num_rows: usize,
        rows: Range<usize>,
        blocks: Range<usize>,
    ) -> Self {
        let along = blocks.end * block_bytes;
        Self {
            bytes,
            start: if along < row_bytes {
                rows.start * row_bytes + along
            } else {
                rows.end * row_bytes
            },
            row_bytes,
            num_rows,
            lines_per_row: blocks.len() * block_bytes / 64,
        }
    }

    /// Asks for one of `shares` shares. Past the end of the weights that does nothing.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn ask(self, share: usize, shares: usize) {
        let all = self.num_rows * self.lines_per_row;
        for line in share * all / shares..(share + 1) * all / shares {
            let (row, line) = (line / self.lines_per_row, line % self.lines_per_row);
            let at = self.start + row * self.row_bytes + line * 64;
            _mm_prefetch::<_MM_HINT_T0>(self.bytes.as_ptr().wrapping_add(at).cast());
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn low_pd(v: __m256) -> __m256d {
    _mm256_cvtps_pd(_mm256_castps256_ps128(v))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn high_pd(v: __m256) -> __m256d {
    _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(v))
}

/// Sixteen weights: 32 bytes of bf16 or 64 of f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense_pair(bytes: &[u8]) -> Pair {
    match bytes.as_array() {
        Some(bytes) => bf16_pair(bytes),
        None => f32_pair(
            bytes
                .as_array()
                .expect("sixteen weights of two or four bytes"),
        ),
    }
}

/// Sixteen bf16 weights: a 32-bit word holds an even one below an odd one.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn bf16_pair(bytes: &[u8; 2 * LANES]) -> Pair {
    // SAFETY: 32 readable bytes, and the load allows any alignment.
    let words = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    Pair {
        even: _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)),
        odd: _mm256_castsi256_ps(_mm256_and_si256(
            words,
            _mm256_set1_epi32(0xffff_0000_u32.cast_signed()),
        )),
    }
}

/// Sixteen f32 weights, parted into even and odd.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn f32_pair(bytes: &[u8; 4 * LANES]) -> Pair {
    let (low, high) = (&bytes[..32], &bytes[32..]);
    // SAFETY: 32 readable bytes each, and the load allows any alignment.
    let (a, b) = unsafe {
        (
            _mm256_loadu_ps(low.as_ptr().cast()),
            _mm256_loadu_ps(high.as_ptr().cast()),
        )
    };
    let unmix = |v| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v)));
    Pair {
        even: unmix(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)),
        odd: unmix(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)),
    }
}

/// The doubled values of a group of 32 MXFP4 weights: elements 0-15, 16-31.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_pairs(bytes: &[u8; 16]) -> [Pair; 2] {
    let table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    let nibble = _mm_set1_epi8(15);
    // SAFETY: 16 readable bytes, and the load allows any alignment.
    let packed = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let even = _mm_shuffle_epi8(table, _mm_and_si128(packed, nibble));
    let odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16::<4>(packed), nibble));
    let widen = |v| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
    [
        Pair {
            even: widen(even),
            odd: widen(odd),
        },
        Pair {
            even: widen(_mm_unpackhi_epi64(even, even)),
            odd: widen(_mm_unpackhi_epi64(odd, odd)),
        },
    ]
}

#[cfg(test)]
mod tests;
