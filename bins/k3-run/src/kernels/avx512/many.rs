//! Two vectors and more: a tile of 4 rows by up to 6 vectors, whose weights are decoded in registers once for all of them.
//!
//! # Registers
//!
//! 24 block sums, four lines of weights and one input are 29 registers. MXFP4 takes two rows at a time, to load an input once
//! for both (read by every instruction that uses it, the inputs alone keep the load units as busy as the arithmetic ones):
//! four lines, two factors, three intermediates, so 20 sums. The multiply-adds of a vector are a few lines of assembly,
//! because the compiler, free to move them, loads far ahead and spills a third of the sums.
//!
//! # The f64 sums
//!
//! Carrying block sums takes two conversions and two additions a result, half as many as there are multiply-adds. They use
//! other units, but only if they are close enough in the program. So a visit to a tile ends after [`DEPTH`] blocks with
//! the block sums in memory, and during the next visit each of them is carried between two steps. Loading and storing the
//! f64 sums once for four blocks is what makes room for that: once a block measured a tenth slower. Three quarters of the time
//! of dense weights goes to steps without a carry; the blocks and visits around them cost as much as the carries.
//!
//! # Caches
//!
//! More vectors than one tile: a visit meets [`DEPTH`] blocks, and each tile of vectors meets all rows of a group before the next
//! does. The tile's inputs (12 KB) and the block sums of two visits (12 KB) stay in the first-level cache; the group's weights
//! and f64 sums (up to 240 KB) in the second. Eight blocks a visit measured a tenth slower, 12 or 48 rows a group the same.

#![expect(
    clippy::needless_range_loop,
    reason = "a tile is indexed by row and vector alike"
)]

use std::arch::asm;
use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_ps, _mm512_add_pd, _mm512_cvtps_pd,
    _mm512_loadu_pd, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_pd, _mm512_storeu_ps,
};
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{Activations, BLOCK, BlockLines, LANES, Line};
use super::super::weights::{GROUP, Weights, half_factors};
use super::{Lanes, dense_line, mxfp4_lines};

/// Rows of a register tile.
const TILE_ROWS: usize = 4;
/// Vectors of a register tile, at most.
const TILE_TOKENS: usize = 6;
/// The same for MXFP4, whose two rows in work need more registers.
const MXFP4_TOKENS: usize = 5;
/// Results of a tile, at most.
const RESULTS: usize = TILE_ROWS * TILE_TOKENS;
/// Blocks of a visit.
const DEPTH: usize = 4;
/// Lines of a block.
const LINES: usize = BLOCK / LANES;
/// Groups of a block.
const GROUPS: usize = BLOCK / GROUP;
/// Tiles of rows of a group.
const ROW_TILES: usize = 6;
/// Tiles of vectors whose sums are kept.
const TOKEN_TILES: usize = 13;
/// How far ahead of the block in hand a row's bytes are asked for.
const AHEAD: usize = 1024;

/// Running f64 lanes of one result.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sum([f64; LANES]);

/// Running lanes of a tile, the rows of a vector adjacent.
type Sums = [Sum; RESULTS];

/// Block sums of a visit: those of a result adjacent.
type Parts = [[Line; DEPTH]; RESULTS];

const NO_SUMS: Sums = [Sum([0.0; LANES]); RESULTS];
const NO_PARTS: Parts = [[Line([0.0; LANES]); DEPTH]; RESULTS];

/// Some blocks of the rows of a tile.
type Rows<'a, const BYTES: usize> = [&'a [[u8; BYTES]]; TILE_ROWS];

/// The same blocks of its vectors; past the last vector it stands in.
type Vectors<'a> = [&'a [BlockLines]; TILE_TOKENS];

/// A tile's MXFP4 rows.
struct Mxfp4<'a> {
    packed: Rows<'a, { BLOCK / 2 }>,
    scale: Rows<'a, GROUPS>,
    factors: &'a [f32; 256],
}

/// What a tile is made of.
enum Tile<'a> {
    Bf16(Rows<'a, { BLOCK * 2 }>),
    F32(Rows<'a, { BLOCK * 4 }>),
    Mxfp4(Mxfp4<'a>),
}

/// One visit to a tile: at most [`DEPTH`] blocks of it.
struct Visit<'a> {
    tile: Tile<'a>,
    vectors: Vectors<'a>,
    /// How many of the vectors count.
    num_tokens: usize,
    /// Whether the weights are met for the first time.
    fresh: bool,
}

/// What is carried during a visit: block sums of the one before.
struct Due<'a> {
    parts: &'a Parts,
    sums: &'a mut Sums,
    /// How many results.
    count: usize,
}

/// The rows and vectors that a call works on at a time.
struct Area<'a> {
    w: Weights<'a>,
    x: &'a Activations,
    /// Vectors of a tile, at most.
    tile_tokens: usize,
    rows: Range<usize>,
    tokens: Range<usize>,
}

