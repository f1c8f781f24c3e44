//! What is replayed, and that it is what the engine's cache does.
#![expect(clippy::unwrap_used, reason = "a helper of tests fails its test")]

use std::path::PathBuf;

use common::{failure, header, json, traces, write_pairs, write_trace};
use k3_shared::{
    cache::{ExpertCache, GroupBuilder, PolicyKind},
    formats::trace::{Mode, Trace, TraceRecord, TraceRow},
    ids::{ExpertIdx, LayerIdx},
};
use k3_simcache::{CacheSize, PartArgs, Pass, Replay, TraceMode, simulate};
use proptest::prelude::*;
use serde_json::Value;

mod common;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The engine requests a group per layer as it goes; a replay of the trace it wrote must count the same.
    #[test]
    fn a_replay_counts_what_the_engines_cache_counted(records in traces(), slots in 3usize..40) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.trace");
        write_trace(&path, &records);
        let replay = Replay::new(Trace::open(&path).unwrap(), &path, &PartArgs::default()).unwrap();
        let engine_policies: Vec<PolicyKind> =
            PolicyKind::ALL.into_iter().filter(|kind| !kind.is_replay_only()).collect();
        let sizes = [CacheSize { slots, capacity_bytes: 0 }];
        let rows = simulate(&replay, &engine_policies, &sizes).unwrap();
        for (row, kind) in rows.iter().zip(engine_policies) {
            let geometry = header().geometry().unwrap();
            let mut cache = ExpertCache::new(kind, slots, geometry).unwrap();
            let mut builder = GroupBuilder::new(geometry);
            for record in &records {
                let group = builder.group(record.layer, record.experts.iter().copied()).unwrap();
                cache.request_group(record.layer, group);
            }
            prop_assert_eq!(row.policy, kind);
            prop_assert_eq!((row.all.requests, row.all.hits), (cache.counters().requests, cache.counters().hits));
        }
    }

    #[test]
    fn counts_of_the_prefill_and_the_decode_steps_make_up_the_whole(records in traces()) {
        prop_assume!(records.len() > 3);
        let dir = tempfile::tempdir().unwrap();
        let (whole, prefill) = (dir.path().join("whole"), dir.path().join("prefill"));
        write_trace(&whole, &records);
        write_trace(&prefill, &records[..3]);
        let args = ["--slots", "10", "--policy", "lfu"];
        let all = json(&args, &whole);
        let first = json(&args, &prefill);
        let rest = json(&[&args[..], &["--decode-only"]].concat(), &whole);
        for field in ["hits", "requests", "bytes_read"] {
            let of = |report: &Value| report["rows"][0][field].as_u64().unwrap();
            prop_assert_eq!(of(&all), of(&first) + of(&rest), "{}", field);
        }
        let of = |report: &Value| report["compulsory_misses"].as_u64().unwrap();
        prop_assert_eq!(of(&all), of(&first) + of(&rest));
        prop_assert_eq!(&rest["trace"]["mode"], "decode");
        prop_assert_eq!(&all["trace"]["mode"], "mixed");
        // The four rows of the prefill as warm-up are the same part.
        prop_assert_eq!(json(&[&args[..], &["--warmup-tokens", "4"]].concat(), &whole), rest);
    }
}

/// Two passes of a model with layers 1 and 2 and a top-2: two positions, then the same two and a third.
fn two_passes() -> Vec<(i32, i32)> {
    let first = [
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 4),
        (2, 5),
        (2, 6),
        (2, 7),
    ];
    let second = [
        [(1, 0), (1, 1), (1, 2), (1, 3), (1, 0), (1, 2)],
        [(2, 4), (2, 5), (2, 6), (2, 7), (2, 4), (2, 7)],
    ];
    first.into_iter().chain(second.concat()).collect()
}

fn pairs_replay(part: &PartArgs) -> (Replay, Vec<(u32, u32, bool)>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pairs");
    write_pairs(&path, &two_passes());
    let replay = Replay::new(Trace::open(&path).unwrap(), &path, part).unwrap();
    let requests = replay
        .groups()
        .map(|(layer, keys, phase)| {
            assert_eq!(keys.len(), 1, "each pair is its own group");
            (
                layer.0,
                replay.geometry.id(keys[0]).expert.0,
                phase.is_some(),
            )
        })
        .collect();
    (replay, requests)
}

#[test]
fn header_less_pairs_are_replayed_as_is() {
    let part = PartArgs {
        top_k: 2,
        ..PartArgs::default()
    };
    let (replay, requests) = pairs_replay(&part);
    let as_is: Vec<(i32, i32)> = requests
        .iter()
        .map(|&(layer, expert, counted)| {
            assert!(counted);
            (
                i32::try_from(layer).unwrap(),
                i32::try_from(expert).unwrap(),
            )
        })
        .collect();
    assert_eq!(as_is, two_passes());
    assert_eq!(replay.facts.tokens, Some(5));
    assert_eq!(replay.facts.mode, TraceMode::Unknown);
    assert_eq!(replay.facts.repeated_tokens, Some(2));
    assert!(
        replay.warnings.iter().any(|w| w.contains("2 passes")
            && w.contains("2 of the 5 tokens")
            && w.contains("artefact")),
        "{replay:?}"
    );
}

