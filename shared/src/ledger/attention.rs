//! Bytes of the vectors that multi-head latent attention holds during a step.

use super::activations::{floats, inputs};
use crate::config::MlaConfig;

/// Positions of one block of the latent cache; scores exist for one block at a time.
const POSITIONS: usize = 64;
/// Queries that meet a block together.
const QUERIES: usize = 32;
/// Rows of one task, at most.
const TASK_ROWS: usize = 64;
/// Attended latents (rows by heads) that a task keeps for each of its rows, and altogether, at most.
const ATTENDED_PER_ROW: usize = 32;
const ATTENDED: usize = 128;
/// Kernels store vectors in whole runs of this many values, and cached positions too.
pub(super) const RUN: usize = 16;
/// Inputs summed before the sum is carried on.
const BLOCK: usize = 128;

/// Bytes of `k3_run::model`'s MLA buffers for `rows` rows on `threads` threads.
///
/// The low-rank query, also as the kernels read it; queries; the latent; outputs by head; gate and gated output, also as the
/// kernels read it.
pub(super) fn attention_bytes(mla: &MlaConfig, rows: usize, threads: usize) -> u128 {
    let cached = mla.kv_lora_rank.saturating_add(mla.qk_rope_head_dim);
    let head = mla.qk_nope_head_dim.saturating_add(mla.qk_rope_head_dim);
    let queries = mla.num_heads.saturating_mul(head);
    let values = mla.num_heads.saturating_mul(mla.v_head_dim);
    let step = [
        floats(rows, mla.q_lora_rank),
        inputs(rows, mla.q_lora_rank),
        floats(rows, queries),
        floats(rows, cached),
        floats(rows, values).saturating_mul(3),
        inputs(rows, values),
    ];
    let threads = thread_bytes(mla, rows).saturating_mul(threads as u128);
    step.into_iter().fold(threads, u128::saturating_add)
}

/// Of one thread, which no longer grows where a task has all the rows it takes: a group of absorbed queries, the scores of one
/// block, the f64 sums of each query and the f32 sums of a tile of four by four scores, twice; the attended latents of a task,
/// and those of one head as the value expansion reads them.
pub(super) fn thread_bytes(mla: &MlaConfig, rows: usize) -> u128 {
    let padded = |width: usize| width.div_ceil(RUN).saturating_mul(RUN);
    let rank = padded(mla.kv_lora_rank);
    let width = padded(mla.kv_lora_rank.saturating_add(mla.qk_rope_head_dim));
    let tiles = width.div_ceil(BLOCK).saturating_mul(2 * 16);
    let attended = rows.saturating_mul(ATTENDED_PER_ROW).min(ATTENDED);
    floats(QUERIES, rank)
        .saturating_mul(2)
        .saturating_add(floats(QUERIES, width))
        .saturating_add(floats(QUERIES, POSITIONS))
        .saturating_add(floats(tiles, RUN))
        .saturating_add(floats(attended, rank))
        .saturating_add(inputs(rows.min(TASK_ROWS), rank))
}
