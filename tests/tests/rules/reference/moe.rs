//! Dense MLP and mixture of experts (specification 3.6).

use k3_shared::names::LayerTensor as T;

use super::{Mistake, Model, rms_norm, sigmoid, silu, times};

impl Model {
    fn situ(&self, gate: f64, up: f64) -> f64 {
        let (b1, b2) = (
            self.config.activation_situ_beta,
            self.config.activation_situ_linear_beta,
        );
        let capped = b1 * (gate / b1).tanh();
        if self.makes(Mistake::SwiGlu) {
            return silu(gate) * up;
        }
        if self.makes(Mistake::CapsNotRescaled) {
            return (gate / b1).tanh() * sigmoid(gate) * (up / b2).tanh();
        }
        let squashed = sigmoid(if self.makes(Mistake::SigmoidOfCapped) {
            capped
        } else {
            gate
        });
        capped
            * squashed
            * if self.makes(Mistake::UpUncapped) {
                up
            } else {
                b2 * (up / b2).tanh()
            }
    }

    fn gated(&self, gate: &[f64], up: &[f64], down: &[f64], x: &[f64]) -> Vec<f64> {
        let inner: Vec<f64> = times(gate, x)
            .into_iter()
            .zip(times(up, x))
            .map(|(g, u)| self.situ(g, u))
            .collect();
        times(down, &inner)
    }

    pub(super) fn dense(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let [gate, up, down] =
            [T::DenseGate, T::DenseUp, T::DenseDown].map(|t| self.layer(layer, t));
        self.gated(&gate, &up, &down, x)
    }

    /// The experts of one row, best first, and their weights.
    fn route(&self, layer: usize, x: &[f64]) -> (Vec<usize>, Vec<f64>) {
        let moe = &self.config.moe;
        let bias = self.layer(layer, T::RouterBias);
        let scores: Vec<f64> = times(&self.layer(layer, T::RouterWeight), x)
            .into_iter()
            .map(sigmoid)
            .collect();
        let selecting = |e: usize| {
            scores[e]
                + if self.makes(Mistake::BiasMissing) {
                    0.0
                } else {
                    bias[e]
                }
        };
        let mut experts: Vec<usize> = (0..scores.len()).collect();
        // A stable sort: of equals the lowest comes first.
        experts.sort_by(|&a, &b| selecting(b).total_cmp(&selecting(a)));
        experts.truncate(moe.num_experts_per_token);
        let weighing = |e: &usize| {
            scores[*e]
                + if self.makes(Mistake::BiasInWeights) {
                    bias[*e]
                } else {
                    0.0
                }
        };
        let sum: f64 = experts.iter().map(weighing).sum::<f64>() + 1e-20;
        let weights = experts
            .iter()
            .map(|e| weighing(e) / sum * moe.routed_scaling_factor)
            .collect();
        (experts, weights)
    }

    pub(super) fn moe(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let (experts, weights) = self.route(layer, x);
        let latent = times(&self.layer(layer, T::LatentDown), x);
        let (norm, eps) = (self.layer(layer, T::LatentNorm), self.config.rms_norm_eps);
        let mut sum = vec![0.0; latent.len()];
        for (expert, weight) in experts.iter().zip(weights) {
            let own = self.expert(layer, u32::try_from(*expert).unwrap());
            let mut y = self.gated(&own.w1, &own.w3, &own.w2, &latent);
            if self.makes(Mistake::NormPerExpert) {
                y = rms_norm(&y, &norm, eps);
            }
            sum.iter_mut()
                .zip(y)
                .for_each(|(sum, y)| *sum += weight * y);
        }
        if !self.makes(Mistake::NormPerExpert) && !self.makes(Mistake::LatentNormMissing) {
            sum = rms_norm(&sum, &norm, eps);
        }
        let mut out = times(&self.layer(layer, T::LatentUp), &sum);
        let weight = if self.makes(Mistake::SharedHalved) {
            0.5
        } else {
            1.0
        };
        for part in 0..self.config.moe.num_shared_experts {
            let skipped = self.makes(Mistake::SharedMissing)
                || (part > 0 && self.makes(Mistake::SharedFirstOnly));
            if !skipped {
                let shared = self.shared(layer, part, x);
                out.iter_mut()
                    .zip(shared)
                    .for_each(|(out, y)| *out += weight * y);
            }
        }
        out
    }

    /// One of the shared experts, as an MLP of its own.
    fn shared(&self, layer: usize, part: usize, x: &[f64]) -> Vec<f64> {
        let [gate, up, down] =
            [T::SharedGate, T::SharedUp, T::SharedDown].map(|t| self.layer(layer, t));
        let (inner, all) = (
            self.config.moe.moe_intermediate_size,
            self.config.moe.shared_intermediate_size(),
        );
        let rows = part * inner * x.len()..(part + 1) * inner * x.len();
        let columns: Vec<f64> = down
            .chunks_exact(all)
            .flat_map(|row| &row[part * inner..(part + 1) * inner])
            .copied()
            .collect();
        self.gated(&gate[rows.clone()], &up[rows], &columns, x)
    }
}
