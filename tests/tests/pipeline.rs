//! The five tools as processes, chained through files and pipes: what they write, where, and with which exit code.
#![expect(
    clippy::unwrap_used,
    clippy::float_cmp,
    reason = "a helper of a test fails it by panicking; a report repeats numbers exactly"
)]
mod common;
#[path = "common/process.rs"]
mod process;

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use common::{Fixture, TINY_PROMPT, argmax, golden, ids};
use process::{Setup, finish, finish_with, ids_of, json, list, tool};
use serde_json::Value;

fn golden_ids() -> Vec<u32> {
    ids(&golden("tiny_eps1e-6.json")["generated_ids"])
}

fn floats(path: &Path) -> Vec<f32> {
    let bytes = fs::read(path).unwrap();
    assert_eq!(bytes.len() % 4, 0);
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
        .collect()
}

/// Census, pack and plan of a checkpoint as processes; the plan's text.
fn prepare(fixture: &Fixture, layers: &[&str]) -> Vec<u8> {
    let census = finish(tool("k3-census").arg(&fixture.model).args(layers)).expect(0);
    let census: Value = serde_json::from_slice(&census.stdout).unwrap();
    assert_eq!(
        (&census["schema"], &census["ok"]),
        (&"k3.census/1".into(), &true.into())
    );
    let mut pack = tool("k3-pack");
    let packed = finish(pack.arg(&fixture.model).arg(&fixture.trunk).args(layers)).expect(0);
    assert!(
        packed.stdout.is_empty(),
        "the trunk is the result: {}",
        packed.text()
    );
    let mut plan = tool("k3-plan");
    plan.env("K3_MODEL", &fixture.model)
        .env("K3_TRUNK", &fixture.trunk);
    let planned = finish(plan.args(["--budget", "200M"]).args(layers)).expect(0);
    let parsed: Value = serde_json::from_slice(&planned.stdout).unwrap();
    assert_eq!(parsed["schema"], "k3.plan/1");
    assert_eq!(parsed["identity"], census["identity"]);
    planned.stdout
}

#[test]
fn the_five_tools_chain_from_shards_to_tokens_and_a_simulated_cache() {
    let mut fixture = Fixture::empty();
    fixture.model = fixture.path("my model");
    fixture.trunk = fixture.path("the model's trunk");
    finish(tool("k3-synth").arg("tiny").arg(&fixture.model)).expect(0);
    fs::remove_file(fixture.model.join("tiktoken.model")).unwrap();
    let plan = prepare(&fixture, &[]);
    let (report, trace) = (fixture.path("a report.json"), fixture.path("run.trace"));
    let mut run = tool("k3-run");
    run.args(["--gen", "20", "--ids", &list(&TINY_PROMPT), "--no-stop"]);
    run.arg("--json").arg(&report).arg("--trace").arg(&trace);
    let done = finish_with(&mut run, &plan).expect(0);
    // Without a tokenizer: ids, on one line.
    assert_eq!(done.text(), format!("{}\n", list(&golden_ids())));
    let report = json(&report);
    assert_eq!(ids_of(&report), golden_ids());
    assert_eq!(
        (&report["finish"], &report["text"]),
        (&"length".into(), &Value::Null)
    );
    let done = finish(
        tool("k3-simcache")
            .arg(&trace)
            .args(["--slots", "8", "--format", "json"]),
    );
    let simulated: Value = serde_json::from_slice(&done.expect(0).stdout).unwrap();
    assert_eq!(simulated["schema"], "k3.simcache/1");
    assert_eq!(
        simulated["trace"]["requests"],
        report["totals"]["expert_requests"]
    );
    let table = finish(tool("k3-simcache").arg(&trace).args(["--slots", "8,60"])).expect(0);
    assert!(table.text().contains("layer-distance"), "{}", table.text());
}

