//! k3-census as a process: exit codes, streams, JSON, and one test for each way a checkpoint goes wrong.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use k3_shared::formats::census::{Census, digests::ExpertDigests};
use sha2::{Digest as _, Sha256};

// The small checkpoint of shared's own tests.
#[path = "../../../shared/src/checkpoint/tests/small.rs"]
mod small;
use k3_shared::{self as shared, checkpoint::hex};
use small::{Small, Tensor, shard_bytes, shard_name};

const INDEX: &str = "model.safetensors.index.json";

struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Run {
    fn census(&self) -> Census {
        Census::parse(self.stdout.as_bytes(), Path::new("stdout")).unwrap()
    }

    /// The problems, each as one line; the exit code and `ok` must agree with them.
    fn problems(&self) -> Vec<String> {
        let census = self.census();
        assert_eq!(census.ok, census.problems.is_empty());
        assert_eq!(self.code, i32::from(!census.ok), "{}", self.stderr);
        census.problems.iter().map(ToString::to_string).collect()
    }
}

fn census(dir: &Path, args: &[&str]) -> Run {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(env!("CARGO_BIN_EXE_k3-census"))
        .arg(dir)
        .args(args)
        .output()
        .unwrap();
    Run {
        code: status.code().unwrap(),
        stdout: String::from_utf8(stdout).unwrap(),
        stderr: String::from_utf8(stderr).unwrap(),
    }
}

/// Exactly one problem, with all these words.
fn one(problems: &[String], words: &[&str]) {
    assert_eq!(problems.len(), 1, "{problems:#?}");
    all_words(&problems[0], words);
}

fn all_words(problem: &str, words: &[&str]) {
    for word in words {
        assert!(problem.contains(word), "{word}: {problem}");
    }
}

#[test]
fn a_whole_checkpoint_is_counted() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let run = census(&dir, &[]);
    assert!(run.problems().is_empty(), "{}", run.stderr);
    let census = run.census();
    let tensors: Vec<&Tensor> = small.shards.values().flatten().collect();
    let bytes: usize = tensors.iter().map(|t| t.data.len()).sum();
    assert_eq!(census.num_tensors, tensors.len() as u64);
    assert_eq!(census.total_bytes, bytes as u64);
    assert_eq!((census.num_shards, census.layers.len()), (7, 4));
    assert_eq!((census.expert_bytes, census.num_experts_total), (9_792, 36));
    assert_eq!(census.identity.as_ref().map(String::len), Some(64));
    assert_eq!(census.scale_bytes_nan, None);
    for (number, shard) in (1..).zip(&census.shards) {
        let file = fs::read(dir.join(shard_name(number))).unwrap();
        assert_eq!(shard.file, shard_name(number));
        assert_eq!(shard.bytes, file.len() as u64);
        let json = u64::from_le_bytes(file[..8].try_into().unwrap());
        assert_eq!(shard.header_bytes, 8 + json);
        assert_eq!((shard.expected_bytes, &shard.sha256), (None, &None));
    }
    for layer in &census.layers {
        assert!(layer.contiguous);
        let shard = &census.shards[layer.layer.get()];
        assert_eq!(
            (&layer.shard, layer.trunk_offset),
            (&shard.file, shard.header_bytes)
        );
        let data = shard.bytes - shard.header_bytes;
        assert_eq!(layer.trunk_bytes + layer.expert_bytes_total, data);
    }
    assert!(run.stderr.contains("whole, no problems"), "{}", run.stderr);
    assert!(run.stderr.contains("no tiktoken.model"), "{}", run.stderr);
}

