//! Checkpoint tensor names, their roles, and the dtype and shape each must have.
//!
//! One table per kind of layer binds names to roles; everything else (census, packer, engine, synthetic checkpoints)
//! asks it. Source: specification 2.3.

use serde::{Deserialize, Serialize};

use crate::{
    config::{Config, Mixer, Mlp},
    ids::{ExpertId, ExpertIdx, LayerIdx},
};

/// Prefix of every tensor of the text model.
pub const TEXT_PREFIX: &str = "language_model.";
const LAYER_PREFIX: &str = "language_model.model.layers.";
const EXPERT_INFIX: &str = "block_sparse_moe.experts.";

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// The upper half of a single.
    #[serde(rename = "BF16")]
    Bf16,
    /// Raw bytes: packed 4-bit weights and their scales.
    U8,
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }

    /// Its name in a safetensors header.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::U8 => "U8",
        }
    }
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorRole {
    /// `embed_tokens`, `[vocab_size, hidden_size]`.
    Embedding,
    /// `lm_head`, `[vocab_size, hidden_size]`.
    OutputHead,
    /// The last norm.
    FinalNorm,
    /// Norm weight of the output attention residual.
    OutputAttnResNorm,
    /// Projection of the output attention residual.
    OutputAttnResProj,
    /// An always-used tensor of a layer.
    Layer(LayerIdx, LayerTensor),
    /// One of an expert's six tensors.
    Expert(ExpertId, ExpertTensor),
}

/// The census class of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorClass {
    /// 4-bit experts.
    RoutedExperts,
    /// Fused shared experts.
    SharedExperts,
    /// Kimi Delta Attention.
    KdaAttention,
    /// Multi-head latent attention.
    MlaAttention,
    /// Router weight and bias.
    Router,
    /// Latent down and up projections and the norm between.
    LatentProjections,
    /// Dense MLP.
    DenseMlp,
    /// Input and post-attention norms.
    Norms,
    /// Attention-residual vectors of the layers.
    AttentionResiduals,
    /// Embedding.
    Embedding,
    /// Output head.
    OutputHead,
    /// Final norm and output attention residual.
    Final,
    /// Vision tower and projector, which the text model ignores.
    Vision,
}

macro_rules! layer_tensors {
    ($($variant:ident $suffix:literal $class:ident $doc:literal;)*) => {
        /// An always-used tensor of a layer, by its place in the model.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum LayerTensor {
            $(#[doc = $doc] $variant,)*
        }

        impl LayerTensor {
            /// Every always-used tensor that any kind of layer has.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name after `language_model.model.layers.L.`.
            pub fn suffix(self) -> &'static str {
                match self { $(Self::$variant => $suffix,)* }
            }

            /// Its census class. The output gate and projections of both mixers share names; `mixer` tells them apart.
            pub fn class(self, mixer: Mixer) -> TensorClass {
                let class = match self { $(Self::$variant => TensorClass::$class,)* };
                match self {
                    Self::AttnG | Self::AttnO if mixer == Mixer::Mla => TensorClass::MlaAttention,
                    _ => class,
                }
            }
        }
    };
}

