//! One matrix of the trunk times the rows of a step, tile by tile.

use std::time::Instant;

use k3_shared::{
    config::Config,
    ids::ExpertIdx,
    names::TensorRole,
    tiles::{TilePart, TileSpec},
};
use rayon::prelude::*;

pub(super) use super::workspace::sized;
use super::{
    ExpertWeights, ModelError, Part, SourceError, StepProfile, WeightSource,
    vectors::{describe, part_bytes, stored},
    workspace::vec_bytes,
};
use crate::kernels::{Activations, Isa, Weights, par_matmul};

/// Buffers that every matrix reuses.
#[derive(Debug, Default)]
pub(super) struct MatrixScratch {
    /// `[tile rows, step rows]`, as the kernels write it.
    raw: Vec<f32>,
}

impl MatrixScratch {
    /// Bytes of memory the buffer holds.
    pub(super) fn allocated_bytes(&self) -> usize {
        vec_bytes(&self.raw)
    }
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
        step.use_ready_experts()?;
    }
    Ok(())
}

/// What is done with an expert that arrives.
pub(super) type UseExpert<'a> = dyn FnMut(ExpertIdx, ExpertWeights<'_>) + 'a;

/// What every part of a step needs: the model's shape, the instruction set, the weights in order of use.
pub(super) struct StepContext<'a> {
    pub(super) config: &'a Config,
    pub(super) isa: Isa,
    pub(super) source: &'a mut dyn WeightSource,
    pub(super) matrix: &'a mut MatrixScratch,
    pub(super) profile: &'a mut StepProfile,
    /// What to do with experts that arrive while tiles are multiplied; nothing takes them where nobody has asked for them.
    pub(super) meanwhile: Option<&'a mut UseExpert<'a>>,
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

    /// Between two tiles: use the experts that have arrived, so that their slots are free for others.
    fn use_ready_experts(&mut self) -> Result<(), SourceError> {
        let Some(use_it) = &mut self.meanwhile else {
            return Ok(());
        };
        let (profile, began) = (&mut *self.profile, Instant::now());
        let mut any = false;
        while self.source.with_ready_expert(&mut |expert, weights| {
            profile.touch(weights.block.len());
            use_it(expert, weights);
        })? {
            any = true;
        }
        if any {
            profile.in_between(Part::RoutedExperts, began.elapsed());
        }
        Ok(())
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
        let mut raw = std::mem::take(&mut self.matrix.raw);
        let outcome = for_each_tile(self, role, num_rows, &mut |part, weights| {
            let raw = sized(&mut raw, part.rows.len() * step_rows);
            par_matmul(isa, weights, x, raw);
            scatter_columns(raw, step_rows, part.rows.start, out);
        });
        self.matrix.raw = raw;
        outcome
    }
}

/// Vectors transposed by one task: a cache line of a row of results.
const TASK_VECTORS: usize = 16;
/// Rows of results gone through for all vectors of a task before the next ones: few enough that their lines stay cached
/// whatever their distance is.
const TASK_ROWS: usize = 32;

/// Write results `[rows, t]`, as [`par_matmul`] gives them, into columns `first..first + rows` of `t` vectors in `into`, split
/// over the pool.
///
/// # Panics
/// If the vectors are not as wide as that.
pub(super) fn scatter_columns(results: &[f32], t: usize, first: usize, into: &mut [f32]) {
    let (rows, width) = (results.len() / t, into.len() / t);
    assert!(
        results.len() == rows * t && into.len() == width * t && first + rows <= width,
        "{t} vectors with room for the results"
    );
    if t == 1 {
        return into[first..first + rows].copy_from_slice(results);
    }
    let each = t
        .div_ceil(rayon::current_num_threads())
        .clamp(1, TASK_VECTORS);
    into.par_chunks_mut(width * each)
        .enumerate()
        .for_each(|(task, vectors)| {
            for (at, block) in results.chunks(TASK_ROWS * t).enumerate() {
                let first = first + at * TASK_ROWS;
                let vectors = vectors.chunks_exact_mut(width);
                for (vector, token) in vectors.zip(task * each..) {
                    let values = vector[first..].iter_mut();
                    for (value, results) in values.zip(block.chunks_exact(t)) {
                        *value = results[token];
                    }
                }
            }
        });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_columns_are_the_transpose_and_touch_nothing_else() {
        for (rows, t, first, width) in [(1, 1, 0, 1), (5, 1, 2, 9), (70, 3, 1, 80), (33, 50, 7, 40)]
        {
            let results: Vec<f32> = (0..rows * t).map(|i| i as f32).collect();
            let mut into = vec![-1.0; width * t];
            scatter_columns(&results, t, first, &mut into);
            for (token, vector) in into.chunks(width).enumerate() {
                for (at, value) in vector.iter().enumerate() {
                    let row = at.checked_sub(first).filter(|row| *row < rows);
                    let want = row.map_or(-1.0, |row| (row * t + token) as f32);
                    assert_eq!(
                        value.to_bits(),
                        want.to_bits(),
                        "vector {token}, column {at}"
                    );
                }
            }
        }
    }
}
