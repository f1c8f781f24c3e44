//! The register tile of several vectors: four rows times up to three vectors.
//!
//! - Even and odd lanes take turns, since no lane ever meets another before the final tree: twelve sums of eight lanes.
//! - The f32 sums of two blocks are stored, then converted from memory and added to the f64 lanes. From registers the upper
//!   halves would need a shuffle each, which competes with the multiply-adds; and two blocks share one load and store of the
//!   f64 lanes. The processor does these additions beside the next blocks' multiply-adds. (Four blocks at once measured
//!   slower: more than it looks ahead.)
//!
//! # MXFP4 without the factor
//!
//! The written order multiplies a group's sum by its factor `h = 2^k`. Where nothing can leave the range of normal numbers, `h`
//! may as well be multiplied into the weights beforehand, which is exact, and the third instruction becomes an addition, which other units of the processor do.
//! That is so when the inputs are [in range] and the scale bytes within [`SCALES`]. Anything else takes [`Form::Factors`].
//!
//! [in range]: super::super::activations::Activations::are_in_range
//! [`SCALES`]: super::super::weights::SCALES

#![expect(
    clippy::needless_range_loop,
    reason = "a tile is indexed by row and vector alike"
)]

use std::arch::x86_64::{
    __m256, _mm_loadu_ps, _mm256_add_pd, _mm256_add_ps, _mm256_cvtps_pd, _mm256_fmadd_ps,
    _mm256_loadu_pd, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_storeu_pd, _mm256_storeu_ps,
};
use std::array;
use std::hint::black_box;

use super::super::activations::{BLOCK, BlockLines, LANES, Line};
use super::super::weights::GROUP;

/// Rows of a tile.
pub(super) const ROWS: usize = 4;

/// Groups of a block.
pub(super) const GROUPS: usize = BLOCK / GROUP;

/// Blocks whose f32 sums are carried together.
pub(super) const CARRIED: usize = 2;

/// Running f64 lanes of a tile's rows for one vector.
pub(super) type Sums<const R: usize> = [[f64; LANES]; R];

/// One block of the rows of a tile, unpacked.
#[derive(Clone, Copy)]
pub(super) struct TileBlock {
    pub(super) lines: [BlockLines; ROWS],
    /// [`Form::Factors`] only.
    pub(super) factors: [[f32; GROUPS]; ROWS],
}

impl TileBlock {
    pub(super) const ZERO: Self = Self {
        lines: [[Line([0.0; LANES]); BLOCK / LANES]; ROWS],
        factors: [[0.0; GROUPS]; ROWS],
    };
}

/// What the lines of a [`TileBlock`] hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// bf16 or f32 weights.
    Dense,
    /// MXFP4 weights times their factors.
    Scaled,
    /// MXFP4 weights doubled; the factors are apart.
    Factors,
}

/// The f32 sums of one block of a tile's rows, by vector.
pub(super) type BlockSums<const R: usize, const N: usize> = [[Line; R]; N];

/// What [`BlockSums`] start from.
pub(super) const NO_SUM: Line = Line([0.0; LANES]);

/// Adds the products of `tile` and the same blocks of `N` vectors to their sums.
#[target_feature(enable = "avx2,fma")]
pub(super) fn multiply<const N: usize>(
    form: Form,
    tile: &[TileBlock],
    x: [&[BlockLines]; N],
    sums: &mut [Sums<ROWS>],
) {
    match form {
        Form::Dense => multiply_form::<N, DENSE>(tile, x, sums),
        Form::Scaled => multiply_form::<N, SCALED>(tile, x, sums),
        Form::Factors => multiply_form::<N, FACTORS>(tile, x, sums),
    }
}

const DENSE: u8 = 0;
const SCALED: u8 = 1;
const FACTORS: u8 = 2;

#[inline]
#[target_feature(enable = "avx2,fma")]
fn multiply_form<const N: usize, const FORM: u8>(
    tile: &[TileBlock],
    x: [&[BlockLines]; N],
    sums: &mut [Sums<ROWS>],
) {
    let x = x.map(|x| &x[..tile.len()]);
    let sums = &mut sums[..N];
    let mut blocks = [[[NO_SUM; ROWS]; N]; CARRIED];
    for (i, w) in tile.chunks(CARRIED).enumerate() {
        for (k, (w, block)) in w.iter().zip(&mut blocks).enumerate() {
            products::<N, FORM>(w, x.map(|x| &x[i * CARRIED + k]), block);
        }
        carry(&blocks, w.len(), sums);
    }
}