layer_tensors! {
    InputNorm "input_layernorm.weight" Norms "Norm before the mixer.";
    PostNorm "post_attention_layernorm.weight" Norms "Norm before the channel mixer.";
    AttnResNorm "self_attention_res_norm.weight" AttentionResiduals "Norm weight of the mixer's attention residual.";
    AttnResProj "self_attention_res_proj.weight" AttentionResiduals "Projection of the mixer's attention residual.";
    MlpResNorm "mlp_res_norm.weight" AttentionResiduals "Norm weight of the channel mixer's attention residual.";
    MlpResProj "mlp_res_proj.weight" AttentionResiduals "Projection of the channel mixer's attention residual.";
    KdaQ "self_attn.q_proj.weight" KdaAttention "KDA queries.";
    KdaK "self_attn.k_proj.weight" KdaAttention "KDA keys.";
    KdaV "self_attn.v_proj.weight" KdaAttention "KDA values.";
    KdaFA "self_attn.f_a_proj.weight" KdaAttention "Decay gate, down.";
    KdaFB "self_attn.f_b_proj.weight" KdaAttention "Decay gate, up.";
    KdaB "self_attn.b_proj.weight" KdaAttention "Write strength.";
    KdaConvQ "self_attn.q_conv1d.weight" KdaAttention "Convolution taps of the queries.";
    KdaConvK "self_attn.k_conv1d.weight" KdaAttention "Convolution taps of the keys.";
    KdaConvV "self_attn.v_conv1d.weight" KdaAttention "Convolution taps of the values.";
    KdaALog "self_attn.A_log" KdaAttention "Log decay rate, per head; entries past the heads are zero padding.";
    KdaDtBias "self_attn.dt_bias" KdaAttention "Bias of the decay gate.";
    KdaONorm "self_attn.o_norm.weight" KdaAttention "Norm of each head's output.";
    MlaQA "self_attn.q_a_proj.weight" MlaAttention "Queries, down.";
    MlaQANorm "self_attn.q_a_layernorm.weight" MlaAttention "Norm of the low-rank query.";
    MlaQB "self_attn.q_b_proj.weight" MlaAttention "Queries, up.";
    MlaKvA "self_attn.kv_a_proj_with_mqa.weight" MlaAttention "Latent, and the shared slice after it.";
    MlaKvANorm "self_attn.kv_a_layernorm.weight" MlaAttention "Norm of the latent.";
    MlaKvB "self_attn.kv_b_proj.weight" MlaAttention "Per head: keys from the latent, then values.";
    AttnG "self_attn.g_proj.weight" KdaAttention "Output gate, of either mixer.";
    AttnO "self_attn.o_proj.weight" KdaAttention "Output projection, of either mixer.";
    DenseGate "mlp.gate_proj.weight" DenseMlp "Dense MLP, gate.";
    DenseUp "mlp.up_proj.weight" DenseMlp "Dense MLP, up.";
    DenseDown "mlp.down_proj.weight" DenseMlp "Dense MLP, down.";
    RouterWeight "block_sparse_moe.gate.weight" Router "Router.";
    RouterBias "block_sparse_moe.gate.e_score_correction_bias" Router "Bias that takes part in the selection only.";
    LatentDown "block_sparse_moe.routed_expert_down_proj.weight" LatentProjections "Full width to the experts' latent.";
    LatentUp "block_sparse_moe.routed_expert_up_proj.weight" LatentProjections "The experts' latent to full width.";
    LatentNorm "block_sparse_moe.routed_expert_norm.weight" LatentProjections "Norm of the experts' weighted sum.";
    SharedGate "block_sparse_moe.shared_experts.gate_proj.weight" SharedExperts "Shared experts, gate.";
    SharedUp "block_sparse_moe.shared_experts.up_proj.weight" SharedExperts "Shared experts, up.";
    SharedDown "block_sparse_moe.shared_experts.down_proj.weight" SharedExperts "Shared experts, down.";
}

/// One of an expert's six tensors, in file order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertTensor {
    /// Gate, packed.
    W1Packed,
    /// Gate, scales.
    W1Scale,
    /// Down, packed.
    W2Packed,
    /// Down, scales.
    W2Scale,
    /// Up, packed.
    W3Packed,
    /// Up, scales.
    W3Scale,
}

impl ExpertTensor {
    /// All six, in file order.
    pub const ALL: [Self; 6] = [
        Self::W1Packed,
        Self::W1Scale,
        Self::W2Packed,
        Self::W2Scale,
        Self::W3Packed,
        Self::W3Scale,
    ];

    /// The name after `experts.E.`.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::W1Packed => "w1.weight_packed",
            Self::W1Scale => "w1.weight_scale",
            Self::W2Packed => "w2.weight_packed",
            Self::W2Scale => "w2.weight_scale",
            Self::W3Packed => "w3.weight_packed",
            Self::W3Scale => "w3.weight_scale",
        }
    }

    /// Whether this is packed weights rather than scales.
    pub fn is_packed(self) -> bool {
        matches!(self, Self::W1Packed | Self::W2Packed | Self::W3Packed)
    }
}

/// The dtype and shape the release has for a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Element type as released; trunk tensors may be F32 or BF16.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    fn new(dtype: Dtype, shape: &[usize]) -> Self {
        Self {
            dtype,
            shape: shape.to_vec(),
        }
    }

    /// Bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product::<u64>() * self.dtype.bytes() as u64
    }
}

