//! What a synthetic checkpoint consists of, before anything is written.

use std::path::Path;

use k3_shared::{
    config::{Config, Mlp},
    ids::{ExpertId, ExpertIdx, LayerIdx},
    names::{ExpertTensor, TOP_TENSORS, TensorRole, layer_tensors},
    release,
};
use serde_json::Value;

use super::{
    SynthError, config,
    layout::{Shard, Tensor},
};

/// Names and shapes of the tensors outside the text model, by shard.
const VISION_TENSORS: &str = include_str!("../../../manifests/kimi-k3.vision_tensors.txt");

/// How a custom checkpoint departs from the release's way of storing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Store every BF16 tensor as F32, unrounded.
    pub dtype_f32: bool,
    /// Write `config.json` in the flat form.
    pub flat: bool,
}

/// A tensor of another part of the model, which a text engine ignores.
#[derive(Clone, Debug)]
struct Foreign {
    name: String,
    shape: Vec<usize>,
}

/// A synthetic checkpoint to be written: its configuration, and how its files are filled.
///
/// Layer L is shard L + 1, then comes the shard with embedding, head and the final vectors, then those of foreign tensors.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub(super) kind: &'static str,
    config: Config,
    /// `config.json`, as it will be written.
    pub(super) config_json: Vec<u8>,
    store_f32: bool,
    foreign: Vec<Vec<Foreign>>,
    /// Leave the payload of all shards to holes.
    pub(super) holes: bool,
    /// Write the tiny vocabulary too.
    pub(super) tiny_tokenizer: bool,
}

impl Recipe {
    /// The tiny checkpoint, with one ignored tensor in each of two vision shards.
    ///
    /// # Errors
    /// Never, unless the program contradicts itself.
    pub fn tiny() -> Result<Self, SynthError> {
        let foreign = [
            "mm_projector.post_norm.weight",
            "vision_tower.encoder.final_layernorm.weight",
        ];
        let foreign = foreign.map(|name| {
            vec![Foreign {
                name: name.to_owned(),
                shape: vec![8],
            }]
        });
        Ok(Self {
            foreign: foreign.to_vec(),
            tiny_tokenizer: true,
            ..Self::text_only("tiny", &config::tiny())?
        })
    }

    /// A slice of `layers` layers of the released widths.
    ///
    /// # Errors
    /// [`SynthError::NoSuchSlice`] unless there are 2, 3 or 5.
    pub fn slice(layers: u32) -> Result<Self, SynthError> {
        Self::text_only("slice", &config::slice(layers)?)
    }

    /// The whole release, its payload holes.
    ///
    /// # Errors
    /// Never, unless the program contradicts itself.
    pub fn replica() -> Result<Self, SynthError> {
        let text = release::CONFIG_JSON.as_bytes();
        Ok(Self {
            kind: "replica",
            config: Config::parse(text, Path::new("config.json"))?,
            config_json: text.to_vec(),
            store_f32: false,
            foreign: vision_tensors(),
            holes: true,
            tiny_tokenizer: false,
        })
    }

    /// A checkpoint of the shape that `config_json`, nested or flat, describes; `path` is for messages.
    ///
    /// # Errors
    /// [`SynthError::Config`] with every problem of the configuration.
    pub fn custom(config_json: &[u8], path: &Path, options: Options) -> Result<Self, SynthError> {
        let config = Config::parse(config_json, path)?;
        let config_json = if options.flat {
            let root = serde_json::from_slice(config_json).unwrap_or(Value::Null);
            pretty(&config::flatten(&config, &root))
        } else {
            config_json.to_vec()
        };
        Ok(Self {
            kind: "custom",
            config,
            config_json,
            store_f32: options.dtype_f32,
            foreign: Vec::new(),
            holes: false,
            tiny_tokenizer: false,
        })
    }

    fn text_only(kind: &'static str, root: &Value) -> Result<Self, SynthError> {
        Ok(Self {
            kind,
            config: Config::from_value(root, Path::new("config.json"))?,
            config_json: pretty(root),
            store_f32: false,
            foreign: Vec::new(),
            holes: false,
            tiny_tokenizer: false,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Files with tensors.
    pub fn num_shards(&self) -> usize {
        self.config.num_hidden_layers + 1 + self.foreign.len()
    }

    /// File name of shard `index`, counted from zero: five digits, of six (specification 2.1).
    pub fn shard_file(&self, index: usize) -> String {
        let (number, total) = (index + 1, self.num_shards());
        format!("model-{number:05}-of-{total:06}.safetensors")
    }

    /// The layout of shard `index`, counted from zero. Nothing of it is kept here: the release has 497,220 tensors.
    ///
    /// # Errors
    /// [`SynthError::TooLarge`].
    ///
    /// # Panics
    /// If there are not that many shards.
    pub fn shard(&self, index: usize) -> Result<Shard, SynthError> {
        let layers = self.config.num_hidden_layers;
        let tensors = match u32::try_from(index) {
            Ok(layer) if index < layers => self.layer(LayerIdx(layer)),
            _ if index == layers => TOP_TENSORS.iter().map(|&r| self.tensor(r)).collect(),
            _ => self.foreign[index - layers - 1]
                .iter()
                .map(|f| Tensor::foreign(&f.name, f.shape.clone()))
                .collect(),
        };
        Shard::new(self.shard_file(index), tensors)
    }

    fn tensor(&self, role: TensorRole) -> Tensor {
        Tensor::of_role(role, &self.config, self.store_f32)
    }

    fn layer(&self, layer: LayerIdx) -> Vec<Tensor> {
        let mut tensors: Vec<Tensor> = layer_tensors(&self.config, layer)
            .map(|tensor| self.tensor(TensorRole::Layer(layer, tensor)))
            .collect();
        if self.config.mlp(layer) == Mlp::Moe {
            // The parser bounds the experts far below a u32.
            let experts = u32::try_from(self.config.moe.num_experts).unwrap_or(u32::MAX);
            for expert in (0..experts).map(ExpertIdx) {
                let id = ExpertId { layer, expert };
                let six = ExpertTensor::ALL.map(|t| self.tensor(TensorRole::Expert(id, t)));
                tensors.extend(six);
            }
        }
        tensors
    }
}

fn pretty(root: &Value) -> Vec<u8> {
    format!("{root:#}\n").into_bytes()
}

/// The manifest's lines `shard name sizes`, grouped by shard.
fn vision_tensors() -> Vec<Vec<Foreign>> {
    let mut shards: Vec<(&str, Vec<Foreign>)> = Vec::new();
    for line in VISION_TENSORS.lines() {
        let mut words = line.split(' ');
        let (Some(shard), Some(name), Some(sizes)) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let tensor = Foreign {
            name: name.to_owned(),
            shape: sizes.split(',').filter_map(|d| d.parse().ok()).collect(),
        };
        match shards.last_mut() {
            Some((last, tensors)) if *last == shard => tensors.push(tensor),
            _ => shards.push((shard, vec![tensor])),
        }
    }
    shards.into_iter().map(|(_, tensors)| tensors).collect()
}
