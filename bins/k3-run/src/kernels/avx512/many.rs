//! Two vectors and more: [pairs of rows](super::tile), a block at a time, in an order that suits the caches.
//!
//! A visit is some blocks of a pair of rows times up to [`TOKENS`] vectors. The inputs of a visit (32 KB) stay in the first-level
//! cache from pair to pair, with the block sums (2 KB) and the f64 sums in work (4 KB); the weights of a group of rows and its
//! f64 sums (up to 240 KB) in the second.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{Activations, BLOCK};
use super::super::weights::{Weights, half_factors};
use super::tile::{self, GROUPS, NO_PARTS, NO_SUMS, Parts, ROWS, Results, Sums, Vectors, carry};

/// Vectors that one decoding of a pair of rows serves, at most.
const TOKENS: usize = 32;
/// Blocks of inputs of a visit, at most.
const INPUTS: usize = 64;
/// Pairs of rows of a group.
const PAIRS: usize = 24;
/// Sets of up to [`TOKENS`] vectors whose sums are kept.
const SETS: usize = 2;
/// How far ahead of the block in hand a row's bytes are asked for.
const AHEAD: usize = 1024;

/// The rows and vectors that a call works on at a time.
struct Area<'a> {
    w: Weights<'a>,
    x: &'a Activations,
    rows: Range<usize>,
    tokens: Range<usize>,
}

/// What a call works in: 250 KB of stack, so that nothing is allocated.
struct Scratch {
    /// Of each set of vectors and pair of rows.
    sums: [[[MaybeUninit<Sums>; TOKENS]; PAIRS]; SETS],
    parts: [Parts; TOKENS],
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn matmul(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    let num_tokens = x.num_rows();
    let mut scratch = Scratch::new();
    let rows = PAIRS * ROWS;
    // As few runs of vectors as can be, of nearly equal sizes.
    let runs = num_tokens.div_ceil(SETS * TOKENS);
    for run in 0..runs {
        for (first_row, out) in (0..).step_by(rows).zip(out.chunks_mut(rows * num_tokens)) {
            let area = Area {
                w,
                x,
                rows: first_row..first_row + out.len() / num_tokens,
                tokens: run * num_tokens / runs..(run + 1) * num_tokens / runs,
            };
            area.multiply(&mut scratch);
            area.finish(&scratch, out);
        }
    }
}

impl Area<'_> {
    /// As few sets of vectors as can be, of nearly equal sizes.
    fn sets(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (first, count) = (self.tokens.start, self.tokens.len());
        let sets = count.div_ceil(TOKENS);
        (0..sets).map(move |i| first + i * count / sets..first + (i + 1) * count / sets)
    }

    /// The first row of every pair.
    fn pairs(&self) -> impl Iterator<Item = usize> + use<> {
        self.rows.clone().step_by(ROWS)
    }

