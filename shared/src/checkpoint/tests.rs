use std::fs;

use super::*;
use crate as shared;
use crate::{
    ids::{ExpertIdx, LayerIdx},
    names::{LayerTensor, TOP_TENSORS, layer_tensors},
};

mod small;

use small::{Small, shard_name};

fn id(layer: u32, expert: u32) -> ExpertId {
    ExpertId {
        layer: LayerIdx(layer),
        expert: ExpertIdx(expert),
    }
}

fn problems(dir: &Path, layers: Option<usize>) -> Vec<String> {
    match Checkpoint::open(dir, layers) {
        Ok(_) => Vec::new(),
        Err(CheckpointError::Problems { problems, .. }) => {
            problems.iter().map(ToString::to_string).collect()
        }
        Err(other) => panic!("{other}"),
    }
}

/// Every tensor is where the checkpoint says, byte for byte.
fn check_contents(checkpoint: &Checkpoint, small: &Small) {
    let mut roles = TOP_TENSORS.to_vec();
    for layer in checkpoint.config.layers().take(checkpoint.layers) {
        roles.extend(layer_tensors(&checkpoint.config, layer).map(|t| TensorRole::Layer(layer, t)));
        if checkpoint.config.mlp(layer) == Mlp::Moe {
            let experts = (0..12).map(|e| id(layer.0, e));
            roles.extend(experts.flat_map(|e| ExpertTensor::ALL.map(|t| TensorRole::Expert(e, t))));
        }
    }
    for role in roles {
        let location = checkpoint.tensor(role).unwrap();
        let file = fs::read(checkpoint.shard_path(location.shard)).unwrap();
        let range = usize::try_from(location.offset).unwrap()..;
        let found = &file[range][..usize::try_from(location.bytes).unwrap()];
        let mut all = small.shards.values().flatten();
        let want = all.find(|t| t.name == role.name()).unwrap();
        assert!(found == want.data, "{}", want.name);
        assert_eq!(location.shape, want.shape);
        if let TensorRole::Expert(id, tensor) = role
            && let Ok(block) = checkpoint.expert(id)
        {
            let inner = checkpoint.expert_layout()[tensor as usize];
            assert_eq!(
                (block.shard, block.offset + inner.offset, inner.len),
                (location.shard, location.offset, location.bytes)
            );
            assert_eq!(block.bytes, checkpoint.config.moe.expert_bytes());
        }
    }
}

#[test]
fn every_tensor_is_found_where_it_was_written() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let checkpoint = Checkpoint::open(&dir, None).unwrap();
    check_contents(&checkpoint, &small);
    assert_eq!(checkpoint.layers, 4);
    assert_eq!(checkpoint.shards().len(), 5, "vision shards are not opened");
    for layer in 1..4 {
        assert_eq!(
            checkpoint.expert_order(LayerIdx(layer)),
            Some(ExpertOrder::Strings)
        );
    }
    assert_eq!(checkpoint.expert_order(LayerIdx(0)), None);
    assert!(checkpoint.expert(id(0, 0)).is_err());
    assert!(checkpoint.expert(id(1, 12)).is_err());
}

#[test]
fn expert_blocks_follow_the_trunk_in_string_order() {
    let (_guard, dir) = Small::new().folder();
    let checkpoint = Checkpoint::open(&dir, None).unwrap();
    let offset = |e| checkpoint.expert(id(1, e)).unwrap().offset;
    let bytes = checkpoint.config.moe.expert_bytes();
    assert_eq!(bytes, 9_792);
    for (rank, expert) in (0..).zip([0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]) {
        assert_eq!(offset(expert), offset(0) + rank * bytes);
    }
}

#[test]
fn experts_in_another_order_are_found_too() {
    let mut small = Small::new();
    let layer = small.shards.get_mut(&shard_name(2)).unwrap();
    layer.reverse();
    let layer = small.shards.get_mut(&shard_name(3)).unwrap();
    let last = layer.len() - 6;
    layer.rotate_right(6);
    assert!(layer[0].name.contains("experts.9."), "{last}");
    let (_guard, dir) = small.folder();
    let checkpoint = Checkpoint::open(&dir, None).unwrap();
    check_contents(&checkpoint, &small);
    let order = |layer| checkpoint.expert_order(LayerIdx(layer)).unwrap();
    assert_eq!(order(1), ExpertOrder::Scattered, "reversed inside too");
    assert_eq!(order(2), ExpertOrder::Blocks);
    assert_eq!(order(3), ExpertOrder::Strings);
    assert!(checkpoint.expert(id(2, 9)).is_ok());
    let error = checkpoint.expert(id(1, 9)).unwrap_err().to_string();
    assert!(error.contains("expert 9 in layer 1"), "{error}");
}

