//! After the last layer: the output attention residual, the final norm and the head (specification 3.7).

use k3_shared::{names::TensorRole, tiles::FINAL_VECTORS};
use rayon::prelude::*;

use super::{
    ModelError,
    attn_res::ResidualStream,
    matrix::{StepContext, for_each_tile, sized},
    vectors::{describe, widen_part},
};
use crate::kernels::{Activations, norm::rms_norm_in_place, par_matmul, transpose};

/// Buffers of the output stage.
#[derive(Debug, Default)]
pub(super) struct HeadScratch {
    norm: Vec<f32>,
    res_norm: Vec<f32>,
    res_proj: Vec<f32>,
    mixed: Vec<f32>,
    chosen: Vec<f32>,
    input: Activations,
    raw: Vec<f32>,
    logits: Vec<f32>,
}

/// Run the head over the step's rows `rows`; each tile's logits go to `take` as (first id, `[rows, ids]`).
pub(super) fn run(
    step: &mut StepContext<'_>,
    stream: &ResidualStream,
    scratch: &mut HeadScratch,
    rows: &[usize],
    take: &mut dyn FnMut(usize, &[f32]),
) -> Result<(), ModelError> {
    load_vectors(step, scratch)?;
    let hidden = step.config.hidden_size;
    let eps = step.config.rms_norm_eps;
    for (weight, projection) in scratch.res_norm.iter_mut().zip(&scratch.res_proj) {
        *weight *= projection;
    }
    stream.mix(&scratch.res_norm, eps, &mut scratch.mixed);
    scratch.chosen.clear();
    for &row in rows {
        scratch
            .chosen
            .extend_from_slice(&scratch.mixed[row * hidden..(row + 1) * hidden]);
    }
    let norm = &scratch.norm;
    scratch
        .chosen
        .par_chunks_mut(hidden)
        .for_each(|row| rms_norm_in_place(row, norm, eps));
    scratch.input.fill(&scratch.chosen, hidden);
    let HeadScratch {
        input, raw, logits, ..
    } = scratch;
    let (isa, vocab_size) = (step.isa, step.config.vocab_size);
    for_each_tile(
        step,
        TensorRole::OutputHead,
        vocab_size,
        &mut |part, weights| {
            let len = part.rows.len() * rows.len();
            let raw = sized(raw, len);
            par_matmul(isa, weights, input, raw);
            let logits = sized(logits, len);
            transpose(raw, rows.len(), logits);
            take(part.rows.start, logits);
        },
    )
}

fn load_vectors(step: &mut StepContext<'_>, scratch: &mut HeadScratch) -> Result<(), ModelError> {
    let mut wrong = None;
    step.with_tile(&mut |spec, bytes| {
        for part in &spec.parts {
            let into = match part.role {
                TensorRole::FinalNorm => &mut scratch.norm,
                TensorRole::OutputAttnResNorm => &mut scratch.res_norm,
                TensorRole::OutputAttnResProj => &mut scratch.res_proj,
                _ => {
                    wrong = Some(describe(spec));
                    continue;
                }
            };
            widen_part(part, bytes, into);
        }
    })?;
    match wrong {
        Some(found) => Err(ModelError::WrongTile {
            wanted: FINAL_VECTORS[0],
            row: 0,
            found,
        }),
        None => Ok(()),
    }
}