    /// Leaves the sums of all results in `scratch`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn multiply(&self, scratch: &mut Scratch) {
        for (tokens, sums) in self.sets().zip(&mut scratch.sums) {
            for (_, sums) in self.pairs().zip(sums) {
                for sums in &mut sums[..tokens.len()] {
                    sums.write(NO_SUMS);
                }
            }
        }
        let most = self.sets().map(|tokens| tokens.len()).max().unwrap_or(1);
        let depth = INPUTS / most;
        let num_blocks = self.x.blocks_per_row();
        for first in (0..num_blocks).step_by(depth) {
            let blocks = first..num_blocks.min(first + depth);
            for (tokens, sums) in self.sets().zip(&mut scratch.sums) {
                let parts = &mut scratch.parts[..tokens.len()];
                self.visit(&blocks, &tokens, parts, sums);
            }
        }
    }

    /// Adds `blocks` of all rows times `tokens` to their sums.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn visit(
        &self,
        blocks: &Range<usize>,
        tokens: &Range<usize>,
        parts: &mut [Parts],
        sums: &mut [[MaybeUninit<Sums>; TOKENS]; PAIRS],
    ) {
        parts.fill(NO_PARTS);
        let mut due = 0;
        for (pair, row) in self.pairs().enumerate() {
            for b in blocks.clone() {
                let results = Results {
                    parts,
                    // SAFETY: written in `multiply`.
                    due: unsafe { sums[due][..tokens.len()].assume_init_mut() },
                };
                self.block(row, b, tokens, results);
                due = pair;
            }
        }
        for (parts, sums) in parts.iter().zip(&mut sums[due]) {
            // SAFETY: as above.
            carry(parts, unsafe { sums.assume_init_mut() });
        }
    }

    /// Block `b` of the pair at `row` times `tokens`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn block(&self, row: usize, b: usize, tokens: &Range<usize>, results: Results<'_>) {
        let x = Vectors {
            blocks: self.x.from_block(tokens.start, b),
            stride: self.x.stride(),
        };
        match self.w {
            Weights::Bf16(bytes) => {
                let mut padded = [[0; BLOCK * 2]; ROWS];
                tile::dense(self.pair(bytes, row, b, &mut padded), x, results);
            }
            Weights::F32(bytes) => {
                let mut padded = [[0; BLOCK * 4]; ROWS];
                tile::dense(self.pair(bytes, row, b, &mut padded), x, results);
            }
            Weights::Mxfp4 {
                packed,
                scale,
                nan_scales,
            } => {
                let mut padded = [[0; BLOCK / 2]; ROWS];
                // An absent group has factor 1 and weights of 0.
                let mut padded_scale = [[128; GROUPS]; ROWS];
                let packed = self.pair(packed, row, b, &mut padded);
                let scale = self.pair(scale, row, b, &mut padded_scale);
                let table = half_factors(nan_scales);
                let in_range = self.x.are_in_range();
                tile::mxfp4((packed, scale), table, in_range, x, results);
            }
        }
    }

    /// Block `b` of two rows, copied into `padded` when the rows end inside it; past the last row it stands in, and its sums are
    /// dropped.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn pair<'a, const BYTES: usize>(
        &self,
        bytes: &'a [u8],
        row: usize,
        b: usize,
        padded: &'a mut [[u8; BYTES]; ROWS],
    ) -> [&'a [u8; BYTES]; ROWS] {
        let row_bytes = self.x.cols() * BYTES / BLOCK;
        let first = &bytes[row * row_bytes..][..row_bytes];
        let second = (row + 1).min(self.rows.end - 1);
        let second = &bytes[second * row_bytes..][..row_bytes];
        let [a, c] = padded;
        [block_of(first, b, a), block_of(second, b, c)]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn finish(&self, scratch: &Scratch, out: &mut [f32]) {
        for (r, out) in out.chunks_exact_mut(self.x.num_rows()).enumerate() {
            for (tokens, sums) in self.sets().zip(&scratch.sums) {
                for (out, sums) in out[tokens].iter_mut().zip(&sums[r / ROWS]) {
                    // SAFETY: `multiply` wrote the sums of every vector and pair of this area.
                    let sums = unsafe { sums.assume_init_ref() };
                    *out = sums[r % ROWS].load().reduce();
                }
            }
        }
    }
}

impl Scratch {
    #[expect(
        clippy::large_stack_arrays,
        reason = "threads have 2 MB of stack, and the decode loop must not allocate"
    )]
    fn new() -> Self {
        Self {
            sums: [const { [const { [const { MaybeUninit::uninit() }; TOKENS] }; PAIRS] }; SETS],
            parts: [NO_PARTS; TOKENS],
        }
    }
}

/// Block `b` of a row, copied into `padded` when the row ends inside it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn block_of<'a, const BYTES: usize>(
    row: &'a [u8],
    b: usize,
    padded: &'a mut [u8; BYTES],
) -> &'a [u8; BYTES] {
    let (whole, rest) = row.as_chunks::<BYTES>();
    let Some(block) = whole.get(b) else {
        padded[..rest.len()].copy_from_slice(rest);
        return padded;
    };
    if BYTES >= 64 {
        ask_ahead(block);
    }
    block
}

/// Asks for the bytes [`AHEAD`] of these; past the end of the weights that does nothing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn ask_ahead<const BYTES: usize>(bytes: &[u8; BYTES]) {
    for line in bytes.chunks_exact(64) {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
    }
}
