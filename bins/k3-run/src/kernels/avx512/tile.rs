//! A tile of 4 rows by up to 6 vectors, whose weights are decoded in registers once for all of them.
//!
//! # Registers
//!
//! 24 block sums, four lines of weights and one input are 29 registers. MXFP4 takes two rows at a time, to load an input once
//! for both (one row at a time, each instruction reading its input, measured 6 % slower): four lines, two factors, three
//! intermediates, so 20 sums. The multiply-adds of a vector are a few lines of assembly,
//! because the compiler, free to move them, loads far ahead and spills a third of the sums.
//!
//! # The f64 sums
//!
//! Carrying block sums takes two conversions and two additions a result, half as many as there are multiply-adds. They use
//! other units, but only if they are close enough in the program. So a visit to a tile ends after [`DEPTH`] blocks with
//! the block sums in memory, and during the next visit each of them is carried between two steps. Loading and storing the
//! f64 sums once for four blocks is what makes room for that: once a block measured a tenth slower.
//!
//! Measured on Zen 5 at 64 vectors, of the multiply-add rate: bf16 50 %, and 64 % if nothing were carried; MXFP4 38 % and
//! 43 %, where three instructions for two products allow 67 %.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_ps, _mm512_add_pd, _mm512_cvtps_pd,
    _mm512_loadu_pd, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_pd, _mm512_storeu_ps,
};

use super::super::activations::{BLOCK, BlockLines, LANES, Line};
use super::super::weights::GROUP;
use super::{Lanes, dense_line, mxfp4_lines};

/// Rows of a register tile.
pub(super) const TILE_ROWS: usize = 4;
/// Vectors of a register tile, at most.
pub(super) const TILE_TOKENS: usize = 6;
/// The same for MXFP4, whose two rows in work need more registers.
pub(super) const MXFP4_TOKENS: usize = 5;
/// Results of a tile, at most.
const RESULTS: usize = TILE_ROWS * TILE_TOKENS;
/// Blocks of a visit.
pub(super) const DEPTH: usize = 4;
/// Lines of a block.
const LINES: usize = BLOCK / LANES;
/// Groups of a block.
const GROUPS: usize = BLOCK / GROUP;
/// How far ahead of the block in hand a row's bytes are asked for.
const AHEAD: usize = 1024;

/// Running f64 lanes of one result.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Sum([f64; LANES]);

/// Running lanes of a tile, the rows of a vector adjacent.
pub(super) type Sums = [Sum; RESULTS];

/// Block sums of a visit: those of a result adjacent.
pub(super) type Parts = [[Line; DEPTH]; RESULTS];

/// What sums start from.
pub(super) const NO_SUMS: Sums = [Sum([0.0; LANES]); RESULTS];
/// Block sums that change nothing.
pub(super) const NO_PARTS: Parts = [[Line([0.0; LANES]); DEPTH]; RESULTS];

/// Some blocks of the rows of a tile.
pub(super) type Rows<'a, const BYTES: usize> = [&'a [[u8; BYTES]]; TILE_ROWS];

/// The same blocks of its vectors; past the last vector it stands in.
pub(super) type Vectors<'a> = [&'a [BlockLines]; TILE_TOKENS];

/// A tile's MXFP4 rows.
pub(super) struct Mxfp4<'a> {
    pub(super) packed: Rows<'a, { BLOCK / 2 }>,
    pub(super) scale: Rows<'a, GROUPS>,
    pub(super) factors: &'a [f32; 256],
}

/// What a tile is made of.
pub(super) enum Tile<'a> {
    Bf16(Rows<'a, { BLOCK * 2 }>),
    F32(Rows<'a, { BLOCK * 4 }>),
    Mxfp4(Mxfp4<'a>),
}

/// One visit to a tile: at most [`DEPTH`] blocks of it.
pub(super) struct Visit<'a> {
    pub(super) tile: Tile<'a>,
    pub(super) vectors: Vectors<'a>,
    /// How many of the vectors count.
    pub(super) num_tokens: usize,
    /// Whether the weights are met for the first time.
    pub(super) fresh: bool,
}

/// What is carried during a visit: block sums of the one before.
pub(super) struct Due<'a> {
    pub(super) parts: &'a Parts,
    pub(super) sums: &'a mut Sums,
    /// How many results.
    pub(super) count: usize,
}

