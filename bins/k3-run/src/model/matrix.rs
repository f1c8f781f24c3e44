//! One matrix of the trunk times the rows of a step, tile by tile.

use std::time::Instant;

use k3_shared::{
    config::Config,
    ids::ExpertIdx,
    names::TensorRole,
    tiles::{TilePart, TileSpec},
};

use super::{
    ExpertWeights, ModelError, Part, SourceError, StepProfile, WeightSource,
    vectors::{describe, part_bytes, stored},
};
use crate::kernels::{Activations, Isa, Weights, par_matmul, transpose};

/// Buffers that every matrix reuses.
#[derive(Debug, Default)]
pub(super) struct MatrixScratch {
    /// `[weight rows, step rows]`, as the kernels write it.
    raw: Vec<f32>,
}

/// The first `len` values of a buffer that only ever grows.
pub(super) fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Walk the tiles of one matrix in order, giving each its rows.
pub(super) fn for_each_tile(
    step: &mut StepContext<'_>,
    role: TensorRole,
    num_rows: usize,
    use_it: &mut dyn FnMut(&TilePart, Weights<'_>),
) -> Result<(), ModelError> {
    let mut row = 0;
    while row < num_rows {
        let mut outcome = Ok(0);
        step.with_tile(&mut |spec, bytes| match spec.parts.as_slice() {
            [part] if part.role == role && part.rows.start == row && part.rows.end <= num_rows => {
                use_it(part, stored(part.dtype, part_bytes(part, bytes)));
                outcome = Ok(part.rows.end);
            }
            _ => outcome = Err(describe(spec)),
        })?;
        row = outcome.map_err(|found| ModelError::WrongTile {
            wanted: role,
            row,
            found,
        })?;
    }
    Ok(())
}

/// What every part of a step needs: the model's shape, the instruction set, the weights in order of use.
pub(super) struct StepContext<'a> {
    pub(super) config: &'a Config,
    pub(super) isa: Isa,
    pub(super) source: &'a mut dyn WeightSource,
    pub(super) matrix: &'a mut MatrixScratch,
    pub(super) profile: &'a mut StepProfile,
}

impl StepContext<'_> {
    /// What was done since the last boundary was `part`.
    pub(super) fn lap(&mut self, part: Part) {
        self.profile.lap(part);
    }

    /// Give the next tile of the step to `use_it`.
    pub(super) fn with_tile(
        &mut self,
        use_it: &mut dyn FnMut(&TileSpec, &[u8]),
    ) -> Result<(), SourceError> {
        let (profile, asked) = (&mut *self.profile, Instant::now());
        self.source.with_tile(&mut |spec, bytes| {
            profile.wait(asked.elapsed());
            // The padding after the payload is never looked at.
            profile.touch(
                spec.parts
                    .iter()
                    .map(|part| part_bytes(part, bytes).len())
                    .sum(),
            );
            use_it(spec, bytes);
        })
    }

    /// Give the next of the requested experts to `use_it`; `false` when all were given.
    pub(super) fn with_next_expert(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError> {
        let (profile, asked) = (&mut *self.profile, Instant::now());
        self.source.with_next_expert(&mut |expert, weights| {
            profile.wait(asked.elapsed());
            profile.touch(weights.block.len());
            use_it(expert, weights);
        })
    }

    /// `out[t, :] = W x[t, :]` for the matrix that is due.
    ///
    /// - `x`: the step's rows. `out`: at least `[step rows, num_rows]`, grown if need be.
    pub(super) fn multiply(
        &mut self,
        role: TensorRole,
        num_rows: usize,
        x: &Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let isa = self.isa;
        let step_rows = x.num_rows();
        let out = sized(out, num_rows * step_rows);
        if step_rows == 1 {
            return for_each_tile(self, role, num_rows, &mut |part, weights| {
                par_matmul(isa, weights, x, &mut out[part.rows.clone()]);
            });
        }
        let mut buffer = std::mem::take(&mut self.matrix.raw);
        let raw = sized(&mut buffer, num_rows * step_rows);
        let outcome = for_each_tile(self, role, num_rows, &mut |part, weights| {
            let range = part.rows.start * step_rows..part.rows.end * step_rows;
            par_matmul(isa, weights, x, &mut raw[range]);
        });
        transpose(raw, step_rows, out);
        self.matrix.raw = buffer;
        outcome
    }
}
