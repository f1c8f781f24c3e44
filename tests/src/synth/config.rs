//! `config.json` of the synthetic checkpoints: the tiny one, the slices, and the flat form of any.

use k3_shared::config::{Config, Mixer};
use serde_json::{Map, Value, json};

use super::SynthError;

/// The tiny checkpoint: every structure of the release, no width or count in common with it.
pub(super) fn tiny() -> Value {
    let mut text = json!({
        "model_type": "kimi_linear",
        "vocab_size": 576,
        "hidden_size": 160,
        "num_hidden_layers": 13,
        "attn_res_block_size": 3,
        "linear_attn_config": linear_attn(13, &[4, 8, 12, 13], 5, 16),
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "num_experts": 12,
        "num_experts_per_token": 4,
        "routed_expert_hidden_size": 64,
        "moe_intermediate_size": 96,
        "intermediate_size": 224,
        "max_position_embeddings": 4096,
    });
    extend(&mut text, constants());
    nested(text, 576)
}

/// Layers of the released widths: `(layers, MLA layers counted from one, experts)` differ, and the vocabulary is an eighth.
pub(super) fn slice(layers: u32) -> Result<Value, SynthError> {
    let (mla, num_experts): (&[u32], u32) = match layers {
        2 => (&[2], 32),
        3 => (&[3], 128),
        5 => (&[4, 5], 64),
        _ => return Err(SynthError::NoSuchSlice { layers }),
    };
    let mut text = json!({
        "model_type": "kimi_linear",
        "vocab_size": 20_480,
        "hidden_size": 7168,
        "num_hidden_layers": layers,
        "attn_res_block_size": 2,
        "linear_attn_config": linear_attn(layers, mla, 96, 128),
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": num_experts,
        "num_experts_per_token": 16,
        "routed_expert_hidden_size": 3584,
        "moe_intermediate_size": 3072,
        "intermediate_size": 33_792,
        "max_position_embeddings": 1_048_576,
    });
    extend(&mut text, constants());
    Ok(nested(text, 20_480))
}

fn linear_attn(layers: u32, mla: &[u32], num_heads: u32, head_dim: u32) -> Value {
    let kda: Vec<u32> = (1..=layers).filter(|l| !mla.contains(l)).collect();
    json!({
        "full_attn_layers": mla,
        "kda_layers": kda,
        "gate_lower_bound": -5.0,
        "head_dim": head_dim,
        "num_heads": num_heads,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": true,
    })
}

/// What the tiny checkpoint and the slices have in common with the release.
fn constants() -> Value {
    json!({
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "mla_use_nope": true,
        "mla_use_output_gate": true,
        "num_shared_experts": 2,
        "latent_moe_use_norm": true,
        "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": true,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": false,
        "quantization_config": {
            "format": "mxfp4-pack-quantized",
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {
                "format": "mxfp4-pack-quantized",
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "group_size": 32,
                    "type": "float",
                    "strategy": "group",
                    "symmetric": true,
                    "scale_dtype": "torch.uint8",
                },
            }},
        },
    })
}

/// The whole file around `text`, with the 256 special tokens at the top of the vocabulary.
fn nested(mut text: Value, vocab_size: u32) -> Value {
    let tokens = json!({
        "bos_token_id": vocab_size - 256,
        "eos_token_id": vocab_size - 254,
        "pad_token_id": vocab_size - 1,
    });
    extend(&mut text, tokens.clone());
    let mut root = json!({
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": false,
        "text_config": text,
    });
    extend(&mut root, tokens);
    root
}

fn extend(object: &mut Value, with: Value) {
    if let (Value::Object(object), Value::Object(with)) = (object, with) {
        object.extend(with);
    }
}

/// The flat form of a configuration, as fixtures of other engines have it: all names at the root, some by their alias, and
/// none that only the nested form carries (specification 1.1). Token ids are taken from `root`, its original.
pub(super) fn flatten(config: &Config, root: &Value) -> Value {
    let full_attn_layers: Vec<usize> = config
        .layers()
        .map(k3_shared::ids::LayerIdx::get)
        .filter(|&layer| config.mixers[layer] == Mixer::Mla)
        .map(|layer| layer + 1)
        .collect();
    let (kda, mla, moe) = (&config.kda, &config.mla, &config.moe);
    let mut flat = json!({
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "kda_num_heads": kda.num_heads,
        "kda_head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.short_conv_kernel_size,
        "gate_lower_bound": kda.gate_lower_bound,
        "full_attn_layers": full_attn_layers,
        "num_attention_heads": mla.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_output_gate": true,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "routed_expert_hidden_size": moe.routed_expert_hidden_size,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "latent_moe_use_norm": true,
        "moe_renormalize": true,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "first_k_dense_replace": config.first_k_dense_replace,
        "intermediate_size": config.intermediate_size,
        "attn_res_block_size": config.attn_res_block_size,
        "situ_beta": config.activation_situ_beta,
        "situ_linear_beta": config.activation_situ_linear_beta,
        "tie_word_embeddings": false,
    });
    let text = root.get("text_config").unwrap_or(root);
    let mut kept = Map::new();
    for name in [
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_position_embeddings",
    ] {
        if let Some(value) = text.get(name).or_else(|| root.get(name)) {
            kept.insert(name.to_owned(), value.clone());
        }
    }
    extend(&mut flat, Value::Object(kept));
    flat
}