impl Visit<'_> {
    /// Leaves the block sums in `parts` and carries what is due.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn run(&self, parts: &mut Parts, due: Due<'_>) {
        match self.num_tokens {
            1 => self.run_for::<1>(parts, due),
            2 => self.run_for::<2>(parts, due),
            3 => self.run_for::<3>(parts, due),
            4 => self.run_for::<4>(parts, due),
            5 => self.run_for::<5>(parts, due),
            _ => self.run_for::<6>(parts, due),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn run_for<const N: usize>(&self, parts: &mut Parts, due: Due<'_>) {
        match &self.tile {
            Tile::Bf16(rows) => dense::<_, N>(rows, &self.vectors, parts, due, self.fresh),
            Tile::F32(rows) => dense::<_, N>(rows, &self.vectors, parts, due, self.fresh),
            Tile::Mxfp4(rows) => mxfp4::<N>(rows, &self.vectors, parts, due, self.fresh),
        }
    }
}

/// Block sums of bf16 or f32 rows times the first `N` vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dense<const BYTES: usize, const N: usize>(
    w: &Rows<'_, BYTES>,
    x: &Vectors<'_>,
    parts: &mut Parts,
    mut due: Due<'_>,
    fresh: bool,
) {
    let size = BYTES / LINES;
    for b in 0..x[0].len().min(DEPTH) {
        let w: [&[u8; BYTES]; TILE_ROWS] = std::array::from_fn(|r| &w[r][b]);
        let x: [&BlockLines; N] = std::array::from_fn(|t| &x[t][b]);
        if fresh {
            for bytes in w {
                ask_ahead(bytes);
            }
        }
        let mut tile = [[_mm512_setzero_ps(); TILE_ROWS]; N];
        for i in 0..LINES {
            // SAFETY: a line of `BYTES / LINES` bytes is in each block.
            let w: [__m512; TILE_ROWS] = unsafe {
                [
                    dense_line(w[0].get_unchecked(i * size..(i + 1) * size)),
                    dense_line(w[1].get_unchecked(i * size..(i + 1) * size)),
                    dense_line(w[2].get_unchecked(i * size..(i + 1) * size)),
                    dense_line(w[3].get_unchecked(i * size..(i + 1) * size)),
                ]
            };
            for t in 0..N {
                // SAFETY: `i` is a line of the block.
                unsafe { multiply_line(&w, x[t], i, &mut tile[t]) };
            }
            due.carry(b * LINES + i);
        }
        store(&tile, parts, b);
    }
}

/// Adds the products of line `i` of a vector with that of four rows, fused.
///
/// # Safety
/// `i` is below [`LINES`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn multiply_line(
    w: &[__m512; TILE_ROWS],
    x: &BlockLines,
    i: usize,
    sums: &mut [__m512; TILE_ROWS],
) {
    // Scratch, with a name and so a type: an anonymous output is given a register of another class.
    let line: __m512;
    // SAFETY: reads a line of `x`, writes nothing.
    unsafe {
        asm!(
            "vmovups {x:z}, zmmword ptr [{p} + {i}]",
            "vfmadd231ps {a0:z}, {w0:z}, {x:z}",
            "vfmadd231ps {a1:z}, {w1:z}, {x:z}",
            "vfmadd231ps {a2:z}, {w2:z}, {x:z}",
            "vfmadd231ps {a3:z}, {w3:z}, {x:z}",
            x = out(zmm_reg) line,
            p = in(reg) x.as_ptr(),
            i = in(reg) i * size_of::<Line>(),
            a0 = inout(zmm_reg) sums[0],
            a1 = inout(zmm_reg) sums[1],
            a2 = inout(zmm_reg) sums[2],
            a3 = inout(zmm_reg) sums[3],
            w0 = in(zmm_reg) w[0],
            w1 = in(zmm_reg) w[1],
            w2 = in(zmm_reg) w[2],
            w3 = in(zmm_reg) w[3],
            options(nostack, preserves_flags)
        );
    }
    let _ = line;
}

/// [`dense`] for MXFP4: the two products of a group first, then the group's factor.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn mxfp4<const N: usize>(
    w: &Mxfp4<'_>,
    x: &Vectors<'_>,
    parts: &mut Parts,
    mut due: Due<'_>,
    fresh: bool,
) {
    for b in 0..x[0].len().min(DEPTH) {
        let packed: [&[u8; BLOCK / 2]; TILE_ROWS] = std::array::from_fn(|r| &w.packed[r][b]);
        let scale: [&[u8; GROUPS]; TILE_ROWS] = std::array::from_fn(|r| &w.scale[r][b]);
        let x: [&BlockLines; N] = std::array::from_fn(|t| &x[t][b]);
        if fresh {
            for bytes in packed {
                ask_ahead(bytes);
            }
        }
        let mut tile = [[_mm512_setzero_ps(); TILE_ROWS]; N];
        for g in 0..GROUPS {
            // SAFETY: `g` is a group of the block.
            unsafe {
                let rows = [(packed[0], scale[0]), (packed[1], scale[1])];
                multiply_group::<0, N>(rows, w.factors, &x, g, &mut tile);
                due.carry((b * GROUPS + g) * 2);
                let rows = [(packed[2], scale[2]), (packed[3], scale[3])];
                multiply_group::<2, N>(rows, w.factors, &x, g, &mut tile);
                due.carry((b * GROUPS + g) * 2 + 1);
            }
        }
        store(&tile, parts, b);
    }
}

