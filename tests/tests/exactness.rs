//! The exactness contract: ids and every logit, to the bit, whatever the plan, the threads, the instruction set and the I/O.
mod common;

use common::{Ask, Fixture, Record, TINY_PROMPT, run, try_run};
use k3_run::{engine::EngineOptions, kernels::Isa, store::Verify};
use k3_shared::{direct::Mode, formats::plan::Plan};

/// Tiles this small make the tiny trunk several hundred of them.
const TILE_BYTES: &str = "8Ki";
/// A ring of a few tiles.
const RING: &str = "40Ki";

fn ask() -> Ask {
    Ask {
        all_rows: true,
        ..Ask::new(&TINY_PROMPT, 5)
    }
}

fn reference(fixture: &Fixture) -> Record {
    let plan = fixture.plan(&["--budget", "200M", "--prefill-chunk", "12"]);
    let options = EngineOptions {
        threads: Some(1),
        ..EngineOptions::default()
    };
    run(&plan, &options, &ask())
}

fn assert_same(got: &Record, want: &Record, how: &str) {
    assert_eq!(got.ids, want.ids, "{how}");
    assert!(
        got.bits() == want.bits(),
        "logits differ in some bit: {how}"
    );
}

/// Six splits from nothing pinned to everything, crossed with chunks, cache sizes and policies.
fn plans(fixture: &Fixture, chunk: &str) -> Vec<(String, Plan)> {
    let mut plans = Vec::new();
    for pin in ["0", "400K", "1200K", "2500K", "4M", "8M"] {
        for slots in ["min", "144"] {
            for policy in ["lru", "layer-distance"] {
                let mut flags = vec!["--budget", "200M", "--pin", pin, "--prefill-chunk", chunk];
                flags.extend(["--cache-policy", policy, "--stream-buffers", RING]);
                // One token asks a layer for four; four reads may be in flight.
                let fewest = ["--queue-depth", "4", "--expert-slots", "8"];
                flags.extend(if slots == "min" {
                    &fewest[..]
                } else {
                    &["--expert-slots", "144"]
                });
                let name = format!("pin {pin}, chunk {chunk}, {slots} slots, {policy}");
                plans.push((name, fixture.plan(&flags)));
            }
        }
    }
    plans
}

fn matrix(chunk: &str) {
    let fixture = Fixture::tiny(TILE_BYTES);
    let want = reference(&fixture);
    for (name, plan) in plans(&fixture, chunk) {
        for threads in [1, 2] {
            for isa in Isa::available() {
                for mode in [Mode::Direct, Mode::Buffered] {
                    let options = EngineOptions {
                        threads: Some(threads),
                        isa,
                        mode,
                        ..EngineOptions::default()
                    };
                    let got = run(&plan, &options, &ask());
                    let how = format!("{name}, {threads} threads, {}, {mode:?}", isa.name());
                    assert_same(&got, &want, &how);
                }
            }
        }
    }
}

#[test]
fn every_plan_gives_the_same_bits_with_chunks_of_1() {
    matrix("1");
}

#[test]
fn every_plan_gives_the_same_bits_with_chunks_of_3() {
    matrix("3");
}

#[test]
fn every_plan_gives_the_same_bits_with_chunks_of_7() {
    matrix("7");
}

#[test]
fn every_plan_gives_the_same_bits_with_the_whole_prompt_at_once() {
    matrix("12");
}

#[test]
fn every_budget_from_the_smallest_to_all_resident_gives_the_same_bits() {
    let fixture = Fixture::tiny(TILE_BYTES);
    let want = reference(&fixture);
    let floor = fixture.plan(&["--budget", "floor"]).total_bytes;
    let all = fixture.plan(&["--budget", "1G"]).total_bytes;
    let mut last_streamed = u64::MAX;
    for step in 0..6 {
        let budget = (floor + (all - floor) * step / 5).to_string();
        let plan = fixture.plan(&["--budget", &budget]);
        assert!(plan.total_bytes <= plan.budget_bytes);
        assert!(
            plan.streamed_trunk_bytes <= last_streamed,
            "more memory never reads more"
        );
        last_streamed = plan.streamed_trunk_bytes;
        let got = run(&plan, &EngineOptions::default(), &ask());
        assert_same(&got, &want, &format!("budget {budget}"));
    }
    assert_eq!(last_streamed, 0, "the largest budget holds everything");
}

#[test]
fn every_engine_policy_gives_the_same_bits() {
    let fixture = Fixture::tiny(TILE_BYTES);
    let want = reference(&fixture);
    for policy in [
        "lru",
        "lfu",
        "layer-distance",
        "reuse-odds",
        "layer-quota",
        "s3-fifo",
        "sieve",
        "w-tinylfu",
        "static-pin",
    ] {
        for slots in ["8", "20", "60"] {
            let mut flags = vec![
                "--budget",
                "200M",
                "--cache-policy",
                policy,
                "--expert-slots",
                slots,
            ];
            flags.extend(["--queue-depth", "4"]);
            let got = run(&fixture.plan(&flags), &EngineOptions::default(), &ask());
            assert_same(&got, &want, &format!("{policy}, {slots} slots"));
        }
    }
}

#[test]
fn recomputing_the_whole_prefix_gives_the_same_bits() {
    let fixture = Fixture::tiny(TILE_BYTES);
    let want = reference(&fixture);
    let plan = fixture.plan(&["--budget", "200M", "--prefill-chunk", "5"]);
    let ask = Ask {
        recompute: true,
        ..ask()
    };
    let got = run(&plan, &EngineOptions::default(), &ask);
    assert_same(&got, &want, "recompute");
}

#[test]
fn when_digests_are_checked_changes_no_bit_and_no_count() {
    let fixture = Fixture::tiny(TILE_BYTES);
    let want = reference(&fixture);
    let plan = fixture.plan(&["--budget", "200M", "--pin", "1M", "--stream-buffers", RING]);
    for verify in [Verify::First, Verify::Always, Verify::Never] {
        let options = EngineOptions {
            verify,
            ..EngineOptions::default()
        };
        let (got, generated) = try_run(&plan, &options, &ask());
        assert_same(&got, &want, &format!("{verify:?}"));
        let decode = generated.steps.last().unwrap().spent;
        assert_eq!(
            decode.trunk_bytes_read,
            plan.predicted.trunk_bytes_per_token
        );
        assert_eq!(decode.head_bytes_read, plan.predicted.head_bytes_per_token);
    }
}

#[test]
fn a_later_token_changes_no_earlier_logit() {
    let fixture = Fixture::tiny("16Mi");
    let plan = fixture.plan(&["--budget", "200M"]);
    let options = EngineOptions::default();
    let want = reference(&fixture);
    let mut other = TINY_PROMPT;
    other[9] = 7;
    let got = run(
        &plan,
        &options,
        &Ask {
            prompt: other.to_vec(),
            ..ask()
        },
    );
    for position in 0..12 {
        let same = got.prompt_logits[position] == want.prompt_logits[position];
        assert_eq!(same, position < 9, "position {position}");
    }
}
