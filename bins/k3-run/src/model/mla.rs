//! Multi-head latent attention in its absorbed form over the latent cache (specification 3.5).
//!
//! `kv_b_proj` arrives as tiles of whole heads; each head absorbs its keys into the query, attends over the latent cache and
//! expands its values while its tile is held, so the two latent-wide vectors exist for one head a thread at a time. Prefill and
//! decode run the same code on the same visible positions.

use std::{ops::Range, sync::Mutex};

use k3_shared::{
    config::MlaConfig,
    ids::LayerIdx,
    names::{LayerTensor, TensorRole},
};
use rayon::prelude::*;

use super::{
    LatentCache, ModelError, Part,
    matrix::{StepContext, for_each_tile, sized},
    vectors::LayerVectors,
};
use crate::kernels::{
    Activations, Isa, Weights,
    attention::{absorb, attend},
    math::sigmoid_gate,
    matmul,
    norm::rms_norm_in_place,
};

/// Buffers of the mixer.
#[derive(Debug, Default)]
pub(super) struct MlaScratch {
    low_rank: Vec<f32>,
    low_rank_in: Activations,
    /// `[rows, heads * (nope + rope)]`.
    q: Vec<f32>,
    latent: Vec<f32>,
    /// `[heads, v_head_dim, rows]`, as the value expansion writes it.
    by_head: Vec<f32>,
    gate: Vec<f32>,
    out: Vec<f32>,
    out_in: Activations,
    per_thread: Vec<Mutex<HeadScratch>>,
}

/// What one thread needs for one head.
#[derive(Debug, Default)]
struct HeadScratch {
    query: Vec<f32>,
    /// `[rows, kv_lora_rank]`: the attended latent.
    attended: Vec<f32>,
    sums: Vec<f64>,
    values_in: Activations,
}

/// One sequence's part in a step.
pub(super) struct MlaRows<'a> {
    /// Rows of the step that are this sequence's, in order.
    pub(super) rows: Range<usize>,
    /// Position of the first of them.
    pub(super) position: usize,
    /// Its cache in this layer.
    pub(super) cache: &'a mut LatentCache,
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
    for row in low_rank.chunks_exact_mut(mla.q_lora_rank) {
        rms_norm_in_place(row, vectors.get(T::MlaQANorm), low_rank_eps);
    }
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
            let slot = sequence.cache.slot(sequence.position + offset);
            slot.copy_from_slice(&scratch.latent[row * mla.cache_width()..][..mla.cache_width()]);
            // The shared slice after the latent is neither normed nor rotated.
            let latent = &mut slot[..mla.kv_lora_rank];
            rms_norm_in_place(latent, vectors.get(T::MlaKvANorm), low_rank_eps);
        }
    }
    step.lap(Part::MlaProjections);
    attend_heads(step, role(T::MlaKvB), &mla, scratch, sequences, rows)?;
    step.lap(Part::MlaAttention);

    let width = mla.num_heads * mla.v_head_dim;
    step.multiply(role(T::AttnG), width, x, &mut scratch.gate)?;
    gather_heads(&mla, step.isa, scratch, rows);
    scratch.out_in.fill(&scratch.out[..rows * width], width);
    step.multiply(
        role(T::AttnO),
        step.config.hidden_size,
        &scratch.out_in,
        out,
    )?;
    step.lap(Part::MlaProjections);
    Ok(())
}

/// Absorb, attend and expand for every head, tile by tile.
fn attend_heads(
    step: &mut StepContext<'_>,
    kv_b: TensorRole,
    mla: &MlaConfig,
    scratch: &mut MlaScratch,
    sequences: &[MlaRows<'_>],
    rows: usize,
) -> Result<(), ModelError> {
    let threads = rayon::current_num_threads();
    if scratch.per_thread.len() < threads {
        scratch.per_thread.resize_with(threads, Mutex::default);
    }
    let isa = step.isa;
    let head_rows = mla.kv_b_rows_per_head();
    let per_head = rows * mla.v_head_dim;
    sized(&mut scratch.by_head, mla.num_heads * per_head);
    let MlaScratch {
        q,
        by_head,
        per_thread,
        ..
    } = scratch;
    for_each_tile(
        step,
        kv_b,
        mla.num_heads * head_rows,
        &mut |part, weights| {
            let first = part.rows.start / head_rows;
            let heads = part.rows.len() / head_rows;
            let outs =
                by_head[first * per_head..(first + heads) * per_head].par_chunks_mut(per_head);
            outs.enumerate().for_each(|(index, out)| {
                let thread = rayon::current_thread_index().unwrap_or(0);
                let mut own = per_thread[thread]
                    .lock()
                    .expect("a panicking head ends the step");
                let kv = weights.rows(index * head_rows..(index + 1) * head_rows, mla.kv_lora_rank);
                one_head(mla, isa, kv, first + index, q, sequences, &mut own, out);
            });
        },
    )
}

/// One head over all rows: `out` becomes `[v_head_dim, rows]`.
#[expect(
    clippy::too_many_arguments,
    reason = "one inner loop, cut out to be read"
)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the scale is f32 in the arithmetic"
)]
fn one_head(
    mla: &MlaConfig,
    isa: Isa,
    kv: Weights<'_>,
    head: usize,
    q: &[f32],
    sequences: &[MlaRows<'_>],
    own: &mut HeadScratch,
    out: &mut [f32],
) {
    let latent = mla.kv_lora_rank;
    // The unrotated slots count in the scale: nope + rope.
    let scale = (1.0 / (mla.qk_head_dim() as f64).sqrt()) as f32;
    let keys = kv.rows(0..mla.qk_nope_head_dim, latent);
    let values = kv.rows(mla.qk_nope_head_dim..mla.kv_b_rows_per_head(), latent);
    let rows = out.len() / mla.v_head_dim;
    let attended = sized(&mut own.attended, rows * latent);
    own.query.resize(mla.cache_width(), 0.0);
    own.sums.resize(latent, 0.0);
    for sequence in sequences {
        for (offset, row) in sequence.rows.clone().enumerate() {
            let at = (row * mla.num_heads + head) * mla.qk_head_dim();
            let (nope, rope) = q[at..at + mla.qk_head_dim()].split_at(mla.qk_nope_head_dim);
            absorb(isa, keys, nope, &mut own.query[..latent]);
            own.query[latent..].copy_from_slice(rope);
            let visible = sequence.cache.visible(sequence.position + offset + 1);
            let attended = &mut attended[row * latent..(row + 1) * latent];
            attend(
                isa,
                &own.query,
                visible,
                latent,
                scale,
                attended,
                &mut own.sums,
            );
        }
    }
    own.values_in.fill(attended, latent);
    matmul(isa, values, &own.values_in, out);
}

/// Lay the heads side by side and gate them: a plain sigmoid, no norm.
fn gather_heads(mla: &MlaConfig, isa: Isa, scratch: &mut MlaScratch, rows: usize) {
    let (dim, width) = (mla.v_head_dim, mla.num_heads * mla.v_head_dim);
    let (by_head, gate) = (&scratch.by_head, &scratch.gate);
    let out = sized(&mut scratch.out, rows * width);
    out.par_chunks_mut(width)
        .enumerate()
        .for_each(|(row, out)| {
            for (index, out) in out.iter_mut().enumerate() {
                *out = by_head[index / dim * dim * rows + index % dim * rows + row];
            }
            sigmoid_gate(isa, out, &gate[row * width..(row + 1) * width]);
        });
}
