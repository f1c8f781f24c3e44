//! Kimi Delta Attention: gated delta-rule linear attention with a state of fixed size (specification 3.4).

use std::ops::Range;

use k3_shared::{
    config::KdaConfig,
    ids::LayerIdx,
    names::{LayerTensor, TensorRole},
};
use rayon::prelude::*;

use super::{
    KdaState, ModelError, Part,
    matrix::{StepContext, sized},
    vectors::LayerVectors,
};
use crate::kernels::{
    Activations, Isa,
    conv::conv_silu,
    delta::{DeltaInput, decay_gate, delta_step},
    math::{self, sigmoid_gate, sigmoid_slice},
    norm::{l2_normalize, rms_norm_in_place},
};

/// Epsilon of the query and key norms, inside the root of a sum.
const L2_EPS: f64 = 1e-6;

/// Buffers of the mixer.
#[derive(Debug, Default)]
pub(super) struct KdaScratch {
    /// Raw projection of queries, keys or values, `[rows, heads * head_dim]`.
    raw: Vec<f32>,
    /// Queries, keys, values after convolution, `[rows, heads * head_dim]` each.
    qkv: [Vec<f32>; 3],
    low_rank: Vec<f32>,
    low_rank_in: Activations,
    /// Gate input, then decay, `[rows, heads * head_dim]`.
    alpha: Vec<f32>,
    beta: Vec<f32>,
    gate: Vec<f32>,
    /// `[heads, rows, head_dim]`.
    by_head: Vec<f32>,
    out: Vec<f32>,
    out_in: Activations,
}

/// One sequence's part in a step.
pub(super) struct KdaRows<'a> {
    /// Rows of the step that are this sequence's, in order.
    pub(super) rows: Range<usize>,
    /// Its state in this layer.
    pub(super) state: &'a mut KdaState,
}

/// The mixer of `layer`: `x` are the normed inputs, `out` becomes `[rows, hidden]`.
pub(super) fn run(
    step: &mut StepContext<'_>,
    layer: LayerIdx,
    vectors: &LayerVectors,
    scratch: &mut KdaScratch,
    sequences: &mut [KdaRows<'_>],
    x: &Activations,
    out: &mut Vec<f32>,
) -> Result<(), ModelError> {
    use LayerTensor as T;
    let config = step.config.kda.clone();
    let isa = step.isa;
    let (rows, width) = (x.num_rows(), config.projection_size());
    let role = |tensor| TensorRole::Layer(layer, tensor);
    let mixed = [
        (T::KdaQ, T::KdaConvQ),
        (T::KdaK, T::KdaConvK),
        (T::KdaV, T::KdaConvV),
    ];
    for (index, (projection, taps)) in mixed.into_iter().enumerate() {
        step.multiply(role(projection), width, x, &mut scratch.raw)?;
        step.lap(Part::KdaProjections);
        let mixed = sized(&mut scratch.qkv[index], rows * width);
        for sequence in &mut *sequences {
            let at = sequence.rows.start * width..sequence.rows.end * width;
            let history = &mut sequence.state.history[index];
            conv_silu(
                isa,
                &scratch.raw[at.clone()],
                history,
                vectors.get(taps),
                width,
                &mut mixed[at],
            );
        }
        step.lap(Part::KdaConvolution);
    }
    step.multiply(role(T::KdaFA), config.head_dim, x, &mut scratch.low_rank)?;
    scratch
        .low_rank_in
        .fill(&scratch.low_rank[..rows * config.head_dim], config.head_dim);
    step.multiply(
        role(T::KdaFB),
        width,
        &scratch.low_rank_in,
        &mut scratch.alpha,
    )?;
    step.multiply(role(T::KdaB), config.num_heads, x, &mut scratch.beta)?;
    step.lap(Part::KdaProjections);
    sigmoid_slice(isa, &mut scratch.beta[..rows * config.num_heads]);
    prepare_heads(&config, isa, vectors, scratch, rows);
    step.lap(Part::KdaGates);
    recur(&config, isa, scratch, sequences, rows);
    step.lap(Part::KdaRecurrence);
    step.multiply(role(T::AttnG), width, x, &mut scratch.gate)?;
    step.lap(Part::KdaProjections);
    gather_heads(
        &config,
        isa,
        step.config.rms_norm_eps,
        vectors,
        scratch,
        rows,
    );
    scratch.out_in.fill(&scratch.out[..rows * width], width);
    step.lap(Part::KdaGates);
    step.multiply(
        role(T::AttnO),
        step.config.hidden_size,
        &scratch.out_in,
        out,
    )?;
    step.lap(Part::KdaProjections);
    Ok(())
}

/// Norm the queries and keys of each head and turn the gate's input into decays (steps 3 and 5).
#[expect(
    clippy::cast_possible_truncation,
    reason = "the bound is f32 in the arithmetic"
)]
fn prepare_heads(
    config: &KdaConfig,
    isa: Isa,
    vectors: &LayerVectors,
    scratch: &mut KdaScratch,
    rows: usize,
) {
    let (dim, width) = (config.head_dim, config.projection_size());
    let query_scale = 1.0 / (dim as f64).sqrt();
    let lambda = config.gate_lower_bound as f32;
    let a_log = vectors.get(LayerTensor::KdaALog);
    let bias = vectors.get(LayerTensor::KdaDtBias);
    let [q, k, _] = &mut scratch.qkv;
    let len = rows * width;
    let heads = q[..len]
        .par_chunks_mut(dim)
        .zip(k[..len].par_chunks_mut(dim));
    heads
        .zip(scratch.alpha[..len].par_chunks_mut(dim))
        .enumerate()
        .for_each_init(
            || vec![0.0; dim],
            |z, (index, ((q, k), alpha))| {
                let head = index % config.num_heads;
                l2_normalize(q, L2_EPS, query_scale);
                l2_normalize(k, L2_EPS, 1.0);
                z.copy_from_slice(alpha);
                let exp_a = math::exp(a_log[head]);
                decay_gate(
                    isa,
                    z,
                    &bias[head * dim..(head + 1) * dim],
                    exp_a,
                    lambda,
                    alpha,
                );
            },
        );
}

