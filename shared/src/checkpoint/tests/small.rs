//! A small checkpoint in the release's layout, written from the configuration and the name tables.
//!
//! Payload is a byte pattern that depends on the tensor and the place in it; only `A_log` is meaningful (zero padding).

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use super::shared::{
    config::{Config, Mlp},
    ids::{ExpertId, ExpertIdx},
    names::{Dtype, ExpertTensor, LayerTensor, TOP_TENSORS, TensorRole, layer_tensors},
};

/// A configuration with every kind of layer, a dozen experts, and 16 `A_log` entries for 5 heads.
pub(crate) const CONFIG: &str = r#"{"text_config":{"vocab_size":64,"hidden_size":32,"num_hidden_layers":4,
"rms_norm_eps":1e-5,"hidden_act":"situ","activation_situ_beta":4.0,"activation_situ_linear_beta":25.0,"attn_res_block_size":2,
"linear_attn_config":{"full_attn_layers":[2,4],"kda_layers":[1,3],"gate_lower_bound":-5.0,"head_dim":16,"num_heads":5,
"short_conv_kernel_size":4,"use_full_rank_gate":true},"num_attention_heads":3,"num_key_value_heads":3,"q_lora_rank":48,
"kv_lora_rank":32,"qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":20,"mla_use_nope":true,"mla_use_output_gate":true,
"num_experts":12,"num_experts_per_token":4,"num_shared_experts":2,"routed_expert_hidden_size":64,"moe_intermediate_size":96,
"latent_moe_use_norm":true,"moe_renormalize":true,"moe_router_activation_func":"sigmoid","routed_scaling_factor":1.0,
"first_k_dense_replace":1,"intermediate_size":40,"tie_word_embeddings":false,"eos_token_id":2,
"quantization_config":{"format":"mxfp4-pack-quantized","config_groups":{"group_0":{"weights":{"num_bits":4,"group_size":32}}}}}}"#;

/// One tensor to be written.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

/// A checkpoint in memory; change it before it is written.
#[derive(Clone, Debug)]
pub(crate) struct Small {
    pub(crate) config: String,
    /// File name to tensors in file order.
    pub(crate) shards: BTreeMap<String, Vec<Tensor>>,
}

/// File name of a shard, counted from one.
pub(crate) fn shard_name(number: usize) -> String {
    format!("model-{number:05}-of-000007.safetensors")
}

fn tensor(role: TensorRole, config: &Config) -> Tensor {
    let spec = role.spec(config);
    let name = role.name();
    let seed: usize = name.bytes().map(usize::from).sum();
    // Never 255, which is NaN among scales.
    let byte = |i: usize| u8::try_from((i * 31 + i / 251 + seed) % 251).unwrap();
    let len = usize::try_from(spec.bytes()).unwrap();
    let data = match role {
        TensorRole::Layer(_, LayerTensor::KdaALog) => (0..len)
            .map(|i| {
                if i < 4 * config.kda.num_heads {
                    byte(i)
                } else {
                    0
                }
            })
            .collect(),
        _ => (0..len).map(byte).collect(),
    };
    Tensor {
        name,
        dtype: spec.dtype.name(),
        shape: spec.shape,
        data,
    }
}

fn vision(name: &str) -> Tensor {
    Tensor {
        name: name.into(),
        dtype: Dtype::Bf16.name(),
        shape: vec![8],
        data: vec![1; 16],
    }
}

impl Small {
    /// The checkpoint as the release would store it: a shard a layer, one with embedding and head, two with vision tensors.
    pub(crate) fn new() -> Self {
        let config = Config::parse(CONFIG.as_bytes(), "config.json".as_ref()).unwrap();
        let mut shards = BTreeMap::new();
        for layer in config.layers() {
            let mut tensors: Vec<Tensor> = layer_tensors(&config, layer)
                .map(|t| tensor(TensorRole::Layer(layer, t), &config))
                .collect();
            if config.mlp(layer) == Mlp::Moe {
                for expert in (0..12).map(ExpertIdx) {
                    let id = ExpertId { layer, expert };
                    tensors.extend(
                        ExpertTensor::ALL.map(|t| tensor(TensorRole::Expert(id, t), &config)),
                    );
                }
            }
            shards.insert(shard_name(layer.get() + 1), tensors);
        }
        shards.insert(
            shard_name(5),
            TOP_TENSORS.map(|t| tensor(t, &config)).into(),
        );
        shards.insert(shard_name(6), vec![vision("mm_projector.post_norm.weight")]);
        shards.insert(
            shard_name(7),
            vec![vision("vision_tower.encoder.final_layernorm.weight")],
        );
        let mut small = Self {
            config: CONFIG.into(),
            shards,
        };
        small.sort();
        small
    }

    /// Put every shard's tensors into the release's order: element size descending, then name.
    pub(crate) fn sort(&mut self) {
        let size = |dtype: &str| match dtype {
            "F32" => 4,
            "BF16" => 2,
            _ => 1,
        };
        for tensors in self.shards.values_mut() {
            tensors.sort_by(|a, b| size(b.dtype).cmp(&size(a.dtype)).then(a.name.cmp(&b.name)));
        }
    }

    /// The tensor of that name, wherever it is.
    pub(crate) fn tensor_mut(&mut self, name: &str) -> &mut Tensor {
        let mut all = self.shards.values_mut().flatten();
        all.find(|t| t.name == name).unwrap()
    }

    /// Write configuration, index and shards.
    pub(crate) fn write(&self, dir: &Path) {
        fs::write(dir.join("config.json"), &self.config).unwrap();
        let mut map = serde_json::Map::new();
        let mut total = 0;
        for (file, tensors) in &self.shards {
            for tensor in tensors {
                map.insert(tensor.name.clone(), file.as_str().into());
                total += tensor.data.len();
            }
            fs::write(dir.join(file), shard_bytes(tensors)).unwrap();
        }
        let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": map});
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    /// Written to a folder of its own.
    pub(crate) fn folder(&self) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path());
        let path = dir.path().to_owned();
        (dir, path)
    }
}

/// A shard: header as the release writes it, then the data.
pub(crate) fn shard_bytes(tensors: &[Tensor]) -> Vec<u8> {
    let mut offset = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|t| {
            let begin = offset;
            offset += t.data.len();
            let (name, dtype, shape) = (&t.name, t.dtype, &t.shape);
            let shape = serde_json::to_string(shape).unwrap();
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{offset}]}}"#)
        })
        .collect();
    let mut json = format!("{{{}}}", entries.join(","));
    json.push_str(&" ".repeat(json.len().next_multiple_of(8) - json.len()));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    for tensor in tensors {
        bytes.extend(&tensor.data);
    }
    bytes
}
