//! AVX-512 bodies (F, BW, DQ, VL). Each reproduces the scalar order bit for bit.
//!
//! A register holds all sixteen lanes of a block sum, in storage order: even lanes below, odd lanes above. Weights take that
//! order as they are decoded: their bytes are broadcast to both halves by the load itself, then the lower half keeps the even
//! weights and the upper half the odd ones.
//!
//! - bf16: one byte shuffle puts each weight into the upper half of its 32 bits, and zeros below.
//! - MXFP4: a byte shuffle puts byte `j` of the group's two lines into the two words of dword `j`, a shift brings the upper
//!   nibble down for odd lanes, and a table lookup by words gives both weights as bf16, of which a shift and a mask make f32:
//!   five instructions for 32 weights. (A lookup in f32 takes as many, but one more of them on the two shuffle units.) The
//!   lookup minds only five bits of an index and the table repeats after sixteen entries, so nothing is masked before it.
//! - f32: one permutation.
//!
//! So a weight costs less to decode than to load unpacked, and no body unpacks weights into memory.
//!
//! Bodies: [`one`] vector, MXFP4 with a [`few`], everything else with [`many`].

mod few;
mod many;
mod one;
mod tile;

use std::arch::x86_64::{
    __m512, __m512d, __m512i, _mm_add_pd, _mm_add_sd, _mm_cvtsd_ss, _mm_cvtss_f32, _mm_loadu_si128,
    _mm_setzero_ps, _mm_unpackhi_pd, _mm256_add_pd, _mm256_castpd256_pd128, _mm256_extractf128_pd,
    _mm256_loadu_si256, _mm512_add_pd, _mm512_and_si512, _mm512_broadcast_i32x4,
    _mm512_broadcast_i64x4, _mm512_castpd512_pd256, _mm512_castps512_ps256, _mm512_castsi512_ps,
    _mm512_cvtps_pd, _mm512_extractf32x8_ps, _mm512_extractf64x4_pd, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_permutexvar_epi16, _mm512_permutexvar_ps, _mm512_set1_epi32,
    _mm512_setzero_pd, _mm512_shuffle_epi8, _mm512_slli_epi32, _mm512_srlv_epi32,
};

use super::activations::{Activations, LANES, Line};
use super::weights::{GROUP, SCALES, TWICE_E2M1, Weights};

/// `out[row][t] = w[row] . x[t]` on this thread.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn matmul(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    match (x.num_rows(), w) {
        (1, _) => one::matvec(w, x, out),
        (
            ..=few::MOST,
            Weights::Mxfp4 {
                packed,
                scale,
                nan_scales,
            },
        ) => few::mxfp4(packed, scale, nan_scales, x, out),
        _ => many::matmul(w, x, out),
    }
}

/// The f64 lanes of one output: even ones, odd ones.
#[derive(Clone, Copy)]
struct Lanes([__m512d; 2]);

impl Lanes {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn zero() -> Self {
        Self([_mm512_setzero_pd(); 2])
    }

    /// Adds a block sum.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn carry(&mut self, block: __m512) {
        let Self([even, odd]) = self;
        *even = _mm512_add_pd(*even, _mm512_cvtps_pd(_mm512_castps512_ps256(block)));
        *odd = _mm512_add_pd(*odd, _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(block)));
    }

    /// The tree: neighbours, distance 4, 2, 1, one rounding.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn reduce(self) -> f32 {
        let Self([even, odd]) = self;
        let pairs = _mm512_add_pd(even, odd);
        let quads = _mm256_add_pd(
            _mm512_castpd512_pd256(pairs),
            _mm512_extractf64x4_pd::<1>(pairs),
        );
        let two = _mm_add_pd(
            _mm256_castpd256_pd128(quads),
            _mm256_extractf128_pd::<1>(quads),
        );
        let total = _mm_add_sd(two, _mm_unpackhi_pd(two, two));
        _mm_cvtss_f32(_mm_cvtsd_ss(_mm_setzero_ps(), total))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load(line: &Line) -> __m512 {
    // SAFETY: sixteen readable f32.
    unsafe { _mm512_loadu_ps(line.0.as_ptr()) }
}

/// A constant of 64 bytes as a register.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn constant<T: Copy, const N: usize>(values: &'static [T; N]) -> __m512i {
    const { assert!(size_of::<T>() * N == 64) };
    // SAFETY: 64 readable bytes.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

