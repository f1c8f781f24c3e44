//! Streaming: the ring, the slots and the readers at their smallest, on slow disks, over several folders, at any budget.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;
#[path = "common/disk.rs"]
mod disk;
#[path = "common/process.rs"]
mod process;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use common::{Ask, Fixture, TINY_PROMPT, golden, ids, run, try_run};
use disk::Delays;
use k3_run::engine::EngineOptions;
use k3_shared::{formats::trunk::Trunk, ledger::TileSet};
use process::{Setup, finish};
use proptest::{prelude::*, test_runner::TestRunner};

#[test]
fn two_thousand_tokens_through_the_smallest_cache_and_a_slow_disk_are_those_of_the_resident_run() {
    let fixture = Fixture::tiny("64Ki");
    let prompt: Vec<u32> = (0..1900).map(|i| (i * 37 + 11) % 576).collect();
    let ask = Ask::new(&prompt, 100);
    let resident = fixture.plan(&["--budget", "300M", "--context", "2000"]);
    assert_eq!(
        (resident.streamed_trunk_bytes, resident.expert_slots),
        (0, 144)
    );
    let want = run(&resident, &EngineOptions::default(), &ask);
    // The fewest slots at a depth, each with the smallest ring; then reads take so long that they overtake each other.
    for (depth, slots) in [("1", "5"), ("4", "8")] {
        let flags = ["--budget", "300M", "--context", "2000", "--pin", "4M"];
        let one_row = ["--prefill-chunk", "1", "--stream-buffers", "128Ki"];
        let cache = ["--queue-depth", depth, "--expert-slots", slots];
        let smallest = fixture.plan(&[&flags[..], &one_row, &cache].concat());
        assert!(smallest.streamed_trunk_bytes > 0);
        let delays = Arc::new(Delays::default());
        let options = EngineOptions {
            interpose: Delays::before_reads(&delays),
            ..EngineOptions::default()
        };
        let (got, generated) = common::try_run(&smallest, &options, &ask);
        assert!(generated.error.is_none(), "{:?}", generated.error);
        assert_eq!(generated.steps.len(), 1999);
        assert!(delays.count() > 100_000, "{} reads", delays.count());
        assert_eq!(got.ids.len(), 100);
        assert_eq!(got.ids, want.ids);
        assert!(got.bits() == want.bits(), "logits differ in some bit");
    }
}

/// Run as a process; logits of all tokens, and peak and planned memory.
fn logits_and_peak(setup: &Setup) -> (Vec<u8>, u64, u64) {
    let logits = setup.path("logits.f32");
    let flags = [
        "-q",
        "--gen",
        "5",
        "--dump-logits",
        logits.to_str().unwrap(),
    ];
    setup.run_golden(&flags).expect(0);
    let report = setup.report();
    let bytes = |name: &str| report[name].as_u64().unwrap();
    let (peak, planned) = (bytes("peak_rss_bytes"), bytes("planned_peak_bytes"));
    (fs::read(&logits).unwrap(), peak, planned)
}