#[test]
fn the_json_has_the_names_that_scripts_rely_on() {
    let (_guard, dir) = Small::new().folder();
    let run = census(&dir, &["--hash", "-q"]);
    assert!(run.stderr.is_empty(), "{}", run.stderr);
    let json: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    for key in [
        "schema",
        "model_dir",
        "identity",
        "num_shards",
        "num_tensors",
        "total_bytes",
        "total_file_bytes",
        "total_params",
        "ok",
        "problems",
        "classes",
        "expert_bytes",
        "num_experts_total",
        "layers",
        "shards",
        "scale_bytes_nan",
        "config",
        "trunk_exceptions",
    ] {
        assert!(json.get(key).is_some(), "{key}");
    }
    assert_eq!(json["schema"], "k3.census/1");
    for class in [
        "routed_experts",
        "shared_experts",
        "kda_attention",
        "mla_attention",
        "router",
        "latent_projections",
        "dense_mlp",
        "norms",
        "attention_residuals",
        "embedding",
        "output_head",
        "final",
        "vision",
    ] {
        for key in ["tensors", "params", "bytes"] {
            assert!(json["classes"][class][key].is_u64(), "{class} {key}");
        }
    }
    let layers = [
        ("kda", "dense"),
        ("mla", "moe"),
        ("kda", "moe"),
        ("mla", "moe"),
    ];
    for (layer, (mixer, mlp)) in layers.into_iter().enumerate() {
        let found = &json["layers"][layer];
        assert_eq!(
            (&found["mixer"], &found["mlp"]),
            (&mixer.into(), &mlp.into())
        );
        for key in ["layer", "trunk_offset", "trunk_bytes", "expert_bytes_total"] {
            assert!(found[key].is_u64(), "{key}");
        }
    }
    assert!(json["shards"][0]["sha256"].is_string());
}

#[test]
fn the_output_file_replaces_standard_output() {
    let (_guard, dir) = Small::new().folder();
    let file = dir.join("census.json");
    let run = census(&dir, &["-o", file.to_str().unwrap()]);
    assert_eq!((run.code, run.stdout.as_str()), (0, ""));
    assert!(Census::open(&file).unwrap().ok);
    assert!(!census(&dir, &["-o", "-"]).stdout.is_empty());
}

#[test]
fn usage_and_environment_errors_exit_with_two_and_say_what_to_do() {
    let (_guard, dir) = Small::new().folder();
    for args in [
        &["--layers", "0"][..],
        &["--threads", "0"],
        &["--experts"],
        &["--manifest", "/nonexistent"],
        &["--expect", "/nonexistent"],
        &["-o", "/nonexistent/census.json"],
    ] {
        let run = census(&dir, args);
        assert_eq!(run.code, 2, "{args:?}: {}", run.stderr);
        assert!(!run.stderr.is_empty());
    }
    let run = census(Path::new("/nonexistent"), &[]);
    assert_eq!(run.code, 2);
    all_words(&run.stderr, &["/nonexistent", "config.json"]);
    assert_eq!(census(&dir.join("config.json"), &[]).code, 2);
    fs::write(dir.join("config.json"), "{}").unwrap();
    let run = census(&dir, &[]);
    assert_eq!(run.code, 2);
    all_words(&run.stderr, &["hidden_size", "num_experts"]);
}

#[test]
fn a_folder_without_shards_is_not_whole() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), small::CONFIG).unwrap();
    let problems = census(dir.path(), &[]).problems();
    all_words(&problems[0], &["no *.safetensors"]);
}

#[test]
fn missing_shards_are_all_named_with_and_without_an_index() {
    let (_guard, dir) = Small::new().folder();
    for number in [1, 3] {
        fs::remove_file(dir.join(shard_name(number))).unwrap();
    }
    for _ in 0..2 {
        let run = census(&dir, &[]);
        let problems = run.problems();
        assert_eq!(problems.len(), 2, "{problems:#?}");
        all_words(&problems[0], &[&shard_name(1), "missing"]);
        all_words(&problems[1], &[&shard_name(3), "missing"]);
        assert_eq!(run.census().identity, None);
        let _ = fs::remove_file(dir.join(INDEX));
    }
}

#[test]
fn a_text_only_download_is_whole_and_has_the_same_identity() {
    let (_guard, dir) = Small::new().folder();
    let full = census(&dir, &[]).census();
    for number in [6, 7] {
        fs::remove_file(dir.join(shard_name(number))).unwrap();
    }
    for _ in 0..2 {
        let run = census(&dir, &[]);
        assert!(run.problems().is_empty(), "{}", run.stderr);
        assert!(run.stderr.contains(&shard_name(6)), "absence is mentioned");
        assert_eq!(run.census().identity, full.identity);
        let _ = fs::remove_file(dir.join(INDEX));
    }
}

#[test]
fn the_first_layers_are_whole_in_their_own_terms() {
    let (_guard, dir) = Small::new().folder();
    let first = census(&dir, &["--layers", "2"]).census();
    assert_eq!(
        (first.num_shards, first.layers.len(), first.first_layers),
        (3, 2, Some(2))
    );
    for number in [3, 4, 6, 7] {
        fs::remove_file(dir.join(shard_name(number))).unwrap();
    }
    let run = census(&dir, &["--layers", "2"]);
    assert!(run.problems().is_empty(), "{}", run.stderr);
    let partial = run.census();
    assert_eq!(partial, first);
    assert_eq!(census(&dir, &[]).problems().len(), 2);
    let all = census(&dir, &["--layers", "4"]).census();
    assert_eq!(all.first_layers, None, "all layers are no part");
}

