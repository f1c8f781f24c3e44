//! MXFP4 times a few vectors: tiles of four rows by all of them, decoded in registers once.
//!
//! With so few vectors most instructions decode, and [block by block](super::many) a pair of rows waits for that each time; here the
//! decoding of a group runs beside the multiply-adds of others. Two rows are in work at a time, to load an input once for both:
//! four lines, two factors, three intermediates and 20 block sums. The multiply-adds of a vector are a few lines of assembly,
//! because the compiler, free to move them, loads far ahead and spills a third of the sums.
//!
//! Block sums are left in memory for [`DEPTH`] blocks, and carried into the f64 sums between two steps of the next ones, since
//! that takes other units than the multiply-adds.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, _mm256_loadu_ps, _mm512_add_pd, _mm512_cvtps_pd, _mm512_loadu_pd, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_storeu_pd, _mm512_storeu_ps,
};
use std::array;

use super::super::activations::{Activations, BLOCK, BlockLines, LANES, Line};
use super::super::prefetch;
use super::super::weights::{GROUP, NanScales, half_factors};
use super::{Lanes, mxfp4_lines};

/// Rows of a tile.
const ROWS: usize = 4;
/// The most vectors this is faster for.
pub(super) const MOST: usize = 5;
/// Results of a tile, at most.
const RESULTS: usize = ROWS * MOST;
/// Blocks whose sums are carried together.
const DEPTH: usize = 4;
/// Groups of a block.
const GROUPS: usize = BLOCK / GROUP;
/// Steps of a block after which a result is carried.
const STEPS: usize = GROUPS * 2;
/// Bytes of a packed block.
const PACKED: usize = BLOCK / 2;
/// How far ahead of the block in hand a row's bytes are asked for.
const AHEAD: usize = 1024;

/// Running f64 lanes of one result.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sum([f64; LANES]);

/// Running lanes of a tile, the rows of a vector adjacent.
type Sums = [Sum; RESULTS];

/// Block sums of up to [`DEPTH`] blocks: those of a result adjacent.
type Parts = [[Line; DEPTH]; RESULTS];

/// The stored rows of a call.
#[derive(Clone, Copy)]
struct Stored<'a> {
    packed: &'a [u8],
    scale: &'a [u8],
    factors: &'a [f32; 256],
    num_rows: usize,
}

/// Some blocks of the rows of a tile.
struct Tile<'a> {
    packed: [&'a [[u8; PACKED]]; ROWS],
    scale: [&'a [[u8; GROUPS]]; ROWS],
    factors: &'a [f32; 256],
}

/// Block sums not carried yet, and where they go.
struct Due<'a> {
    parts: &'a Parts,
    sums: &'a mut Sums,
    /// How many results.
    count: usize,
}

/// `out[row][t] = w[row] . x[t]` for two to [`MOST`] vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn mxfp4(
    packed: &[u8],
    scale: &[u8],
    nan_scales: NanScales,
    x: &Activations,
    out: &mut [f32],
) {
    let stored = Stored {
        packed,
        scale,
        factors: half_factors(nan_scales),
        num_rows: out.len() / x.num_rows(),
    };
    let mut parts = [[[Line::default(); DEPTH]; RESULTS]; 2];
    for (row, out) in (0..).step_by(ROWS).zip(out.chunks_mut(ROWS * x.num_rows())) {
        match x.num_rows() {
            1 => tile::<1>(stored, row, x, &mut parts, out),
            2 => tile::<2>(stored, row, x, &mut parts, out),
            3 => tile::<3>(stored, row, x, &mut parts, out),
            4 => tile::<4>(stored, row, x, &mut parts, out),
            _ => tile::<MOST>(stored, row, x, &mut parts, out),
        }
    }
}

/// The results of up to four rows from `row` on and `N` vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn tile<const N: usize>(
    stored: Stored<'_>,
    row: usize,
    x: &Activations,
    parts: &mut [Parts; 2],
    out: &mut [f32],
) {
    let mut sums = [Sum([0.0; LANES]); RESULTS];
    // Which of `parts` are not carried yet, and how many results.
    let (mut last, mut count) = (0, 0);
    let vectors: [&[BlockLines]; N] = array::from_fn(|t| x.row(t));
    let whole = x.cols() / BLOCK;
    for first in (0..x.blocks_per_row()).step_by(DEPTH) {
        let [a, b] = &mut *parts;
        let (old, new) = if last == 0 { (a, b) } else { (b, a) };
        let mut due = Due {
            parts: old,
            sums: &mut sums,
            count,
        };
        let blocks = first..whole.min(first + DEPTH);
        let mut depth = blocks.len();
        if depth > 0 {
            let tile = stored.tile(row, x.cols(), blocks.clone());
            let x = vectors.map(|x| &x[blocks.clone()]);
            multiply(&tile, 0, &x, new, &mut due);
        }
        if depth < DEPTH && whole < x.blocks_per_row() {
            let packed = stored.padded(stored.packed, row, x.cols());
            let scale = stored.padded(stored.scale, row, x.cols());
            let tile = Tile {
                packed: packed.each_ref().map(std::slice::from_ref),
                scale: scale.each_ref().map(std::slice::from_ref),
                factors: stored.factors,
            };
            let x = vectors.map(|x| &x[whole..=whole]);
            multiply(&tile, depth, &x, new, &mut due);
            depth += 1;
        }
        for i in depth * STEPS..count {
            due.carry(i);
        }
        for parts in &mut new[..N * ROWS] {
            parts[depth..].fill(Line::default());
        }
        (last, count) = (1 - last, N * ROWS);
    }
    for (parts, sum) in parts[last].iter().zip(&mut sums).take(count) {
        carry(parts, sum);
    }
    for (r, out) in out.chunks_exact_mut(N).enumerate() {
        for (t, out) in out.iter_mut().enumerate() {
            *out = sums[t * ROWS + r].load().reduce();
        }
    }
}