#[test]
fn a_layout_that_all_experts_share_is_the_layout() {
    let mut small = Small::new();
    for tensors in small.shards.values_mut() {
        let experts = tensors.iter().position(|t| t.dtype == "U8");
        let experts = experts.unwrap_or(tensors.len());
        for six in tensors[experts..].chunks_exact_mut(6) {
            six.reverse();
        }
    }
    let (_guard, dir) = small.folder();
    let checkpoint = Checkpoint::open(&dir, None).unwrap();
    check_contents(&checkpoint, &small);
    assert_eq!(
        checkpoint.expert_order(LayerIdx(1)),
        Some(ExpertOrder::Blocks)
    );
    assert_eq!(checkpoint.expert_layout()[5].offset, 0, "w3 scale is first");
    assert!(checkpoint.expert(id(3, 11)).is_ok());
}

#[test]
fn a_layer_may_be_split_over_shards() {
    let mut small = Small::new();
    let layer = small.shards.get_mut(&shard_name(3)).unwrap();
    let moved = layer.split_off(layer.len() - 20);
    small.shards.get_mut(&shard_name(5)).unwrap().extend(moved);
    let (_guard, dir) = small.folder();
    let checkpoint = Checkpoint::open(&dir, None).unwrap();
    check_contents(&checkpoint, &small);
    assert!(checkpoint.expert(id(2, 9)).is_ok());
    let split = (0..12).filter(|&e| checkpoint.expert(id(2, e)).is_err());
    assert_eq!(split.count(), 1, "20 tensors are three experts and a third");
}

#[test]
fn the_index_is_not_needed() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let with = Checkpoint::open(&dir, None).unwrap();
    fs::remove_file(dir.join(INDEX_FILE)).unwrap();
    let without = Checkpoint::open(&dir, None).unwrap();
    check_contents(&without, &small);
    assert_eq!(with.identity(), without.identity());
    assert_eq!(Checkpoint::open(&dir, Some(2)).unwrap().shards().len(), 3);
}

#[test]
fn tensors_that_the_index_omits_are_found_in_the_shards() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    fs::write(dir.join(INDEX_FILE), r#"{"weight_map":{}}"#).unwrap();
    check_contents(&Checkpoint::open(&dir, None).unwrap(), &small);
}

#[test]
fn a_text_only_download_has_the_identity_of_a_full_one() {
    let (_guard, dir) = Small::new().folder();
    let full = Checkpoint::open(&dir, None).unwrap();
    assert_eq!(full.identity().len(), 64);
    for vision in [6, 7] {
        fs::remove_file(dir.join(shard_name(vision))).unwrap();
    }
    let text = Checkpoint::open(&dir, None).unwrap();
    assert_eq!(full.identity(), text.identity());
}

#[test]
fn the_first_layers_have_one_identity_in_full_and_partial_downloads() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let full = Checkpoint::open(&dir, None).unwrap();
    let first = Checkpoint::open(&dir, Some(2)).unwrap();
    assert_ne!(full.identity(), first.identity());
    assert_eq!((first.layers, first.config.num_hidden_layers), (2, 4));
    for later in [3, 4, 6, 7] {
        fs::remove_file(dir.join(shard_name(later))).unwrap();
    }
    let partial = Checkpoint::open(&dir, Some(2)).unwrap();
    check_contents(&partial, &small);
    assert_eq!(first.identity(), partial.identity());
    fs::remove_file(dir.join(INDEX_FILE)).unwrap();
    let without_index = Checkpoint::open(&dir, Some(2)).unwrap();
    assert_eq!(first.identity(), without_index.identity());
    let error = partial.expert(id(2, 0)).unwrap_err().to_string();
    assert!(error.contains("--layers"), "{error}");
    let role = TensorRole::Layer(LayerIdx(2), LayerTensor::InputNorm);
    assert!(partial.tensor(role).is_err());
    let all = Checkpoint::open(&dir, Some(4));
    assert!(all.is_err(), "layer 2 and 3 are gone");
}