/// What a call works in: 255 KB of stack, so that nothing is allocated, and most of it not even touched for few vectors.
struct Scratch {
    /// Of each tile of vectors and tile of rows.
    sums: [[MaybeUninit<Sums>; ROW_TILES]; TOKEN_TILES],
    /// Those of the last visit, and those of the one in work.
    parts: [Parts; 2],
    /// Which of `parts` is that of the last visit.
    last: usize,
    /// The tile of the last visit, and how many results it has, while they are not carried.
    due: Option<((usize, usize), usize)>,
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn matmul(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    let num_tokens = x.num_rows();
    let tile_tokens = match w {
        Weights::Mxfp4 { .. } => MXFP4_TOKENS,
        Weights::Bf16(_) | Weights::F32(_) => TILE_TOKENS,
    };
    let row_tiles = if num_tokens <= tile_tokens {
        1
    } else {
        ROW_TILES
    };
    let mut scratch = Scratch {
        sums: [const { [const { MaybeUninit::uninit() }; ROW_TILES] }; TOKEN_TILES],
        parts: [NO_PARTS; 2],
        last: 0,
        due: None,
    };
    let rows = row_tiles * TILE_ROWS;
    for (first_row, out) in (0..).step_by(rows).zip(out.chunks_mut(rows * num_tokens)) {
        for first_token in (0..num_tokens).step_by(TOKEN_TILES * tile_tokens) {
            let area = Area {
                w,
                x,
                tile_tokens,
                rows: first_row..first_row + out.len() / num_tokens,
                tokens: first_token..num_tokens.min(first_token + TOKEN_TILES * tile_tokens),
            };
            area.multiply(&mut scratch);
            area.finish(&mut scratch, out);
        }
    }
}

impl Area<'_> {
    /// As few tiles of vectors as can be, of nearly equal sizes.
    fn token_tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (first, count) = (self.tokens.start, self.tokens.len());
        let tiles = count.div_ceil(self.tile_tokens);
        (0..tiles).map(move |i| first + i * count / tiles..first + (i + 1) * count / tiles)
    }

    /// The first row of every tile of rows.
    fn row_tiles(&self) -> impl Iterator<Item = usize> + use<> {
        self.rows.clone().step_by(TILE_ROWS)
    }

    /// Leaves the sums of all results in `scratch`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn multiply(&self, scratch: &mut Scratch) {
        for (_, sums) in self.token_tiles().zip(&mut scratch.sums) {
            for (_, sums) in self.row_tiles().zip(sums) {
                sums.write(NO_SUMS);
            }
        }
        let whole = self.x.cols() / BLOCK;
        for first in (0..whole).step_by(DEPTH) {
            let blocks = first..whole.min(first + DEPTH);
            self.visit(scratch, &blocks, |row| self.tile(row, &blocks));
        }
        if whole < self.x.blocks_per_row() {
            self.visit_ragged(scratch, whole);
        }
        scratch.settle();
    }

    /// Visits every tile once.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn visit<'a>(
        &'a self,
        scratch: &mut Scratch,
        blocks: &Range<usize>,
        tile: impl Fn(usize) -> Tile<'a>,
    ) {
        for (t, tokens) in self.token_tiles().enumerate() {
            let vectors = self.vectors(&tokens, blocks);
            for (r, row) in self.row_tiles().enumerate() {
                let visit = Visit {
                    tile: tile(row),
                    vectors,
                    num_tokens: tokens.len(),
                    fresh: t == 0,
                };
                scratch.visit((t, r), &visit);
            }
        }
    }

    /// The last block of rows that end inside it, one tile of rows after the other; zeros stand for the missing weights.
    #[cold]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn visit_ragged(&self, scratch: &mut Scratch, block: usize) {
        for (t, tokens) in self.token_tiles().enumerate() {
            let vectors = self.vectors(&tokens, &(block..block + 1));
            for (r, row) in self.row_tiles().enumerate() {
                let mut visit = |tile| {
                    let visit = Visit {
                        tile,
                        vectors,
                        num_tokens: tokens.len(),
                        fresh: false,
                    };
                    scratch.visit((t, r), &visit);
                };
                match self.w {
                    Weights::Bf16(bytes) => {
                        visit(Tile::Bf16(as_rows(&self.padded(bytes, row))));
                    }
                    Weights::F32(bytes) => {
                        visit(Tile::F32(as_rows(&self.padded(bytes, row))));
                    }
                    Weights::Mxfp4 {
                        packed,
                        scale,
                        nan_scales,
                    } => visit(Tile::Mxfp4(Mxfp4 {
                        packed: as_rows(&self.padded(packed, row)),
                        scale: as_rows(&self.padded(scale, row)),
                        factors: half_factors(nan_scales),
                    })),
                }
            }
        }
    }

    /// `blocks` of up to six vectors; past the last one it stands in.
    fn vectors(&self, tokens: &Range<usize>, blocks: &Range<usize>) -> Vectors<'_> {
        std::array::from_fn(|t| &self.x.row((tokens.start + t).min(tokens.end - 1))[blocks.clone()])
    }

    /// Whole blocks of the tile of rows from `row` on.
    fn tile(&self, row: usize, blocks: &Range<usize>) -> Tile<'_> {
        match self.w {
            Weights::Bf16(bytes) => Tile::Bf16(self.whole(bytes, row, blocks)),
            Weights::F32(bytes) => Tile::F32(self.whole(bytes, row, blocks)),
            Weights::Mxfp4 {
                packed,
                scale,
                nan_scales,
            } => Tile::Mxfp4(Mxfp4 {
                packed: self.whole(packed, row, blocks),
                scale: self.whole(scale, row, blocks),
                factors: half_factors(nan_scales),
            }),
        }
    }

    fn whole<'a, const BYTES: usize>(
        &self,
        bytes: &'a [u8],
        row: usize,
        blocks: &Range<usize>,
    ) -> Rows<'a, BYTES> {
        std::array::from_fn(|r| &self.row(bytes, BYTES, row + r).as_chunks().0[blocks.clone()])
    }

    fn padded<const BYTES: usize>(&self, bytes: &[u8], row: usize) -> [[u8; BYTES]; TILE_ROWS] {
        std::array::from_fn(|r| {
            let rest = self.row(bytes, BYTES, row + r).as_chunks::<BYTES>().1;
            let mut padded = [0; BYTES];
            padded[..rest.len()].copy_from_slice(rest);
            padded
        })
    }

    /// A row's bytes, `block_bytes` a block; past the last row it stands in, and its sums are dropped.
    fn row<'a>(&self, bytes: &'a [u8], block_bytes: usize, row: usize) -> &'a [u8] {
        let row_bytes = self.x.cols() * block_bytes / BLOCK;
        let at = row.min(self.rows.end - 1) * row_bytes;
        &bytes[at..at + row_bytes]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn finish(&self, scratch: &mut Scratch, out: &mut [f32]) {
        for (r, out) in out.chunks_exact_mut(self.x.num_rows()).enumerate() {
            for (nth, tokens) in self.token_tiles().enumerate() {
                // SAFETY: `multiply` wrote the sums of every tile of this area.
                let sums = unsafe { scratch.sums[nth][r / TILE_ROWS].assume_init_ref() };
                let rows = sums.as_chunks::<TILE_ROWS>().0;
                for (out, sums) in out[tokens].iter_mut().zip(rows) {
                    *out = sums[r % TILE_ROWS].load().reduce();
                }
            }
        }
    }
}

