//! Bytes of the vectors that multi-head latent attention holds during a step.

use super::activations::{floats, inputs};
use crate::config::MlaConfig;

/// Bytes of `k3_run::model`'s MLA buffers for `rows` rows on `threads` threads.
///
/// The low-rank query, also as the kernels read it; queries; the latent; outputs by head; gate and gated output, also as the
/// kernels read it. For each thread the attended latent of all rows of one head, also as the kernels read it, one query, and
/// the f64 sums of one row.
pub(super) fn attention_bytes(mla: &MlaConfig, rows: usize, threads: usize) -> u128 {
    let latent = mla.kv_lora_rank;
    let cached = latent.saturating_add(mla.qk_rope_head_dim);
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
    let thread = floats(rows, latent)
        .saturating_add(inputs(rows, latent))
        .saturating_add(floats(1, cached))
        .saturating_add(floats(2, latent));
    step.into_iter()
        .fold(thread.saturating_mul(threads as u128), u128::saturating_add)
}
