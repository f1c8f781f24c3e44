//! The latent mixture of experts with its shared experts (specification 3.6).
//!
//! Expert reads start as soon as the router has chosen and overlap with the latent projection and the shared experts. Experts
//! are consumed in whatever order they arrive; each result is kept by (row, rank) and the sum runs in selection order, so
//! arrival order changes no bit.

use k3_shared::{
    ids::{ExpertIdx, LayerIdx, expert_file_ranks},
    names::{LayerTensor, TensorRole},
};
use rayon::prelude::*;

use super::{
    ExpertWeights, ModelError, Part, Routing,
    dense::{GatedMlp, GatedScratch, situ_in_place},
    matrix::{StepContext, sized},
    route,
    vectors::LayerVectors,
};
use crate::kernels::{Activations, NanScales, norm::rms_norm_in_place, par_matmul, transpose};

/// Buffers of the layer's experts.
#[derive(Debug, Default)]
pub(super) struct MoeScratch {
    scores: Vec<f32>,
    routings: Vec<Routing>,
    latent: Vec<f32>,
    latent_in: Activations,
    shared: GatedScratch,
    shared_out: Vec<f32>,
    expert: ExpertScratch,
    /// `[rows, num_experts_per_token, latent]`: every chosen expert's output.
    outputs: Vec<f32>,
    sum: Vec<f32>,
    sum_in: Activations,
    /// Place of each expert in the layer's file.
    ranks: Vec<u32>,
}

/// Buffers of one expert.
#[derive(Debug, Default)]
struct ExpertScratch {
    /// Rows that chose the expert, and the rank each gave it.
    rows: Vec<u32>,
    slots: Vec<usize>,
    input: Activations,
    gate: Vec<f32>,
    up: Vec<f32>,
    by_row: Vec<f32>,
    inner: Activations,
    out: Vec<f32>,
}

impl MoeScratch {
    /// The experts each row of the last step took in the last layer.
    pub(super) fn routings(&self) -> &[Routing] {
        &self.routings
    }
}

/// The channel mixer of `layer`: `x` are the normed inputs, `out` becomes `[rows, hidden]`.
pub(super) fn run(
    step: &mut StepContext<'_>,
    layer: LayerIdx,
    nan_scales: NanScales,
    vectors: &LayerVectors,
    scratch: &mut MoeScratch,
    x: &Activations,
    out: &mut Vec<f32>,
) -> Result<(), ModelError> {
    use LayerTensor as T;
    let moe = step.config.moe.clone();
    let (rows, latent) = (x.num_rows(), moe.routed_expert_hidden_size);
    let role = |tensor| TensorRole::Layer(layer, tensor);

    step.multiply(
        role(T::RouterWeight),
        moe.num_experts,
        x,
        &mut scratch.scores,
    )?;
    scratch.routings.clear();
    for row in 0..rows {
        let logits = &mut scratch.scores[row * moe.num_experts..(row + 1) * moe.num_experts];
        let routing = route(&moe, logits, vectors.get(T::RouterBias));
        scratch
            .routings
            .push(routing.ok_or(ModelError::NotFinite { layer, row })?);
    }
    let group = distinct(&scratch.routings, moe.num_experts, &mut scratch.ranks);
    step.lap(Part::Router);
    step.source.request_experts(layer, &group)?;
    step.lap(Part::RoutedExperts);

    step.multiply(role(T::LatentDown), latent, x, &mut scratch.latent)?;
    scratch
        .latent_in
        .fill(&scratch.latent[..rows * latent], latent);
    step.lap(Part::LatentProjections);
    let shared = GatedMlp::shared(step.config, layer);
    shared.run(step, &mut scratch.shared, x, &mut scratch.shared_out)?;

    step.lap(Part::SharedExperts);
    consume(step, nan_scales, scratch)?;
    step.lap(Part::RoutedExperts);
    weighted_sum(step, vectors, scratch, rows);
    step.lap(Part::ExpertSum);
    scratch.sum_in.fill(&scratch.sum[..rows * latent], latent);
    step.multiply(
        role(T::LatentUp),
        step.config.hidden_size,
        &scratch.sum_in,
        out,
    )?;
    for (out, shared) in out.iter_mut().zip(&scratch.shared_out) {
        *out += shared;
    }
    step.lap(Part::LatentProjections);
    Ok(())
}

