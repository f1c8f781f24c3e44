//! The latent mixture of experts with its shared experts (specification 3.6).
//!
//! Expert reads start as soon as the router has chosen and overlap with the latent projection and the shared experts. Experts
//! are consumed in whatever order they arrive; each result is kept by (row, rank) and the sum runs in selection order, so
//! arrival order changes no bit.

use k3_shared::{
    ids::{ExpertIdx, LayerIdx},
    names::{LayerTensor, TensorRole},
};
use rayon::prelude::*;

use super::{
    ExpertWeights, ModelError, Part,
    attn_res::add_slice,
    dense::{GatedBuffers, GatedMlp, situ_in_place},
    groups::ExpertGroups,
    matrix::{StepContext, scatter_columns, sized},
    route_into,
    vectors::LayerVectors,
    workspace::Workspace,
};
use crate::kernels::{Activations, NanScales, norm::rms_norm_in_place, par_matmul};

/// The channel mixer of `layer`: `x` are the normed inputs, `out` becomes `[rows, hidden]`.
pub(super) fn run(
    step: &mut StepContext<'_>,
    layer: LayerIdx,
    nan_scales: NanScales,
    vectors: &LayerVectors,
    work: &mut Workspace,
    x: &Activations,
    out: &mut Vec<f32>,
) -> Result<(), ModelError> {
    use LayerTensor as T;
    let moe = &step.config.moe;
    let (rows, latent) = (x.num_rows(), moe.routed_expert_hidden_size);
    let role = |tensor| TensorRole::Layer(layer, tensor);

    let scores = &mut work.small[0];
    step.multiply(role(T::RouterWeight), moe.num_experts, x, scores)?;
    choose(step, layer, vectors, scores, rows, &mut work.groups)?;
    step.lap(Part::Router);
    step.source.request_experts(layer, work.groups.distinct())?;
    step.lap(Part::RoutedExperts);

    // Expert outputs; gate and up of the shared experts, then of each expert; the shared experts' output; the latent, then
    // each expert's output as the kernel writes it, then the sum.
    let [_, gate, up, shared_out, raw] = &mut work.wide;
    let [inner, latent_in, _] = &mut work.inputs;
    step.multiply(role(T::LatentDown), latent, x, raw)?;
    latent_in.fill(&raw[..rows * latent], latent);
    step.lap(Part::LatentProjections);
    let shared = GatedMlp::shared(step.config, layer);
    shared.run(step, GatedBuffers { gate, up, inner }, x, shared_out)?;
    step.lap(Part::SharedExperts);

    consume(step, nan_scales, work)?;
    step.lap(Part::RoutedExperts);
    weighted_sum(step, vectors, work, rows);
    step.lap(Part::ExpertSum);
    let [sum_in, ..] = &mut work.inputs;
    sum_in.fill(&work.wide[4][..rows * latent], latent);
    let hidden = step.config.hidden_size;
    step.multiply(role(T::LatentUp), hidden, sum_in, out)?;
    step.lap(Part::LatentProjections);
    out[..rows * hidden]
        .par_chunks_exact_mut(hidden)
        .zip(work.wide[3].par_chunks_exact(hidden))
        .for_each(|(out, shared)| add_slice(out, shared));
    step.lap(Part::Stream);
    Ok(())
}

/// Route every row by its `scores`, `[rows, num_experts]`, and turn the routings around.
fn choose(
    step: &StepContext<'_>,
    layer: LayerIdx,
    vectors: &LayerVectors,
    scores: &mut [f32],
    rows: usize,
    groups: &mut ExpertGroups,
) -> Result<(), ModelError> {
    let (moe, isa) = (&step.config.moe, step.isa);
    let bias = vectors.get(LayerTensor::RouterBias);
    let wrong = groups
        .routings_mut(rows)
        .par_iter_mut()
        .zip(scores.par_chunks_exact_mut(moe.num_experts))
        .enumerate()
        .filter_map(|(row, (routing, logits))| {
            (!route_into(isa, moe, logits, bias, routing)).then_some(row)
        })
        .min();
    if let Some(row) = wrong {
        return Err(ModelError::NotFinite { layer, row });
    }
    groups.turn(moe.num_experts);
    Ok(())
}

/// Run each expert as it arrives over all rows that chose it. Outputs are kept in the order of experts, `[choices, latent]`.
fn consume(
    step: &mut StepContext<'_>,
    nan_scales: NanScales,
    work: &mut Workspace,
) -> Result<(), ModelError> {
    let (config, isa) = (step.config, step.isa);
    let moe = &config.moe;
    let (latent, width) = (moe.routed_expert_hidden_size, moe.moe_intermediate_size);
    let groups = &work.groups;
    let [outputs, gate, up, _, raw] = &mut work.wide;
    let [inner, latent_in, input] = &mut work.inputs;
    let choices = groups.routings().len() * moe.num_experts_per_token;
    let outputs = sized(outputs, choices * latent);
    let mut run_one = |expert: ExpertIdx, weights: ExpertWeights<'_>| {
        let (start, rows) = groups.rows_of(expert);
        let count = rows.len();
        input.gather(latent_in, rows);
        let matrix = |index| weights.matrix(index, nan_scales);
        let gate = sized(gate, width * count);
        let up = sized(up, width * count);
        par_matmul(isa, matrix(0), input, gate);
        par_matmul(isa, matrix(4), input, up);
        situ_in_place(config, isa, gate, up);
        let output = &mut outputs[start * latent..(start + count) * latent];
        if count == 1 {
            inner.fill(up, width);
            par_matmul(isa, matrix(2), inner, output);
        } else {
            // The gate has been used; its memory takes the product row by row.
            scatter_columns(up, count, 0, gate);
            inner.fill(gate, width);
            let raw = sized(raw, latent * count);
            par_matmul(isa, matrix(2), inner, raw);
            scatter_columns(raw, count, 0, output);
        }
    };
    while step.with_next_expert(&mut run_one)? {}
    Ok(())
}

/// Sum the experts of each row in selection order and norm the sum, once.
fn weighted_sum(step: &StepContext<'_>, vectors: &LayerVectors, work: &mut Workspace, rows: usize) {
    let moe = &step.config.moe;
    let latent = moe.routed_expert_hidden_size;
    let groups = &work.groups;
    let [outputs, _, _, _, sum] = &mut work.wide;
    let norm = vectors.get(LayerTensor::LatentNorm);
    let eps = step.config.rms_norm_eps;
    let sum = sized(sum, rows * latent);
    sum.par_chunks_exact_mut(latent)
        .zip(groups.routings())
        .enumerate()
        .for_each(|(row, (sum, routing))| {
            sum.fill(0.0);
            let places = groups.places(row, moe.num_experts_per_token);
            for (weight, &place) in routing.weights.iter().zip(places) {
                let output = &outputs[place as usize * latent..][..latent];
                for (sum, y) in sum.iter_mut().zip(output) {
                    *sum += weight * y;
                }
            }
            rms_norm_in_place(sum, norm, eps);
        });
}