#[test]
fn malformed_shards_are_refused_with_file_tensor_and_offset() {
    let (_guard, dir) = Small::new().folder();
    let path = dir.join(shard_name(2));
    let good = fs::read(&path).unwrap();
    let json = usize::try_from(u64::from_le_bytes(good[..8].try_into().unwrap())).unwrap();
    let text = String::from_utf8(good[8..8 + json].to_vec()).unwrap();
    let rewrite = |text: &str| {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes.extend(&good[8 + json..]);
        bytes
    };
    let mut longer = good.clone();
    longer.push(0);
    let mut huge = good.clone();
    huge[..8].copy_from_slice(&[0xff; 8]);
    let overlap = text.replacen("\"data_offsets\":[0,", "\"data_offsets\":[8,", 1);
    let cases: Vec<(Vec<u8>, &[&str])> = vec![
        (
            good[..good.len() - 1].to_vec(),
            &["experts.9.w3.weight_scale", "at byte", "truncated"],
        ),
        (longer, &["1 bytes after the last tensor", "at byte"]),
        (huge, &["18446744073709551615", "at byte 0"]),
        (rewrite(&overlap), &["e_score_correction_bias", "at byte"]),
        (
            rewrite(&text.replacen("\"dtype\":\"U8\"", "\"dtype\":\"U9\"", 1)),
            &["U9", "at byte", "experts.0.w1.weight_packed"],
        ),
        (
            rewrite(&text[1..]),
            &["does not begin with '{'", "at byte 8"],
        ),
        (good[..4].to_vec(), &["4 bytes, too few"]),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n".to_vec(),
            &["Git-LFS pointer"],
        ),
    ];
    for (bytes, words) in cases {
        fs::write(&path, bytes).unwrap();
        let problems = census(&dir, &[]).problems();
        assert!(
            problems.iter().all(|p| p.contains(&shard_name(2))),
            "{problems:#?}"
        );
        let found = problems.iter().any(|p| words.iter().all(|w| p.contains(w)));
        assert!(found, "{words:?}: {problems:#?}");
        assert!(
            !problems.iter().any(|p| p.contains("calls for it")),
            "{problems:#?}"
        );
    }
}

#[test]
fn problems_of_several_kinds_come_in_one_run() {
    let mut small = Small::new();
    small
        .tensor_mut("language_model.model.layers.2.self_attn.A_log")
        .data[63] = 1;
    let scale = small
        .tensor_mut("language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale");
    scale.shape.reverse();
    let (_guard, dir) = small.folder();
    fs::remove_file(dir.join(shard_name(4))).unwrap();
    fs::write(dir.join(shard_name(1)), "nonsense").unwrap();
    let problems = census(&dir, &[]).problems();
    assert_eq!(problems.len(), 4, "{problems:#?}");
    for number in 1..=4 {
        assert!(
            problems.iter().any(|p| p.contains(&shard_name(number))),
            "{number}"
        );
    }
}

#[test]
fn a_log_entries_past_the_heads_must_be_zero() {
    let mut small = Small::new();
    let tensor = small.tensor_mut("language_model.model.layers.2.self_attn.A_log");
    tensor.data[4 * 15 + 2] = 1;
    let (_guard, dir) = small.folder();
    one(
        &census(&dir, &[]).problems(),
        &["layers.2.self_attn.A_log", "at byte", "past num_heads"],
    );
}

#[test]
fn types_the_release_does_not_have_are_listed_but_whole() {
    let mut small = Small::new();
    let name = "language_model.model.layers.0.mlp.gate_proj.weight";
    let tensor = small.tensor_mut(name);
    tensor.dtype = "F32";
    tensor.data = vec![0; tensor.data.len() * 2];
    let a_log = "language_model.model.layers.0.self_attn.A_log";
    let tensor = small.tensor_mut(a_log);
    tensor.shape = vec![5];
    tensor.data.truncate(20);
    small.sort();
    let (_guard, dir) = small.folder();
    let run = census(&dir, &[]);
    assert!(run.problems().is_empty(), "{}", run.stderr);
    let mut found = run.census().trunk_exceptions;
    found.sort_by(|a, b| a.tensor.cmp(&b.tensor));
    let found: Vec<_> = found
        .iter()
        .map(|e| (e.tensor.as_str(), e.dtype.as_str(), e.shape.as_slice()))
        .collect();
    assert_eq!(found, [(name, "F32", &[40, 32][..]), (a_log, "F32", &[5])]);
}