/// Advance every head of every sequence through its rows, one after the other (step 6).
fn recur(
    config: &KdaConfig,
    isa: Isa,
    scratch: &mut KdaScratch,
    sequences: &mut [KdaRows<'_>],
    rows: usize,
) {
    let (dim, heads, width) = (config.head_dim, config.num_heads, config.projection_size());
    let [q, k, v] = &scratch.qkv;
    let (alpha, beta) = (&scratch.alpha, &scratch.beta);
    sized(&mut scratch.by_head, rows * width);
    for sequence in sequences {
        let states = sequence.state.matrix.par_chunks_mut(dim * dim);
        let outs = scratch.by_head[..rows * width].par_chunks_mut(rows * dim);
        let range = sequence.rows.clone();
        states.zip(outs).enumerate().for_each_init(
            || vec![0.0; dim],
            |u, (head, (state, out))| {
                for row in range.clone() {
                    let at = row * width + head * dim..row * width + (head + 1) * dim;
                    let input = DeltaInput {
                        q: &q[at.clone()],
                        k: &k[at.clone()],
                        v: &v[at.clone()],
                        alpha: &alpha[at],
                        beta: beta[row * heads + head],
                    };
                    delta_step(isa, state, input, u, &mut out[row * dim..(row + 1) * dim]);
                }
            },
        );
    }
}

/// Norm each head's output, gate it, and lay the heads side by side (step 7: norm first, then the plain sigmoid gate).
fn gather_heads(
    config: &KdaConfig,
    isa: Isa,
    eps: f64,
    vectors: &LayerVectors,
    scratch: &mut KdaScratch,
    rows: usize,
) {
    let (dim, width) = (config.head_dim, config.projection_size());
    let weight = vectors.get(LayerTensor::KdaONorm);
    let (by_head, gate) = (&scratch.by_head, &scratch.gate);
    let out = sized(&mut scratch.out, rows * width);
    out.par_chunks_mut(dim)
        .enumerate()
        .for_each(|(index, out)| {
            let (row, head) = (index / config.num_heads, index % config.num_heads);
            out.copy_from_slice(&by_head[(head * rows + row) * dim..][..dim]);
            rms_norm_in_place(out, weight, eps);
            sigmoid_gate(isa, out, &gate[index * dim..(index + 1) * dim]);
        });
}
