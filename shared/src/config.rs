//! `config.json` to [`Config`]: every missing or contradictory field in one message, none defaulted.
//!
//! The released file is nested (`text_config`, and `linear_attn_config` inside it); a flat file with all names at the root is
//! read too. Fields that only the nested form carries are required there and checked in the flat form when present.
//! Layer lists count from one in the file and are converted here. Source: specification 1.

mod fields;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::ids::LayerIdx;
use fields::Fields;

/// The token mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mixer {
    /// Kimi Delta Attention: a recurrent state of fixed size.
    Kda,
    /// Multi-head latent attention: a cache that grows with the context.
    Mla,
}

/// The channel mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mlp {
    /// One gated MLP of `intermediate_size`.
    Dense,
    /// Routed experts in the latent width, plus the fused shared experts.
    Moe,
}

/// Kimi Delta Attention dimensions (`linear_attn_config`).
#[derive(Clone, Debug, PartialEq)]
pub struct KdaConfig {
    /// Heads.
    pub num_heads: usize,
    /// Width of one head, for keys and values alike.
    pub head_dim: usize,
    /// Taps of the causal convolution.
    pub short_conv_kernel_size: usize,
    /// Lower bound of the log decay, negative.
    pub gate_lower_bound: f64,
}

impl KdaConfig {
    /// All heads together: rows of `q_proj` and its like.
    pub fn projection_size(&self) -> usize {
        self.num_heads * self.head_dim
    }
}

/// Multi-head latent attention dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaConfig {
    /// Heads (`num_attention_heads`).
    pub num_heads: usize,
    /// Rank of the query projection.
    pub q_lora_rank: usize,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Query-key width of a head that comes from the latent.
    pub qk_nope_head_dim: usize,
    /// Query-key width shared by all heads; never rotated in this model.
    pub qk_rope_head_dim: usize,
    /// Value width of a head.
    pub v_head_dim: usize,
}

impl MlaConfig {
    /// Query-key width of one head.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// f32 values cached for one position of one layer: the latent, then the shared slice.
    pub fn cache_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Rows of `kv_b_proj` that belong to one head: its keys, then its values.
    pub fn kv_b_rows_per_head(&self) -> usize {
        self.qk_nope_head_dim + self.v_head_dim
    }
}

/// Mixture-of-experts dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts a layer.
    pub num_experts: usize,
    /// Experts chosen for each token.
    pub num_experts_per_token: usize,
    /// Shared experts, stored fused as one MLP.
    pub num_shared_experts: usize,
    /// Latent width the routed experts work in.
    pub routed_expert_hidden_size: usize,
    /// Inner width of one expert.
    pub moe_intermediate_size: usize,
    /// Factor on the routing weights.
    pub routed_scaling_factor: f64,
}

impl MoeConfig {
    /// Inner width of the fused shared experts.
    pub fn shared_intermediate_size(&self) -> usize {
        self.num_shared_experts * self.moe_intermediate_size
    }

    /// Bytes of one packed expert: three matrices of 4-bit weights, each with one scale byte per group of 32.
    pub fn expert_bytes(&self) -> u64 {
        let weights = self.routed_expert_hidden_size as u64 * self.moe_intermediate_size as u64;
        3 * (weights / 2 + weights / 32)
    }
}

/// Everything the text model reads from `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Epsilon of every norm but the two low-rank ones of MLA.
    pub rms_norm_eps: f64,
    /// Snapshot period of the attention residuals.
    pub attn_res_block_size: usize,
    /// SiTU cap of the gate.
    pub activation_situ_beta: f64,
    /// SiTU cap of the linear branch.
    pub activation_situ_linear_beta: f64,
    /// Layers before this one have a dense MLP.
    pub first_k_dense_replace: usize,
    /// Inner width of the dense MLP.
    pub intermediate_size: usize,
    /// Kimi Delta Attention.
    pub kda: KdaConfig,
    /// Multi-head latent attention.
    pub mla: MlaConfig,
    /// Mixture of experts.
    pub moe: MoeConfig,
    /// The mixer of each layer.
    pub mixers: Vec<Mixer>,
    /// `eos_token_id`, where the file has one.
    pub eos_token_id: Option<u32>,
    /// `max_position_embeddings`, where the file has one: the context to advertise.
    pub max_position_embeddings: Option<usize>,
}

/// Why `config.json` cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: {source} (is this the folder with the checkpoint's config.json?)", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not a JSON object.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Fields are missing, of the wrong type, or contradict each other.
    #[error("{}: {} problem(s); take config.json from the release unchanged\n  {}", path.display(), problems.len(), problems.join("\n  "))]
    Problems {
        /// The file.
        path: PathBuf,
        /// Every problem, each naming its field.
        problems: Vec<String>,
    },
}

impl Config {
    /// Read `config.json` in the folder `model_dir`.
    ///
    /// # Errors
    /// If the file cannot be read, or as [`Self::parse`].
    pub fn open(model_dir: &Path) -> Result<Self, ConfigError> {
        let path = model_dir.join("config.json");
        let bytes = std::fs::read(&path).map_err(|source| ConfigError::Io {
            path: path.clone(),
            source,
        })?;
        Self::parse(&bytes, &path)
    }