#[test]
fn a_plan_goes_straight_through_a_pipe() {
    let setup = Setup::new(&["--budget", "floor"]);
    let mut plan = tool("k3-plan");
    plan.arg("--model")
        .arg(&setup.fixture.model)
        .arg("--trunk")
        .arg(&setup.fixture.trunk);
    let mut plan = plan
        .args(["--budget", "80M"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut run = tool("k3-run");
    run.stdin(Stdio::from(plan.stdout.take().unwrap()));
    run.args(["--ids", &list(&TINY_PROMPT), "--no-stop", "--gen", "3"]);
    run.arg("--json").arg(setup.path("r.json"));
    finish(&mut run).expect(0);
    assert!(plan.wait().unwrap().success());
    assert_eq!(ids_of(&json(&setup.path("r.json"))), golden_ids()[..3]);
}

#[test]
fn the_first_layers_alone_work_from_census_to_tokens() {
    let whole = Fixture::tiny("8Ki");
    let layers = ["--layers", "5"];
    let parts = Fixture::empty();
    finish(tool("k3-synth").arg("tiny").arg(&parts.model)).expect(0);
    // Nothing but the first layers, and the shard with embedding and head, was downloaded.
    for shard in (6..=13).chain([15, 16]) {
        for entry in fs::read_dir(&parts.model).unwrap() {
            let path = entry.unwrap().path();
            if path.to_str().unwrap().contains(&format!("-{shard:06}-of-"))
                || path.to_str().unwrap().contains(&format!("-{shard:05}-of-"))
            {
                fs::remove_file(path).unwrap();
            }
        }
    }
    let plan = prepare(&parts, &layers);
    let report = parts.path("r.json");
    let mut run = tool("k3-run");
    run.args(["--ids", &list(&TINY_PROMPT), "--no-stop", "--gen", "4"])
        .args(layers);
    finish_with(run.arg("--json").arg(&report), &plan).expect(0);
    let report = json(&report);
    assert_eq!(report["num_layers"], 5);
    // The same from a trunk of all layers, planned for the first ones.
    let mut of_whole = tool("k3-run");
    of_whole
        .args(["--ids", &list(&TINY_PROMPT), "--no-stop", "--gen", "4"])
        .args(layers);
    let plan = serde_json::to_vec(&whole.plan(&[&["--budget", "200M"], &layers[..]].concat()));
    let done = finish_with(&mut of_whole, &plan.unwrap()).expect(0);
    let text = report["text"].as_str().unwrap();
    assert_eq!(done.text(), format!("{text}\n"));
    // A run that expects other layers than were planned is refused.
    let mut other = tool("k3-run");
    other.args(["--ids", "1", "--layers", "4"]);
    finish_with(
        &mut other,
        &serde_json::to_vec(&whole.plan(&["--budget", "200M"])).unwrap(),
    )
    .expect(1)
    .says(&["num_layers", "k3-plan --budget"]);
}

/// Fail unless `value` is a count; return it.
#[track_caller]
fn count(value: &Value, name: &str) -> u64 {
    value[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name}: {} is no count", value[name]))
}

#[track_caller]
fn number(value: &Value, name: &str) -> f64 {
    value[name]
        .as_f64()
        .unwrap_or_else(|| panic!("{name}: {} is no number", value[name]))
}

const COUNTS: [&str; 6] = [
    "trunk_bytes_read",
    "head_bytes_read",
    "expert_bytes_read",
    "bytes_requested",
    "expert_requests",
    "expert_hits",
];

#[test]
fn the_report_has_every_field_and_its_sums_are_sums() {
    let setup = Setup::new(&[
        "--budget",
        "60M",
        "--prefill-chunk",
        "5",
        "--disk-speed",
        "1G",
    ]);
    setup.run_golden(&["--gen", "4"]).expect(0);
    let report = setup.report();
    let plan = setup.read_plan();
    assert_eq!(report["schema"], "k3.run/1");
    assert_eq!(ids(&report["prompt_ids"]), TINY_PROMPT);
    assert_eq!(ids_of(&report), golden_ids()[..4]);
    assert!(report["text"].is_string());
    assert_eq!(report["finish"], "length");
    assert_eq!(report["error"], Value::Null);
    assert_eq!(report["identity"], plan.identity.as_str());
    assert_eq!(report["experts_verified"], false);
    assert_eq!(number(&report, "mla_norm_eps"), 1e-6);
    assert!(["scalar", "avx2", "avx512"].contains(&report["isa"].as_str().unwrap()));
    assert_eq!(count(&report, "threads"), plan.threads as u64);
    assert_eq!(report["cache_policy"], plan.cache_policy.as_str());
    assert_eq!(count(&report, "planned_peak_bytes"), plan.total_bytes);
    assert!(count(&report, "peak_rss_bytes") > 1_000_000);
    let steps = report["steps"].as_array().unwrap();
    let modes: Vec<_> = steps
        .iter()
        .map(|s| (s["mode"].as_str().unwrap(), count(s, "rows")))
        .collect();
    let (prefill, decode) = ("prefill", "decode");
    let want = [
        (prefill, 5),
        (prefill, 5),
        (prefill, 2),
        (decode, 1),
        (decode, 1),
        (decode, 1),
    ];
    assert_eq!(modes, want);
    let totals = &report["totals"];
    for name in COUNTS {
        let sum: u64 = steps.iter().map(|step| count(step, name)).sum();
        assert_eq!(count(totals, name), sum, "{name}");
    }
    for step in steps {
        let (wait, compute) = (
            number(step, "wait_seconds"),
            number(step, "compute_seconds"),
        );
        assert!(wait >= 0.0 && compute >= 0.0);
        assert!(
            (wait + compute - number(step, "seconds")).abs() < 1e-6,
            "{step}"
        );
        let reading = number(step, "reading_seconds");
        assert!(["disk", "compute"].contains(&step["bound_by"].as_str().unwrap()));
        let payload = count(step, "trunk_bytes_read")
            + count(step, "head_bytes_read")
            + count(step, "expert_bytes_read");
        assert!(reading >= 0.0 && (reading > 0.0 || payload == 0), "{step}");
        assert!(
            count(step, "bytes_requested") > payload,
            "padding and an embedding row come on top"
        );
        assert!(count(step, "expert_hits") <= count(step, "expert_requests"));
        assert!(
            count(step, "expert_requests") >= 48,
            "twelve layers ask for four experts each"
        );
    }
    assert_eq!(count(totals, "readahead_discarded_bytes"), 0);
    let limit = &report["limit"];
    assert_eq!(number(limit, "disk_bytes_per_second"), 1e9);
    let least = count(totals, "bytes_requested") as f64 / 1e9;
    assert!((number(limit, "seconds") - least).abs() < 1e-9, "{limit}");
    for name in ["memory_bytes_per_second", "flops_per_second"] {
        assert_eq!(
            limit.get(name),
            Some(&Value::Null),
            "{name} was not measured"
        );
    }
}

#[test]
fn text_goes_to_stdout_and_everything_else_to_stderr() {
    let setup = Setup::new(&["--budget", "200M"]);
    let done = setup
        .run(&["--prompt", "hello world", "--gen", "6", "--no-stop"])
        .expect(0);
    let report = setup.report();
    assert_eq!(ids(&report["prompt_ids"]), [317, 315]);
    assert_eq!(
        done.text(),
        format!("{}\n", report["text"].as_str().unwrap())
    );
    assert!(done.stderr.contains("peak memory"), "{}", done.stderr);
    let quiet = setup
        .run(&["--prompt", "hello world", "--gen", "6", "--no-stop", "-q"])
        .expect(0);
    assert_eq!(quiet.stdout, done.stdout);
    assert_eq!(quiet.stderr, "");
}

#[test]
fn no_token_asked_for_is_a_report_without_tokens() {
    let setup = Setup::new(&["--budget", "200M"]);
    let done = setup.run_golden(&["--gen", "0"]).expect(0);
    assert_eq!(done.text().trim(), "");
    let report = setup.report();
    assert_eq!(ids_of(&report), [0; 0]);
    assert_eq!(
        (&report["finish"], &report["text"]),
        (&"length".into(), &"".into())
    );
    assert_eq!(
        count(&report["totals"], "head_bytes_read"),
        0,
        "nobody needs logits"
    );
}

#[test]
fn dumps_have_the_promised_sizes_and_contents() {
    let setup = Setup::new(&["--budget", "200M", "--prefill-chunk", "5"]);
    let (logits, hidden) = (setup.path("logits"), setup.path("hidden"));
    let flags = [
        "--dump-logits",
        logits.to_str().unwrap(),
        "--dump-hidden",
        hidden.to_str().unwrap(),
    ];
    setup
        .run_golden(&[&["--gen", "7"], &flags[..]].concat())
        .expect(0);
    let logits = floats(&logits);
    assert_eq!(logits.len(), 7 * 576);
    for (row, id) in logits.chunks_exact(576).zip(golden_ids()) {
        assert_eq!(argmax(row), id as usize);
    }
    let hidden = floats(&hidden);
    // 13 layers of 160 for 12 prompt rows and the 6 generated tokens that were fed back.
    assert_eq!(hidden.len(), 13 * 160 * (12 + 6));
    // The last layer of the first chunk of five rows, as the golden file has it.
    let golden = golden("tiny_eps1e-6.json");
    let first_layer = &hidden[..5 * 160];
    let max = first_layer.iter().fold(0f32, |max, x| max.max(x.abs()));
    assert!(f64::from(max) <= golden["max_abs_h"][0].as_f64().unwrap() + 1e-3 && max > 1.0);
}

#[test]
fn scores_agree_with_the_golden_logits() {
    let setup = Setup::new(&["--budget", "200M", "--prefill-chunk", "5"]);
    let path = setup.path("score.json");
    // The prompt and the first golden tokens: the scored argmax of each position is then the next token.
    let prompt = [&TINY_PROMPT[..], &golden_ids()[..3]].concat();
    let flags = [
        "--ids",
        &list(&prompt),
        "--score",
        path.to_str().unwrap(),
        "--gen",
        "1",
        "--no-stop",
    ];
    setup.run(&flags).expect(0);
    assert_eq!(
        ids_of(&setup.report()),
        golden_ids()[3..4],
        "scoring changes no token"
    );
    let file = json(&path);
    assert_eq!(file["schema"], "k3.score/1");
    let golden = golden("tiny_eps1e-6.json");
    let scores = file["scores"].as_array().unwrap();
    assert_eq!(
        scores.len(),
        prompt.len() - 1,
        "the first token has nothing before it"
    );
    for (index, score) in scores.iter().enumerate() {
        let position = index + 1;
        assert_eq!(count(score, "position"), position as u64);
        assert_eq!(count(score, "id"), u64::from(prompt[position]));
        let (rank, logprob) = (count(score, "rank"), number(score, "logprob"));
        assert!(logprob < 0.0 && rank < 576);
        assert_eq!(rank == 0, score["argmax"] == score["id"], "{score}");
        if position >= TINY_PROMPT.len() {
            assert_eq!(score["argmax"], golden_ids()[position - TINY_PROMPT.len()]);
            continue;
        }
        let row = common::numbers(&golden["logits"][index]);
        let of_id = row[prompt[position] as usize];
        assert_eq!(score["argmax"], golden["argmax"][index]);
        assert!((number(score, "logit") - of_id).abs() < 1e-3);
        let sum = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        assert!((logprob - (of_id - sum)).abs() < 2e-3, "{score}");
        assert_eq!(
            rank,
            row.iter().filter(|&&x| x > of_id).count() as u64,
            "{score}"
        );
    }
}

#[test]
fn a_stop_token_ends_the_text_and_is_only_in_the_ids_and_the_dump() {
    let setup = Setup::new(&["--budget", "200M"]);
    let want = golden_ids();
    let stop = want
        .iter()
        .position(|id| want[..3].iter().all(|other| other != id))
        .unwrap();
    let logits = setup.path("logits");
    let ids = list(&TINY_PROMPT);
    let flags = [
        "--ids",
        &ids,
        "--gen",
        "20",
        "--dump-logits",
        logits.to_str().unwrap(),
    ];
    let stop_id = want[stop].to_string();
    let stopped = setup
        .run(&[&flags[..], &["--stop-id", &stop_id]].concat())
        .expect(0);
    let report = setup.report();
    assert_eq!(
        (ids_of(&report), &report["finish"]),
        (want[..=stop].to_vec(), &"stop".into())
    );
    assert_eq!(floats(&logits).len(), (stop + 1) * 576);
    let shorter = setup.run_golden(&["--gen", &stop.to_string()]).expect(0);
    assert_eq!(
        stopped.stdout, shorter.stdout,
        "the stop token is not in the text"
    );
    // Without a stop token, the config's end of message (322) would stop; this text does not meet it.
    setup.run_golden(&["--gen", "20"]).expect(0);
    assert_eq!(ids_of(&setup.report()), want);
}

#[test]
fn the_config_s_end_of_message_stops_unless_told_otherwise() {
    let setup = Setup::new(&["--budget", "200M"]);
    let config = setup.fixture.model.join("config.json");
    // The third golden token becomes the end of message.
    let text = fs::read_to_string(&config).unwrap();
    let edited = text.replace(
        "\"eos_token_id\":322",
        &format!("\"eos_token_id\":{}", golden_ids()[2]),
    );
    let edited = edited.replace(
        "\"eos_token_id\": 322",
        &format!("\"eos_token_id\": {}", golden_ids()[2]),
    );
    assert_ne!(text, edited);
    fs::write(&config, edited).unwrap();
    setup.fixture.pack(&["--force"]);
    setup.replan(&["--budget", "200M"]);
    let ids = list(&TINY_PROMPT);
    setup.run(&["--ids", &ids, "--gen", "5"]).expect(0);
    let report = setup.report();
    assert_eq!(
        (ids_of(&report), &report["finish"]),
        (golden_ids()[..3].to_vec(), &"stop".into())
    );
    setup
        .run(&["--ids", &ids, "--gen", "5", "--no-stop"])
        .expect(0);
    assert_eq!(ids_of(&setup.report()), golden_ids()[..5]);
    setup
        .run(&["--ids", &ids, "--gen", "5", "--stop-id", "1"])
        .expect(0);
    assert_eq!(
        ids_of(&setup.report()),
        golden_ids()[..5],
        "--stop-id replaces the default"
    );
}

#[test]
fn a_seed_repeats_its_text_and_seeds_differ() {
    let setup = Setup::new(&["--budget", "200M"]);
    let sampled = |flags: &[&str]| {
        setup
            .run_golden(&[&["--gen", "12"], flags].concat())
            .expect(0);
        ids_of(&setup.report())
    };
    let one = sampled(&["--temperature", "1", "--seed", "1"]);
    assert_eq!(one, sampled(&["--temperature", "1", "--seed", "1"]));
    assert_eq!(
        one,
        sampled(&[
            "--temperature",
            "1",
            "--seed",
            "1",
            "--threads",
            "1",
            "--buffered"
        ])
    );
    assert_ne!(one, sampled(&["--temperature", "1", "--seed", "2"]));
    let greedy = golden_ids()[..12].to_vec();
    assert_eq!(greedy, sampled(&["--temperature", "0", "--seed", "7"]));
    assert_eq!(
        greedy,
        sampled(&["--temperature", "1", "--top-p", "0.000001", "--seed", "7"])
    );
}

#[test]
fn a_prompt_is_bytes_and_names_of_special_tokens_in_it_are_text() {
    let setup = Setup::new(&["--budget", "200M"]);
    let file = setup.path("prompt");
    fs::write(&file, b"hello\xff\xfe world").unwrap();
    setup
        .run(&["--prompt-file", file.to_str().unwrap(), "--gen", "1"])
        .expect(0);
    assert_eq!(ids(&setup.report()["prompt_ids"]), [317, 187, 186, 315]);
    let text = "hello<|open|>x<|close|>";
    let want = [
        317, 27, 91, 78, 79, 266, 91, 29, 87, 27, 91, 66, 75, 78, 82, 68, 91, 29,
    ];
    setup.run(&["--prompt", text, "--gen", "1"]).expect(0);
    assert_eq!(ids(&setup.report()["prompt_ids"]), want);
    fs::write(&file, " 5, 17\n300\t42 ").unwrap();
    setup
        .run(&["--ids-file", file.to_str().unwrap(), "--gen", "1"])
        .expect(0);
    assert_eq!(ids(&setup.report()["prompt_ids"]), [5, 17, 300, 42]);
    // The vocabulary may lie elsewhere.
    let elsewhere = setup.path("vocabulary");
    fs::create_dir(&elsewhere).unwrap();
    fs::rename(
        setup.fixture.model.join("tiktoken.model"),
        elsewhere.join("tiktoken.model"),
    )
    .unwrap();
    setup
        .run(&["--prompt", "hello", "--gen", "1"])
        .expect(2)
        .says(&["tiktoken.model"]);
    setup
        .run(&[
            "--prompt",
            "hello",
            "--gen",
            "1",
            "--tokenizer",
            elsewhere.to_str().unwrap(),
        ])
        .expect(0);
}

#[test]
fn wrong_usage_is_2_and_says_what_to_type() {
    let setup = Setup::new(&["--budget", "200M"]);
    let cases: [(&[&str], &str); 12] = [
        (&[], "--prompt"),
        (&["--ids", "1", "--prompt", "x"], "cannot be used with"),
        (&["--ids", "1,x"], "x"),
        (&["--ids", "1,576"], "576"),
        (&["--ids", "-1"], "-1"),
        (&["--prompt", ""], "no token"),
        (&["--ids", "1", "--stop-id", "576"], "576"),
        (&["--ids", "1", "--gen", "-1"], "-1"),
        (&["--ids", "1", "--gen", "5000"], "--context 5000"),
        (
            &["--ids", "1", "--no-stop", "--stop-id", "3"],
            "cannot be used with",
        ),
        (&["--ids", "1", "--temperature=-1"], "temperature"),
        (
            &["--prompt-file", "/nonexistent/prompt"],
            "/nonexistent/prompt",
        ),
    ];
    for (flags, word) in cases {
        let done = setup.run(flags).expect(2).says(&[word]);
        assert!(done.stdout.is_empty(), "{flags:?}: {}", done.text());
        assert!(!setup.path("report.json").exists(), "{flags:?}");
    }
    for input in [
        &b""[..],
        b"\n",
        b"not json",
        b"{}",
        b"{\"schema\":\"k3.plans/1\",\"plans\":[]}",
    ] {
        finish_with(tool("k3-run").args(["--ids", "1"]), input)
            .expect(2)
            .says(&["k3-plan --budget"]);
    }
    let mut missing = tool("k3-run");
    finish(missing.args(["--plan", "/nonexistent/plan.json", "--ids", "1"]))
        .expect(2)
        .says(&["/nonexistent/plan.json"]);
}

#[test]
fn missing_folders_are_2_for_every_tool() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = dir.path().join("nowhere");
    let name = nowhere.to_str().unwrap();
    let commands: [(&str, &[&str]); 4] = [
        ("k3-census", &[name]),
        ("k3-pack", &[name, name]),
        (
            "k3-plan",
            &["--model", name, "--trunk", name, "--budget", "200M"],
        ),
        ("k3-simcache", &[name]),
    ];
    for (program, flags) in commands {
        let done = finish(tool(program).args(flags))
            .expect(2)
            .says(&["nowhere"]);
        assert!(done.stdout.is_empty(), "{program}: {}", done.text());
        finish(tool(program).arg("--no-such-flag"))
            .expect(2)
            .says(&["--no-such-flag"]);
    }
    let setup = Setup::new(&["--budget", "200M"]);
    fs::rename(&setup.fixture.trunk, &nowhere).unwrap();
    setup
        .run_golden(&[])
        .expect(2)
        .says(&["trunk.json", "k3-pack"]);
    fs::rename(&nowhere, &setup.fixture.trunk).unwrap();
    fs::rename(&setup.fixture.model, &nowhere).unwrap();
    setup.run_golden(&[]).expect(2).says(&["config.json"]);
}

#[test]
fn an_edited_plan_is_refused_with_every_problem_named() {
    let setup = Setup::new(&["--budget", "200M"]);
    let plan = setup.read_plan();
    let mut greedy = plan.clone();
    greedy.budget_bytes = plan.total_bytes - 1;
    let mut foreign = plan.clone();
    foreign.identity = "0".repeat(64);
    let mut starved = plan.clone();
    starved.expert_slots = 3;
    let mut unsummed = plan.clone();
    unsummed.total_bytes += 1;
    for (plan, words) in [
        (greedy, ["budget_bytes", "k3-plan --budget"]),
        (foreign, ["identity", "k3-plan --budget"]),
        (starved, ["expert_slots", "k3-plan --budget"]),
        (unsummed, ["total_bytes", "k3-plan --budget"]),
    ] {
        setup.write_plan(&plan);
        let done = setup.run_golden(&[]).expect(1).says(&words);
        assert!(done.stdout.is_empty());
    }
    let mut fewer = plan.clone();
    fewer.expert_slots -= 1;
    setup.write_plan(&fewer);
    setup.run_golden(&["--gen", "2"]).expect(0);
    let report = setup.report();
    assert_eq!(
        ids_of(&report),
        golden_ids()[..2],
        "a plan may be edited where it still fits"
    );
    assert!(
        count(&report, "planned_peak_bytes") < plan.total_bytes,
        "the ledger is recomputed"
    );
}

#[test]
fn a_closed_pipe_is_a_success_and_the_report_is_still_written() {
    let setup = Setup::new(&["--budget", "floor", "--context", "20000"]);
    let ids = list(&TINY_PROMPT);
    let mut run = setup.start(&["--ids", &ids, "--no-stop", "--gen", "15000"]);
    let mut head = Command::new("head");
    head.args(["-c", "1"])
        .stdin(Stdio::from(run.stdout.take().unwrap()));
    assert_eq!(head.output().unwrap().stdout.len(), 1);
    // It holds the reading end too.
    drop(head);
    process::Done::of(run.wait_with_output().unwrap()).expect(0);
    let report = setup.report();
    assert_eq!(report["finish"], "interrupted");
    assert!(ids_of(&report).len() < 15_000);
    // The other tools write at once, to a reader that is already gone.
    for (name, arg) in [
        ("k3-census", &setup.fixture.model),
        ("k3-plan", &setup.plan),
    ] {
        let mut command = tool(name);
        if name == "k3-plan" {
            command
                .env("K3_MODEL", &setup.fixture.model)
                .env("K3_TRUNK", &setup.fixture.trunk);
        } else {
            command.arg(arg);
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        finish(command.stdout(writer)).expect(0);
    }
}

fn interrupted(signal: rustix::process::Signal, code: i32) {
    use std::io::Read as _;
    let setup = Setup::new(&["--budget", "floor", "--context", "20000"]);
    let (trace, logits, hidden) = (
        setup.path("trace"),
        setup.path("logits"),
        setup.path("hidden"),
    );
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let (ids, trace_flag) = (list(&TINY_PROMPT), path(&trace));
    let (logits_flag, hidden_flag) = (path(&logits), path(&hidden));
    let mut run = setup.start(&[
        "--ids",
        &ids,
        "--no-stop",
        "--gen",
        "15000",
        "--trace",
        &trace_flag,
        "--dump-logits",
        &logits_flag,
        "--dump-hidden",
        &hidden_flag,
    ]);
    let mut first = [0; 40];
    run.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&run), signal).unwrap();
    let done = process::Done::of(run.wait_with_output().unwrap()).expect(code);
    let report = setup.report();
    assert_eq!(report["finish"], "interrupted");
    let generated = ids_of(&report);
    assert!(generated.len() < 15_000);
    let same = generated.len().min(20);
    assert_eq!(
        generated[..same],
        golden_ids()[..same],
        "what was generated is kept, and right"
    );
    let text = [&first[..], &done.stdout].concat();
    assert_eq!(
        text,
        format!("{}\n", report["text"].as_str().unwrap()).into_bytes()
    );
    // Every file holds the steps that ended, and nothing of the one that was dropped.
    assert_eq!(floats(&logits).len(), generated.len() * 576);
    let rows: u64 = report["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| count(s, "rows"))
        .sum();
    assert_eq!(floats(&hidden).len() as u64, rows * 13 * 160);
    let simulated = finish(
        tool("k3-simcache")
            .arg(&trace)
            .args(["--slots", "8", "--format", "json"]),
    );
    let simulated: Value = serde_json::from_slice(&simulated.expect(0).stdout).unwrap();
    let totals = &report["totals"];
    assert_eq!(simulated["trace"]["requests"], totals["expert_requests"]);
}

#[test]
fn an_interrupt_keeps_what_was_generated_and_exits_130() {
    interrupted(rustix::process::Signal::INT, 130);
}

#[test]
fn a_termination_keeps_what_was_generated_and_exits_143() {
    interrupted(rustix::process::Signal::TERM, 143);
}