#[test]
fn index_and_headers_are_compared_both_ways() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.join(INDEX)).unwrap()).unwrap();
    let check = |change: &dyn Fn(&mut serde_json::Value), words: &[&str]| {
        let mut changed = index.clone();
        change(&mut changed);
        fs::write(dir.join(INDEX), changed.to_string()).unwrap();
        one(&census(&dir, &[]).problems(), words);
    };
    let head = "language_model.lm_head.weight";
    let vision = "mm_projector.post_norm.weight";
    check(
        &|i| i["metadata"]["total_size"] = 1.into(),
        &[INDEX, "total_size 1"],
    );
    check(
        &|i| drop(i["weight_map"].as_object_mut().unwrap().remove(head)),
        &[&shard_name(5), head, "does not list"],
    );
    check(
        &|i| drop(i["weight_map"].as_object_mut().unwrap().remove(vision)),
        &[&shard_name(6), "not named by the index"],
    );
    check(
        &|i| i["weight_map"][head] = shard_name(1).into(),
        &[&shard_name(5), head, &shard_name(1)],
    );
    check(
        &|i| i["weight_map"]["extra"] = shard_name(1).into(),
        &[INDEX, "lists 1 tensors", &shard_name(1)],
    );
    let mut outside = index.clone();
    outside["weight_map"][head] = "../x.safetensors".into();
    fs::write(dir.join(INDEX), outside.to_string()).unwrap();
    let problems = census(&dir, &[]).problems();
    all_words(&problems[0], &[INDEX, "../x.safetensors"]);
}

#[test]
fn an_index_may_name_absent_files_that_hold_no_text() {
    let (_guard, dir) = Small::new().folder();
    let mut index: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.join(INDEX)).unwrap()).unwrap();
    index["weight_map"]["vision_tower.x"] = "gone.safetensors".into();
    fs::write(dir.join(INDEX), index.to_string()).unwrap();
    assert!(census(&dir, &[]).problems().is_empty());
    index["weight_map"]["language_model.model.norm.weight"] = "gone.safetensors".into();
    fs::write(dir.join(INDEX), index.to_string()).unwrap();
    let problems = census(&dir, &[]).problems();
    assert!(
        problems
            .iter()
            .any(|p| p.starts_with("gone.safetensors: is missing")),
        "{problems:#?}"
    );
}

#[test]
fn a_tensor_in_two_shards_names_both() {
    let mut small = Small::new();
    let copy = small.shards[&shard_name(2)][0].clone();
    let (name, file) = (copy.name.clone(), shard_name(5));
    small.shards.get_mut(&file).unwrap().push(copy);
    let (_guard, dir) = small.folder();
    let problems = census(&dir, &[]).problems();
    let twice = problems.iter().find(|p| p.contains("is also in")).unwrap();
    all_words(twice, &[&name, &shard_name(2), &file]);
}

#[test]
fn names_of_no_part_of_the_model_are_problems() {
    for name in ["language_model.model.layers.0.extra", "rotary.inv_freq"] {
        let mut small = Small::new();
        let tensor = Tensor {
            name: name.into(),
            dtype: "F32",
            shape: vec![1],
            data: vec![0; 4],
        };
        small.shards.get_mut(&shard_name(1)).unwrap().push(tensor);
        let (_guard, dir) = small.folder();
        one(&census(&dir, &[]).problems(), &[name, &shard_name(1)]);
    }
}

#[test]
fn experts_need_to_be_blocks_but_in_any_order() {
    let mut small = Small::new();
    small
        .shards
        .get_mut(&shard_name(3))
        .unwrap()
        .rotate_right(6);
    let (_guard, dir) = small.folder();
    let run = census(&dir, &[]);
    assert!(run.problems().is_empty());
    assert!(run.stderr.contains("another order"), "{}", run.stderr);
    small
        .shards
        .get_mut(&shard_name(4))
        .unwrap()
        .rotate_right(3);
    let (_guard, dir) = small.folder();
    let run = census(&dir, &[]);
    one(
        &run.problems(),
        &["experts.9.w1.weight_packed", "not one block"],
    );
    assert!(!run.census().layers[3].contiguous || run.census().layers[3].trunk_offset > 0);
}

