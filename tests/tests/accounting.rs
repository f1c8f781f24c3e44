//! What a run says it read is what it read, and what the planner and the cache simulator said it would.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
#[path = "common/mod.rs"]
mod common;
#[path = "common/process.rs"]
mod process;

use std::{fs, path::Path};

use common::{Ask, Fixture, TINY_PROMPT, try_run};
use k3_run::{
    cli::OutputArgs,
    engine::{Engine, EngineOptions},
    generate::{Request, generate},
    live::{Goal, Screen},
    observe::RunObserver,
    report::{Spent, StepReport},
    sampler::Sampler,
};
use k3_shared::{
    cache::{Counters, ExpertCache, PolicyKind},
    checkpoint::Checkpoint,
    formats::{
        plan::Plan,
        trace::{Trace, TraceHeader, cache_groups},
    },
};
use process::{Setup, finish, json, list, tool};

/// A ring of a few tiles.
const RING: &str = "40Ki";

#[test]
fn bytes_a_token_are_the_planned_ones_at_every_budget_and_never_grow_with_it() {
    let fixture = Fixture::tiny("8Ki");
    let flags = ["--stream-buffers", RING, "--queue-depth", "4"];
    let plan = |budget: &str| fixture.plan(&[&["--budget", budget], &flags[..]].concat());
    let (floor, all) = (plan("floor").total_bytes, plan("1G").total_bytes);
    let mut last = u64::MAX;
    let mut distinct = 0;
    for step in 0..12 {
        let budget = floor + (all - floor) * step / 11;
        let plan = plan(&budget.to_string());
        let ask = Ask::new(&TINY_PROMPT, 4);
        let (_, generated) = try_run(&plan, &EngineOptions::default(), &ask);
        assert!(generated.error.is_none(), "{:?}", generated.error);
        let predicted = &plan.predicted;
        for decode in &generated.steps[generated.steps.len() - 3..] {
            assert_eq!(decode.rows, 1);
            let read = (decode.spent.trunk_bytes_read, decode.spent.head_bytes_read);
            let said = (
                predicted.trunk_bytes_per_token,
                predicted.head_bytes_per_token,
            );
            assert_eq!(read, said, "budget {budget}");
        }
        let bytes = predicted.trunk_bytes_per_token + predicted.head_bytes_per_token;
        assert!(
            bytes <= last,
            "budget {budget} reads {bytes}, a smaller one {last}"
        );
        distinct += u32::from(bytes < last);
        last = bytes;
    }
    assert_eq!(last, 0, "the largest budget reads nothing more");
    assert!(
        distinct > 2,
        "the budgets lie between nothing and everything"
    );
}

/// Run in this process, with a trace.
fn run_traced(plan: &Plan, trace: &Path) -> Vec<StepReport> {
    let mut engine = Engine::open(plan.clone(), &EngineOptions::default()).unwrap();
    let moe = engine.config().moe.clone();
    let header = TraceHeader {
        identity: plan.identity.clone(),
        layers: u32::try_from(engine.config().num_hidden_layers).unwrap(),
        experts: u32::try_from(moe.num_experts).unwrap(),
        top_k: u32::try_from(moe.num_experts_per_token).unwrap(),
        expert_bytes: moe.expert_bytes(),
    };
    let outputs = OutputArgs {
        json: None,
        trace: Some(trace.to_owned()),
        dump_logits: None,
        dump_hidden: None,
        score: None,
    };
    let vocab_size = engine.config().vocab_size;
    let display = (Screen::hidden(), Goal::default());
    let mut observer =
        RunObserver::open(&outputs, &TINY_PROMPT, vocab_size, header, display).unwrap();
    let request = Request {
        prompt_ids: TINY_PROMPT.to_vec(),
        num_tokens: 6,
        stop_ids: Vec::new(),
        recompute: false,
        score_prompt: false,
        leave_rows: 0,
    };
    let mut sampler = Sampler::new(0.0, 1.0, 0).unwrap();
    let mut emit = |_| Ok(());
    let generated = generate(
        &mut engine,
        &request,
        &mut sampler,
        &mut observer,
        &mut emit,
    );
    assert!(generated.error.is_none(), "{:?}", generated.error);
    observer.finish().unwrap();
    generated.steps
}

