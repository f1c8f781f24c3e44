//! One block of two rows, decoded into registers, times any number of vectors.
//!
//! # Registers
//!
//! The sixteen lines of both rows stay in registers while vector after vector passes: eight loads for sixteen multiply-adds, block
//! sums that are complete when a vector has passed, and half the registers left for what is in work, so that nothing depends
//! on how the compiler orders instructions.
//!
//! # The f64 sums
//!
//! Carrying a block sum takes two conversions and two additions, on other units than the multiply-adds; the processor does both
//! at once if they are close in the program and do not wait for each other. So block sums are left in memory ([`Parts`]), and
//! those of a vector are carried when it comes by again, for the next block.
//!
//! Of the multiply-add rate, from the first-level cache and without decoding, Zen 5 reaches 88 % this way (98 % if nothing were carried),
//! where tiles of four rows by six vectors, which hold sums in registers instead of weights, reach 75 %.
//!
//! # MXFP4 without the factor
//!
//! The written order multiplies a group's sum by its factor `h = 2^k`. Where nothing can leave the range of normal numbers
//! ([`Activations::are_in_range`], [`SCALES`]), weights are looked up in a table that has `h` multiplied in. Then an addition takes
//! the place of the third multiply-add of a group, and units of its own.
//!
//! A block sum starts from its first product instead of adding it to +0. The two differ if that product is -0, and then at most in
//! the sign of a block sum of zero, which the f64 lanes drop.
//!
//! [`Activations::are_in_range`]: super::super::activations::Activations::are_in_range

use std::arch::x86_64::{
    __m512, _mm256_loadu_ps, _mm512_add_pd, _mm512_add_ps, _mm512_cvtps_pd, _mm512_fmadd_ps,
    _mm512_loadu_pd, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_pd,
    _mm512_storeu_ps,
};

use super::super::activations::{BLOCK, BlockLines, LANES, Line};
use super::super::weights::{GROUP, SCALES};
use super::{Lanes, dense_line, load, mxfp4_lines, mxfp4_scaled_lines};

/// Rows that pass together.
pub(super) const ROWS: usize = 2;
/// Lines of a block.
const LINES: usize = BLOCK / LANES;
/// Groups of a block.
pub(super) const GROUPS: usize = BLOCK / GROUP;

/// Running f64 lanes of one result.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Sum([f64; LANES]);

/// Running lanes of both rows for one vector.
pub(super) type Sums = [Sum; ROWS];

/// Block sums of both rows for one vector.
pub(super) type Parts = [Line; ROWS];

/// What sums start from.
pub(super) const NO_SUMS: Sums = [Sum([0.0; LANES]); ROWS];
/// Block sums that change nothing.
pub(super) const NO_PARTS: Parts = [Line([0.0; LANES]); ROWS];

/// The same block of both rows, in registers.
type Decoded = [[__m512; LINES]; ROWS];

/// Factors of the groups of both rows.
type Factors = [[f32; GROUPS]; ROWS];

/// The vectors that a block of weights meets: their blocks from it on, `stride` blocks apart.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    pub(super) blocks: &'a [BlockLines],
    pub(super) stride: usize,
}

/// Block sums of the vectors, and the sums that those of the block before belong to. Both are as long as there are vectors.
pub(super) struct Results<'a> {
    pub(super) parts: &'a mut [Parts],
    pub(super) due: &'a mut [Sums],
}

/// What a decoded block holds.
const DENSE: u8 = 0;
/// MXFP4 weights times their factors.
const SCALED: u8 = 1;
/// MXFP4 weights doubled; the factors are apart.
const FACTORS: u8 = 2;

/// bf16 or f32 rows, `BYTES` a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn dense<const BYTES: usize>(
    rows: [&[u8; BYTES]; ROWS],
    x: Vectors<'_>,
    results: Results<'_>,
) {
    let size = BYTES / LINES;
    let mut w = [[_mm512_setzero_ps(); LINES]; ROWS];
    for (w, bytes) in w.iter_mut().zip(rows) {
        for (w, bytes) in w.iter_mut().zip(bytes.chunks_exact(size)) {
            *w = dense_line(bytes);
        }
    }
    meet::<DENSE>(&w, &[[0.0; GROUPS]; ROWS], x, results);
}