fn as_rows<const BYTES: usize>(padded: &[[u8; BYTES]; TILE_ROWS]) -> Rows<'_, BYTES> {
    padded.each_ref().map(std::slice::from_ref)
}

impl Scratch {
    /// Leaves the block sums of the visit due, and carries those that were.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn visit(&mut self, tile: (usize, usize), visit: &Visit<'_>) {
        let depth = visit.vectors[0].len();
        if depth < DEPTH {
            // Too short a visit to carry everything in its course.
            self.settle();
        }
        let [a, b] = &mut self.parts;
        let (old, new) = if self.last == 0 { (a, b) } else { (b, a) };
        let ((t, r), count) = self.due.unwrap_or((tile, 0));
        let due = Due {
            parts: old,
            // SAFETY: the sums of all tiles of the area were written before the first visit.
            sums: unsafe { self.sums[t][r].assume_init_mut() },
            count,
        };
        visit.run(new, due);
        let count = visit.num_tokens * TILE_ROWS;
        for parts in &mut new[..count] {
            parts[depth..].fill(Line::default());
        }
        self.last = 1 - self.last;
        self.due = Some((tile, count));
    }

    /// Carries what is due.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn settle(&mut self) {
        if let Some(((t, r), count)) = self.due.take() {
            // SAFETY: as in `visit`.
            let sums = unsafe { self.sums[t][r].assume_init_mut() };
            for (parts, sum) in self.parts[self.last].iter().zip(sums).take(count) {
                carry(parts, sum);
            }
        }
    }
}

impl Visit<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn run(&self, parts: &mut Parts, due: Due<'_>) {
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
            w.iter().for_each(|bytes| ask_ahead(bytes));
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
    let _line: __m512;
    // SAFETY: reads a line of `x`, writes nothing.
    unsafe {
        asm!(
            "vmovups {x:z}, zmmword ptr [{p} + {i}]",
            "vfmadd231ps {a0:z}, {w0:z}, {x:z}",
            "vfmadd231ps {a1:z}, {w1:z}, {x:z}",
            "vfmadd231ps {a2:z}, {w2:z}, {x:z}",
            "vfmadd231ps {a3:z}, {w3:z}, {x:z}",
            x = out(zmm_reg) _line,
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
            packed.iter().for_each(|bytes| ask_ahead(bytes));
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
        let (_x0, _x1, _m): (__m512, __m512, __m512);
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
                x0 = out(zmm_reg) _x0,
                x1 = out(zmm_reg) _x1,
                m = out(zmm_reg) _m,
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

/// Asks for the bytes [`AHEAD`] of these; past the end of the weights that does nothing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn ask_ahead<const BYTES: usize>(bytes: &[u8; BYTES]) {
    for line in bytes.chunks_exact(64) {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
    }
}
