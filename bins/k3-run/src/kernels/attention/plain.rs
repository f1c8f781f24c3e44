//! The reference bodies of one block of positions: they define the bits that the other instruction sets must reproduce.

use super::super::activations::{BLOCK, LANES, Line};
use super::super::scalar::{carry, reduce};
use super::group::{Block, Scores, Sums};

/// Dot products of every position of the block with every active query.
pub(super) fn scores(block: &Block<'_>, out: &mut Scores) {
    for (s, row) in block.rows.chunks_exact(block.lines).enumerate() {
        for (q, query) in block.queries() {
            let mut lanes = [0f64; LANES];
            for (row, query) in row.chunks(BLOCK / LANES).zip(query.chunks(BLOCK / LANES)) {
                let mut sum = Line::default();
                for (c, q) in row.iter().zip(query) {
                    for ((sum, q), c) in sum.0.iter_mut().zip(q.0).zip(c) {
                        *sum = q.mul_add(*c, *sum);
                    }
                }
                carry(&mut lanes, &sum);
            }
            out.0[s][q] = reduce(&lanes);
        }
    }
}

/// Adds the weighted latents of the block to the sums of every active query.
pub(super) fn values(block: &Block<'_>, weights: &Scores, shrink: &[f64], sums: &mut [Sums]) {
    for q in block.active.clone() {
        let sums = &mut sums[q * block.value_lines..][..block.value_lines];
        for (line, sums) in sums.iter_mut().enumerate() {
            let mut sum = [0f32; LANES];
            for s in 0..block.counts[q] {
                let (weight, row) = (weights.0[s][q], &block.rows[s * block.lines + line]);
                for (sum, c) in sum.iter_mut().zip(row) {
                    *sum = weight.mul_add(*c, *sum);
                }
            }
            for (total, sum) in sums.0.iter_mut().zip(sum) {
                *total = *total * shrink[q] + f64::from(sum);
            }
        }
    }
}