/// Both lines and the factor of group `g` of a row.
///
/// # Safety
/// `g` is below [`GROUPS`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn unpack(
    (packed, scale): (&[u8; BLOCK / 2], &[u8; GROUPS]),
    factors: &[f32; 256],
    g: usize,
) -> ([__m512; 2], __m512) {
    // SAFETY: the caller's.
    let (bytes, byte) = unsafe {
        (
            packed.as_chunks().0.get_unchecked(g),
            scale.get_unchecked(g),
        )
    };
    (
        mxfp4_lines(bytes),
        _mm512_set1_ps(factors[usize::from(*byte)]),
    )
}

/// Adds the products of group `g` of the vectors with that of rows `R` and `R + 1`.
///
/// # Safety
/// `g` is below [`GROUPS`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn multiply_group<const R: usize, const N: usize>(
    rows: [(&[u8; BLOCK / 2], &[u8; GROUPS]); 2],
    factors: &[f32; 256],
    x: &[&BlockLines; N],
    g: usize,
    sums: &mut [[__m512; TILE_ROWS]; N],
) {
    // SAFETY: `g` is a group of the block.
    let [(v, e), (w, f)] = unsafe { [unpack(rows[0], factors, g), unpack(rows[1], factors, g)] };
    for t in 0..N {
        let (x0, x1, m): (__m512, __m512, __m512);
        // SAFETY: reads two lines of a vector, writes nothing.
        unsafe {
            asm!(
                "vmovups {x0:z}, zmmword ptr [{p} + {i}]",
                "vmovups {x1:z}, zmmword ptr [{p} + {i} + 64]",
                "vmulps {m:z}, {v0:z}, {x0:z}",
                "vmulps {x0:z}, {w0:z}, {x0:z}",
                "vfmadd231ps {m:z}, {v1:z}, {x1:z}",
                "vfmadd231ps {x0:z}, {w1:z}, {x1:z}",
                "vfmadd231ps {a:z}, {e:z}, {m:z}",
                "vfmadd231ps {b:z}, {f:z}, {x0:z}",
                x0 = out(zmm_reg) x0,
                x1 = out(zmm_reg) x1,
                m = out(zmm_reg) m,
                p = in(reg) x[t].as_ptr(),
                i = in(reg) g * 2 * size_of::<Line>(),
                a = inout(zmm_reg) sums[t][R],
                b = inout(zmm_reg) sums[t][R + 1],
                v0 = in(zmm_reg) v[0],
                v1 = in(zmm_reg) v[1],
                w0 = in(zmm_reg) w[0],
                w1 = in(zmm_reg) w[1],
                e = in(zmm_reg) e,
                f = in(zmm_reg) f,
                options(nostack, preserves_flags)
            );
        }
        let _ = (x0, x1, m);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store<const N: usize>(tile: &[[__m512; TILE_ROWS]; N], parts: &mut Parts, b: usize) {
    for t in 0..N {
        for r in 0..TILE_ROWS {
            // SAFETY: sixteen writable f32.
            unsafe { _mm512_storeu_ps(parts[t * TILE_ROWS + r][b].0.as_mut_ptr(), tile[t][r]) };
        }
    }
}

impl Due<'_> {
    /// Carries result `i` if there is one.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn carry(&mut self, i: usize) {
        if i < self.count.min(RESULTS) {
            carry(&self.parts[i], &mut self.sums[i]);
        }
    }
}

/// Adds the block sums of a visit to the f64 lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn carry(parts: &[Line; DEPTH], sum: &mut Sum) {
    for (half, sum) in sum.0.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        // SAFETY: eight readable f64.
        let mut total = unsafe { _mm512_loadu_pd(sum.as_ptr()) };
        for part in parts {
            // SAFETY: eight readable f32.
            let part = unsafe { _mm256_loadu_ps(part.0.as_chunks::<8>().0[half].as_ptr()) };
            total = _mm512_add_pd(total, _mm512_cvtps_pd(part));
        }
        // SAFETY: eight writable f64.
        unsafe { _mm512_storeu_pd(sum.as_mut_ptr(), total) };
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

/// Asks for the bytes [`AHEAD`] of these; past the end of the weights that does nothing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn ask_ahead<const BYTES: usize>(bytes: &[u8; BYTES]) {
    for line in bytes.chunks_exact(64) {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
    }
}