    /// Read the bytes of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// With all missing, mistyped and contradictory fields at once.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        let root: Value = serde_json::from_slice(bytes).map_err(|e| ConfigError::Json {
            path: path.to_owned(),
            reason: format!("not JSON: {e}"),
        })?;
        Self::from_value(&root, path)
    }

    /// Read a parsed `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn from_value(root: &Value, path: &Path) -> Result<Self, ConfigError> {
        if !root.is_object() {
            return Err(ConfigError::Json {
                path: path.to_owned(),
                reason: "not a JSON object".into(),
            });
        }
        let mut fields = Fields::new(root);
        let config = Self::gather(&mut fields);
        match config {
            Some(config) if fields.problems.is_empty() => Ok(config),
            _ => Err(ConfigError::Problems {
                path: path.to_owned(),
                problems: fields.problems,
            }),
        }
    }

    /// `None` only if a problem was recorded.
    fn gather(fields: &mut Fields<'_>) -> Option<Self> {
        let num_hidden_layers = fields.size("num_hidden_layers");
        let kda = KdaConfig::gather(fields);
        let mla = MlaConfig::gather(fields);
        let moe = MoeConfig::gather(fields);
        let mixers = fields.mixers(num_hidden_layers);
        let hidden_size = fields.size("hidden_size");
        let vocab_size = fields.size("vocab_size");
        let rms_norm_eps = fields.positive("rms_norm_eps");
        let attn_res_block_size = fields.size("attn_res_block_size");
        let activation_situ_beta = fields.positive("activation_situ_beta");
        let activation_situ_linear_beta = fields.positive("activation_situ_linear_beta");
        let intermediate_size = fields.size("intermediate_size");
        let first_k_dense_replace = fields.count("first_k_dense_replace");
        if let (Some(first), Some(layers)) = (first_k_dense_replace, num_hidden_layers)
            && first > layers
        {
            fields.problem(format!(
                "first_k_dense_replace: {first} is past num_hidden_layers = {layers}"
            ));
        }
        fields.check_fixed();
        let config = Self {
            hidden_size: hidden_size?,
            num_hidden_layers: num_hidden_layers?,
            vocab_size: vocab_size?,
            rms_norm_eps: rms_norm_eps?,
            attn_res_block_size: attn_res_block_size?,
            activation_situ_beta: activation_situ_beta?,
            activation_situ_linear_beta: activation_situ_linear_beta?,
            first_k_dense_replace: first_k_dense_replace?,
            intermediate_size: intermediate_size?,
            kda: kda?,
            mla: mla?,
            moe: moe?,
            mixers: mixers?,
            eos_token_id: fields.token("eos_token_id"),
            max_position_embeddings: fields.optional_count("max_position_embeddings"),
        };
        if let Some(eos) = config.eos_token_id
            && eos as usize >= config.vocab_size
        {
            fields.problem(format!(
                "eos_token_id: {eos} is not below vocab_size = {}",
                config.vocab_size
            ));
        }
        Some(config)
    }

    /// The channel mixer of `layer`.
    pub fn mlp(&self, layer: LayerIdx) -> Mlp {
        if layer.get() < self.first_k_dense_replace {
            Mlp::Dense
        } else {
            Mlp::Moe
        }
    }

    /// All layers, in order.
    pub fn layers(&self) -> impl DoubleEndedIterator<Item = LayerIdx> + use<> {
        // The parser refuses more layers than a u32 holds.
        (0..u32::try_from(self.num_hidden_layers).unwrap_or(u32::MAX)).map(LayerIdx)
    }

    /// How many layers have the mixer `mixer`.
    pub fn num_layers_with(&self, mixer: Mixer) -> usize {
        self.mixers.iter().filter(|&&m| m == mixer).count()
    }

    /// How many layers have routed experts.
    pub fn num_moe_layers(&self) -> usize {
        self.num_hidden_layers - self.first_k_dense_replace.min(self.num_hidden_layers)
    }

    /// The first `layers` layers as a model of their own (`--layers N`); more than there are is all of them.
    #[must_use]
    pub fn first_layers(&self, layers: usize) -> Self {
        let layers = layers.min(self.num_hidden_layers);
        let mut config = self.clone();
        config.num_hidden_layers = layers;
        config.mixers.truncate(layers);
        config.first_k_dense_replace = config.first_k_dense_replace.min(layers);
        config
    }

    /// The canonical form: the nested file with exactly the fields the text model reads, in one fixed order.
    ///
    /// Identities are taken over its compact text, and [`Self::parse`] reads it back.
    pub fn to_canonical(&self) -> Value {
        let one_based = |mixer: Mixer| -> Vec<usize> {
            self.mixers
                .iter()
                .enumerate()
                .filter(|(_, m)| **m == mixer)
                .map(|(layer, _)| layer + 1)
                .collect()
        };
        let mut text = json!({
            "activation_situ_beta": self.activation_situ_beta,
            "activation_situ_linear_beta": self.activation_situ_linear_beta,
            "attn_res_block_size": self.attn_res_block_size,
            "first_k_dense_replace": self.first_k_dense_replace,
            "hidden_act": "situ",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "kv_lora_rank": self.mla.kv_lora_rank,
            "latent_moe_use_norm": true,
            "linear_attn_config": {
                "full_attn_layers": one_based(Mixer::Mla),
                "gate_lower_bound": self.kda.gate_lower_bound,
                "head_dim": self.kda.head_dim,
                "kda_layers": one_based(Mixer::Kda),
                "num_heads": self.kda.num_heads,
                "short_conv_kernel_size": self.kda.short_conv_kernel_size,
                "use_full_rank_gate": true,
            },
            "mla_use_nope": true,
            "mla_use_output_gate": true,
            "moe_intermediate_size": self.moe.moe_intermediate_size,
            "moe_layer_freq": 1,
            "moe_renormalize": true,
            "moe_router_activation_func": "sigmoid",
            "num_attention_heads": self.mla.num_heads,
            "num_expert_group": 1,
            "num_experts": self.moe.num_experts,
            "num_experts_per_token": self.moe.num_experts_per_token,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.mla.num_heads,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": self.moe.num_shared_experts,
            "q_lora_rank": self.mla.q_lora_rank,
            "qk_nope_head_dim": self.mla.qk_nope_head_dim,
            "qk_rope_head_dim": self.mla.qk_rope_head_dim,
            "quantization_config": {
                "config_groups": {"group_0": {"weights": {"group_size": 32, "num_bits": 4}}},
                "format": "mxfp4-pack-quantized",
            },
            "rms_norm_eps": self.rms_norm_eps,
            "routed_expert_hidden_size": self.moe.routed_expert_hidden_size,
            "routed_scaling_factor": self.moe.routed_scaling_factor,
            "tie_word_embeddings": false,
            "topk_group": 1,
            "v_head_dim": self.mla.v_head_dim,
            "vocab_size": self.vocab_size,
        });
        if let Some(object) = text.as_object_mut() {
            if let Some(eos) = self.eos_token_id {
                object.insert("eos_token_id".into(), eos.into());
            }
            if let Some(positions) = self.max_position_embeddings {
                object.insert("max_position_embeddings".into(), positions.into());
            }
        }
        json!({ "text_config": text })
    }
}

