//! The census of the release, from its configuration, the name tables and the published file sizes.

use super::{Census, Classes, LayerRecord, SCHEMA, ShardRecord, params};
use crate::{
    config::{Config, Mlp},
    ids::{ExpertId, ExpertIdx, LayerIdx},
    names::{ExpertTensor, TOP_TENSORS, TensorClass, TensorRole, layer_tensors},
    release,
};

/// Shapes of the vision tensors, all BF16, and how often each occurs (specification 2.3): projector, then tower.
const PROJECTOR: &[(u64, &[u64])] = &[(1, &[4096, 4096]), (1, &[7168, 4096]), (1, &[7168])];
const TOWER: &[(u64, &[u64])] = &[
    (1, &[1024, 3, 14, 14]),
    (1, &[64, 64, 1024]),
    (1, &[1024]),
    (27, &[4608, 1024]),
    (27, &[1024, 1536]),
    (27, &[4096, 1024]),
    (27, &[1024, 4096]),
    (54, &[1024]),
];

impl Census {
    /// The census of the whole release, as `k3-census` finds it, but without an identity, which needs the files.
    ///
    /// # Panics
    /// If the embedded configuration is not accepted, which a test excludes.
    pub fn of_release() -> Self {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), release::NAME.as_ref())
            .expect("the embedded configuration is accepted");
        let mut builder = Builder {
            config: &config,
            sizes: release::shard_sizes().into_iter(),
            classes: Classes::default(),
            shards: Vec::new(),
        };
        let layers: Vec<LayerRecord> = config.layers().map(|layer| builder.layer(layer)).collect();
        builder.shard(TOP_TENSORS);
        builder.vision(PROJECTOR);
        builder.vision(TOWER);
        let Builder {
            classes, shards, ..
        } = builder;
        let sum = classes.sum();
        let num_experts = config.num_moe_layers() * config.moe.num_experts;
        Self {
            schema: SCHEMA.into(),
            model_dir: release::NAME.into(),
            identity: None,
            first_layers: None,
            ok: true,
            problems: Vec::new(),
            num_shards: shards.len() as u64,
            num_tensors: sum.tensors,
            total_bytes: sum.bytes,
            total_file_bytes: shards.iter().map(|s| s.bytes).sum(),
            total_params: sum.params,
            expert_bytes: config.moe.expert_bytes(),
            num_experts_total: num_experts as u64,
            scale_bytes_nan: None,
            classes,
            layers,
            shards,
            trunk_exceptions: Vec::new(),
            config: config.to_canonical(),
        }
    }
}

struct Builder<'c> {
    config: &'c Config,
    sizes: std::vec::IntoIter<(&'static str, u64)>,
    classes: Classes,
    shards: Vec<ShardRecord>,
}

impl Builder<'_> {
    fn layer(&mut self, layer: LayerIdx) -> LayerRecord {
        let config = self.config;
        let mlp = config.mlp(layer);
        let trunk: Vec<TensorRole> = layer_tensors(config, layer)
            .map(|tensor| TensorRole::Layer(layer, tensor))
            .collect();
        let trunk_bytes = trunk.iter().map(|role| role.spec(config).bytes()).sum();
        let num_experts = match mlp {
            Mlp::Dense => 0,
            Mlp::Moe => u32::try_from(config.moe.num_experts).unwrap_or(u32::MAX),
        };
        let experts = (0..num_experts).flat_map(|expert| {
            let expert = ExpertIdx(expert);
            ExpertTensor::ALL.map(|t| TensorRole::Expert(ExpertId { layer, expert }, t))
        });
        let (file, header_bytes) = self.shard(trunk.into_iter().chain(experts));
        LayerRecord {
            layer,
            mixer: config.mixers[layer.get()],
            mlp,
            shard: file,
            trunk_offset: header_bytes,
            trunk_bytes,
            contiguous: true,
            expert_bytes_total: config.moe.expert_bytes() * u64::from(num_experts),
        }
    }

    /// Count the tensors of the next shard; its name, and its header's size, which is what the tensors leave of the file.
    fn shard(&mut self, roles: impl IntoIterator<Item = TensorRole>) -> (String, u64) {
        let (mut tensors, mut data_bytes) = (0, 0);
        for role in roles {
            let spec = role.spec(self.config);
            let elements = spec.shape.iter().map(|&d| d as u64).product();
            let totals = self.classes.get_mut(role.class(self.config));
            totals.add(params(Some(role), elements), spec.bytes());
            tensors += 1;
            data_bytes += spec.bytes();
        }
        self.finish_shard(tensors, data_bytes)
    }

    fn vision(&mut self, shapes: &[(u64, &[u64])]) {
        let (mut tensors, mut data_bytes) = (0, 0);
        for &(count, shape) in shapes {
            let elements: u64 = shape.iter().product();
            for _ in 0..count {
                let totals = self.classes.get_mut(TensorClass::Vision);
                totals.add(elements, 2 * elements);
            }
            tensors += count;
            data_bytes += count * 2 * elements;
        }
        self.finish_shard(tensors, data_bytes);
    }

    fn finish_shard(&mut self, tensors: u64, data_bytes: u64) -> (String, u64) {
        let (file, bytes) = self.sizes.next().unwrap_or_default();
        let header_bytes = bytes.saturating_sub(data_bytes);
        self.shards.push(ShardRecord {
            file: file.into(),
            bytes,
            expected_bytes: Some(bytes),
            tensors,
            header_bytes,
            sha256: None,
        });
        (file.into(), header_bytes)
    }
}
