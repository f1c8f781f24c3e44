//! Multi-head latent attention with keys and values expanded (specification 3.5).

use k3_shared::names::LayerTensor as T;

use super::{Mistake, Model, dot, rms_norm, sigmoid, silu, softmax, times};

impl Model {
    /// The mixer of an MLA layer over a whole sequence.
    pub(super) fn mla(&self, layer: usize, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let mla = &self.config.mla;
        let (q_a, q_norm) = (self.layer(layer, T::MlaQA), self.layer(layer, T::MlaQANorm));
        let (q_b, kv_a) = (self.layer(layer, T::MlaQB), self.layer(layer, T::MlaKvA));
        let (kv_norm, kv_b) = (
            self.layer(layer, T::MlaKvANorm),
            self.layer(layer, T::MlaKvB),
        );
        let (g, o) = (self.layer(layer, T::AttnG), self.layer(layer, T::AttnO));
        let eps = if self.makes(Mistake::LowRankEps) {
            1e-5
        } else {
            1e-6
        };
        let (mut ropes, mut expanded) = (Vec::new(), Vec::new());
        let mut outputs = Vec::new();
        for (t, x) in inputs.iter().enumerate() {
            let q = times(&q_b, &rms_norm(&times(&q_a, x), &q_norm, eps));
            let c = times(&kv_a, x);
            let (latent, rope) = c.split_at(mla.kv_lora_rank);
            let normed = rms_norm(latent, &kv_norm, eps);
            expanded.push(times(
                &kv_b,
                if self.makes(Mistake::LatentRaw) {
                    latent
                } else {
                    &normed
                },
            ));
            ropes.push(self.rope(rope, t, eps));
            let gate = times(&g, x);
            let mut row = Vec::new();
            for head in 0..mla.num_heads {
                row.extend(self.head(head, t, &q, &expanded, &ropes));
            }
            if self.makes(Mistake::MlaOutputNormed) {
                row = rms_norm(&row, &vec![1.0; row.len()], self.config.rms_norm_eps);
            }
            for (x, g) in row.iter_mut().zip(&gate) {
                if self.makes(Mistake::MlaGateSilu) {
                    *x *= silu(*g);
                } else if !self.makes(Mistake::MlaGateMissing) {
                    *x *= sigmoid(*g);
                }
            }
            outputs.push(times(&o, &row));
        }
        outputs
    }

    /// The slice after the latent as it is cached: as projected.
    fn rope(&self, rope: &[f64], t: usize, eps: f64) -> Vec<f64> {
        if self.makes(Mistake::RopeNormed) {
            return rms_norm(rope, &vec![1.0; rope.len()], eps);
        }
        self.turned(rope, t)
    }

    /// A rotation by position, which this model does not have.
    fn turned(&self, x: &[f64], t: usize) -> Vec<f64> {
        let mut x = x.to_vec();
        if self.makes(Mistake::RopeRotated) {
            let half = x.len() / 2;
            for i in 0..half {
                let angle = t as f64 * 10_000f64.powf(-(i as f64) / half as f64);
                let (a, b) = (x[i], x[i + half]);
                x[i] = a * angle.cos() - b * angle.sin();
                x[i + half] = a * angle.sin() + b * angle.cos();
            }
        }
        x
    }

    fn head(
        &self,
        head: usize,
        t: usize,
        q: &[f64],
        expanded: &[Vec<f64>],
        ropes: &[Vec<f64>],
    ) -> Vec<f64> {
        let mla = &self.config.mla;
        let (nope, width) = (mla.qk_nope_head_dim, mla.qk_head_dim());
        let q = &q[head * width..(head + 1) * width];
        let (q_nope, q_rope) = if self.makes(Mistake::QueryRopeFirst) {
            (&q[mla.qk_rope_head_dim..], &q[..mla.qk_rope_head_dim])
        } else {
            q.split_at(nope)
        };
        let q_rope = self.turned(q_rope, t);
        let (key_at, value_at) = if self.makes(Mistake::KeysThenValues) {
            (head * nope, mla.num_heads * nope + head * mla.v_head_dim)
        } else {
            let at = head * (nope + mla.v_head_dim);
            (at, at + nope)
        };
        let scale = if self.makes(Mistake::ScaleOfNopeOnly) {
            nope
        } else {
            width
        };
        let mut scores: Vec<f64> = (0..=t)
            .map(|s| {
                let shared = if self.makes(Mistake::RopeDropped) {
                    0.0
                } else {
                    dot(&q_rope, &ropes[s])
                };
                (dot(q_nope, &expanded[s][key_at..key_at + nope]) + shared) / (scale as f64).sqrt()
            })
            .collect();
        softmax(&mut scores);
        let value = |j: usize| (0..=t).map(|s| scores[s] * expanded[s][value_at + j]).sum();
        (0..mla.v_head_dim).map(value).collect()
    }
}