impl TensorRole {
    /// The full tensor name.
    pub fn name(self) -> String {
        match self {
            Self::Embedding => "language_model.model.embed_tokens.weight".into(),
            Self::OutputHead => "language_model.lm_head.weight".into(),
            Self::FinalNorm => "language_model.model.norm.weight".into(),
            Self::OutputAttnResNorm => "language_model.model.output_attn_res_norm.weight".into(),
            Self::OutputAttnResProj => "language_model.model.output_attn_res_proj.weight".into(),
            Self::Layer(layer, tensor) => format!("{LAYER_PREFIX}{layer}.{}", tensor.suffix()),
            Self::Expert(id, tensor) => {
                format!(
                    "{LAYER_PREFIX}{}.{EXPERT_INFIX}{}.{}",
                    id.layer,
                    id.expert,
                    tensor.suffix()
                )
            }
        }
    }

    /// The role a name stands for in a model of this `config`; `None` for names the text model does not have.
    pub fn parse(name: &str, config: &Config) -> Option<Self> {
        match name {
            "language_model.model.embed_tokens.weight" => return Some(Self::Embedding),
            "language_model.lm_head.weight" => return Some(Self::OutputHead),
            "language_model.model.norm.weight" => return Some(Self::FinalNorm),
            "language_model.model.output_attn_res_norm.weight" => {
                return Some(Self::OutputAttnResNorm);
            }
            "language_model.model.output_attn_res_proj.weight" => {
                return Some(Self::OutputAttnResProj);
            }
            _ => {}
        }
        let (layer, rest) = split_index(name.strip_prefix(LAYER_PREFIX)?)?;
        if layer as usize >= config.num_hidden_layers {
            return None;
        }
        let layer = LayerIdx(layer);
        if let Some(rest) = rest.strip_prefix(EXPERT_INFIX) {
            let (expert, rest) = split_index(rest)?;
            let tensor = ExpertTensor::ALL.into_iter().find(|t| t.suffix() == rest)?;
            let known = config.mlp(layer) == Mlp::Moe && (expert as usize) < config.moe.num_experts;
            return known.then_some(Self::Expert(
                ExpertId {
                    layer,
                    expert: ExpertIdx(expert),
                },
                tensor,
            ));
        }
        let tensor = layer_tensors(config, layer).find(|t| t.suffix() == rest)?;
        Some(Self::Layer(layer, tensor))
    }

    /// The dtype and shape the tensor must have.
    ///
    /// `A_log` is at least as long as there are heads (entries past them are zero padding); the length given here is the one
    /// synthetic checkpoints store.
    pub fn spec(self, config: &Config) -> TensorSpec {
        use Dtype::{Bf16, U8};
        let hidden = config.hidden_size;
        match self {
            Self::Embedding | Self::OutputHead => {
                TensorSpec::new(Bf16, &[config.vocab_size, hidden])
            }
            Self::FinalNorm | Self::OutputAttnResNorm => TensorSpec::new(Bf16, &[hidden]),
            Self::OutputAttnResProj => TensorSpec::new(Bf16, &[1, hidden]),
            Self::Layer(_, tensor) => tensor.spec(config, self.layer_mixer(config)),
            Self::Expert(_, tensor) => {
                let (latent, inner) = (
                    config.moe.routed_expert_hidden_size,
                    config.moe.moe_intermediate_size,
                );
                let (rows, cols) = match tensor {
                    ExpertTensor::W2Packed | ExpertTensor::W2Scale => (latent, inner),
                    _ => (inner, latent),
                };
                TensorSpec::new(
                    U8,
                    &[
                        rows,
                        if tensor.is_packed() {
                            cols / 2
                        } else {
                            cols / 32
                        },
                    ],
                )
            }
        }
    }

    fn layer_mixer(self, config: &Config) -> Mixer {
        match self {
            Self::Layer(layer, _) => config
                .mixers
                .get(layer.get())
                .copied()
                .unwrap_or(Mixer::Kda),
            _ => Mixer::Kda,
        }
    }

    /// Whether a stored dtype and shape will do.
    ///
    /// Experts must be U8; any other tensor may be F32 or BF16, and `A_log` may be longer than the heads.
    pub fn accepts(self, config: &Config, dtype: Dtype, shape: &[usize]) -> bool {
        let spec = self.spec(config);
        let dtype_ok = match self {
            Self::Expert(..) => dtype == Dtype::U8,
            _ => dtype != Dtype::U8,
        };
        let shape_ok = match self {
            Self::Layer(_, LayerTensor::KdaALog) => {
                matches!(shape, [n] if *n >= config.kda.num_heads)
            }
            _ => shape == spec.shape.as_slice(),
        };
        dtype_ok && shape_ok
    }

