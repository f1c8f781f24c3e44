//! One flipped bit anywhere: the run is refused, or gives the bits it would have given. Nothing wrong comes out silently.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;
#[path = "common/process.rs"]
mod process;

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Parser as _;
use common::{Ask, Fixture, Record, TINY_PROMPT, try_run};
use k3_run::{
    engine::{Engine, EngineOptions},
    model::SequenceState,
    saved,
};
use k3_shared::{formats::plan::Plan, term::Outcome};
use process::{Setup, finish, poke, tool};

/// Flips in all.
const FLIPS: usize = 2000;

/// A generator whose high bits are good enough to choose bytes.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 24) % bound.max(1)
    }
}

/// What a run of the files as they are gives; `None` if it is refused at any point.
fn outcome(plan: &Path) -> Option<Record> {
    let plan: Plan = serde_json::from_slice(&fs::read(plan).unwrap()).ok()?;
    // Opened twice, because a refusal is an answer here and a failure in the helper.
    drop(Engine::open(plan.clone(), &EngineOptions::default()).ok()?);
    let ask = Ask {
        all_rows: true,
        ..Ask::new(&TINY_PROMPT, 3)
    };
    let (record, generated) = try_run(&plan, &EngineOptions::default(), &ask);
    generated.error.is_none().then_some(record)
}

struct Flipped {
    setup: Setup,
    want: Record,
}

impl Flipped {
    fn new() -> Self {
        let setup = Setup::new(&["--budget", "floor"]);
        let census = [setup.fixture.model.to_str().unwrap(), "--hash", "--experts"];
        finish(tool("k3-census").args(census)).expect(0);
        setup.replan(&["--budget", "60M", "--prefill-chunk", "5"]);
        assert!(setup.read_plan().expert_digests.is_some());
        let want = outcome(&setup.plan).unwrap();
        Self { setup, want }
    }

    /// Flip a bit, see what a run gives, and flip it back; whether the run was refused.
    fn is_refused(&self, file: &Path, at: u64, bit: u64) -> bool {
        poke(file, at, |byte| byte ^ (1 << bit));
        let got = outcome(&self.setup.plan);
        poke(file, at, |byte| byte ^ (1 << bit));
        let Some(got) = got else { return true };
        let how = format!("{}: byte {at}, bit {bit}", file.display());
        assert_eq!(got.ids, self.want.ids, "{how}");
        assert!(got.bits() == self.want.bits(), "{how}: logits differ");
        false
    }
}

/// Files in a folder, with their lengths.
fn files_of(folder: &Path) -> Vec<(PathBuf, u64)> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            (entry.path(), entry.metadata().unwrap().len())
        })
        .collect();
    files.sort_unstable();
    files
}

#[test]
fn no_flipped_bit_of_weights_records_or_plan_changes_a_token_silently() {
    let it = Flipped::new();
    let model = files_of(&it.setup.fixture.model);
    let trunk = files_of(&it.setup.fixture.trunk);
    let plan = vec![(
        it.setup.plan.clone(),
        fs::metadata(&it.setup.plan).unwrap().len(),
    )];
    let mut random = Random(7);
    let mut refused = [0; 3];
    for number in 0..FLIPS {
        // Most bytes are weights, most mistakes are made where there are few: half of the flips are at the front of a file.
        let which = [0, 0, 0, 0, 1, 1, 1, 2][number % 8];
        let files = [&model, &trunk, &plan][which];
        let (file, len) = &files[usize::try_from(random.below(files.len() as u64)).unwrap()];
        let within = if number % 3 == 0 {
            (*len).min(65_536)
        } else {
            *len
        };
        let at = random.below(within);
        let bit = random.below(8);
        refused[which] += usize::from(it.is_refused(file, at, bit));
    }
    // Harmless ones are bytes that are never used: experts nobody chose, padding, tensors of vision, other formats of the same.
    assert!(
        refused[0] > 100 && refused[1] > 300 && refused[2] > 20,
        "{refused:?} were refused"
    );
}

#[test]
fn no_flipped_bit_of_a_saved_state_is_gone_on_from() {
    let it = Flipped::new();
    let state = it.setup.path("state");
    let flags = ["--gen", "2", "--state", state.to_str().unwrap()];
    it.setup.run_golden(&flags).expect(0);
    let len = fs::metadata(&state).unwrap().len();
    let config = Fixture::tiny("64Ki");
    let config = k3_shared::checkpoint::Checkpoint::open(&config.model, None)
        .unwrap()
        .config;
    let mut random = Random(11);
    for number in 0..300 {
        let at = random.below(if number % 2 == 0 { len.min(4096) } else { len });
        let bit = random.below(8);
        poke(&state, at, |byte| byte ^ (1 << bit));
        let mut sequence = SequenceState::new(&config, config.num_hidden_layers, 64);
        let read = saved::Reader::open(&state).and_then(|reader| reader.read_into(&mut sequence));
        assert!(read.is_err(), "byte {at}, bit {bit}");
        poke(&state, at, |byte| byte ^ (1 << bit));
    }
    saved::Reader::open(&state).unwrap();
}

#[test]
fn no_flipped_bit_of_a_trace_is_replayed() {
    let it = Flipped::new();
    let trace = it.setup.path("run.trace");
    it.setup
        .run_golden(&["--gen", "3", "--trace", trace.to_str().unwrap()])
        .expect(0);
    let replay = || {
        let line = [
            "k3-simcache",
            trace.to_str().unwrap(),
            "-q",
            "--slots",
            "20",
            "--format",
            "json",
        ];
        let mut out = Vec::new();
        match k3_simcache::run(&k3_simcache::Cli::parse_from(line), &mut out) {
            Ok(Outcome::Done) => Some(out),
            _ => None,
        }
    };
    let want = replay().unwrap();
    let len = fs::metadata(&trace).unwrap().len();
    let mut random = Random(13);
    for _ in 0..300 {
        let (at, bit) = (random.below(len), random.below(8));
        poke(&trace, at, |byte| byte ^ (1 << bit));
        if let Some(got) = replay() {
            assert!(got == want, "byte {at}, bit {bit}: another result");
            // What tells a trace of ours from one of bare pairs is its first bytes.
            panic!("byte {at}, bit {bit}: replayed as if nothing were");
        }
        poke(&trace, at, |byte| byte ^ (1 << bit));
    }
}
