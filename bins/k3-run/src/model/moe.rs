//! The latent mixture of experts with its shared experts (specification 3.6).
//!
//! Expert reads start as soon as the router has chosen, while the latent projection and the shared experts are computed. From
//! then on, experts are consumed as they arrive, between two tiles of the shared experts and after the last one, in whatever
//! order: each result is kept by (row, rank) and the sum runs in selection order, so arrival order changes no bit.

use k3_shared::{
    config::Config,
    ids::{ExpertIdx, LayerIdx},
    names::{LayerTensor, TensorRole},
};
use rayon::prelude::*;

use super::{
    ExpertWeights, ModelError, Part,
    attn_res::add_slice,
    dense::{GatedBuffers, GatedMlp, situ_here},
    groups::ExpertGroups,
    matrix::{StepContext, scatter_columns, sized},
    route_into,
    vectors::LayerVectors,
    workspace::Workspace,
};
use crate::kernels::{
    Activations, Isa, NanScales, norm::rms_norm_in_place, par_matmul, par_matmul_pair,
};

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

    let [outputs, gate, up, shared_out, raw, expert_gate, expert_up] = &mut work.wide;
    let [inner, latent_in, expert_input, expert_inner] = &mut work.inputs;
    step.multiply(role(T::LatentDown), latent, x, raw)?;
    latent_in.fill(&raw[..rows * latent], latent);
    step.lap(Part::LatentProjections);

    let mut experts = Experts {
        config: step.config,
        isa: step.isa,
        nan_scales,
        groups: &work.groups,
        latent_in,
        outputs: sized(outputs, rows * moe.num_experts_per_token * latent),
        input: expert_input,
        gate: expert_gate,
        up: expert_up,
        inner: expert_inner,
        raw,
    };
    let mut run_one = |expert, weights: ExpertWeights<'_>| experts.run(expert, &weights);
    let shared = GatedMlp::shared(step.config, layer);
    let mut with_experts = StepContext {
        config: step.config,
        isa: step.isa,
        source: step.source,
        matrix: step.matrix,
        profile: step.profile,
        meanwhile: Some(&mut run_one),
    };
    let buffers = GatedBuffers { gate, up, inner };
    shared.run(&mut with_experts, buffers, x, shared_out)?;
    step.lap(Part::SharedExperts);
    while step.with_next_expert(&mut run_one)? {}
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

/// The routed experts of a step and layer, run one after the other over all rows that chose them.
struct Experts<'a> {
    config: &'a Config,
    isa: Isa,
    nan_scales: NanScales,
    groups: &'a ExpertGroups,
    /// `[rows, latent]`.
    latent_in: &'a Activations,
    /// `[choices, latent]`, in the order of experts.
    outputs: &'a mut [f32],
    input: &'a mut Activations,
    gate: &'a mut Vec<f32>,
    up: &'a mut Vec<f32>,
    inner: &'a mut Activations,
    raw: &'a mut Vec<f32>,
}

impl Experts<'_> {
    fn run(&mut self, expert: ExpertIdx, weights: &ExpertWeights<'_>) {
        let (config, isa) = (self.config, self.isa);
        let moe = &config.moe;
        let (latent, width) = (moe.routed_expert_hidden_size, moe.moe_intermediate_size);
        let (start, rows) = self.groups.rows_of(expert);
        let count = rows.len();
        self.input.gather(self.latent_in, rows);
        let matrix = |index| weights.matrix(index, self.nan_scales);
        let gate = sized(self.gate, width * count);
        let up = sized(self.up, width * count);
        let gate_up = [matrix(0), matrix(4)];
        par_matmul_pair(isa, gate_up, self.input, [gate, up], |gate, up| {
            situ_here(config, isa, gate, up);
        });
        let output = &mut self.outputs[start * latent..(start + count) * latent];
        if count == 1 {
            self.inner.fill(up, width);
            par_matmul(isa, matrix(2), self.inner, output);
        } else {
            // The gate has been used; its memory takes the product row by row.
            scatter_columns(up, count, 0, gate);
            self.inner.fill(gate, width);
            let raw = sized(self.raw, latent * count);
            par_matmul(isa, matrix(2), self.inner, raw);
            scatter_columns(raw, count, 0, output);
        }
    }
}

/// Sum the experts of each row in selection order and norm the sum, once.
fn weighted_sum(step: &StepContext<'_>, vectors: &LayerVectors, work: &mut Workspace, rows: usize) {
    let moe = &step.config.moe;
    let latent = moe.routed_expert_hidden_size;
    let groups = &work.groups;
    let [outputs, _, _, _, sum, ..] = &mut work.wide;
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