/// What a fresh cache counts for each step of a trace.
fn replay(trace: &Path, policy: PolicyKind, slots: usize) -> Vec<Counters> {
    let Trace::Recorded(mut reader) = Trace::open(trace).unwrap() else {
        panic!("not a trace of ours");
    };
    let geometry = reader.header().geometry().unwrap();
    let mut cache = ExpertCache::new(policy, slots, geometry).unwrap();
    let mut steps = Vec::new();
    for group in cache_groups(&mut reader).unwrap() {
        let step = usize::try_from(group.step).unwrap();
        steps.resize(step + 1, Counters::default());
        let before = cache.counters();
        cache.request_group(group.layer, &group.keys);
        let counted = cache.counters().since(before);
        steps[step].requests += counted.requests;
        steps[step].hits += counted.hits;
    }
    steps
}

/// Plans with the fewest slots the queue depth allows, and more; the tiny checkpoint has 144 experts, 48 a token.
fn cache_plan(fixture: &Fixture, policy: PolicyKind, slots: usize, chunk: &str) -> Plan {
    let slots = slots.to_string();
    fixture.plan(&[
        "--budget",
        "200M",
        "--cache-policy",
        policy.name(),
        "--expert-slots",
        &slots,
        "--prefill-chunk",
        chunk,
        "--queue-depth",
        "4",
    ])
}

fn engine_policies() -> impl Iterator<Item = PolicyKind> {
    PolicyKind::ALL
        .into_iter()
        .filter(|kind| !kind.is_replay_only())
}

#[test]
fn expert_counters_are_those_of_a_replay_of_the_run_s_own_trace() {
    let fixture = Fixture::tiny("8Ki");
    let trace = fixture.path("run.trace");
    assert!(engine_policies().count() >= 9);
    let mut some_hit_and_missed = 0;
    for policy in engine_policies() {
        for slots in [8, 14, 20, 33, 47, 60, 96, 144] {
            // One prompt token a step, three chunks the last of which is short, and all at once; decode steps follow each.
            for (chunk, prefill_steps) in [("1", 12), ("5", 3), ("12", 1)] {
                let plan = cache_plan(&fixture, policy, slots, chunk);
                assert_eq!(plan.expert_slots, slots);
                let steps = run_traced(&plan, &trace);
                let replayed = replay(&trace, policy, slots);
                let how = format!("{}, {slots} slots, chunk {chunk}", policy.name());
                assert_eq!(steps.len(), prefill_steps + 5, "{how}");
                assert_eq!(replayed.len(), steps.len(), "{how}");
                for (number, (step, want)) in steps.iter().zip(&replayed).enumerate() {
                    let Spent {
                        expert_requests,
                        expert_hits,
                        expert_bytes_read,
                        ..
                    } = step.spent;
                    assert_eq!(expert_requests, want.requests, "{how}, step {number}");
                    assert_eq!(expert_hits, want.hits, "{how}, step {number}");
                    let bytes = want.misses() * fixture_expert_bytes(&trace);
                    assert_eq!(expert_bytes_read, bytes, "{how}, step {number}");
                    some_hit_and_missed += u32::from(want.hits > 0 && want.misses() > 0);
                }
            }
        }
    }
    assert!(
        some_hit_and_missed > 800,
        "the sizes try the policies: {some_hit_and_missed}"
    );
}

fn fixture_expert_bytes(trace: &Path) -> u64 {
    match Trace::open(trace).unwrap() {
        Trace::Recorded(reader) => reader.header().expert_bytes,
        Trace::Pairs(_) => panic!("not a trace of ours"),
    }
}

#[test]
fn the_simulator_as_a_process_counts_what_the_run_counted() {
    let setup = Setup::new(&["--budget", "floor"]);
    let trace = setup.path("run.trace");
    let trace_flag = trace.to_str().unwrap();
    for (policy, slots) in [(PolicyKind::Lru, 60), (PolicyKind::LayerDistance, 20)] {
        setup.write_plan(&cache_plan(&setup.fixture, policy, slots, "5"));
        setup
            .run_golden(&["--gen", "6", "--trace", trace_flag])
            .expect(0);
        let totals = setup.report()["totals"].clone();
        let slots = slots.to_string();
        let mut simcache = tool("k3-simcache");
        simcache
            .arg(&trace)
            .args(["--format", "json", "--slots", &slots]);
        let done = finish(simcache.args(["--policy", policy.name()])).expect(0);
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        let row = &report["rows"][0];
        assert_eq!(row["requests"], totals["expert_requests"]);
        assert_eq!(row["hits"], totals["expert_hits"]);
        assert_eq!(row["bytes_read"], totals["expert_bytes_read"]);
        assert!(row["hits"].as_u64().unwrap() > 0);
    }
}

