//! Two vectors and more: visits to [tiles](super::tile) of 4 rows by up to 6 vectors, in an order that suits the caches.
//!
//! More vectors than one tile: a visit meets [`DEPTH`] blocks, and each tile of vectors meets all rows of a group before the next
//! does. The tile's inputs (12 KB) and the block sums of two visits (12 KB) stay in the first-level cache; the group's weights
//! and f64 sums (up to 240 KB) in the second. Eight blocks a visit measured a tenth slower, 12 or 48 rows a group the same.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{Activations, BLOCK, Line};
use super::super::weights::{Weights, half_factors};
use super::tile::{
    DEPTH, Due, MXFP4_TOKENS, Mxfp4, NO_PARTS, NO_SUMS, Parts, Rows, Sums, TILE_ROWS, TILE_TOKENS,
    Tile, Vectors, Visit, carry,
};

/// Tiles of rows of a group.
const ROW_TILES: usize = 6;
/// Tiles of vectors whose sums are kept.
const TOKEN_TILES: usize = 13;

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
    let mut scratch = Scratch::new();
    let rows = row_tiles * TILE_ROWS;
    // The same vectors meet all rows of the call before others do, so that they come from afar once.
    for first_token in (0..num_tokens).step_by(TOKEN_TILES * tile_tokens) {
        for (first_row, out) in (0..).step_by(rows).zip(out.chunks_mut(rows * num_tokens)) {
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
    #[expect(
        clippy::large_stack_arrays,
        reason = "threads have 2 MB of stack, and the decode loop must not allocate"
    )]
    fn new() -> Self {
        Self {
            sums: [const { [const { MaybeUninit::uninit() }; ROW_TILES] }; TOKEN_TILES],
            parts: [NO_PARTS; 2],
            last: 0,
            due: None,
        }
    }

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