    /// Its census class.
    pub fn class(self, config: &Config) -> TensorClass {
        match self {
            Self::Embedding => TensorClass::Embedding,
            Self::OutputHead => TensorClass::OutputHead,
            Self::FinalNorm | Self::OutputAttnResNorm | Self::OutputAttnResProj => {
                TensorClass::Final
            }
            Self::Layer(_, tensor) => tensor.class(self.layer_mixer(config)),
            Self::Expert(..) => TensorClass::RoutedExperts,
        }
    }
}

impl LayerTensor {
    fn spec(self, config: &Config, mixer: Mixer) -> TensorSpec {
        use Dtype::{Bf16, F32};
        let hidden = config.hidden_size;
        let (kda, mla, moe) = (&config.kda, &config.mla, &config.moe);
        let projection = kda.projection_size();
        let shared = moe.shared_intermediate_size();
        let attention_output = match mixer {
            Mixer::Kda => projection,
            Mixer::Mla => mla.num_heads * mla.v_head_dim,
        };
        let (dtype, shape): (Dtype, &[usize]) = match self {
            Self::InputNorm | Self::PostNorm | Self::AttnResNorm | Self::MlpResNorm => {
                (Bf16, &[hidden])
            }
            Self::AttnResProj | Self::MlpResProj => (Bf16, &[1, hidden]),
            Self::KdaQ | Self::KdaK | Self::KdaV => (Bf16, &[projection, hidden]),
            Self::KdaFA => (Bf16, &[kda.head_dim, hidden]),
            Self::KdaFB => (Bf16, &[projection, kda.head_dim]),
            Self::KdaB => (Bf16, &[kda.num_heads, hidden]),
            Self::KdaConvQ | Self::KdaConvK | Self::KdaConvV => {
                (F32, &[projection, 1, kda.short_conv_kernel_size])
            }
            Self::KdaALog => (F32, &[kda.head_dim.max(kda.num_heads)]),
            Self::KdaDtBias => (F32, &[projection]),
            Self::KdaONorm => (F32, &[kda.head_dim]),
            Self::MlaQA => (Bf16, &[mla.q_lora_rank, hidden]),
            Self::MlaQANorm => (Bf16, &[mla.q_lora_rank]),
            Self::MlaQB => (Bf16, &[mla.num_heads * mla.qk_head_dim(), mla.q_lora_rank]),
            Self::MlaKvA => (Bf16, &[mla.cache_width(), hidden]),
            Self::MlaKvANorm => (Bf16, &[mla.kv_lora_rank]),
            Self::MlaKvB => (
                Bf16,
                &[mla.num_heads * mla.kv_b_rows_per_head(), mla.kv_lora_rank],
            ),
            Self::AttnG => (Bf16, &[attention_output, hidden]),
            Self::AttnO => (Bf16, &[hidden, attention_output]),
            Self::DenseGate | Self::DenseUp => (Bf16, &[config.intermediate_size, hidden]),
            Self::DenseDown => (Bf16, &[hidden, config.intermediate_size]),
            Self::RouterWeight => (Bf16, &[moe.num_experts, hidden]),
            Self::RouterBias => (F32, &[moe.num_experts]),
            Self::LatentDown => (Bf16, &[moe.routed_expert_hidden_size, hidden]),
            Self::LatentUp => (Bf16, &[hidden, moe.routed_expert_hidden_size]),
            Self::LatentNorm => (Bf16, &[moe.routed_expert_hidden_size]),
            Self::SharedGate | Self::SharedUp => (Bf16, &[shared, hidden]),
            Self::SharedDown => (Bf16, &[hidden, shared]),
        };
        TensorSpec::new(dtype, shape)
    }
}

/// The always-used tensors of a layer.
pub fn layer_tensors(
    config: &Config,
    layer: LayerIdx,
) -> impl Iterator<Item = LayerTensor> + use<> {
    use LayerTensor as T;
    let mixer = config
        .mixers
        .get(layer.get())
        .copied()
        .unwrap_or(Mixer::Kda);
    let mlp = config.mlp(layer);
    T::ALL.iter().copied().filter(move |tensor| match tensor {
        T::InputNorm
        | T::PostNorm
        | T::AttnResNorm
        | T::AttnResProj
        | T::MlpResNorm
        | T::MlpResProj
        | T::AttnG
        | T::AttnO => true,
        T::DenseGate | T::DenseUp | T::DenseDown => mlp == Mlp::Dense,
        other => match other.class(mixer) {
            TensorClass::KdaAttention => mixer == Mixer::Kda,
            TensorClass::MlaAttention => mixer == Mixer::Mla,
            _ => mlp == Mlp::Moe,
        },
    })
}

