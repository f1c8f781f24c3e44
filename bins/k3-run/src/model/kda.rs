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
    workspace::Workspace,
};
use crate::kernels::{
    Activations, Isa,
    conv::conv_silu,
    delta::{DeltaRows, decay_gate, delta_rows},
    math::{self, sigmoid_gate, sigmoid_slice},
    norm::{l2_normalize, rms_norm_in_place},
};

/// Epsilon of the query and key norms, inside the root of a sum.
const L2_EPS: f64 = 1e-6;
/// Heads normed by one task: a head alone is less work than handing it over.
const HEADS_PER_TASK: usize = 24;

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
    work: &mut Workspace,
    sequences: &mut [KdaRows<'_>],
    x: &Activations,
    out: &mut Vec<f32>,
) -> Result<(), ModelError> {
    use LayerTensor as T;
    let config = &step.config.kda;
    let isa = step.isa;
    let (rows, width) = (x.num_rows(), config.projection_size());
    let role = |tensor| TensorRole::Layer(layer, tensor);
    // The raw projections, then the outputs by head; queries, then the gated outputs; keys, then the gate; values; decays.
    let [raw, q, k, v, alpha, ..] = &mut work.wide;
    let [low_rank, beta] = &mut work.small;
    let [out_in, low_rank_in, ..] = &mut work.inputs;
    for (index, (projection, taps, mixed)) in [
        (T::KdaQ, T::KdaConvQ, &mut *q),
        (T::KdaK, T::KdaConvK, &mut *k),
        (T::KdaV, T::KdaConvV, &mut *v),
    ]
    .into_iter()
    .enumerate()
    {
        step.multiply(role(projection), width, x, raw)?;
        step.lap(Part::KdaProjections);
        let mixed = sized(mixed, rows * width);
        for sequence in &mut *sequences {
            let at = sequence.rows.start * width..sequence.rows.end * width;
            let history = &mut sequence.state.history[index];
            let (raw, mixed) = (&raw[at.clone()], &mut mixed[at]);
            conv_silu(isa, raw, history, vectors.get(taps), width, mixed);
        }
        step.lap(Part::KdaConvolution);
    }
    step.multiply(role(T::KdaFA), config.head_dim, x, low_rank)?;
    low_rank_in.fill(&low_rank[..rows * config.head_dim], config.head_dim);
    step.multiply(role(T::KdaFB), width, low_rank_in, alpha)?;
    step.multiply(role(T::KdaB), config.num_heads, x, beta)?;
    step.lap(Part::KdaProjections);

    let len = rows * width;
    let (beta, alpha) = (&mut beta[..rows * config.num_heads], &mut alpha[..len]);
    let (by_head, q, v) = (sized(raw, len), &mut q[..len], &v[..len]);
    sigmoid_slice(isa, beta);
    prepare_heads(config, isa, vectors, (&mut *q, &mut k[..len], &mut *alpha));
    step.lap(Part::KdaGates);
    let input = DeltaRows {
        q,
        k: &k[..len],
        v,
        alpha,
        beta,
        width,
        heads: config.num_heads,
    };
    recur(config, isa, input, sequences, by_head);
    step.lap(Part::KdaRecurrence);

    step.multiply(role(T::AttnG), width, x, k)?;
    step.lap(Part::KdaProjections);
    let (weight, eps) = (vectors.get(T::KdaONorm), step.config.rms_norm_eps);
    gather_heads(config, isa, (weight, eps), by_head, &k[..len], q);
    out_in.fill(q, width);
    step.lap(Part::KdaGates);
    step.multiply(role(T::AttnO), step.config.hidden_size, out_in, out)?;
    step.lap(Part::KdaProjections);
    Ok(())
}

/// Norm the queries and keys of each head and turn the gate's input into decays (steps 3 and 5).
///
/// - `qka`: queries, keys and gate inputs, `[rows, heads * head_dim]` each.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the bound is f32 in the arithmetic"
)]
fn prepare_heads(
    config: &KdaConfig,
    isa: Isa,
    vectors: &LayerVectors,
    qka: (&mut [f32], &mut [f32], &mut [f32]),
) {
    /// Decays made at a time from gate inputs set aside.
    const PIECE: usize = 128;
    let dim = config.head_dim;
    let query_scale = 1.0 / (dim as f64).sqrt();
    let lambda = config.gate_lower_bound as f32;
    let a_log = vectors.get(LayerTensor::KdaALog);
    let bias = vectors.get(LayerTensor::KdaDtBias);
    let one_head = |head: usize, q: &mut [f32], k: &mut [f32], alpha: &mut [f32]| {
        l2_normalize(q, L2_EPS, query_scale);
        l2_normalize(k, L2_EPS, 1.0);
        let exp_a = math::exp(a_log[head]);
        let bias = bias[head * dim..(head + 1) * dim].chunks(PIECE);
        for (alpha, bias) in alpha.chunks_mut(PIECE).zip(bias) {
            let mut z = [0.0; PIECE];
            let z = &mut z[..alpha.len()];
            z.copy_from_slice(alpha);
            decay_gate(isa, z, bias, exp_a, lambda, alpha);
        }
    };
    let (q, k, alpha) = qka;
    q.par_chunks_exact_mut(dim)
        .zip(k.par_chunks_exact_mut(dim))
        .zip(alpha.par_chunks_exact_mut(dim))
        .enumerate()
        .with_min_len(HEADS_PER_TASK)
        .for_each(|(index, ((q, k), alpha))| one_head(index % config.num_heads, q, k, alpha));
}

/// Advance every head of every sequence through its rows, one after the other (step 6).
///
/// - `input`: of all rows and heads. `by_head`: `[heads, rows, head_dim]`.
fn recur(
    config: &KdaConfig,
    isa: Isa,
    input: DeltaRows<'_>,
    sequences: &mut [KdaRows<'_>],
    by_head: &mut [f32],
) {
    let (dim, heads) = (config.head_dim, config.num_heads);
    let per_head = by_head.len() / heads;
    for sequence in sequences {
        let states = sequence.state.matrix.par_chunks_exact_mut(dim * dim);
        let outs = by_head.par_chunks_exact_mut(per_head);
        let range = sequence.rows.clone();
        states
            .zip(outs)
            .enumerate()
            .for_each(|(head, (state, out))| {
                let out = &mut out[range.start * dim..range.end * dim];
                let rows = input.of(range.start, head, dim);
                delta_rows(isa, state, rows, dim, out);
            });
    }
}

/// Norm each head's output, gate it, and lay the heads side by side (step 7: norm first, then the plain sigmoid gate).
///
/// - `norm`: its weight, `[head_dim]`, and epsilon. `by_head`: `[heads, rows, head_dim]`. `gate`, `out`: `[rows, heads *
///   head_dim]`.
fn gather_heads(
    config: &KdaConfig,
    isa: Isa,
    norm: (&[f32], f64),
    by_head: &[f32],
    gate: &[f32],
    out: &mut [f32],
) {
    let dim = config.head_dim;
    let rows = out.len() / config.projection_size();
    out.par_chunks_exact_mut(dim)
        .zip(gate.par_chunks_exact(dim))
        .enumerate()
        .with_min_len(HEADS_PER_TASK)
        .for_each(|(index, (out, gate))| {
            let (row, head) = (index / config.num_heads, index % config.num_heads);
            out.copy_from_slice(&by_head[(head * rows + row) * dim..][..dim]);
            rms_norm_in_place(out, norm.0, norm.1);
            sigmoid_gate(isa, out, gate);
        });
}
