//! Every read of a run may fail, be interrupted or come up short: the run gives the same bits, or stops and says where.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;
#[path = "common/disk.rs"]
mod disk;

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use common::{Ask, Fixture, Record, TINY_PROMPT, run, try_run};
use disk::Act;
use k3_run::{
    engine::{Engine, EngineOptions},
    report::Finish,
};
use k3_shared::{
    direct::{Interpose, Mode},
    formats::plan::Plan,
};
use rustix::io::Errno;

/// A plan that streams most of its tiles and experts.
fn plan(fixture: &Fixture) -> Plan {
    let flags = [
        "--budget",
        "200M",
        "--pin",
        "1M",
        "--stream-buffers",
        "64Ki",
    ];
    let cache = ["--queue-depth", "4", "--expert-slots", "20"];
    fixture.plan(&[&flags[..], &cache].concat())
}

fn ask() -> Ask {
    Ask::new(&TINY_PROMPT, 4)
}

fn with(interpose: Interpose) -> EngineOptions {
    EngineOptions {
        interpose,
        ..EngineOptions::default()
    }
}

/// A disk on which `fault` strikes the read call of number `at`, and the files it struck.
fn strike(at: usize, fault: Act) -> (Interpose, Arc<Mutex<Vec<PathBuf>>>) {
    let (calls, struck) = (AtomicUsize::new(0), Arc::<Mutex<Vec<PathBuf>>>::default());
    let files = Arc::clone(&struck);
    let interpose = disk::on_reads(move |path, _, _| {
        if calls.fetch_add(1, Ordering::Relaxed) == at {
            files.lock().unwrap().push(path.to_owned());
            fault
        } else {
            Act::Pass
        }
    });
    (interpose, struck)
}

/// How many read calls the run makes when nothing is wrong, and what it gives.
fn undisturbed(plan: &Plan) -> (usize, Record) {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let interpose = disk::before_reads(move |_, _, _| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let record = run(plan, &with(interpose), &ask());
    (calls.load(Ordering::Relaxed), record)
}

/// Numbers of calls spread over the run, the first and the last among them.
fn spread(calls: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |i| i * (calls - 1) / (count - 1))
}

#[test]
fn a_read_that_fails_at_any_point_stops_the_run_and_names_the_file() {
    let fixture = Fixture::tiny("8Ki");
    let plan = plan(&fixture);
    let (calls, want) = undisturbed(&plan);
    assert!(calls > 1000, "{calls} read calls");
    for fault in [Act::Fail(Errno::IO), Act::Fail(Errno::STALE), Act::Short(0)] {
        for at in spread(calls, 60) {
            let (interpose, struck) = strike(at, fault);
            let (got, generated) = try_run(&plan, &with(interpose), &ask());
            let how = format!("{fault:?} at call {at} of {calls}");
            // Calls run ahead of steps; one for a step that never came would harm nobody, but there is none.
            let struck = struck.lock().unwrap();
            let file = struck
                .first()
                .unwrap_or_else(|| panic!("{how}: never made"));
            assert_eq!(generated.finish, Finish::Error, "{how}");
            let error = generated.error.unwrap().to_string();
            assert!(error.contains(file.to_str().unwrap()), "{how}: {error}");
            // What came before it is right.
            assert!(got.ids.len() < want.ids.len(), "{how}");
            assert_eq!(got.ids, want.ids[..got.ids.len()], "{how}");
            assert_eq!(got.bits(), want.bits()[..got.ids.len()], "{how}");
        }
    }
}

#[test]
fn interrupted_and_short_reads_change_no_bit() {
    let fixture = Fixture::tiny("8Ki");
    let plan = plan(&fixture);
    let want = run(&plan, &EngineOptions::default(), &ask());
    for (mode, piece) in [(Mode::Auto, 4096), (Mode::Buffered, 1000)] {
        let calls = AtomicUsize::new(0);
        let interpose =
            disk::on_reads(
                move |_, _, _| match calls.fetch_add(1, Ordering::Relaxed) % 4 {
                    0 => Act::Fail(Errno::INTR),
                    1 | 2 => Act::Short(piece),
                    _ => Act::Pass,
                },
            );
        let options = EngineOptions {
            mode,
            ..with(interpose)
        };
        let got = run(&plan, &options, &ask());
        assert_eq!(got.ids, want.ids, "{mode:?}");
        assert!(got.bits() == want.bits(), "{mode:?}: logits differ");
    }
}

#[test]
fn after_a_failed_step_its_sequence_is_refused() {
    use k3_run::model::{ModelError, Observer, Output, Segment};
    struct Blind;
    impl Observer for Blind {}
    let fixture = Fixture::tiny("8Ki");
    let plan = plan(&fixture);
    let (calls, _) = undisturbed(&plan);
    let (interpose, _) = strike(calls / 2, Act::Fail(Errno::IO));
    let mut engine = Engine::open(plan, &with(interpose)).unwrap();
    let mut state = engine.new_sequence();
    let token = [k3_shared::ids::TokenId(5)];
    let failed = (0..64).find_map(|_| {
        let mut segments = [Segment {
            state: &mut state,
            tokens: &token,
        }];
        engine.step(&mut segments, Output::Last, &mut Blind).err()
    });
    assert!(matches!(failed, Some(ModelError::Source(_))), "{failed:?}");
    let before = state.position;
    let mut segments = [Segment {
        state: &mut state,
        tokens: &token,
    }];
    let again = engine.step(&mut segments, Output::Last, &mut Blind);
    assert!(matches!(again, Err(ModelError::StateLost)), "{again:?}");
    assert_eq!(state.position, before);
}