#[test]
fn a_links_target_is_named_when_it_is_gone() {
    let (_guard, dir) = Small::new().folder();
    let snapshot = dir.join("snapshots");
    fs::create_dir(&snapshot).unwrap();
    for entry in fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let target = Path::new("..").join(path.file_name().unwrap());
            std::os::unix::fs::symlink(target, snapshot.join(path.file_name().unwrap())).unwrap();
        }
    }
    std::os::unix::fs::symlink("../blobs/voc", snapshot.join("tiktoken.model")).unwrap();
    one(
        &census(&snapshot, &[]).problems(),
        &["tiktoken.model", "../blobs/voc"],
    );
    fs::remove_file(dir.join(shard_name(7))).unwrap();
    let problems = census(&snapshot, &[]).problems();
    assert_eq!(problems.len(), 2, "{problems:#?}");
    all_words(
        &problems[0],
        &[&shard_name(7), &format!("link to ../{}", shard_name(7))],
    );
    fs::remove_file(dir.join("config.json")).unwrap();
    let run = census(&snapshot, &[]);
    assert_eq!(run.code, 2);
    all_words(&run.stderr, &["config.json", "../config.json"]);
}

#[test]
fn sizes_are_compared_with_a_manifest() {
    let (_guard, dir) = Small::new().folder();
    let manifest = dir.join("sizes.txt");
    let size = fs::metadata(dir.join(shard_name(1))).unwrap().len();
    fs::write(&manifest, format!("# sizes\n{} {size}\n", shard_name(1))).unwrap();
    let args = ["--manifest", manifest.to_str().unwrap()];
    let run = census(&dir, &args);
    assert!(run.problems().is_empty());
    assert_eq!(run.census().shards[0].expected_bytes, Some(size));
    fs::write(&manifest, format!("{} 77\n", shard_name(1))).unwrap();
    one(
        &census(&dir, &args).problems(),
        &[&shard_name(1), "77", &size.to_string()],
    );
    assert!(census(&dir, &["--manifest", "none"]).problems().is_empty());
    fs::write(&manifest, "a b\n").unwrap();
    let run = census(&dir, &args);
    assert_eq!(run.code, 2);
    all_words(&run.stderr, &["sizes.txt", "line 1"]);
    assert_eq!(
        census(&dir, &["--manifest", "kimi-k3"]).problems().len(),
        0,
        "other names"
    );
}

#[test]
fn hashes_are_those_of_the_files() {
    let (_guard, dir) = Small::new().folder();
    let run = census(&dir, &["--hash"]);
    assert!(run.problems().is_empty(), "{}", run.stderr);
    let census = run.census();
    assert_eq!(census.scale_bytes_nan, Some(0));
    for shard in &census.shards {
        let file = fs::read(dir.join(&shard.file)).unwrap();
        assert_eq!(shard.sha256, Some(hex(Sha256::digest(file))));
    }
}

#[test]
fn nan_scales_are_counted_and_nan_like_weights_are_not() {
    let mut small = Small::new();
    let prefix = "language_model.model.layers.1.block_sparse_moe.experts.7";
    small.tensor_mut(&format!("{prefix}.w2.weight_scale")).data[5] = 255;
    small.tensor_mut(&format!("{prefix}.w3.weight_scale")).data[..2].fill(255);
    small
        .tensor_mut(&format!("{prefix}.w3.weight_packed"))
        .data
        .fill(255);
    let (_guard, dir) = small.folder();
    let run = census(&dir, &["--hash"]);
    one(
        &run.problems(),
        &["experts.7.w2.weight_scale", "3 scale bytes", "at byte"],
    );
    assert_eq!(run.census().scale_bytes_nan, Some(3));
    assert!(census(&dir, &[]).problems().is_empty(), "not read");
}

