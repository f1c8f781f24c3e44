//! A dense number for every text tensor, so that half a million of them need no map of names.

use crate::{
    config::{Config, Mlp},
    ids::{ExpertId, ExpertIdx, LayerIdx},
    names::{ExpertTensor, LayerTensor, TOP_TENSORS, TensorRole},
};

/// Most numbers given out: sixty times the release, and 400 MB as the largest table over them.
const MAX_SLOTS: usize = 30_000_000;

/// A configuration that describes more tensors than can be counted here.
#[derive(Debug, thiserror::Error)]
#[error("num_experts x num_hidden_layers describes over {MAX_SLOTS} tensors; is it the release's?")]
pub struct TooManyTensors;

/// Numbers of the text tensors of one configuration: those beside the layers, then layer by layer.
#[derive(Debug)]
pub struct Slots {
    /// First number of each layer, and one past the last.
    starts: Vec<usize>,
}

impl Slots {
    /// Number the tensors of `config`.
    ///
    /// # Errors
    /// If there are implausibly many.
    pub fn new(config: &Config) -> Result<Self, TooManyTensors> {
        let num_experts = config.moe.num_experts;
        if config.num_hidden_layers > MAX_SLOTS || num_experts > MAX_SLOTS {
            return Err(TooManyTensors);
        }
        let mut starts = vec![TOP_TENSORS.len()];
        let mut end = TOP_TENSORS.len();
        for layer in config.layers() {
            end += LayerTensor::ALL.len();
            if config.mlp(layer) == Mlp::Moe {
                end += num_experts * ExpertTensor::ALL.len();
            }
            if end > MAX_SLOTS {
                return Err(TooManyTensors);
            }
            starts.push(end);
        }
        Ok(Self { starts })
    }

    /// How many numbers there are; some stand for tensors that a layer of another kind would have.
    pub fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Never true: a model has an embedding.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of a tensor of this configuration.
    ///
    /// # Panics
    /// If the role's layer is not one of the configuration's.
    pub fn of(&self, role: TensorRole) -> usize {
        match role {
            TensorRole::OutputHead => 0,
            TensorRole::Embedding => 1,
            TensorRole::FinalNorm => 2,
            TensorRole::OutputAttnResNorm => 3,
            TensorRole::OutputAttnResProj => 4,
            TensorRole::Layer(layer, tensor) => self.starts[layer.get()] + tensor as usize,
            TensorRole::Expert(id, tensor) => {
                self.starts[id.layer.get()]
                    + LayerTensor::ALL.len()
                    + id.expert.get() * ExpertTensor::ALL.len()
                    + tensor as usize
            }
        }
    }

    /// The tensor a number stands for.
    pub fn role(&self, slot: usize) -> Option<TensorRole> {
        if let Some(top) = TOP_TENSORS.get(slot) {
            return Some(*top);
        }
        if slot >= self.len() {
            return None;
        }
        let index = self.starts.partition_point(|&start| start <= slot) - 1;
        let layer = LayerIdx(u32::try_from(index).ok()?);
        let inner = slot - self.starts[index];
        if let Some(tensor) = LayerTensor::ALL.get(inner) {
            return Some(TensorRole::Layer(layer, *tensor));
        }
        let inner = inner - LayerTensor::ALL.len();
        let expert = ExpertIdx(u32::try_from(inner / ExpertTensor::ALL.len()).ok()?);
        let tensor = ExpertTensor::ALL[inner % ExpertTensor::ALL.len()];
        Some(TensorRole::Expert(ExpertId { layer, expert }, tensor))
    }

    /// Whether a number belongs to the first `layers` layers or to the tensors beside them.
    pub fn is_within(&self, slot: usize, layers: usize) -> bool {
        let end = self.starts.get(layers).copied().unwrap_or(self.len());
        slot < end
    }
}

/// Whether a tensor belongs to the first `layers` layers or to the tensors beside them.
pub(super) fn role_is_within(role: TensorRole, layers: usize) -> bool {
    match role {
        TensorRole::Layer(layer, _) => layer.get() < layers,
        TensorRole::Expert(id, _) => id.layer.get() < layers,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{names::layer_tensors, release};

    #[test]
    fn numbers_and_roles_are_inverse() {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        let slots = Slots::new(&config).unwrap();
        let mut roles = TOP_TENSORS.to_vec();
        for layer in config.layers() {
            roles.extend(layer_tensors(&config, layer).map(|t| TensorRole::Layer(layer, t)));
        }
        for (layer, expert) in [(1, 0), (1, 895), (92, 895)] {
            let (layer, expert) = (LayerIdx(layer), ExpertIdx(expert));
            let id = ExpertId { layer, expert };
            roles.extend(ExpertTensor::ALL.map(|t| TensorRole::Expert(id, t)));
        }
        for role in roles {
            assert_eq!(slots.role(slots.of(role)), Some(role));
        }
        assert_eq!(slots.role(slots.len()), None);
    }

    #[test]
    fn the_first_layers_are_a_prefix() {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        let slots = Slots::new(&config).unwrap();
        for slot in [0, 4, 5, 41, 42, 5_454, 5_455, slots.len() - 1] {
            for layers in [0, 1, 2, 93] {
                let role = slots.role(slot).unwrap();
                let within = slots.is_within(slot, layers);
                assert_eq!(within, role_is_within(role, layers), "{role:?} {layers}");
            }
        }
    }

    #[test]
    fn absurd_configurations_are_refused_before_anything_is_allocated() {
        let mut config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        config.moe.num_experts = 1 << 40;
        assert!(Slots::new(&config).is_err());
    }
}
