//! Multi-head latent attention in its absorbed form over the latent cache (specification 3.5).
//!
//! `kv_b_proj` arrives as tiles of whole heads; heads absorb their keys into the queries, attend over the latent cache and
//! expand their values while their tile is held, so the two latent-wide vectors exist for one task a thread at a time. Prefill and
//! decode run the same code on the same visible positions.

use k3_shared::{
    config::MlaConfig,
    ids::LayerIdx,
    names::{LayerTensor, TensorRole},
};
use rayon::prelude::*;

use super::{
    ModelError, Part,
    matrix::{StepContext, for_each_tile, sized},
    vectors::LayerVectors,
};
use crate::kernels::{
    Activations,
    attention::{LatentAttention, LatentDims, LatentScratch},
    math::sigmoid_gate,
    norm::rms_norm_in_place,
};

/// One sequence's part in a step.
pub(super) use crate::kernels::attention::CachedRows as MlaRows;

/// Rows whose heads are laid side by side by one task.
const GATHER_ROWS: usize = 16;

/// Buffers of the mixer.
#[derive(Debug, Default)]
pub(super) struct MlaScratch {
    low_rank: Vec<f32>,
    low_rank_in: Activations,
    /// `[rows, heads * (nope + rope)]`.
    q: Vec<f32>,
    latent: Vec<f32>,
    /// The heads' results, as the value expansion writes them.
    by_head: Vec<f32>,
    gate: Vec<f32>,
    out: Vec<f32>,
    out_in: Activations,
    per_thread: LatentScratch,
}

/// The mixer of `layer`: `x` are the normed inputs, `out` becomes `[rows, hidden]`.
#[expect(
    clippy::too_many_arguments,
    reason = "buffers and inputs of distinct owners"
)]
pub(super) fn run(
    step: &mut StepContext<'_>,
    layer: LayerIdx,
    low_rank_eps: f64,
    vectors: &LayerVectors,
    scratch: &mut MlaScratch,
    sequences: &mut [MlaRows<'_>],
    x: &Activations,
    out: &mut Vec<f32>,
) -> Result<(), ModelError> {
    use LayerTensor as T;
    let mla = step.config.mla.clone();
    let rows = x.num_rows();
    let role = |tensor| TensorRole::Layer(layer, tensor);

    step.multiply(role(T::MlaQA), mla.q_lora_rank, x, &mut scratch.low_rank)?;
    let low_rank = &mut scratch.low_rank[..rows * mla.q_lora_rank];
    low_rank
        .par_chunks_exact_mut(mla.q_lora_rank)
        .for_each(|row| rms_norm_in_place(row, vectors.get(T::MlaQANorm), low_rank_eps));
    scratch.low_rank_in.fill(low_rank, mla.q_lora_rank);
    let query_width = mla.num_heads * mla.qk_head_dim();
    step.multiply(
        role(T::MlaQB),
        query_width,
        &scratch.low_rank_in,
        &mut scratch.q,
    )?;

    step.multiply(role(T::MlaKvA), mla.cache_width(), x, &mut scratch.latent)?;
    for sequence in &mut *sequences {
        for (offset, row) in sequence.rows.clone().enumerate() {
            let cached = &mut scratch.latent[row * mla.cache_width()..][..mla.cache_width()];
            // The shared slice after the latent is neither normed nor rotated.
            let latent = &mut cached[..mla.kv_lora_rank];
            rms_norm_in_place(latent, vectors.get(T::MlaKvANorm), low_rank_eps);
            sequence.cache.store(sequence.position + offset, cached);
        }
    }

    step.lap(Part::MlaProjections);
    scratch.per_thread.prepare();
    let q = &scratch.q[..rows * query_width];
    let attention = LatentAttention::new(step.isa, dims(&mla), q, sequences);
    let per_head = attention.head_len();
    let by_head = sized(&mut scratch.by_head, mla.num_heads * per_head);
    let head_rows = mla.kv_b_rows_per_head();
    for_each_tile(
        step,
        role(T::MlaKvB),
        mla.num_heads * head_rows,
        &mut |part, weights| {
            // A tile holds whole heads, each its keys and then its values.
            let heads = part.rows.start / head_rows..part.rows.end / head_rows;
            let out = &mut by_head[heads.start * per_head..heads.end * per_head];
            attention.par_heads(weights, heads.start, &scratch.per_thread, out);
        },
    )?;
    step.lap(Part::MlaAttention);

    let width = mla.num_heads * mla.v_head_dim;
    step.multiply(role(T::AttnG), width, x, &mut scratch.gate)?;
    let (isa, gate) = (step.isa, &scratch.gate[..rows * width]);
    let gathered = sized(&mut scratch.out, rows * width);
    gathered
        .par_chunks_mut(GATHER_ROWS * width)
        .zip(gate.par_chunks(GATHER_ROWS * width))
        .enumerate()
        .for_each(|(index, (out, gate))| {
            attention.gather(by_head, index * GATHER_ROWS, out);
            // A plain sigmoid, no norm.
            sigmoid_gate(isa, out, gate);
        });
    scratch.out_in.fill(gathered, width);
    step.multiply(
        role(T::AttnO),
        step.config.hidden_size,
        &scratch.out_in,
        out,
    )?;
    step.lap(Part::MlaProjections);
    Ok(())
}

fn dims(mla: &MlaConfig) -> LatentDims {
    LatentDims {
        num_heads: mla.num_heads,
        nope: mla.qk_nope_head_dim,
        rope: mla.qk_rope_head_dim,
        value: mla.v_head_dim,
        rank: mla.kv_lora_rank,
    }
}