/// Run to the end; how many bytes all its read calls returned, from what the kernel keeps of a process not yet waited for, and
/// how many the report and the ends of the shards say.
fn bytes_read_by(setup: &Setup, num_tokens: &str) -> (u64, u64) {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let (ids, trace) = (list(&TINY_PROMPT), setup.path("run.trace"));
    let flags = ["--ids", &ids, "--no-stop", "-q", "--gen", num_tokens];
    let child = setup.start(&[&flags[..], &["--trace", trace.to_str().unwrap()]].concat());
    let pid = Pid::from_child(&child);
    waitid(
        WaitId::Pid(pid),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
    )
    .unwrap();
    let io = fs::read_to_string(format!("/proc/{}/io", child.id())).unwrap();
    process::Done::of(child.wait_with_output().unwrap()).expect(0);
    let rchar = io
        .lines()
        .find_map(|line| line.strip_prefix("rchar: "))
        .unwrap();
    let requested = setup.report()["totals"]["bytes_requested"]
        .as_u64()
        .unwrap();
    let past_the_end = asked_past_the_end(&setup.read_plan(), &trace);
    (rchar.parse().unwrap(), requested - past_the_end)
}

/// Bytes that widened reads asked for beyond the end of a shard, which no read returns: those of its last experts.
fn asked_past_the_end(plan: &Plan, trace: &Path) -> u64 {
    let checkpoint = Checkpoint::open(&plan.model_dir, None).unwrap();
    let Trace::Recorded(mut reader) = Trace::open(trace).unwrap() else {
        panic!("not a trace of ours");
    };
    let geometry = reader.header().geometry().unwrap();
    let policy = plan.cache_policy.parse().unwrap();
    let mut cache = ExpertCache::new(policy, plan.expert_slots, geometry).unwrap();
    let mut past = 0;
    for group in cache_groups(&mut reader).unwrap() {
        for decision in cache.request_group(group.layer, &group.keys) {
            let place = checkpoint.expert(geometry.id(decision.key)).unwrap();
            let file_bytes = fs::metadata(checkpoint.shard_path(place.shard))
                .unwrap()
                .len();
            let end = (place.offset + place.bytes).next_multiple_of(4096);
            past += if decision.is_hit() {
                0
            } else {
                end.saturating_sub(file_bytes)
            };
        }
    }
    past
}

#[test]
fn bytes_requested_are_the_bytes_the_kernel_counted() {
    let setup = Setup::new(&["--budget", "floor"]);
    let splits: [&[&str]; 3] = [
        &["--budget", "floor"],
        &[
            "--budget",
            "200M",
            "--pin",
            "2M",
            "--stream-buffers",
            RING,
            "--expert-slots",
            "30",
        ],
        &["--budget", "200M", "--pin", "8M", "--expert-slots", "144"],
    ];
    for flags in splits {
        setup.replan(flags);
        let (few, few_requested) = bytes_read_by(&setup, "1");
        let (many, many_requested) = bytes_read_by(&setup, "41");
        let (counted, requested) = (many - few, many_requested - few_requested);
        // Plan, headers and tokenizer cancel. What a run reads of /proc and of the cgroup has numbers in it whose digits differ
        // from run to run; no read of weights is as small as the page that is allowed for them.
        assert!(
            requested >= 40 * 4096,
            "{flags:?}: every token reads an embedding row"
        );
        assert!(
            counted.abs_diff(requested) < 4096,
            "{flags:?}: the kernel counted {counted}, the report {requested}"
        );
    }
}

#[test]
fn no_run_takes_more_memory_than_its_plan_says() {
    let setup = Setup::new(&["--budget", "floor"]);
    let splits: [&[&str]; 5] = [
        &["--budget", "floor"],
        &[
            "--budget",
            "floor",
            "--prefill-chunk",
            "1",
            "--context",
            "64",
        ],
        &["--budget", "200M", "--pin", "2M", "--expert-slots", "30"],
        &["--budget", "200M"],
        &["--budget", "1G", "--context", "50000"],
    ];
    for flags in splits {
        setup.replan(flags);
        setup.run_golden(&["--gen", "8", "-q"]).expect(0);
        let report = json(&setup.path("report.json"));
        let bytes = |name: &str| report[name].as_u64().unwrap();
        let (planned, peak) = (bytes("planned_peak_bytes"), bytes("peak_rss_bytes"));
        assert_eq!(planned, setup.read_plan().total_bytes);
        assert!(
            peak > 0 && peak <= planned,
            "{flags:?}: {peak} of {planned} planned"
        );
    }
}