impl KdaConfig {
    fn gather(fields: &mut Fields<'_>) -> Option<Self> {
        let num_heads = fields.linear_attn_size("num_heads", "kda_num_heads");
        let head_dim = fields.linear_attn_size("head_dim", "kda_head_dim");
        let kernel = fields.linear_attn_size("short_conv_kernel_size", "short_conv_kernel_size");
        let bound = fields.gate_lower_bound();
        Some(Self {
            num_heads: num_heads?,
            head_dim: head_dim?,
            short_conv_kernel_size: kernel?,
            gate_lower_bound: bound?,
        })
    }
}

impl MlaConfig {
    fn gather(fields: &mut Fields<'_>) -> Option<Self> {
        let num_heads = fields.size("num_attention_heads");
        let q_lora_rank = fields.size("q_lora_rank");
        let kv_lora_rank = fields.size("kv_lora_rank");
        let qk_nope_head_dim = fields.size("qk_nope_head_dim");
        let qk_rope_head_dim = fields.size("qk_rope_head_dim");
        let v_head_dim = fields.size("v_head_dim");
        fields.check_key_value_heads(num_heads);
        Some(Self {
            num_heads: num_heads?,
            q_lora_rank: q_lora_rank?,
            kv_lora_rank: kv_lora_rank?,
            qk_nope_head_dim: qk_nope_head_dim?,
            qk_rope_head_dim: qk_rope_head_dim?,
            v_head_dim: v_head_dim?,
        })
    }
}

impl MoeConfig {
    fn gather(fields: &mut Fields<'_>) -> Option<Self> {
        let num_experts = fields.size("num_experts");
        let per_token = fields.size("num_experts_per_token");
        let num_shared_experts = fields.size("num_shared_experts");
        let latent = fields.group_size_multiple("routed_expert_hidden_size");
        let inner = fields.group_size_multiple("moe_intermediate_size");
        let scale = fields.positive("routed_scaling_factor");
        if let (Some(k), Some(experts)) = (per_token, num_experts)
            && k > experts
        {
            fields.problem(format!(
                "num_experts_per_token: {k} is more than num_experts = {experts}"
            ));
        }
        Some(Self {
            num_experts: num_experts?,
            num_experts_per_token: per_token?,
            num_shared_experts: num_shared_experts?,
            routed_expert_hidden_size: latent?,
            moe_intermediate_size: inner?,
            routed_scaling_factor: scale?,
        })
    }
}

#[cfg(test)]
mod tests;
