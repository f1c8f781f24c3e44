//! One matrix of the trunk times the rows of a step, tile by tile.

use k3_shared::{config::Config, names::TensorRole, tiles::TilePart};

use super::{
    ModelError, WeightSource,
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
    source: &mut dyn WeightSource,
    role: TensorRole,
    num_rows: usize,
    use_it: &mut dyn FnMut(&TilePart, Weights<'_>),
) -> Result<(), ModelError> {
    let mut row = 0;
    while row < num_rows {
        let mut outcome = Ok(0);
        source.with_tile(&mut |spec, bytes| match spec.parts.as_slice() {
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
}

impl StepContext<'_> {
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
            return for_each_tile(self.source, role, num_rows, &mut |part, weights| {
                par_matmul(isa, weights, x, &mut out[part.rows.clone()]);
            });
        }
        let raw = sized(&mut self.matrix.raw, num_rows * step_rows);
        for_each_tile(self.source, role, num_rows, &mut |part, weights| {
            let range = part.rows.start * step_rows..part.rows.end * step_rows;
            par_matmul(isa, weights, x, &mut raw[range]);
        })?;
        transpose(raw, step_rows, out);
        Ok(())
    }
}
