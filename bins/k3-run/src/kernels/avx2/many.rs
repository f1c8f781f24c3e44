//! Several vectors: weights are unpacked to f32 once for all of them, a [tile](super::tile) of rows at a time.
//!
//! - [`few`]: one tile after the other, each over all its inputs, two blocks at a time: the weights stream as for one vector,
//!   and what they are unpacked into and the f64 lanes stay in the first-level cache.
//! - [`many`]: six tiles in turn meet the same 1,024 inputs of up to 64 vectors, which so stay in the second-level cache; the f64
//!   lanes of all these results wait there too.

use std::ops::Range;

use super::super::activations::{Activations, BLOCK, BlockLines, LANES};
use super::super::weights::Weights;
use super::tile::{Form, ROWS, Sums, TileBlock, multiply};
use super::unpack::unpack;
use super::{Next, load_lanes};

/// The most vectors [`few`] is faster for.
pub(super) const FEW: usize = 24;

/// `out[row][t] = w[row] . x[t]` for up to [`FEW`] vectors.
#[target_feature(enable = "avx2,fma")]
pub(super) fn few(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    matmul(&mut Scratch::<1, FEW, 8>::new(), w, x, out);
}

/// `out[row][t] = w[row] . x[t]`.
#[target_feature(enable = "avx2,fma")]
pub(super) fn many(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    matmul(&mut Scratch::<6, 64, 8>::new(), w, x, out);
}

/// What a call works in, up to 220 KB of stack, so that nothing is allocated.
struct Scratch<const TILES: usize, const TOKENS: usize, const DEPTH: usize> {
    tile: [TileBlock; DEPTH],
    sums: [[Sums<ROWS>; TOKENS]; TILES],
}

impl<const TILES: usize, const TOKENS: usize, const DEPTH: usize> Scratch<TILES, TOKENS, DEPTH> {
    fn new() -> Self {
        Self {
            tile: [TileBlock::ZERO; DEPTH],
            sums: [[[[0.0; LANES]; ROWS]; TOKENS]; TILES],
        }
    }
}

/// `TILES` tiles in turn meet `DEPTH` blocks of `TOKENS` vectors.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn matmul<const TILES: usize, const TOKENS: usize, const DEPTH: usize>(
    scratch: &mut Scratch<TILES, TOKENS, DEPTH>,
    w: Weights<'_>,
    x: &Activations,
    out: &mut [f32],
) {
    let (num_tokens, num_blocks) = (x.num_rows(), x.blocks_per_row());
    for first_token in (0..num_tokens).step_by(TOKENS) {
        let tokens = first_token..num_tokens.min(first_token + TOKENS);
        let in_turn = TILES * ROWS;
        for (first_row, out) in (0..)
            .step_by(in_turn)
            .zip(out.chunks_mut(in_turn * num_tokens))
        {
            let rows = first_row..first_row + out.len() / num_tokens;
            for sums in &mut scratch.sums {
                sums[..tokens.len()].fill([[0.0; LANES]; ROWS]);
            }
            for first_block in (0..num_blocks).step_by(DEPTH) {
                let blocks = first_block..num_blocks.min(first_block + DEPTH);
                for (first, sums) in rows.clone().step_by(ROWS).zip(&mut scratch.sums) {
                    let rows = first..rows.end.min(first + ROWS);
                    let tile = &mut scratch.tile[..blocks.len()];
                    let next = next(
                        w,
                        x.cols(),
                        first..first + in_turn,
                        blocks.start..blocks.start + DEPTH,
                    );
                    let form = unpack(w, x.cols(), rows, blocks.clone(), x.are_in_range(), tile);
                    multiply_tile(form, tile, x, tokens.clone(), blocks.clone(), next, sums);
                }
            }
            for (r, out) in out.chunks_exact_mut(num_tokens).enumerate() {
                let sums = &scratch.sums[r / ROWS];
                for (out, sums) in out[tokens.clone()].iter_mut().zip(sums) {
                    *out = load_lanes(&sums[r % ROWS]).reduce();
                }
            }
        }
    }
}

/// What the tile at the start of `rows` needs after `blocks`.
fn next(w: Weights<'_>, cols: usize, rows: Range<usize>, blocks: Range<usize>) -> Next<'_> {
    let (bytes, block_bytes) = match w {
        Weights::Bf16(bytes) => (bytes, BLOCK * 2),
        Weights::F32(bytes) => (bytes, BLOCK * 4),
        Weights::Mxfp4 { packed, .. } => (packed, BLOCK / 2),
    };
    Next::after(
        bytes,
        [cols * block_bytes / BLOCK, block_bytes],
        ROWS,
        rows,
        blocks,
    )
}

/// Adds `blocks` of a tile times `tokens` to their sums.
#[target_feature(enable = "avx2,fma")]
fn multiply_tile(
    form: Form,
    tile: &[TileBlock],
    x: &Activations,
    tokens: Range<usize>,
    blocks: Range<usize>,
    next: Next<'_>,
    mut sums: &mut [Sums<ROWS>],
) {
    let mut at = tokens.start;
    while at < tokens.end {
        next.ask(at - tokens.start, tokens.len());
        let vector = |t| -> &[BlockLines] { &x.row(at + t)[blocks.clone()] };
        let count = match (tokens.end - at, form) {
            (1, _) => {
                multiply(form, tile, [vector(0)], sums);
                1
            }
            // Three at a time, but never one alone after them; MXFP4 has registers for two.
            (3 | 5.., Form::Dense) => {
                multiply(form, tile, [vector(0), vector(1), vector(2)], sums);
                3
            }
            _ => {
                multiply(form, tile, [vector(0), vector(1)], sums);
                2
            }
        };
        for skipped in 1..count {
            next.ask(at - tokens.start + skipped, tokens.len());
        }
        at += count;
        sums = &mut sums[count..];
    }
}