#[test]
fn the_identity_is_the_documented_digest() {
    use std::fmt::Write as _;

    use sha2::{Digest as _, Sha256};
    let (_guard, dir) = Small::new().folder();
    let checkpoint = Checkpoint::open(&dir, None).unwrap();
    let mut lines = format!("{}\n", checkpoint.config.to_canonical());
    for number in 1..=5 {
        let name = shard_name(number);
        let bytes = fs::read(dir.join(&name)).unwrap();
        let json = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let header = 8 + usize::try_from(json).unwrap();
        let experts = if matches!(number, 2..=4) {
            12 * 9_792
        } else {
            0
        };
        let run = &bytes[header..bytes.len() - experts];
        let sample = run.len().min(65_536);
        let sha = |bytes: &[u8]| hex(Sha256::digest(bytes));
        let (header, first) = (sha(&bytes[..header]), sha(&run[..sample]));
        let (size, last) = (bytes.len(), sha(&run[run.len() - sample..]));
        writeln!(lines, "{name} {size} {header} {first} {last}").unwrap();
    }
    assert_eq!(checkpoint.identity(), hex(Sha256::digest(lines.as_bytes())));
}

#[test]
fn the_identity_follows_what_is_hashed() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let before = Checkpoint::open(&dir, None).unwrap();
    let mut other = small.clone();
    other.config = other.config.replace("1e-5", "1e-6");
    let (_guard, dir) = other.folder();
    let config = Checkpoint::open(&dir, None).unwrap();
    let mut other = small.clone();
    other
        .tensor_mut("language_model.model.layers.0.input_layernorm.weight")
        .data[0] ^= 1;
    let (_guard, dir) = other.folder();
    let payload = Checkpoint::open(&dir, None).unwrap();
    assert_ne!(before.identity(), config.identity());
    assert_ne!(before.identity(), payload.identity());
}

#[test]
fn shards_are_taken_from_several_folders() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let home = Checkpoint::open(&dir, None).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    for number in [2, 4] {
        let name = shard_name(number);
        fs::rename(dir.join(&name), elsewhere.path().join(&name)).unwrap();
    }
    assert_eq!(problems(&dir, None).len(), 2);
    let dirs = [PathBuf::from("/nonexistent"), elsewhere.path().to_owned()];
    let spread = Checkpoint::open_in(&dir, &dirs, None).unwrap();
    check_contents(&spread, &small);
    assert_eq!(home.identity(), spread.identity());
}

#[test]
fn links_are_followed_and_dangling_ones_reported_with_their_target() {
    let (_guard, dir) = Small::new().folder();
    let blobs = dir.join("blobs");
    let snapshot = dir.join("snapshots");
    fs::create_dir(&blobs).unwrap();
    fs::create_dir(&snapshot).unwrap();
    for entry in fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let name = path.file_name().unwrap();
            fs::rename(&path, blobs.join(name)).unwrap();
            let target = Path::new("../blobs").join(name);
            std::os::unix::fs::symlink(target, snapshot.join(name)).unwrap();
        }
    }
    Checkpoint::open(&snapshot, None).unwrap();
    fs::remove_file(blobs.join(shard_name(3))).unwrap();
    let found = problems(&snapshot, None);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains(&format!("is a link to ../blobs/{}", shard_name(3))));
    fs::remove_file(dir.join("blobs").join(INDEX_FILE)).unwrap();
    let found = problems(&snapshot, None);
    assert!(found.iter().any(|p| p.contains(INDEX_FILE)), "{found:?}");
}

#[test]
fn missing_shards_are_all_named_and_their_tensors_are_not() {
    let (_guard, dir) = Small::new().folder();
    for number in [1, 3, 5] {
        fs::remove_file(dir.join(shard_name(number))).unwrap();
    }
    let found = problems(&dir, None);
    assert_eq!(found.len(), 3, "{found:?}");
    for (problem, number) in found.iter().zip([1, 3, 5]) {
        assert!(problem.contains(&shard_name(number)) && problem.contains("missing"));
    }
}

#[test]
fn missing_tensors_are_named_once() {
    let mut small = Small::new();
    for tensors in small.shards.values_mut() {
        tensors.retain(|t| {
            !t.name.contains("layers.1.block_sparse_moe.experts.7.")
                && !t
                    .name
                    .ends_with("layers.2.block_sparse_moe.experts.3.w2.weight_scale")
                && !t.name.ends_with("layers.0.self_attn.q_proj.weight")
                && !t.name.contains("layers.3.")
        });
    }
    let (_guard, dir) = small.folder();
    let found = problems(&dir, None);
    assert_eq!(found.len(), 4, "{found:#?}");
    for want in [
        "layers.1.block_sparse_moe.experts.7.*",
        "layers.2.block_sparse_moe.experts.3.w2.weight_scale",
        "layers.0.self_attn.q_proj.weight",
        "every tensor of layer 3",
    ] {
        assert!(found.iter().any(|p| p.contains(want)), "{want}: {found:#?}");
    }
}