/// The distinct experts of a step in ascending file rank.
fn distinct(routings: &[Routing], num_experts: usize, ranks: &mut Vec<u32>) -> Vec<ExpertIdx> {
    if ranks.len() != num_experts {
        *ranks = expert_file_ranks(num_experts);
    }
    let mut group: Vec<ExpertIdx> = routings.iter().flat_map(|r| &r.experts).copied().collect();
    group.sort_unstable_by_key(|e| ranks[e.get()]);
    group.dedup();
    group
}

/// Run each expert as it arrives over all rows that chose it.
fn consume(
    step: &mut StepContext<'_>,
    nan_scales: NanScales,
    scratch: &mut MoeScratch,
) -> Result<(), ModelError> {
    let moe = &step.config.moe;
    let latent = moe.routed_expert_hidden_size;
    let top_k = moe.num_experts_per_token;
    let MoeScratch {
        routings,
        latent_in,
        expert: own,
        outputs,
        ..
    } = scratch;
    let outputs = sized(outputs, routings.len() * top_k * latent);
    let (config, isa) = (step.config, step.isa);
    let mut run_one = |expert: ExpertIdx, weights: ExpertWeights<'_>| {
        own.rows.clear();
        own.slots.clear();
        for (row, routing) in (0u32..).zip(routings.iter()) {
            if let Some(rank) = routing.experts.iter().position(|&e| e == expert) {
                own.rows.push(row);
                own.slots.push(row as usize * top_k + rank);
            }
        }
        let count = own.rows.len();
        own.input.gather(latent_in, &own.rows);
        let matrix = |index| weights.matrix(index, nan_scales);
        let inner = moe.moe_intermediate_size;
        let gate = sized(&mut own.gate, inner * count);
        let up = sized(&mut own.up, inner * count);
        par_matmul(isa, matrix(0), &own.input, gate);
        par_matmul(isa, matrix(4), &own.input, up);
        situ_in_place(config, isa, gate, up);
        let by_row = sized(&mut own.by_row, inner * count);
        transpose(up, count, by_row);
        own.inner.fill(by_row, inner);
        let out = sized(&mut own.out, latent * count);
        par_matmul(isa, matrix(2), &own.inner, out);
        for (index, &slot) in own.slots.iter().enumerate() {
            let output = &mut outputs[slot * latent..(slot + 1) * latent];
            for (output, row) in output.iter_mut().zip(out.chunks_exact(count)) {
                *output = row[index];
            }
        }
    };
    while step.with_next_expert(&mut run_one)? {}
    Ok(())
}

/// Sum the experts of each row in selection order and norm the sum, once.
fn weighted_sum(
    step: &StepContext<'_>,
    vectors: &LayerVectors,
    scratch: &mut MoeScratch,
    rows: usize,
) {
    let moe = &step.config.moe;
    let latent = moe.routed_expert_hidden_size;
    let top_k = moe.num_experts_per_token;
    let (routings, outputs) = (&scratch.routings, &scratch.outputs);
    let norm = vectors.get(LayerTensor::LatentNorm);
    let eps = step.config.rms_norm_eps;
    let sum = sized(&mut scratch.sum, rows * latent);
    sum.par_chunks_mut(latent)
        .zip(routings)
        .enumerate()
        .for_each(|(row, (sum, routing))| {
            sum.fill(0.0);
            for (rank, weight) in routing.weights.iter().enumerate() {
                let output = &outputs[(row * top_k + rank) * latent..][..latent];
                for (sum, y) in sum.iter_mut().zip(output) {
                    *sum += weight * y;
                }
            }
            rms_norm_in_place(sum, norm, eps);
        });
}
