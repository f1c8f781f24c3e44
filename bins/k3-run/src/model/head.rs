//! After the last layer: the output attention residual, the final norm and the head (specification 3.7).

use k3_shared::{names::TensorRole, tiles::FINAL_VECTORS};
use rayon::prelude::*;

use super::{
    ModelError,
    attn_res::ResidualStream,
    matrix::{StepContext, for_each_tile, scatter_columns},
    vectors::{describe, widen_part},
    workspace::{sized, vec_bytes},
};
use crate::kernels::{Activations, norm::rms_norm_in_place, par_matmul};

/// Buffers of the output stage.
#[derive(Debug, Default)]
pub(super) struct HeadScratch {
    norm: Vec<f32>,
    res_norm: Vec<f32>,
    res_proj: Vec<f32>,
    chosen: Vec<f32>,
    input: Activations,
    raw: Vec<f32>,
    logits: Vec<f32>,
}

impl HeadScratch {
    /// Bytes of memory the buffers hold.
    pub(super) fn allocated_bytes(&self) -> usize {
        let vectors = [&self.norm, &self.res_norm, &self.res_proj, &self.chosen];
        let results = [&self.raw, &self.logits];
        let all = vectors.into_iter().chain(results).map(vec_bytes);
        all.sum::<usize>() + self.input.allocated_bytes()
    }
}

/// Run the head over the step's rows `rows`; each tile's logits go to `take` as (first id, `[rows, ids]`).
pub(super) fn run(
    step: &mut StepContext<'_>,
    stream: &mut ResidualStream,
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
    let chosen = sized(&mut scratch.chosen, rows.len() * hidden);
    stream.mix_rows(rows, &scratch.res_norm, eps, chosen);
    let norm = &scratch.norm;
    chosen
        .par_chunks_exact_mut(hidden)
        .for_each(|row| rms_norm_in_place(row, norm, eps));
    scratch.input.fill(chosen, hidden);
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
            let logits = sized(logits, len);
            if rows.len() == 1 {
                par_matmul(isa, weights, input, logits);
            } else {
                let raw = sized(raw, len);
                par_matmul(isa, weights, input, raw);
                scatter_columns(raw, rows.len(), 0, logits);
            }
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