#[test]
fn a_tensor_in_two_shards_is_refused_with_both_names() {
    let mut small = Small::new();
    let copy = small.shards[&shard_name(2)].clone();
    let trunk = copy[0].clone();
    let expert = copy.last().unwrap().clone();
    let last = small.shards.get_mut(&shard_name(5)).unwrap();
    last.extend([trunk.clone(), expert.clone()]);
    let (_guard, dir) = small.folder();
    let found = problems(&dir, None);
    assert_eq!(found.len(), 2, "{found:?}");
    for (problem, name) in found.iter().zip([&trunk.name, &expert.name]) {
        assert!(problem.contains(name.as_str()), "{problem}");
        assert!(problem.contains(&shard_name(2)) && problem.contains(&shard_name(5)));
    }
}

#[test]
fn wrong_types_and_shapes_are_refused_and_not_also_missing() {
    for (name, dtype, shape) in [
        (
            "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale",
            "F8_E8M0",
            vec![96, 2],
        ),
        (
            "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale",
            "U8",
            vec![2, 96],
        ),
        ("language_model.lm_head.weight", "F16", vec![64, 32]),
        ("language_model.model.norm.weight", "BF16", vec![32, 1]),
    ] {
        let mut small = Small::new();
        let tensor = small.tensor_mut(name);
        (tensor.dtype, tensor.shape) = (dtype, shape);
        let (_guard, dir) = small.folder();
        let found = problems(&dir, None);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(name) && found[0].contains("at byte"));
    }
}

#[test]
fn a_log_as_long_as_the_heads_is_enough() {
    for (entries, ok) in [(4, false), (5, true), (16, true)] {
        let mut small = Small::new();
        let tensor = small.tensor_mut("language_model.model.layers.0.self_attn.A_log");
        tensor.shape = vec![entries];
        tensor.data.truncate(4 * entries);
        let (_guard, dir) = small.folder();
        assert_eq!(Checkpoint::open(&dir, None).is_ok(), ok, "{entries}");
    }
}

#[test]
fn text_tensors_of_another_model_are_refused_and_foreign_ones_ignored() {
    let mut small = Small::new();
    let mut extra = small.shards[&shard_name(6)][0].clone();
    extra.name = "some.other.part".into();
    small
        .shards
        .get_mut(&shard_name(1))
        .unwrap()
        .push(extra.clone());
    let (_guard, dir) = small.folder();
    Checkpoint::open(&dir, None).unwrap();
    extra.name = "language_model.model.layers.0.self_attn.q_proj.bias".into();
    small.shards.get_mut(&shard_name(1)).unwrap().push(extra);
    let (_guard, dir) = small.folder();
    let found = problems(&dir, None);
    assert!(found[0].contains("q_proj.bias"), "{found:?}");
}

#[test]
fn malformed_indexes_are_refused() {
    for (text, word) in [
        ("", "no shard index"),
        ("[]", "no shard index"),
        (r#"{"metadata":{}}"#, "no weight_map"),
        (r#"{"weight_map":{"a":1}}"#, "no shard index"),
        (r#"{"weight_map":{}} x"#, "no shard index"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git-LFS"),
    ] {
        let (_guard, dir) = Small::new().folder();
        fs::write(dir.join(INDEX_FILE), text).unwrap();
        let found = problems(&dir, None);
        assert!(found.iter().any(|p| p.contains(word)), "{text}: {found:?}");
    }
}

#[test]
fn file_names_that_leave_the_folder_are_refused() {
    let (_guard, dir) = Small::new().folder();
    let config = Config::open(&dir).unwrap();
    let slots = Slots::new(&config).unwrap();
    let text =
        r#"{"weight_map":{"language_model.lm_head.weight":"../x.safetensors","b":"a/b","c":""}}"#;
    fs::write(dir.join(INDEX_FILE), text).unwrap();
    let index = Index::open(&dir, &config, &slots).unwrap().unwrap();
    assert!(index.files.is_empty());
    assert_eq!(index.problems.len(), 3);
}
