//! A checkpoint's values, decoded from its shards.

use std::{cell::Cell, collections::BTreeMap, fs, path::Path};

use k3_shared::{
    checkpoint::Checkpoint,
    config::{Config, Mlp},
    ids::{ExpertId, ExpertIdx, LayerIdx},
    names::{Dtype, ExpertTensor, LayerTensor, TOP_TENSORS, TensorRole, layer_tensors},
};

use super::Mistake;

const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// One expert's matrices: gate, up, down.
pub struct Expert {
    pub w1: Vec<f64>,
    pub w3: Vec<f64>,
    pub w2: Vec<f64>,
}

/// A checkpoint in memory.
pub struct Model {
    pub config: Config,
    tensors: BTreeMap<TensorRole, (Dtype, Vec<u8>)>,
    /// Six tensors of each expert, as stored.
    experts: BTreeMap<(u32, u32), [Vec<u8>; 6]>,
    mistake: Cell<Option<Mistake>>,
}

impl Model {
    pub fn open(dir: &Path) -> Self {
        let checkpoint = Checkpoint::open(dir, None).unwrap();
        let files: Vec<Vec<u8>> = checkpoint
            .shards()
            .iter()
            .map(|shard| fs::read(&shard.path).unwrap())
            .collect();
        let bytes = |role| {
            let place = checkpoint.tensor(role).unwrap();
            let start = usize::try_from(place.offset).unwrap();
            let len = usize::try_from(place.bytes).unwrap();
            (
                place.dtype,
                files[place.shard.0 as usize][start..start + len].to_vec(),
            )
        };
        let config = checkpoint.config.clone();
        let mut tensors: BTreeMap<_, _> = TOP_TENSORS
            .into_iter()
            .map(|role| (role, bytes(role)))
            .collect();
        let mut experts = BTreeMap::new();
        for layer in config.layers() {
            let roles = layer_tensors(&config, layer).map(|t| TensorRole::Layer(layer, t));
            tensors.extend(roles.map(|role| (role, bytes(role))));
            if config.mlp(layer) == Mlp::Moe {
                for expert in 0..u32::try_from(config.moe.num_experts).unwrap() {
                    let id = ExpertId {
                        layer,
                        expert: ExpertIdx(expert),
                    };
                    let six = ExpertTensor::ALL.map(|t| bytes(TensorRole::Expert(id, t)).1);
                    experts.insert((layer.0, expert), six);
                }
            }
        }
        Self {
            config,
            tensors,
            experts,
            mistake: Cell::new(None),
        }
    }

    pub(super) fn set(&self, mistake: Option<Mistake>) {
        self.mistake.set(mistake);
    }

    /// Whether this pass makes that mistake.
    pub(super) fn makes(&self, mistake: Mistake) -> bool {
        self.mistake.get() == Some(mistake)
    }

    pub(super) fn layer(&self, layer: usize, tensor: LayerTensor) -> Vec<f64> {
        self.tensor(TensorRole::Layer(
            LayerIdx(u32::try_from(layer).unwrap()),
            tensor,
        ))
    }

    pub(super) fn tensor(&self, role: TensorRole) -> Vec<f64> {
        let (dtype, bytes) = &self.tensors[&role];
        let bf16 =
            |pair: &[u8]| f64::from(f32::from_bits(u32::from_le_bytes([0, 0, pair[0], pair[1]])));
        match dtype {
            Dtype::F32 if self.makes(Mistake::F32AsBf16) => {
                bytes[..bytes.len() / 2].chunks_exact(2).map(bf16).collect()
            }
            Dtype::F32 => {
                let word = |w: &[u8]| f64::from(f32::from_le_bytes([w[0], w[1], w[2], w[3]]));
                bytes.chunks_exact(4).map(word).collect()
            }
            _ => bytes.chunks_exact(2).map(bf16).collect(),
        }
    }

    pub(super) fn expert(&self, layer: usize, expert: u32) -> Expert {
        let mut number = expert;
        if self.makes(Mistake::NumericOrder) {
            // The block at place `expert` of the file is that of another.
            let mut names: Vec<String> = (0..self.config.moe.num_experts)
                .map(|e| e.to_string())
                .collect();
            names.sort();
            number = names[expert as usize].parse().unwrap();
        }
        let six = &self.experts[&(u32::try_from(layer).unwrap(), number)];
        let (mut w1, w2, mut w3) = (
            self.decode(&six[0], &six[1]),
            self.decode(&six[2], &six[3]),
            self.decode(&six[4], &six[5]),
        );
        if self.makes(Mistake::GateIsUp) {
            std::mem::swap(&mut w1, &mut w3);
        }
        Expert { w1, w3, w2 }
    }

    fn decode(&self, packed: &[u8], scales: &[u8]) -> Vec<f64> {
        let bias = if self.makes(Mistake::ScaleBiasOff) {
            128
        } else {
            127
        };
        let mut values = Vec::with_capacity(packed.len() * 2);
        for (group, scale) in packed.chunks_exact(16).zip(scales) {
            let factor = 2f64.powi(i32::from(*scale) - bias);
            for byte in group {
                let mut pair = [byte & 15, byte >> 4];
                if self.makes(Mistake::NibblesSwapped) {
                    pair.reverse();
                }
                values.extend(pair.map(|nibble| {
                    let sign = if nibble & 8 == 0 { factor } else { -factor };
                    sign * E2M1[usize::from(nibble & 7)]
                }));
            }
        }
        values
    }
}
