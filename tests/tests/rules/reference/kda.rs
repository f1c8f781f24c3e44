//! Kimi Delta Attention (specification 3.4).

use k3_shared::names::LayerTensor as T;

use super::{Mistake, Model, dot, rms_norm, sigmoid, silu, times};

impl Model {
    /// The mixer of a KDA layer over a whole sequence.
    pub(super) fn kda(&self, layer: usize, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let kda = &self.config.kda;
        let (heads, dim) = (kda.num_heads, kda.head_dim);
        let [q, k, v] = [
            (T::KdaQ, T::KdaConvQ),
            (T::KdaK, T::KdaConvK),
            (T::KdaV, T::KdaConvV),
        ]
        .map(|(projection, taps)| self.convolved(layer, projection, taps, inputs));
        let mut states = vec![vec![0.0; dim * dim]; heads];
        let (f_a, f_b) = (self.layer(layer, T::KdaFA), self.layer(layer, T::KdaFB));
        let (b, g) = (self.layer(layer, T::KdaB), self.layer(layer, T::AttnG));
        let (o_norm, o) = (self.layer(layer, T::KdaONorm), self.layer(layer, T::AttnO));
        let mut outputs = Vec::new();
        for (t, x) in inputs.iter().enumerate() {
            let z = times(&f_b, &times(&f_a, x));
            let (beta, gate) = (times(&b, x), times(&g, x));
            let mut row = Vec::new();
            for (head, state) in states.iter_mut().enumerate() {
                let at = head * dim..(head + 1) * dim;
                let q = self.normalised(
                    &q[t][at.clone()],
                    if self.makes(Mistake::QueryUnscaled) {
                        1.0
                    } else {
                        (dim as f64).sqrt().recip()
                    },
                );
                let k = self.normalised(&k[t][at.clone()], 1.0);
                let v = if self.makes(Mistake::ValuesNormalised) {
                    self.normalised(&v[t][at.clone()], 1.0)
                } else {
                    v[t][at.clone()].to_vec()
                };
                let alpha = self.decay(layer, head, &z[at.clone()]);
                let beta = if self.makes(Mistake::BetaRaw) {
                    beta[head]
                } else {
                    sigmoid(beta[head])
                };
                let beta = if self.makes(Mistake::BetaDoubled) {
                    2.0 * beta
                } else {
                    beta
                };
                let out = self.recur(state, &q, &k, &v, &alpha, beta);
                row.extend(self.head_output(&out, &o_norm, &gate[at]));
            }
            outputs.push(times(&o, &row));
        }
        outputs
    }

    /// Projection, causal convolution by channel, `SiLU`.
    fn convolved(
        &self,
        layer: usize,
        projection: T,
        taps: T,
        inputs: &[Vec<f64>],
    ) -> Vec<Vec<f64>> {
        let (w, taps) = (self.layer(layer, projection), self.layer(layer, taps));
        let raw: Vec<Vec<f64>> = inputs.iter().map(|x| times(&w, x)).collect();
        let k = self.config.kda.short_conv_kernel_size;
        let channel = |t: usize, c: usize| {
            let mut sum = 0.0;
            for back in 0..k {
                let lost = back > 0 && self.makes(Mistake::HistoryLost);
                if back > t || lost {
                    continue;
                }
                let tap = if self.makes(Mistake::TapsReversed) {
                    back
                } else {
                    k - 1 - back
                };
                sum += taps[c * k + tap] * raw[t - back][c];
            }
            if self.makes(Mistake::ConvWithoutSilu) {
                sum
            } else {
                silu(sum)
            }
        };
        (0..inputs.len())
            .map(|t| (0..raw[t].len()).map(|c| channel(t, c)).collect())
            .collect()
    }

    fn normalised(&self, x: &[f64], scale: f64) -> Vec<f64> {
        let mut sum = dot(x, x);
        if self.makes(Mistake::L2OfMean) {
            sum /= x.len() as f64;
        }
        x.iter().map(|v| v * scale / (sum + 1e-6).sqrt()).collect()
    }

    fn decay(&self, layer: usize, head: usize, z: &[f64]) -> Vec<f64> {
        let (a_log, bias) = (
            self.layer(layer, T::KdaALog),
            self.layer(layer, T::KdaDtBias),
        );
        let dim = z.len();
        let log_decay = |(d, z): (usize, &f64)| {
            let rate = a_log[if self.makes(Mistake::ALogPerChannel) {
                d
            } else {
                head
            }]
            .exp();
            let bias = bias[head * dim + d];
            if self.makes(Mistake::DecaySoftplus) {
                return -rate * (z + bias).exp().ln_1p();
            }
            let inner = if self.makes(Mistake::DecayBiasOutside) {
                rate * z + bias
            } else {
                rate * (z + bias)
            };
            self.config.kda.gate_lower_bound * sigmoid(inner)
        };
        z.iter().enumerate().map(log_decay).map(f64::exp).collect()
    }

    /// Decay, read, write, output; `state` is `[key, value]`.
    fn recur(
        &self,
        state: &mut [f64],
        q: &[f64],
        k: &[f64],
        v: &[f64],
        alpha: &[f64],
        beta: f64,
    ) -> Vec<f64> {
        let dim = k.len();
        let read = |state: &[f64], by: &[f64]| -> Vec<f64> {
            (0..dim)
                .map(|j| (0..dim).map(|i| by[i] * state[i * dim + j]).sum())
                .collect()
        };
        let early = read(state, k);
        for (i, row) in state.chunks_exact_mut(dim).enumerate() {
            for (j, s) in row.iter_mut().enumerate() {
                *s *= alpha[if self.makes(Mistake::DecayOfColumns) {
                    j
                } else {
                    i
                }];
            }
        }
        let before = read(state, q);
        let u = if self.makes(Mistake::ReadBeforeDecay) {
            early
        } else {
            read(state, k)
        };
        for (i, row) in state.chunks_exact_mut(dim).enumerate() {
            for (j, s) in row.iter_mut().enumerate() {
                let known = if self.makes(Mistake::NoDifference) {
                    0.0
                } else {
                    u[j]
                };
                *s += k[i] * beta * (v[j] - known);
            }
        }
        if self.makes(Mistake::OutputBeforeWrite) {
            before
        } else {
            read(state, q)
        }
    }

    fn head_output(&self, out: &[f64], norm: &[f64], gate: &[f64]) -> Vec<f64> {
        let eps = self.config.rms_norm_eps;
        let normed = |x: &[f64]| {
            if self.makes(Mistake::EpsOutsideRoot) {
                let root = (dot(x, x) / x.len() as f64).sqrt() + eps;
                return x.iter().zip(norm).map(|(x, w)| x / root * w).collect();
            }
            rms_norm(x, norm, eps)
        };
        let squash = |g: &f64| {
            if self.makes(Mistake::KdaGateSilu) {
                silu(*g)
            } else {
                sigmoid(*g)
            }
        };
        let gated =
            |x: &[f64]| -> Vec<f64> { x.iter().zip(gate).map(|(x, g)| x * squash(g)).collect() };
        if self.makes(Mistake::GateThenNorm) {
            normed(&gated(out))
        } else {
            gated(&normed(out))
        }
    }
}
