//! Attention residuals: each sublayer's input is a softmax mixture of the snapshots and the running sum (specification 3.2).

use rayon::prelude::*;

use super::workspace::{sized, vec_bytes};
use crate::kernels::norm::attention_residual;

/// The residual stream of a step: the running sum and the snapshots taken of it, all `[rows, hidden]`.
#[derive(Debug, Default)]
pub(super) struct ResidualStream {
    /// The running sum; the layer's input between layers.
    pub(super) sum: Vec<f32>,
    snapshots: Vec<Vec<f32>>,
    num_snapshots: usize,
    hidden_size: usize,
    /// Mixing weights, `[rows, sources]`.
    probs: Vec<f32>,
}

impl ResidualStream {
    /// Begin a step of `rows` rows; the caller fills [`Self::sum`] with embeddings.
    pub(super) fn begin(&mut self, rows: usize, hidden_size: usize) {
        self.hidden_size = hidden_size;
        self.num_snapshots = 0;
        sized(&mut self.sum, rows * hidden_size);
        self.sum.truncate(rows * hidden_size);
    }

    /// Whether a snapshot exists.
    pub(super) fn has_snapshots(&self) -> bool {
        self.num_snapshots > 0
    }

    /// Keep the running sum as a snapshot.
    pub(super) fn snapshot(&mut self) {
        if self.snapshots.len() == self.num_snapshots {
            self.snapshots.push(Vec::new());
        }
        let snapshot = &mut self.snapshots[self.num_snapshots];
        sized(snapshot, self.sum.len());
        snapshot.truncate(self.sum.len());
        snapshot.copy_from_slice(&self.sum);
        self.num_snapshots += 1;
    }

    /// The snapshots, each `[rows, hidden]`.
    #[cfg(test)]
    pub(super) fn snapshots(&self) -> &[Vec<f32>] {
        &self.snapshots[..self.num_snapshots]
    }

    /// Mix snapshots and running sum of every row into `out`, `[rows, hidden]`.
    ///
    /// - `norm_times_proj`: `[hidden]`.
    pub(super) fn mix(&mut self, norm_times_proj: &[f32], eps: f64, out: &mut Vec<f32>) {
        let out = sized(out, self.sum.len());
        let (hidden, sources) = (self.hidden_size, self.num_snapshots + 1);
        let mut probs = std::mem::take(&mut self.probs);
        let all = sized(&mut probs, self.sum.len() / hidden * sources);
        out.par_chunks_exact_mut(hidden)
            .zip(all.par_chunks_exact_mut(sources))
            .enumerate()
            .for_each(|(row, (out, probs))| self.mix_row(row, norm_times_proj, eps, out, probs));
        self.probs = probs;
    }

    /// Mix snapshots and running sum of the given rows into `out`, `[rows given, hidden]`.
    pub(super) fn mix_rows(
        &mut self,
        rows: &[usize],
        norm_times_proj: &[f32],
        eps: f64,
        out: &mut [f32],
    ) {
        let mut probs = std::mem::take(&mut self.probs);
        let probs_row = sized(&mut probs, self.num_snapshots + 1);
        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(self.hidden_size)) {
            self.mix_row(row, norm_times_proj, eps, out, probs_row);
        }
        self.probs = probs;
    }

    fn mix_row(
        &self,
        row: usize,
        norm_times_proj: &[f32],
        eps: f64,
        out: &mut [f32],
        probs: &mut [f32],
    ) {
        let at = row * self.hidden_size..(row + 1) * self.hidden_size;
        let source = |index: usize| match self.snapshots[..self.num_snapshots].get(index) {
            Some(snapshot) => &snapshot[at.clone()],
            None => &self.sum[at.clone()],
        };
        let sources = (0..probs.len()).map(source);
        attention_residual(sources, norm_times_proj, eps, out, probs);
    }

    /// Add a sublayer's output, or restart the sum with it.
    pub(super) fn add(&mut self, output: &[f32], restart: bool) {
        let hidden = self.hidden_size;
        let rows = self.sum.par_chunks_exact_mut(hidden);
        rows.zip(output.par_chunks_exact(hidden))
            .for_each(|(sum, output)| {
                if restart {
                    sum.copy_from_slice(output);
                } else {
                    add_slice(sum, output);
                }
            });
    }

    /// The first row with a value that is not finite.
    pub(super) fn not_finite(&self) -> Option<usize> {
        // All values are looked at, without a branch at each: there is hardly ever one to be found.
        let finite = |row: &[f32]| row.iter().fold(true, |all, x| all & x.is_finite());
        let rows = self.sum.par_chunks_exact(self.hidden_size);
        rows.position_first(|row| !finite(row))
    }

    /// Bytes of memory the buffers hold.
    pub(super) fn allocated_bytes(&self) -> usize {
        let own = [&self.sum, &self.probs].into_iter();
        own.chain(&self.snapshots).map(vec_bytes).sum()
    }
}

/// `sum[i] += x[i]`.
pub(super) fn add_slice(sum: &mut [f32], x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += x;
    }
}
