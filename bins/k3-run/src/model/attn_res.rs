//! Attention residuals: each sublayer's input is a softmax mixture of the snapshots and the running sum (specification 3.2).

use rayon::prelude::*;

use crate::kernels::norm::attention_residual;

/// The residual stream of a step: the running sum and the snapshots taken of it, all `[rows, hidden]`.
#[derive(Debug, Default)]
pub(super) struct ResidualStream {
    /// The running sum; the layer's input between layers.
    pub(super) sum: Vec<f32>,
    snapshots: Vec<Vec<f32>>,
    num_snapshots: usize,
    hidden_size: usize,
}

impl ResidualStream {
    /// Begin a step of `rows` rows; the caller fills [`Self::sum`] with embeddings.
    pub(super) fn begin(&mut self, rows: usize, hidden_size: usize) {
        self.hidden_size = hidden_size;
        self.num_snapshots = 0;
        self.sum.resize(rows * hidden_size, 0.0);
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
        snapshot.clear();
        snapshot.extend_from_slice(&self.sum);
        self.num_snapshots += 1;
    }

    /// The snapshots, each `[rows, hidden]`.
    #[cfg(test)]
    pub(super) fn snapshots(&self) -> &[Vec<f32>] {
        &self.snapshots[..self.num_snapshots]
    }

    /// Mix snapshots and running sum into `out`, `[rows, hidden]`.
    ///
    /// - `norm_times_proj`: `[hidden]`.
    pub(super) fn mix(&self, norm_times_proj: &[f32], eps: f64, out: &mut Vec<f32>) {
        out.resize(self.sum.len(), 0.0);
        let hidden = self.hidden_size;
        let snapshots = &self.snapshots[..self.num_snapshots];
        out.par_chunks_mut(hidden).enumerate().for_each_init(
            || {
                (
                    Vec::with_capacity(snapshots.len() + 1),
                    vec![0.0; snapshots.len() + 1],
                )
            },
            |(sources, probs), (row, out)| {
                let at = row * hidden..(row + 1) * hidden;
                sources.clear();
                sources.extend(snapshots.iter().map(|s| &s[at.clone()]));
                sources.push(&self.sum[at]);
                attention_residual(sources, norm_times_proj, eps, out, probs);
            },
        );
    }

    /// Add a sublayer's output, or restart the sum with it.
    pub(super) fn add(&mut self, output: &[f32], restart: bool) {
        if restart {
            self.sum.copy_from_slice(output);
        } else {
            for (sum, x) in self.sum.iter_mut().zip(output) {
                *sum += x;
            }
        }
    }
}