#[test]
fn the_last_pass_is_replayed_token_by_token_and_warm_up_is_not_counted() {
    let part = PartArgs {
        top_k: 2,
        pass: Some(Pass::Last),
        warmup_tokens: Some(2),
        ..PartArgs::default()
    };
    let (replay, requests) = pairs_replay(&part);
    let want = [
        (1, 0, false),
        (1, 1, false),
        (2, 4, false),
        (2, 5, false),
        (1, 2, false),
        (1, 3, false),
        (2, 6, false),
        (2, 7, false),
        (1, 0, true),
        (1, 2, true),
        (2, 4, true),
        (2, 7, true),
    ];
    assert_eq!(requests, want);
    assert_eq!(replay.facts.requests, 4);
    assert_eq!(replay.facts.warmup_requests, 8);
    assert_eq!(replay.facts.tokens, Some(1));
    assert_eq!(replay.facts.distinct_experts, 4);
    assert_eq!(replay.compulsory_misses, 0);
    let first = PartArgs {
        top_k: 2,
        pass: Some(Pass::Number(1)),
        ..PartArgs::default()
    };
    assert_eq!(pairs_replay(&first).0.facts.requests, 8);
}

#[test]
fn what_cannot_be_replayed_as_asked_says_what_can() {
    let dir = tempfile::tempdir().unwrap();
    let pairs = dir.path().join("pairs");
    write_pairs(&pairs, &two_passes());
    let error = failure(&["--decode-only"], &pairs);
    assert!(error.contains("--pass last --warmup-tokens"), "{error}");
    let error = failure(&["--pass", "3", "--top-k", "2"], &pairs);
    assert!(error.contains("2 passes"), "{error}");
    let error = failure(&["--pass", "last", "--top-k", "4"], &pairs);
    assert!(
        error.contains("byte 64: 6 requests of layer 1, not a multiple of 4"),
        "{error}"
    );
    let error = failure(
        &["--pass", "1", "--top-k", "2", "--warmup-tokens", "2"],
        &pairs,
    );
    assert!(error.contains("nothing is left to count"), "{error}");
    write_pairs(&pairs, &[(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]);
    let error = failure(&["--pass", "last", "--top-k", "2"], &pairs);
    assert!(
        error.contains("byte 16: 4 requests of layer 2, but the pass begins with 2"),
        "{error}"
    );

    let own = dir.path().join("run.trace");
    let row = TraceRow {
        sequence: 0,
        position: 0,
    };
    let experts = [1, 2, 3].map(ExpertIdx).to_vec();
    write_trace(
        &own,
        &[TraceRecord {
            step: 0,
            mode: Mode::Prefill,
            layer: LayerIdx(1),
            rows: vec![row],
            experts,
        }],
    );
    assert!(failure(&["--pass", "last"], &own).contains("--decode-only"));
    assert!(failure(&["--decode-only"], &own).contains("nothing is left to count"));
    let error = failure(&["--capacity", "999"], &own);
    assert!(error.contains("no expert of 1000 bytes"), "{error}");
    assert!(failure(&["--slots", "0"], &own).contains("--slots 0"));
    assert!(failure(&["--expert-bytes", "0"], &own).contains("--expert-bytes"));
    assert!(failure(&["--disk-speed", "0"], &own).contains("--disk-speed"));
}

#[test]
fn slots_are_the_whole_experts_that_fit_and_misses_cost_their_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pairs");
    write_pairs(&path, &two_passes());
    let args = [
        "--expert-bytes",
        "1K",
        "--capacity",
        "7999",
        "--policy",
        "lru,belady",
        "--disk-speed",
        "500",
    ];
    let report = json(&args, &path);
    assert_eq!(report["schema"], "k3.simcache/1");
    assert_eq!(report["trace"]["requests"], 20);
    assert_eq!(report["trace"]["distinct_experts"], 8);
    assert_eq!(report["compulsory_misses"], 8);
    assert_eq!(report["ceiling"], 0.6);
    let lru = &report["rows"][0];
    assert_eq!(
        (&lru["policy"], &lru["slots"], &lru["capacity_bytes"]),
        (&"lru".into(), &7.into(), &7999.into())
    );
    let misses = lru["requests"].as_u64().unwrap() - lru["hits"].as_u64().unwrap();
    assert_eq!(lru["bytes_read"], misses * 1000);
    assert_eq!(lru["read_seconds"], (misses * 2) as f64);
    assert!(
        report["rows"][1]["hits"].as_u64() > lru["hits"].as_u64(),
        "belady does better here: {report}"
    );
    let by_slots = json(
        &["--expert-bytes", "1K", "--slots", "7,8", "--policy", "lru"],
        &path,
    );
    assert_eq!(by_slots["rows"][0]["hits"], lru["hits"]);
    assert_eq!(by_slots["rows"][0]["capacity_bytes"], 7000);
    assert_eq!(by_slots["rows"][1]["hits"], 12, "eight slots hold all");
}