impl<'a> Stored<'a> {
    /// Whole blocks of the tile of rows from `row` on.
    fn tile(&self, row: usize, cols: usize, blocks: std::ops::Range<usize>) -> Tile<'a> {
        Tile {
            packed: array::from_fn(|r| {
                &self.row(self.packed, PACKED, row + r, cols).as_chunks().0[blocks.clone()]
            }),
            scale: array::from_fn(|r| {
                &self.row(self.scale, GROUPS, row + r, cols).as_chunks().0[blocks.clone()]
            }),
            factors: self.factors,
        }
    }

    /// The last block of rows that end inside it; zeros stand for the missing weights.
    fn padded<const BYTES: usize>(
        &self,
        bytes: &[u8],
        row: usize,
        cols: usize,
    ) -> [[u8; BYTES]; ROWS] {
        array::from_fn(|r| {
            let rest = self.row(bytes, BYTES, row + r, cols).as_chunks::<BYTES>().1;
            let mut padded = [0; BYTES];
            padded[..rest.len()].copy_from_slice(rest);
            padded
        })
    }

    /// A row's bytes, `block_bytes` a block; past the last row it stands in, and its sums are dropped.
    fn row<'b>(&self, bytes: &'b [u8], block_bytes: usize, row: usize, cols: usize) -> &'b [u8] {
        let row_bytes = cols * block_bytes / BLOCK;
        let at = row.min(self.num_rows - 1) * row_bytes;
        &bytes[at..at + row_bytes]
    }
}

/// Leaves the block sums of a tile in `parts`, from block `first` of them on, and carries some of what is due.
///
/// The two products of a group come first, then its factor.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn multiply<const N: usize>(
    w: &Tile<'_>,
    first: usize,
    x: &[&[BlockLines]; N],
    parts: &mut Parts,
    due: &mut Due<'_>,
) {
    for b in 0..x[0].len() {
        let packed: [&[u8; PACKED]; ROWS] = array::from_fn(|r| &w.packed[r][b]);
        let scale: [&[u8; GROUPS]; ROWS] = array::from_fn(|r| &w.scale[r][b]);
        let x: [&BlockLines; N] = array::from_fn(|t| &x[t][b]);
        for bytes in packed {
            prefetch::keep::<AHEAD>(bytes);
        }
        let mut tile = [[_mm512_setzero_ps(); ROWS]; N];
        for g in 0..GROUPS {
            // SAFETY: `g` is a group of the block.
            unsafe {
                let rows = [(packed[0], scale[0]), (packed[1], scale[1])];
                multiply_group::<0, N>(rows, w.factors, &x, g, &mut tile);
                due.carry(((first + b) * GROUPS + g) * 2);
                let rows = [(packed[2], scale[2]), (packed[3], scale[3])];
                multiply_group::<2, N>(rows, w.factors, &x, g, &mut tile);
                due.carry(((first + b) * GROUPS + g) * 2 + 1);
            }
        }
        store(&tile, parts, first + b);
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
    sums: &mut [[__m512; ROWS]; N],
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
fn store<const N: usize>(tile: &[[__m512; ROWS]; N], parts: &mut Parts, b: usize) {
    for t in 0..N {
        for r in 0..ROWS {
            // SAFETY: sixteen writable f32.
            unsafe { _mm512_storeu_ps(parts[t * ROWS + r][b].0.as_mut_ptr(), tile[t][r]) };
        }
    }
}

/// Adds the block sums of a visit to the f64 lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn carry(parts: &[Line; DEPTH], sum: &mut Sum) {
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
    fn load(&self) -> Lanes {
        let [even, odd] = [0, 1].map(|half| {
            // SAFETY: eight readable f64.
            unsafe { _mm512_loadu_pd(self.0.as_chunks::<8>().0[half].as_ptr()) }
        });
        Lanes([even, odd])
    }
}