/// The f32 sums of one block.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn products<const N: usize, const FORM: u8>(
    w: &TileBlock,
    x: [&BlockLines; N],
    sums: &mut BlockSums<ROWS, N>,
) {
    if FORM == DENSE {
        dense_half::<N, 0>(w, x, sums);
        dense_half::<N, 8>(w, x, sums);
    } else {
        mxfp4_half::<N, FORM, 0>(w, x, sums);
        mxfp4_half::<N, FORM, 8>(w, x, sums);
    }
}

/// The eight lanes from `HALF` on.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dense_half<const N: usize, const HALF: usize>(
    w: &TileBlock,
    x: [&BlockLines; N],
    sums: &mut BlockSums<ROWS, N>,
) {
    let mut tile = [[_mm256_setzero_ps(); N]; ROWS];
    // A count the compiler cannot see and no bound on it: unrolled, one sum would be spilled, a tenth of the speed.
    for i in 0..black_box(BLOCK / LANES) {
        let i = i % (BLOCK / LANES);
        // Twelve sums, three inputs and one weight at a time are all sixteen registers.
        let x = x.map(|x| half::<HALF>(&x[i]));
        for r in 0..ROWS {
            let w = half::<HALF>(&w.lines[r][i]);
            for t in 0..N {
                tile[r][t] = _mm256_fmadd_ps(w, x[t], tile[r][t]);
            }
        }
    }
    store_half::<ROWS, N, HALF>(&tile, sums);
}

/// The eight lanes from `HALF` on, for MXFP4.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn mxfp4_half<const N: usize, const FORM: u8, const HALF: usize>(
    w: &TileBlock,
    x: [&BlockLines; N],
    sums: &mut BlockSums<ROWS, N>,
) {
    let mut tile = [[_mm256_setzero_ps(); N]; ROWS];
    for g in 0..black_box(GROUPS) {
        let g = g % GROUPS;
        let x: [[__m256; 2]; N] =
            array::from_fn(|t| [half::<HALF>(&x[t][2 * g]), half::<HALF>(&x[t][2 * g + 1])]);
        for r in 0..ROWS {
            let lines = &w.lines[r];
            let (w0, w1) = (half::<HALF>(&lines[2 * g]), half::<HALF>(&lines[2 * g + 1]));
            for t in 0..N {
                let group = _mm256_fmadd_ps(w1, x[t][1], _mm256_mul_ps(w0, x[t][0]));
                tile[r][t] = if FORM == SCALED {
                    _mm256_add_ps(tile[r][t], group)
                } else {
                    _mm256_fmadd_ps(_mm256_set1_ps(w.factors[r][g]), group, tile[r][t])
                };
            }
        }
    }
    store_half::<ROWS, N, HALF>(&tile, sums);
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn half<const HALF: usize>(line: &Line) -> __m256 {
    const { assert!(HALF == 0 || HALF == LANES / 2) };
    let eight: &[f32] = &line.0[HALF..HALF + 8];
    // SAFETY: eight readable f32.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn store_half<const R: usize, const N: usize, const HALF: usize>(
    tile: &[[__m256; N]; R],
    sums: &mut BlockSums<R, N>,
) {
    for t in 0..N {
        for r in 0..R {
            let eight = &mut sums[t][r].0[HALF..HALF + 8];
            // SAFETY: eight writable f32.
            unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), tile[r][t]) };
        }
    }
}

/// Adds the sums of the first `count` blocks, ascending, to the f64 lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn carry<const R: usize, const N: usize>(
    blocks: &[BlockSums<R, N>; CARRIED],
    count: usize,
    sums: &mut [Sums<R>],
) {
    // Seen through, the compiler would keep the sums in registers and shuffle their halves.
    let blocks = black_box(blocks);
    match blocks[..count].as_array::<CARRIED>() {
        Some(all) => carry_all(all, sums),
        None => carry_all::<R, N, 1>(blocks[..1].as_array().expect("one block"), sums),
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn carry_all<const R: usize, const N: usize, const K: usize>(
    blocks: &[BlockSums<R, N>; K],
    sums: &mut [Sums<R>],
) {
    for t in 0..N {
        for r in 0..R {
            for (quad, lanes) in sums[t][r].as_chunks_mut::<4>().0.iter_mut().enumerate() {
                // SAFETY: four readable f64.
                let mut sum = unsafe { _mm256_loadu_pd(lanes.as_ptr()) };
                for block in blocks {
                    let four = &block[t][r].0.as_chunks::<4>().0[quad];
                    // SAFETY: four readable f32.
                    let four = unsafe { _mm_loadu_ps(four.as_ptr()) };
                    sum = _mm256_add_pd(sum, _mm256_cvtps_pd(four));
                }
                // SAFETY: four writable f64.
                unsafe { _mm256_storeu_pd(lanes.as_mut_ptr(), sum) };
            }
        }
    }
}