fn shared_trace() -> PathBuf {
    let folder = std::env::var_os("K3_SHARED_DATA")
        .expect("K3_SHARED_DATA names the folder with expert_trace.bin");
    PathBuf::from(folder).join("expert_trace.bin")
}

/// `[sizes][policies]`, in percent with `decimals`.
fn hit_rates(
    args: &[&str],
    policies: &str,
    gigabytes: &[u32],
    decimals: usize,
) -> Vec<Vec<String>> {
    let capacity: Vec<String> = gigabytes.iter().map(|g| format!("{g}G")).collect();
    let sizes = ["--policy", policies, "--capacity", &capacity.join(",")];
    let report = json(&[args, &sizes].concat(), &shared_trace());
    let rows = report["rows"].as_array().unwrap();
    (0..gigabytes.len())
        .map(|i| {
            let of_size = rows.iter().skip(i).step_by(gigabytes.len());
            of_size
                .map(|row| format!("{:.decimals$}", 100.0 * row["hit_rate"].as_f64().unwrap()))
                .collect()
        })
        .collect()
}

#[test]
#[ignore = "reads expert_trace.bin in K3_SHARED_DATA"]
fn shared_data_published_replay_is_reproduced() {
    let rates = hit_rates(&[], "lru,belady,pin-lru", &[8, 16, 32, 64, 128, 192], 2);
    let published = [
        ["36.24", "39.42", "37.82"],
        ["36.24", "42.61", "39.42"],
        ["36.24", "48.99", "42.57"],
        ["36.24", "61.74", "48.66"],
        ["49.19", "84.59", "62.86"],
        ["90.00", "90.00", "90.00"],
    ];
    assert_eq!(rates, published);
    let report = json(&["--policy", "lru"], &shared_trace());
    assert_eq!(report["trace"]["distinct_experts"], 10_010);
    assert_eq!(report["trace"]["tokens"], 68);
    let slots: Vec<&Value> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| &row["slots"])
        .collect();
    assert_eq!(
        slots,
        [
            227, 455, 911, 1367, 1481, 1823, 2735, 3647, 5470, 7294, 9118, 10941
        ]
    );
}

#[test]
#[ignore = "reads expert_trace.bin in K3_SHARED_DATA"]
fn shared_data_published_incremental_replay_is_reproduced() {
    let args = ["--pass", "last", "--warmup-tokens", "5"];
    let sizes = [4, 8, 16, 24, 26, 32, 64, 128];
    let rates = hit_rates(&args, "lru,lfu,layer-distance,belady", &sizes, 1);
    let published = [
        ["0.0", "5.4", "2.5", "15.4"],
        ["0.0", "11.8", "6.3", "29.4"],
        ["0.0", "19.4", "16.4", "45.1"],
        ["0.0", "26.6", "27.5", "51.9"],
        ["39.7", "27.4", "29.9", "53.0"],
        ["40.0", "32.2", "32.9", "56.3"],
        ["50.9", "50.4", "49.8", "58.0"],
        ["56.7", "56.5", "56.8", "58.0"],
    ];
    assert_eq!(rates, published);
}

#[test]
#[ignore = "reads expert_trace.bin in K3_SHARED_DATA"]
fn shared_data_the_default_policy_hits_below_one_token_s_working_set() {
    let name = PolicyKind::DEFAULT.name();
    for grouped in [&[][..], &["--grouped"]] {
        let args = [&["--pass", "last", "--warmup-tokens", "5"], grouped].concat();
        let sizes = [4, 8, 16, 24, 32];
        let rate = |text: &String| text.parse::<f64>().unwrap();
        let all = "lru,lfu,layer-distance,layer-quota,s3-fifo,sieve,w-tinylfu,static-pin";
        let rates = hit_rates(&args, &format!("{name},{all}"), &sizes, 1);
        for (size, rates) in sizes.iter().zip(&rates) {
            let best = rates[1..].iter().map(rate).fold(0.0, f64::max);
            assert!(rate(&rates[0]) > best, "{size} GB: {rates:?}");
        }
        assert!(rate(&rates[2][0]) >= 26.0, "16 GB: {rates:?}");
        assert!(rate(&rates[4][0]) >= 42.0, "32 GB: {rates:?}");
    }
}