/// MXFP4 rows. `in_range` says that the vectors allow factors multiplied into the weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn mxfp4(
    (packed, scale): ([&[u8; BLOCK / 2]; ROWS], [&[u8; GROUPS]; ROWS]),
    table: &[f32; 256],
    in_range: bool,
    x: Vectors<'_>,
    results: Results<'_>,
) {
    let groups = packed.map(|bytes| bytes.as_chunks::<{ GROUP / 2 }>().0);
    let mut factors = [[0.0; GROUPS]; ROWS];
    let mut w = [[_mm512_setzero_ps(); LINES]; ROWS];
    if in_range
        && scale
            .iter()
            .all(|scale| scale.iter().all(|byte| SCALES.contains(byte)))
    {
        for r in 0..ROWS {
            for g in 0..GROUPS {
                [w[r][2 * g], w[r][2 * g + 1]] = mxfp4_scaled_lines(&groups[r][g], scale[r][g]);
            }
        }
        meet::<SCALED>(&w, &factors, x, results);
    } else {
        for r in 0..ROWS {
            for g in 0..GROUPS {
                [w[r][2 * g], w[r][2 * g + 1]] = mxfp4_lines(&groups[r][g]);
                factors[r][g] = table[usize::from(scale[r][g])];
            }
        }
        meet::<FACTORS>(&w, &factors, x, results);
    }
}

/// Leaves the block sums of every vector, and carries those of the block before.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn meet<const FORM: u8>(
    w: &Decoded,
    factors: &Factors,
    x: Vectors<'_>,
    Results { parts, due }: Results<'_>,
) {
    let count = parts.len();
    assert!(due.len() == count && x.blocks.len() > (count - 1) * x.stride);
    let (pairs, last) = parts.as_chunks_mut();
    let (pairs_due, last_due) = due.as_chunks_mut();
    for (i, (parts, due)) in pairs.iter_mut().zip(pairs_due).enumerate() {
        // SAFETY: there are so many vectors, as asserted.
        let x = unsafe { [x.block(2 * i), x.block(2 * i + 1)] };
        pass::<FORM, 2>(w, factors, x, parts, due);
    }
    for (parts, due) in last
        .as_chunks_mut()
        .0
        .iter_mut()
        .zip(last_due.as_chunks_mut().0)
    {
        // SAFETY: the last vector.
        let x = unsafe { [x.block(count - 1)] };
        pass::<FORM, 1>(w, factors, x, parts, due);
    }
}

impl<'a> Vectors<'a> {
    /// # Safety
    /// There are more than `t * stride` blocks.
    #[inline]
    unsafe fn block(self, t: usize) -> &'a BlockLines {
        // SAFETY: the caller's.
        unsafe { self.blocks.get_unchecked(t * self.stride) }
    }
}

/// `N` vectors at a time, so that one's sums are added to while the other's wait.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn pass<const FORM: u8, const N: usize>(
    w: &Decoded,
    factors: &Factors,
    x: [&BlockLines; N],
    parts: &mut [Parts; N],
    due: &mut [Sums; N],
) {
    let mut sums = [[_mm512_setzero_ps(); ROWS]; N];
    for t in 0..N {
        carry(&parts[t], &mut due[t]);
    }
    if FORM == DENSE {
        for i in 0..LINES {
            for t in 0..N {
                let x = load(&x[t][i]);
                for r in 0..ROWS {
                    sums[t][r] = if i == 0 {
                        _mm512_mul_ps(w[r][i], x)
                    } else {
                        _mm512_fmadd_ps(w[r][i], x, sums[t][r])
                    };
                }
            }
        }
    } else {
        for g in 0..GROUPS {
            for t in 0..N {
                let x = [load(&x[t][2 * g]), load(&x[t][2 * g + 1])];
                for r in 0..ROWS {
                    let group = _mm512_mul_ps(w[r][2 * g], x[0]);
                    let group = _mm512_fmadd_ps(w[r][2 * g + 1], x[1], group);
                    sums[t][r] = if FORM == FACTORS {
                        _mm512_fmadd_ps(_mm512_set1_ps(factors[r][g]), group, sums[t][r])
                    } else if g == 0 {
                        group
                    } else {
                        _mm512_add_ps(sums[t][r], group)
                    };
                }
            }
        }
    }
    for t in 0..N {
        for r in 0..ROWS {
            // SAFETY: sixteen writable f32.
            unsafe { _mm512_storeu_ps(parts[t][r].0.as_mut_ptr(), sums[t][r]) };
        }
    }
}

/// Adds block sums to the f64 lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn carry(parts: &Parts, sums: &mut Sums) {
    for (part, sum) in parts.iter().zip(sums) {
        for (part, sum) in part.0.as_chunks().0.iter().zip(sum.0.as_chunks_mut().0) {
            let (part, sum): (&[f32; 8], &mut [f64; 8]) = (part, sum);
            // SAFETY: eight readable f32, eight readable and writable f64.
            unsafe {
                let part = _mm512_cvtps_pd(_mm256_loadu_ps(part.as_ptr()));
                let total = _mm512_add_pd(_mm512_loadu_pd(sum.as_ptr()), part);
                _mm512_storeu_pd(sum.as_mut_ptr(), total);
            }
        }
    }
}

impl Sum {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn load(&self) -> Lanes {
        let [even, odd] = [0, 1].map(|half| {
            // SAFETY: eight readable f64.
            unsafe { _mm512_loadu_pd(self.0.as_chunks::<8>().0[half].as_ptr()) }
        });
        Lanes([even, odd])
    }
}
