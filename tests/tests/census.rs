//! k3-census on whole synthetic checkpoints: the tiny one of the golden files, and the replica of the release.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{fs, path::Path};

use clap::Parser as _;
use k3_census::{Cli, run};
use k3_shared::{checkpoint::Checkpoint, formats::census::Census, term::Outcome};
use k3_tests::synth;
use serde_json::{Value, json};

fn take(dir: &Path, args: &[&str]) -> anyhow::Result<Census> {
    let dir = dir.to_str().unwrap();
    let cli = Cli::parse_from(["k3-census", dir, "-q"].iter().chain(args));
    let mut out = Vec::new();
    let outcome = run(&cli, &mut out)?;
    let census = Census::parse(&out, "stdout".as_ref())?;
    assert_eq!(outcome == Outcome::Done, census.ok);
    assert_eq!(census.problems.is_empty(), census.ok);
    Ok(census)
}

fn problems(dir: &Path) -> Vec<String> {
    let census = take(dir, &[]).unwrap();
    census.problems.iter().map(ToString::to_string).collect()
}

fn tiny() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    synth::tiny(dir.path()).unwrap();
    dir
}

fn shard(number: usize) -> String {
    format!("model-{number:05}-of-000016.safetensors")
}

#[test]
fn the_tiny_checkpoint_is_whole_and_has_its_published_totals() {
    let dir = tiny();
    let census = take(dir.path(), &["--hash"]).unwrap();
    assert!(census.ok, "{:?}", census.problems);
    assert_eq!((census.num_tensors, census.total_bytes), (1_206, 6_382_880));
    assert_eq!((census.num_shards, census.layers.len()), (16, 13));
    assert_eq!(
        (census.expert_bytes, census.num_experts_total),
        (9_792, 144)
    );
    assert_eq!(census.scale_bytes_nan, Some(0));
    assert!(
        census.trunk_exceptions.is_empty(),
        "{:?}",
        census.trunk_exceptions
    );
    let sizes = [
        (
            1,
            361_248,
            2_720,
            "fafdb05c5fc05c12c0ade4b13141c677dda9ee2239528fb643d36ef664b8c44c",
        ),
        (
            4,
            445_816,
            12_712,
            "27881dc9f04b11c2cbe8f4c25201ee1917377404abd6ea27dea88820099c3158",
        ),
        (
            11,
            503_744,
            13_456,
            "61f258b1de06a7323ecde1e9490dc20972b4d26661b92b0f8644f409e69bada0",
        ),
        (
            14,
            370_136,
            536,
            "ec640b47ea8d5da03c1fcccce474ba4c6e63445fbd33267dbf5dd7825826b328",
        ),
    ];
    for (number, bytes, header, sha256) in sizes {
        let found = &census.shards[number - 1];
        assert_eq!(
            (found.bytes, found.header_bytes),
            (bytes, header),
            "{number}"
        );
        assert_eq!(found.sha256.as_deref(), Some(sha256), "{number}");
    }
    let trunk: Vec<u64> = [0, 1, 3]
        .map(|l: usize| census.layers[l].trunk_bytes)
        .into();
    assert_eq!(trunk, [358_528, 372_784, 315_600]);
    let opened = Checkpoint::open(dir.path(), None).unwrap();
    assert_eq!(census.identity.as_deref(), Some(opened.identity()));
}

#[test]
fn every_missing_config_field_is_named() {
    let dir = tiny();
    let path = dir.path().join("config.json");
    let whole: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for field in [
        "hidden_size",
        "kv_lora_rank",
        "num_experts",
        "attn_res_block_size",
        "hidden_act",
    ] {
        let mut without = whole.clone();
        without["text_config"]
            .as_object_mut()
            .unwrap()
            .remove(field);
        fs::write(&path, without.to_string()).unwrap();
        let error = take(dir.path(), &[]).unwrap_err().to_string();
        assert!(
            error.contains(field) && error.contains("config.json"),
            "{error}"
        );
    }
}

#[test]
fn a_config_that_contradicts_the_tensors_is_found_in_every_layer() {
    let dir = tiny();
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    // Well-formed and wrong: layer 12 (counted from one) changes its mixer with layer 11.
    config["text_config"]["linear_attn_config"]["full_attn_layers"] = json!([4, 8, 11, 13]);
    config["text_config"]["linear_attn_config"]["kda_layers"] =
        json!([1, 2, 3, 5, 6, 7, 9, 10, 12]);
    fs::write(&path, config.to_string()).unwrap();
    let found = problems(dir.path());
    for number in [11, 12] {
        assert!(found.iter().any(|p| p.contains(&shard(number))), "{number}");
    }
    let others = found
        .iter()
        .filter(|p| !p.contains(&shard(11)) && !p.contains(&shard(12)));
    let others: Vec<_> = others
        .filter(|p| !p.starts_with("model.safetensors.index.json"))
        .collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[test]
fn a_byte_less_is_found_in_every_shard() {
    let dir = tiny();
    for number in 1..=16 {
        let path = dir.path().join(shard(number));
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    }
    let found = problems(dir.path());
    assert_eq!(found.len(), 16, "{found:#?}");
    for (problem, number) in found.iter().zip(1..) {
        assert!(
            problem.starts_with(&shard(number)) && problem.contains("truncated"),
            "{problem}"
        );
    }
}

#[test]
fn the_replica_of_the_release_is_the_release() {
    // Headers are real and payload is holes; needs a file system with sparse files.
    let dir = tempfile::tempdir().unwrap();
    synth::replica(dir.path()).unwrap();
    let census = take(dir.path(), &[]).unwrap();
    assert!(census.ok, "{:#?}", census.problems);
    let published = Census::of_release();
    assert_eq!(census.identity.as_ref().map(String::len), Some(64));
    let same = Census {
        model_dir: published.model_dir.clone(),
        identity: None,
        ..census.clone()
    };
    assert_eq!(same, published);
    // The first layers alone: a partial and text-only download of five shards.
    let first = take(dir.path(), &["--layers", "4"]).unwrap();
    for number in (5..=93).chain([95, 96]) {
        let name = format!("model-{number:05}-of-000096.safetensors");
        fs::remove_file(dir.path().join(name)).unwrap();
    }
    let partial = take(dir.path(), &["--layers", "4"]).unwrap();
    assert_eq!(partial, first);
    assert!(partial.ok && partial.num_shards == 5 && partial.identity != census.identity);
    let whole = take(dir.path(), &[]).unwrap();
    assert_eq!(
        whole.problems.len(),
        89,
        "every missing shard with text, by name"
    );
}