#[test]
fn any_budget_from_the_floor_to_all_resident_gives_the_same_bits_within_its_plan() {
    let setup = Setup::new(&["--budget", "1G"]);
    let all = setup.read_plan().total_bytes;
    let (want, ..) = logits_and_peak(&setup);
    assert_eq!(want.len(), 5 * 576 * 4);
    let floor = setup.fixture.plan(&["--budget", "floor"]).total_bytes;
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 32,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let outcome = runner.run(&(floor..=all), |budget| {
        setup.replan(&["--budget", &budget.to_string()]);
        let (logits, peak, planned) = logits_and_peak(&setup);
        prop_assert!(planned <= budget);
        prop_assert!(peak <= planned, "{peak} of {planned} planned");
        prop_assert!(logits == want, "logits differ in some bit");
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

/// The tiny checkpoint with its trunk over two folders, the second three times as fast.
fn striped(fixture: &Fixture) -> PathBuf {
    let second = fixture.path("second disk");
    fixture.pack(&[
        "--tile-bytes",
        "8Ki",
        "--stripe",
        second.to_str().unwrap(),
        "--stripe-weights",
        "1,3",
    ]);
    second
}

#[test]
fn a_striped_trunk_gives_the_same_bits_and_each_folder_serves_its_share() {
    const PLAN: [&str; 6] = [
        "--budget",
        "200M",
        "--pin",
        "1M",
        "--stream-buffers",
        "40Ki",
    ];
    let whole = Fixture::tiny("8Ki");
    let ask = Ask::new(&TINY_PROMPT, 6);
    let want = run(&whole.plan(&PLAN), &EngineOptions::default(), &ask);

    let fixture = Fixture::empty();
    k3_tests::synth::tiny(&fixture.model).unwrap();
    let second = striped(&fixture);
    let plan = fixture.plan(&PLAN);
    assert!(plan.streamed_trunk_bytes > 0);
    let read: Arc<Mutex<BTreeMap<PathBuf, u64>>> = Arc::default();
    let counts = Arc::clone(&read);
    let options = EngineOptions {
        interpose: disk::before_reads(move |path, _, len| {
            *counts.lock().unwrap().entry(path.to_owned()).or_default() += len as u64;
        }),
        ..EngineOptions::default()
    };
    let (got, generated) = try_run(&plan, &options, &ask);
    assert!(generated.error.is_none(), "{:?}", generated.error);
    assert_eq!(got.ids, want.ids);
    assert!(got.bits() == want.bits(), "logits differ in some bit");

    // Pinned tiles are read once, the others in every step; the head only in the steps that give a token.
    let trunk = Trunk::open(&fixture.trunk).unwrap();
    let pinned = TileSet::from_ranges(&plan.pinned_tiles, trunk.specs.len()).unwrap();
    let steps = generated.steps.len() as u64;
    let with_head = 6;
    let mut planned: BTreeMap<PathBuf, u64> = BTreeMap::new();
    for (index, (tile, spec)) in trunk.trunk.tiles().zip(&trunk.specs).enumerate() {
        let times = match spec.layer() {
            _ if pinned.contains(index) => 1,
            Some(_) => steps,
            None => with_head,
        };
        *planned.entry(trunk.files[tile.file].clone()).or_default() += times * tile.stored_bytes;
    }
    let read = read.lock().unwrap();
    assert_eq!(planned.len(), 2);
    for (path, bytes) in &planned {
        assert_eq!(read.get(path), Some(bytes), "{}", path.display());
    }
    let of = |dir: &Path| {
        let mut files = planned.iter().filter(|(path, _)| path.starts_with(dir));
        *files.next().unwrap().1 as f64
    };
    let share = of(&second) / (of(&second) + of(&fixture.trunk));
    assert!(
        (share - 0.75).abs() < 0.02,
        "the second folder serves {share}"
    );
}

#[test]
fn a_missing_or_foreign_stripe_is_an_error_before_the_first_token() {
    let setup = Setup::new(&["--budget", "floor"]);
    fs::remove_dir_all(&setup.fixture.trunk).unwrap();
    let second = striped(&setup.fixture);
    setup.replan(&["--budget", "200M", "--pin", "1M"]);
    let golden_ids = ids(&golden("tiny_eps1e-6.json")["generated_ids"]);
    setup.run_golden(&["--gen", "3"]).expect(0);
    assert_eq!(process::ids_of(&setup.report()), golden_ids[..3]);

    let away = setup.path("unplugged");
    fs::rename(&second, &away).unwrap();
    let named = second.to_str().unwrap();
    let done = setup.run_golden(&["--gen", "3"]);
    assert!(
        matches!(done.code, Some(1 | 2)),
        "{:?}: {}",
        done.code,
        done.stderr
    );
    assert!(done.stdout.is_empty(), "no token comes before the error");
    let done = done.says(&[named, "k3-pack"]);
    assert!(!done.stderr.contains("panicked"));
    // Planning notices as well.
    let mut plan = process::tool("k3-plan");
    plan.args(["--budget", "200M", "--model"])
        .arg(&setup.fixture.model);
    plan.arg("--trunk").arg(&setup.fixture.trunk);
    let done = finish(&mut plan).says(&[named]);
    assert!(matches!(done.code, Some(1 | 2)));

    // A file of the right name that is another trunk's part.
    fs::create_dir(&second).unwrap();
    for entry in fs::read_dir(&away).unwrap() {
        let name = entry.unwrap().file_name();
        fs::write(second.join(name), b"short").unwrap();
    }
    let done = setup.run_golden(&["--gen", "3"]);
    assert!(
        matches!(done.code, Some(1 | 2)),
        "{:?}: {}",
        done.code,
        done.stderr
    );
    assert!(done.stdout.is_empty());
    done.says(&[named]);
}

#[test]
fn too_few_open_files_are_an_error_that_says_what_to_type() {
    let setup = Setup::new(&["--budget", "floor"]);
    // Standard streams, the plan and the trunk, but not every shard.
    let mut limited = std::process::Command::new("sh");
    limited
        .args(["-c", "ulimit -n 9 && exec \"$0\" \"$@\""])
        .arg(setup.command::<&str>(&[]).get_program())
        .args(setup.command(&["--ids", "1,2", "--gen", "1"]).get_args())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    finish(&mut limited)
        .expect(2)
        .says(&["ulimit -n", "model-0"]);
}
