//! Layer records of the census.

use k3_shared::{
    checkpoint::{Checkpoint, ExpertOrder, TensorLocation},
    config::Mlp,
    formats::census::{LayerRecord, Problem, ProblemList},
    ids::{ExpertId, ExpertIdx, LayerIdx},
    names::{ExpertTensor, TensorRole, layer_tensors},
};

/// The records of the opened layers of which anything was found; experts that are no blocks are problems.
pub(crate) fn records(checkpoint: &Checkpoint, problems: &mut Vec<Problem>) -> Vec<LayerRecord> {
    let layers = checkpoint.config.layers().take(checkpoint.layers);
    layers
        .filter_map(|layer| record(checkpoint, layer, problems))
        .collect()
}

fn record(
    checkpoint: &Checkpoint,
    layer: LayerIdx,
    problems: &mut Vec<Problem>,
) -> Option<LayerRecord> {
    let config = &checkpoint.config;
    let trunk: Vec<TensorLocation> = layer_tensors(config, layer)
        .filter_map(|tensor| checkpoint.tensor(TensorRole::Layer(layer, tensor)).ok())
        .collect();
    let first = trunk.iter().min_by_key(|at| (at.shard, at.offset))?;
    let end = trunk.iter().map(|at| at.offset + at.bytes).max()?;
    let trunk_bytes = trunk.iter().map(|at| at.bytes).fold(0, u64::saturating_add);
    let one_shard = trunk.iter().all(|at| at.shard == first.shard);
    let shard = checkpoint.shards().get(first.shard.0 as usize)?;
    let experts = whole_experts(checkpoint, layer);
    if checkpoint.expert_order(layer) == Some(ExpertOrder::Scattered) {
        problems.extend(scattered(checkpoint, &shard.name, &experts));
    }
    Some(LayerRecord {
        layer,
        mixer: *config.mixers.get(layer.get())?,
        mlp: config.mlp(layer),
        shard: shard.name.clone(),
        trunk_offset: first.offset,
        trunk_bytes,
        contiguous: one_shard && end - first.offset == trunk_bytes,
        expert_bytes_total: config
            .moe
            .expert_bytes()
            .saturating_mul(experts.len() as u64),
    })
}

/// Experts of which all six tensors were found.
fn whole_experts(checkpoint: &Checkpoint, layer: LayerIdx) -> Vec<ExpertId> {
    let config = &checkpoint.config;
    if config.mlp(layer) == Mlp::Dense {
        return Vec::new();
    }
    let experts = (0..).map(ExpertIdx).take(config.moe.num_experts);
    experts
        .map(|expert| ExpertId { layer, expert })
        .filter(|&id| {
            ExpertTensor::ALL
                .iter()
                .all(|&tensor| checkpoint.expert_tensor(id, tensor).is_ok())
        })
        .collect()
}

fn scattered(checkpoint: &Checkpoint, file: &str, experts: &[ExpertId]) -> Vec<Problem> {
    let mut problems = ProblemList::new(file);
    for &id in experts {
        if checkpoint.expert(id).is_err()
            && let Ok((shard, offset)) = checkpoint.expert_tensor(id, ExpertTensor::W1Packed)
        {
            let name = TensorRole::Expert(id, ExpertTensor::W1Packed).name();
            let shard = checkpoint.shard_path(shard);
            let message = format!(
                "the six tensors of this expert ({}) are not one block in the common order",
                shard.display()
            );
            problems.tensor(&name, offset, message);
        }
    }
    problems.into_vec()
}
