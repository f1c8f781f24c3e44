//! Several vectors: [pairs of rows](super::tile), a block at a time, in an order that suits the caches.
//!
//! The inputs of a visit ([`INPUTS`] blocks, 32 KB) stay in the first-level cache from pair to pair, beside the block sums (up to 8 KB);
//! the weights of [`PAIRS`] pairs and their f64 sums (up to 390 KB) in the second. Decoding a block costs about as much as three vectors do,
//! so it serves as many as fit: 16 at a time measured a tenth slower than 32, 8 a quarter. With twice the inputs, or half the pairs
//! at 64 vectors, up to a fifth is lost to the caches.
//!
//! Measured on Zen 5, of the multiply-add rate: at 16 vectors bf16 50 %, MXFP4 50 %; at 64, 56 % and 54 %.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{Activations, BLOCK};
use super::super::prefetch;
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

/// Two adjacent rows.
enum Pair<'a> {
    Bf16(Stored<'a, { BLOCK * 2 }>),
    F32(Stored<'a, { BLOCK * 4 }>),
    Mxfp4 {
        packed: Stored<'a, { BLOCK / 2 }>,
        scale: Stored<'a, GROUPS>,
        table: &'static [f32; 256],
    },
}

/// Their bytes, `BYTES` a block, whole blocks apart.
struct Stored<'a, const BYTES: usize> {
    whole: [&'a [[u8; BYTES]]; ROWS],
    rest: [&'a [u8]; ROWS],
}

/// What a call works in: 400 KB of stack, so that nothing is allocated.
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
        for (at, row) in self.pairs().enumerate() {
            let pair = self.pair(row);
            for b in blocks.clone() {
                let x = Vectors {
                    blocks: self.x.blocks_after(tokens.start, b),
                    stride: self.x.stride(),
                };
                let results = Results {
                    parts,
                    // SAFETY: `multiply` wrote the sums of every vector and pair of this area.
                    due: unsafe { sums[due][..tokens.len()].assume_init_mut() },
                };
                pair.multiply(b, x, self.x.are_in_range(), results);
                due = at;
            }
        }
        for (parts, sums) in parts.iter().zip(&mut sums[due]) {
            // SAFETY: as above.
            carry(parts, unsafe { sums.assume_init_mut() });
        }
    }

    /// The pair of rows at `row`.
    fn pair(&self, row: usize) -> Pair<'_> {
        match self.w {
            Weights::Bf16(bytes) => Pair::Bf16(self.stored(bytes, row)),
            Weights::F32(bytes) => Pair::F32(self.stored(bytes, row)),
            Weights::Mxfp4 {
                packed,
                scale,
                nan_scales,
            } => Pair::Mxfp4 {
                packed: self.stored(packed, row),
                scale: self.stored(scale, row),
                table: half_factors(nan_scales),
            },
        }
    }

    /// The bytes of two rows; past the last row it stands in, and its sums are dropped.
    fn stored<'a, const BYTES: usize>(&self, bytes: &'a [u8], row: usize) -> Stored<'a, BYTES> {
        let row_bytes = self.x.cols() * BYTES / BLOCK;
        let [first, second] = [row, (row + 1).min(self.rows.end - 1)]
            .map(|row| bytes[row * row_bytes..][..row_bytes].as_chunks());
        Stored {
            whole: [first.0, second.0],
            rest: [first.1, second.1],
        }
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

impl Pair<'_> {
    /// Block `b` times the vectors.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn multiply(&self, b: usize, x: Vectors<'_>, in_range: bool, results: Results<'_>) {
        match self {
            Self::Bf16(rows) => {
                let mut padded = None;
                tile::dense(rows.block(b, 0, &mut padded), x, results);
            }
            Self::F32(rows) => {
                let mut padded = None;
                tile::dense(rows.block(b, 0, &mut padded), x, results);
            }
            Self::Mxfp4 {
                packed,
                scale,
                table,
            } => {
                let (mut padded, mut padded_scale) = (None, None);
                let packed = packed.block(b, 0, &mut padded);
                // An absent group has factor 1 and weights of 0.
                let scale = scale.block(b, 128, &mut padded_scale);
                tile::mxfp4((packed, scale), table, in_range, x, results);
            }
        }
    }
}

impl<const BYTES: usize> Stored<'_, BYTES> {
    /// Block `b`; when the rows end inside it, a copy with `fill` for what they lack.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn block<'b>(
        &'b self,
        b: usize,
        fill: u8,
        padded: &'b mut Option<[[u8; BYTES]; ROWS]>,
    ) -> [&'b [u8; BYTES]; ROWS] {
        if let (Some(first), Some(second)) = (self.whole[0].get(b), self.whole[1].get(b)) {
            prefetch::keep::<AHEAD>(first);
            prefetch::keep::<AHEAD>(second);
            return [first, second];
        }
        let padded = padded.insert([[fill; BYTES]; ROWS]);
        for (padded, rest) in padded.iter_mut().zip(self.rest) {
            padded[..rest.len()].copy_from_slice(rest);
        }
        padded.each_ref()
    }
}