/// The tensors beside the layers, in the shard with embedding and head.
pub const TOP_TENSORS: [TensorRole; 5] = [
    TensorRole::OutputHead,
    TensorRole::Embedding,
    TensorRole::FinalNorm,
    TensorRole::OutputAttnResNorm,
    TensorRole::OutputAttnResProj,
];

/// `"12.rest"` to `(12, "rest")`; numbers are plain decimals without leading zeros, as the release writes them.
fn split_index(text: &str) -> Option<(u32, &str)> {
    let (number, rest) = text.split_once('.')?;
    let canonical =
        number.bytes().all(|b| b.is_ascii_digit()) && (number == "0" || !number.starts_with('0'));
    if canonical {
        Some((number.parse().ok()?, rest))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release;

    fn config() -> Config {
        Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap()
    }

    fn layer_bytes(config: &Config, layer: u32) -> u64 {
        let layer = LayerIdx(layer);
        layer_tensors(config, layer)
            .map(|t| TensorRole::Layer(layer, t).spec(config).bytes())
            .sum()
    }

    #[test]
    fn names_and_roles_are_inverse() {
        let config = config();
        let mut roles: Vec<TensorRole> = TOP_TENSORS.to_vec();
        for layer in config.layers() {
            roles.extend(layer_tensors(&config, layer).map(|t| TensorRole::Layer(layer, t)));
        }
        let id = ExpertId {
            layer: LayerIdx(92),
            expert: ExpertIdx(895),
        };
        roles.extend(ExpertTensor::ALL.map(|t| TensorRole::Expert(id, t)));
        assert_eq!(roles.len(), 2455 + 5 + 6);
        for role in roles {
            assert_eq!(TensorRole::parse(&role.name(), &config), Some(role));
        }
    }

    #[test]
    fn names_of_another_layer_kind_or_out_of_range_are_unknown() {
        let config = config();
        for name in [
            "language_model.model.layers.0.block_sparse_moe.gate.weight",
            "language_model.model.layers.3.self_attn.q_proj.weight",
            "language_model.model.layers.1.mlp.gate_proj.weight",
            "language_model.model.layers.93.input_layernorm.weight",
            "language_model.model.layers.1.block_sparse_moe.experts.896.w1.weight_packed",
            "language_model.model.layers.01.input_layernorm.weight",
            "model.layers.1.input_layernorm.weight",
        ] {
            assert_eq!(TensorRole::parse(name, &config), None, "{name}");
        }
    }

    #[test]
    fn trunk_bytes_are_the_published_ones() {
        let config = config();
        assert_eq!(layer_bytes(&config, 0), 2_341_213_184);
        assert_eq!(layer_bytes(&config, 1), 1_267_744_256);
        assert_eq!(layer_bytes(&config, 3), 844_335_616);
        assert_eq!(
            (0..93).map(|l| layer_bytes(&config, l)).sum::<u64>(),
            108_811_877_376
        );
        assert_eq!(config.moe.expert_bytes(), 17_547_264);
    }

    #[test]
    fn classes_add_up_to_the_published_census() {
        let config = config();
        let mut kda = 0;
        let mut mla = 0;
        for layer in config.layers() {
            for tensor in layer_tensors(&config, layer) {
                let role = TensorRole::Layer(layer, tensor);
                match role.class(&config) {
                    TensorClass::KdaAttention => kda += role.spec(&config).bytes(),
                    TensorClass::MlaAttention => mla += role.spec(&config).bytes(),
                    _ => {}
                }
            }
        }
        assert_eq!((kda, mla), (61_258_257_408, 11_145_412_608));
    }

    #[test]
    fn a_log_may_be_longer_than_the_heads_but_not_shorter() {
        let config = config();
        let role = TensorRole::Layer(LayerIdx(0), LayerTensor::KdaALog);
        assert!(role.accepts(&config, Dtype::F32, &[128]));
        assert!(role.accepts(&config, Dtype::F32, &[96]));
        assert!(!role.accepts(&config, Dtype::F32, &[95]));
        assert!(!role.accepts(&config, Dtype::U8, &[128]));
    }
}