/// Sixteen weights: 32 bytes of bf16 or 64 of f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dense_line(bytes: &[u8]) -> __m512 {
    match bytes.as_array() {
        Some(bytes) => bf16_line(bytes),
        None => f32_line(
            bytes
                .as_array()
                .expect("sixteen weights of two or four bytes"),
        ),
    }
}

/// Which byte of a line's words each byte of an unpacked bf16 line is. A shuffle reads within sixteen bytes; bit 7 makes a zero.
static BF16_BYTES: [u8; 64] = {
    let mut bytes = [0x80; 64];
    let mut at = 0_u8;
    while at < 8 {
        let word = 4 * at % 16;
        let (even, odd) = (4 * at as usize, 4 * at as usize + 32);
        (bytes[even + 2], bytes[even + 3]) = (word, word + 1);
        (bytes[odd + 2], bytes[odd + 3]) = (word + 2, word + 3);
        at += 1;
    }
    bytes
};

/// Sixteen bf16 weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn bf16_line(bytes: &[u8; 2 * LANES]) -> __m512 {
    // SAFETY: 32 readable bytes, and the load allows any alignment.
    let words = _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) });
    _mm512_castsi512_ps(_mm512_shuffle_epi8(words, constant(&BF16_BYTES)))
}

/// Sixteen f32 weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn f32_line(bytes: &[u8; 4 * LANES]) -> __m512 {
    static ORDER: [u32; LANES] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];
    // SAFETY: 64 readable bytes, and the load allows any alignment.
    let values = unsafe { _mm512_loadu_ps(bytes.as_ptr().cast()) };
    _mm512_permutexvar_ps(constant(&ORDER), values)
}

/// Byte `j` of both lines of a group in dword `j`, for even and for odd lanes.
static MXFP4_BYTES: [u8; 64] = {
    let mut bytes = [0x80; 64];
    let mut at = 0_u8;
    while at < 16 {
        let (first, second) = (4 * at as usize, 4 * at as usize + 2);
        (bytes[first], bytes[second]) = (at % 8, at % 8 + 8);
        at += 1;
    }
    bytes
};

/// bf16 of the sixteen values, twice over, for an index of five bits.
type Values = [u16; 32];

/// The doubled values times `2^(scale - 128)`, for a scale of [`SCALES`].
const fn mxfp4_values(scale: u8) -> Values {
    let factor = f32::from_bits((scale as u32 - 1) << 23);
    let mut values = [0; 32];
    let mut at = 0;
    while at < 32 {
        let value = TWICE_E2M1[at % 16] as f32 * factor;
        values[at] = (value.to_bits() >> 16) as u16;
        at += 1;
    }
    values
}

/// The doubled values.
static MXFP4_VALUES: Values = mxfp4_values(128);

/// The values times the factor of every scale byte; those beyond [`SCALES`] are not used.
static MXFP4_SCALED: [Values; 256] = {
    let mut all = [[0; 32]; 256];
    let mut scale = *SCALES.start();
    while scale <= *SCALES.end() {
        all[scale as usize] = mxfp4_values(scale);
        scale += 1;
    }
    all
};

static MXFP4_SHIFTS: [u32; LANES] = [0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4];

/// The doubled values of a group of 32 MXFP4 weights: elements 0-15, 16-31.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn mxfp4_lines(bytes: &[u8; GROUP / 2]) -> [__m512; 2] {
    mxfp4_lookup(bytes, &MXFP4_VALUES)
}

/// The values of a group times its factor, for a scale of [`SCALES`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn mxfp4_scaled_lines(bytes: &[u8; GROUP / 2], scale: u8) -> [__m512; 2] {
    mxfp4_lookup(bytes, &MXFP4_SCALED[usize::from(scale)])
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn mxfp4_lookup(bytes: &[u8; GROUP / 2], values: &'static Values) -> [__m512; 2] {
    // SAFETY: 16 readable bytes, and the load allows any alignment.
    let packed = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
    let bytes = _mm512_shuffle_epi8(packed, constant(&MXFP4_BYTES));
    let nibbles = _mm512_srlv_epi32(bytes, constant(&MXFP4_SHIFTS));
    let values = _mm512_permutexvar_epi16(nibbles, constant(values));
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(values)),
        _mm512_castsi512_ps(_mm512_and_si512(values, upper)),
    ]
}