#[test]
fn experts_get_a_digest_each() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let run = census(&dir, &["--hash", "--experts"]);
    assert!(run.problems().is_empty(), "{}", run.stderr);
    let digests = ExpertDigests::open(&dir.join("k3-experts.sha256")).unwrap();
    assert_eq!(Some(&digests.identity), run.census().identity.as_ref());
    assert_eq!((digests.len(), digests.layers), (36, 4));
    for (id, digest) in digests.iter() {
        let prefix = format!(
            "layers.{}.block_sparse_moe.experts.{}.",
            id.layer, id.expert
        );
        let mut hash = Sha256::new();
        for tensor in small
            .shards
            .values()
            .flatten()
            .filter(|t| t.name.contains(&prefix))
        {
            hash.update(&tensor.data);
        }
        assert_eq!(hex(digest), hex(hash.finalize()), "{prefix}");
    }
    let file = dir.join("elsewhere.sha256");
    census(&dir, &["--hash", "--experts", file.to_str().unwrap()]);
    assert_eq!(ExpertDigests::open(&file).unwrap(), digests);
}

#[test]
fn digests_of_a_damaged_checkpoint_are_not_written() {
    let (_guard, dir) = Small::new().folder();
    fs::remove_file(dir.join(shard_name(4))).unwrap();
    let run = census(&dir, &["--hash", "--experts"]);
    assert_eq!(run.code, 1);
    assert!(!dir.join("k3-experts.sha256").exists());
}

#[test]
fn a_bit_flipped_in_the_middle_is_found_against_an_earlier_census() {
    let (_guard, dir) = Small::new().folder();
    let before = dir.join("before.json");
    let before = before.to_str().unwrap();
    assert_eq!(census(&dir, &["--hash", "-o", before]).code, 0);
    assert!(
        census(&dir, &["--hash", "--expect", before])
            .problems()
            .is_empty()
    );
    let path = dir.join(shard_name(3));
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() - 5_000;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let run = census(&dir, &["--expect", before]);
    assert!(run.problems().is_empty(), "headers alone cannot tell");
    assert!(
        run.stderr.contains("--hash"),
        "but it says so: {}",
        run.stderr
    );
    one(
        &census(&dir, &["--hash", "--expect", before]).problems(),
        &[&shard_name(3), "SHA-256"],
    );
    for number in [6, 7] {
        fs::remove_file(dir.join(shard_name(number))).unwrap();
    }
    let problems = census(&dir, &["--hash", "--expect", before]).problems();
    one(&problems, &[&shard_name(3), "SHA-256"]);
}

#[test]
fn a_mixed_snapshot_is_found_against_an_earlier_census() {
    let small = Small::new();
    let (_guard, dir) = small.folder();
    let before = dir.join("before.json");
    let before = before.to_str().unwrap();
    census(&dir, &["-o", before]);
    let mut other = small.shards[&shard_name(1)].clone();
    other[0].data[0] ^= 1;
    fs::write(dir.join(shard_name(1)), shard_bytes(&other)).unwrap();
    one(
        &census(&dir, &["--expect", before]).problems(),
        &["identity"],
    );
}

#[test]
fn lines_of_sha256sum_are_compared() {
    let (_guard, dir) = Small::new().folder();
    let sums = dir.join("SHA256SUMS");
    let line = |name: &str| {
        format!(
            "{}  {name}\n",
            hex(Sha256::digest(fs::read(dir.join(name)).unwrap()))
        )
    };
    let mut text: String = (1..=7).map(|n| line(&shard_name(n))).collect();
    text += &line("config.json");
    fs::write(&sums, &text).unwrap();
    let args = ["--hash", "--expect", sums.to_str().unwrap()];
    assert!(census(&dir, &args).problems().is_empty());
    assert_eq!(census(&dir, &args[1..]).code, 2, "needs --hash");
    fs::write(dir.join("config.json"), format!("{} ", small::CONFIG)).unwrap();
    one(&census(&dir, &args).problems(), &["config.json", "SHA-256"]);
    fs::write(&sums, "nonsense\n").unwrap();
    let run = census(&dir, &args);
    assert_eq!(run.code, 2);
    all_words(&run.stderr, &["SHA256SUMS", "line 1"]);
}

#[test]
fn a_closed_pipe_is_a_success() {
    let (_guard, dir) = Small::new().folder();
    let script = r#""$0" "$1" -q | true; exit "${PIPESTATUS[0]}""#;
    let status = Command::new("bash")
        .args(["-c", script, env!("CARGO_BIN_EXE_k3-census")])
        .arg(&dir)
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
fn thread_counts_change_nothing() {
    let (_guard, dir) = Small::new().folder();
    let one = census(&dir, &["--threads", "1", "--hash"]);
    let many = census(&dir, &["--threads", "9", "--hash"]);
    assert_eq!(one.stdout, many.stdout);
}
