//! The layer skeleton with attention residuals, and the output stage (specification 3.1, 3.2, 3.7).

use k3_shared::{
    config::{Mixer, Mlp},
    ids::LayerIdx,
    names::{LayerTensor as T, TensorRole},
};

use super::{Mistake, Model, Pass, dot, rms_norm, softmax, times};

/// One row's snapshots, then its stream.
fn sources<'a>(snapshots: &'a [Vec<f64>], stream: &'a Vec<f64>) -> Vec<&'a Vec<f64>> {
    snapshots.iter().chain([stream]).collect()
}

impl Model {
    /// Run the model over `ids`, making `mistake` if there is one.
    pub fn run(&self, ids: &[u32], mistake: Option<Mistake>) -> Pass {
        self.set(mistake);
        let width = self.config.hidden_size;
        let embedding = self.tensor(TensorRole::Embedding);
        let mut stream: Vec<Vec<f64>> = ids
            .iter()
            .map(|&id| embedding[id as usize * width..][..width].to_vec())
            .collect();
        let mut snapshots: Vec<Vec<Vec<f64>>> = vec![Vec::new(); ids.len()];
        let mut hidden = Vec::new();
        for layer in 0..self.config.num_hidden_layers {
            self.one_layer(layer, &mut stream, &mut snapshots);
            hidden.push(stream.concat());
        }
        let mix = (
            self.tensor(TensorRole::OutputAttnResNorm),
            self.tensor(TensorRole::OutputAttnResProj),
        );
        let (norm, head) = (
            self.tensor(TensorRole::FinalNorm),
            self.tensor(TensorRole::OutputHead),
        );
        let mut logits = Vec::new();
        for (stream, snapshots) in stream.iter().zip(&snapshots) {
            let x = if self.makes(Mistake::NoMixBeforeHead) {
                stream.clone()
            } else {
                self.mix(&sources(snapshots, stream), &mix)
            };
            logits.extend(times(&head, &rms_norm(&x, &norm, self.config.rms_norm_eps)));
        }
        Pass { hidden, logits }
    }

    fn one_layer(&self, layer: usize, stream: &mut [Vec<f64>], snapshots: &mut [Vec<Vec<f64>>]) {
        let period = self.config.attn_res_block_size;
        let eps = self.config.rms_norm_eps;
        let late = usize::from(self.makes(Mistake::BoundaryLate));
        let boundary = (layer + late).is_multiple_of(period);
        let mix = (
            self.layer(layer, T::AttnResNorm),
            self.layer(layer, T::AttnResProj),
        );
        let norm = self.layer(layer, T::InputNorm);
        let mut inputs = Vec::new();
        for (stream, snapshots) in stream.iter().zip(&mut *snapshots) {
            let plain = snapshots.is_empty() || self.makes(Mistake::NoMixBeforeMixer);
            let x = if plain {
                stream.clone()
            } else {
                self.mix(&sources(snapshots, stream), &mix)
            };
            if boundary {
                snapshots.push(if self.makes(Mistake::SnapshotOfMix) {
                    x.clone()
                } else {
                    stream.clone()
                });
            }
            inputs.push(rms_norm(&x, &norm, eps));
        }
        let mixed = match self.config.mixers[layer] {
            Mixer::Kda => self.kda(layer, &inputs),
            Mixer::Mla => self.mla(layer, &inputs),
        };
        let restart = boundary && !self.makes(Mistake::NoRestart);
        let mix = (
            self.layer(layer, T::MlpResNorm),
            self.layer(layer, T::MlpResProj),
        );
        let norm = self.layer(layer, T::PostNorm);
        for ((stream, snapshots), a) in stream.iter_mut().zip(snapshots).zip(mixed) {
            if restart {
                *stream = a;
            } else {
                stream.iter_mut().zip(a).for_each(|(s, a)| *s += a);
            }
            let plain = self.makes(Mistake::NoMixBeforeMlp)
                || (boundary && self.makes(Mistake::NoMlpMixAtBoundary));
            let x = if plain {
                stream.clone()
            } else {
                self.mix(&sources(snapshots, stream), &mix)
            };
            let x = rms_norm(&x, &norm, eps);
            let f = match self.config.mlp(LayerIdx(u32::try_from(layer).unwrap())) {
                Mlp::Dense => self.dense(layer, &x),
                Mlp::Moe => self.moe(layer, &x),
            };
            stream.iter_mut().zip(f).for_each(|(s, f)| *s += f);
        }
    }

    /// A softmax mixture of the sources.
    fn mix(&self, sources: &[&Vec<f64>], (norm, projection): &(Vec<f64>, Vec<f64>)) -> Vec<f64> {
        let unit = vec![1.0; norm.len()];
        let norm = if self.makes(Mistake::ScoreUnweighted) {
            &unit
        } else {
            norm
        };
        let keys: Vec<Vec<f64>> = sources
            .iter()
            .map(|v| rms_norm(v, &unit, self.config.rms_norm_eps))
            .collect();
        let score = |(v, key): (&&Vec<f64>, &Vec<f64>)| {
            let key = if self.makes(Mistake::ScoreRaw) {
                *v
            } else {
                key
            };
            let weighted: Vec<f64> = key.iter().zip(norm).map(|(k, w)| k * w).collect();
            dot(&weighted, projection)
        };
        let mut p: Vec<f64> = sources.iter().zip(&keys).map(score).collect();
        softmax(&mut p);
        let value = |s: usize, i: usize| {
            if self.makes(Mistake::MixNormalised) {
                keys[s][i]
            } else {
                sources[s][i]
            }
        };
        (0..norm.len())
            .map(|i| (0..p.len()).map(|s| p[s] * value(s, i)).sum())
            .collect()
    }
}
