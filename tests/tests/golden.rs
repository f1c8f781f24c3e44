//! The forward pass against the float64 goldens: the tiny checkpoint, and every other shape.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;

use std::path::Path;

use common::{Ask, Fixture, Record, TINY_PROMPT, argmax, golden, ids, numbers, run, worst};
use k3_run::engine::EngineOptions;
use k3_tests::synth::Options;
use serde_json::Value;

/// Absolute, on logits.
const TOLERANCE: f64 = 1e-3;

fn check_last_row(name: &str, record: &Record, golden: &Value) {
    assert_eq!(
        record.ids,
        ids(&golden["generated_ids"]),
        "{name}: generated ids"
    );
    let last = worst(&record.logits[0], &numbers(&golden["last_logits"]));
    assert!(
        last < TOLERANCE,
        "{name}: logits of the last prompt row differ by {last:e}"
    );
    let end = worst(
        record.logits.last().unwrap(),
        &numbers(&golden["final_logits"]),
    );
    assert!(
        end < TOLERANCE,
        "{name}: logits of the last generated token differ by {end:e}"
    );
    let hidden_size = record.hidden[0].len() / ids(&golden["prompt_ids"]).len();
    for (layer, want) in numbers(&golden["last_h_norm"]).into_iter().enumerate() {
        let row = &record.hidden[layer][record.hidden[layer].len() - hidden_size..];
        let norm = row
            .iter()
            .map(|&x| f64::from(x).powi(2))
            .sum::<f64>()
            .sqrt();
        let error = (norm - want).abs() / want;
        assert!(
            error < 1e-4,
            "{name}: layer {layer} norm {norm} is not {want}"
        );
    }
    for (layer, want) in golden["last_experts"].as_object().unwrap() {
        let (experts, weights) = record.routed[layer.parse::<usize>().unwrap()]
            .last()
            .unwrap();
        let experts: Vec<u32> = experts.iter().map(|e| e.0).collect();
        assert_eq!(
            experts,
            ids(&want["ids"]),
            "{name}: experts of layer {layer}"
        );
        let error = worst(weights, &numbers(&want["weights"]));
        assert!(
            error < 1e-5,
            "{name}: weights of layer {layer} differ by {error:e}"
        );
    }
}

fn tiny(file: &str, mla_norm_eps: f64) {
    let golden = golden(file);
    let fixture = Fixture::tiny("16Mi");
    let plan = fixture.plan(&["--budget", "200M"]);
    let options = EngineOptions {
        mla_norm_eps,
        ..EngineOptions::default()
    };
    let ask = Ask {
        all_rows: true,
        ..Ask::new(&TINY_PROMPT, 20)
    };
    let record = run(&plan, &options, &ask);
    check_last_row(file, &record, &golden);
    let want = golden["logits"].as_array().unwrap();
    assert_eq!(record.prompt_logits.len(), want.len());
    for (position, (got, want)) in record.prompt_logits.iter().zip(want).enumerate() {
        let error = worst(got, &numbers(want));
        assert!(
            error < TOLERANCE,
            "{file}: position {position} differs by {error:e}"
        );
    }
    let argmaxes: Vec<u32> = record
        .prompt_logits
        .iter()
        .map(|row| u32::try_from(argmax(row)).unwrap())
        .collect();
    assert_eq!(argmaxes, ids(&golden["argmax"]));
    for (layer, want) in numbers(&golden["max_abs_h"]).into_iter().enumerate() {
        let max = record.hidden[layer]
            .iter()
            .fold(0f32, |max, x| max.max(x.abs()));
        assert!(
            (f64::from(max) - want).abs() < 1e-3,
            "layer {layer}: max |h| {max} is not {want}"
        );
    }
}

#[test]
fn tiny_matches_the_golden_results_at_the_official_eps() {
    tiny("tiny_eps1e-6.json", 1e-6);
}

#[test]
fn tiny_matches_the_golden_results_at_the_compatibility_eps() {
    tiny("tiny_eps1e-5.json", 1e-5);
}

/// The numbers printed in the specification of the tiny checkpoint, so that the golden files themselves are pinned.
#[test]
fn the_golden_files_are_the_published_numbers() {
    let golden = golden("tiny_eps1e-6.json");
    let want = [
        485, 356, 429, 433, 214, 68, 22, 50, 406, 242, 167, 530, 64, 14, 18, 507, 503, 370, 385,
        154,
    ];
    assert_eq!(ids(&golden["generated_ids"]), want);
    let last = numbers(&golden["last_logits"]);
    for (id, logit) in [
        (485, 6.051_641),
        (56, 5.514_805),
        (0, 2.859_333),
        (5, 0.784_619),
    ] {
        assert!((last[id] - logit).abs() < 1e-6);
    }
    assert!((last.iter().sum::<f64>() + 24.149_860).abs() < 1e-4);
}

#[test]
fn other_shapes_match_their_goldens() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/shapes");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .filter_map(|e| {
            Some(
                e.unwrap()
                    .file_name()
                    .to_str()?
                    .strip_suffix(".golden.json")?
                    .to_owned(),
            )
        })
        .collect();
    names.sort();
    assert!(names.len() >= 8, "{names:?}");
    for name in names {
        let golden = golden(&format!("shapes/{name}.golden.json"));
        let config = common::golden(&format!("shapes/{name}.config.json"));
        let options = Options {
            dtype_f32: golden["dtype"] == "f32",
            flat: golden["flat"] == true,
        };
        let fixture = Fixture::custom(&config, options);
        // Streamed through a small ring with the fewest slots: the hardest way to be right.
        let plan = fixture.plan(&["--budget", "1G", "--pin", "0", "--stream-buffers", "64Ki"]);
        let mla_norm_eps = golden["mla_norm_eps"].as_f64().unwrap();
        let engine = EngineOptions {
            mla_norm_eps,
            ..EngineOptions::default()
        };
        let prompt = ids(&golden["prompt_ids"]);
        let num_tokens = ids(&golden["generated_ids"]).len();
        let record = run(&plan, &engine, &Ask::new(&prompt, num_tokens));
        check_last_row(&name, &record, &golden);
    }
}
