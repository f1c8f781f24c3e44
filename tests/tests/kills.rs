//! Killed at any moment, a packer or a save loses at most what it was doing: the next command works or says what to type.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;
#[path = "common/faulty.rs"]
mod faulty;
#[path = "common/packing.rs"]
mod packing;
#[path = "common/process.rs"]
mod process;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use common::TINY_PROMPT;
use faulty::Fault;
use k3_shared::formats::trunk::Trunk;
use packing::Packing;
use process::{Done, Setup, finish, ids_of, list, tool};

const KILLS: [Fault; 3] = [Fault::KillBefore, Fault::KillWithin, Fault::KillAfter];

impl Packing {
    /// What is left after a kill is the whole old or the whole new trunk, or none, which k3-plan says how to make.
    fn check_after_kill(&self, wholes: &[Vec<(PathBuf, Vec<u8>)>], what: &str) -> bool {
        let plan = finish(
            tool("k3-plan")
                .args(["-q", "--budget", "200M", "--probe-cache", "none", "--model"])
                .arg(&self.fixture.model)
                .arg("--trunk")
                .arg(&self.fixture.trunk),
        );
        assert!(!plan.stderr.contains("panicked"), "{what}: {}", plan.stderr);
        let is_there = Trunk::open(&self.fixture.trunk).is_ok();
        if is_there {
            plan.expect(0);
            // What a killed packer left under temporary names is nobody's.
            let files: Vec<_> = self
                .files()
                .into_iter()
                .filter(|(path, _)| !is_temporary(path))
                .collect();
            assert!(wholes.contains(&files), "{what}: a mixture");
            assert!(self.is_usable(), "{what}");
        } else {
            plan.expect(2).says(&["k3-pack"]);
        }
        is_there
    }
}

fn is_temporary(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "partial")
}

/// Moments drawn from a fixed seed; what has been done by then is up to the machine.
struct Moments(u64);

impl Moments {
    fn next(&mut self, longest: Duration) -> Duration {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let micros = u64::try_from(longest.as_micros()).unwrap();
        Duration::from_micros((self.0 >> 33) % micros.max(1))
    }
}

#[test]
fn two_hundred_kills_of_packing_leave_a_trunk_or_none() {
    let it = Packing::new();
    finish(&mut it.command("4Ki")).expect(0);
    let old = it.files();
    let began = Instant::now();
    finish(&mut it.command("16Ki")).expect(0);
    let longest = began.elapsed();
    let wholes = [old, it.files()];
    let mut moments = Moments(99);
    let mut there = 0;
    for kill in 0..200 {
        // On top of what the kill before left, whatever that is; each way round.
        let mut child = it.command(["4Ki", "16Ki"][kill % 2]).spawn().unwrap();
        thread::sleep(moments.next(longest));
        child.kill().unwrap();
        let done = Done::of(child.wait_with_output().unwrap());
        assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
        there += u32::from(it.check_after_kill(&wholes, &format!("kill {kill}")));
    }
    assert!(there > 20, "a trunk was there after {there} of 200 kills");
    finish(&mut it.command("16Ki")).expect(0);
    assert!(
        it.files() == wholes[1],
        "something is left of the killed ones"
    );
}

/// Every call that writes, cuts or syncs a file of the trunk, before, within and after it.
#[test]
fn a_kill_at_any_call_of_packing_leaves_a_trunk_or_none() {
    let it = Packing::new();
    finish(&mut it.command("4Ki")).expect(0);
    let old = it.files();
    finish(&mut it.command("16Ki")).expect(0);
    let wholes = [old, it.files()];
    let (mut at, mut kills) = (0, 0);
    let mut is_over = false;
    while !is_over {
        is_over = true;
        for fault in KILLS {
            let what = format!("{fault:?} at call {at}");
            finish(&mut it.command("4Ki")).expect(0);
            let (done, raised) = faulty::run(&mut it.command("16Ki"), &it.fixture.trunk, fault, at);
            if raised {
                assert_eq!(done.code, None, "{what}");
                it.check_after_kill(&wholes, &what);
                kills += 1;
            } else {
                done.expect(0);
            }
            // A call that is no write has no middle.
            is_over &= fault == Fault::KillWithin || !raised;
        }
        at += 1;
    }
    assert!(kills > 60, "{kills} kills");
}

/// Tokens and logits of a run, and how it is called.
struct Saving {
    setup: Setup,
    folder: PathBuf,
}

const TOKENS: usize = 22;

impl Saving {
    fn new() -> Self {
        let setup = Setup::new(&["--budget", "200M", "--prefill-chunk", "12"]);
        let folder = setup.path("states");
        Self { setup, folder }
    }

    fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// A run from the prompt or from the state, that saves after each token.
    fn command(&self, resumes: bool, count: usize) -> Command {
        let mut command = self.setup.command(&["-q", "--no-stop", "--dump-logits"]);
        command.arg(self.setup.path("logits"));
        command.args(["--gen", &count.to_string(), "--save-every", "1", "--state"]);
        command.arg(self.state());
        if resumes {
            command.arg("--resume").arg(self.state());
        } else {
            command.args(["--ids", &list(&TINY_PROMPT)]);
        }
        command
    }

    fn result(&self) -> (Vec<u32>, Vec<u8>) {
        let logits = fs::read(self.setup.path("logits")).unwrap();
        (ids_of(&self.setup.report()), logits)
    }

    /// The state that a kill left is gone on from, or there is none and the run begins anew: the end is the same. Returns whether
    /// there was one.
    fn check_after_kill(&self, want: &(Vec<u32>, Vec<u8>), what: &str) -> bool {
        let state = self.state();
        let known = match k3_run::saved::Reader::open(&state) {
            Ok(reader) => reader.header.ids.len() - TINY_PROMPT.len(),
            Err(error) => {
                assert!(!state.exists(), "{what}: {error}");
                0
            }
        };
        let left = TOKENS - known;
        if left > 0 {
            finish(&mut self.command(known > 0, left)).expect(0);
            let (ids, logits) = self.result();
            assert_eq!(ids, want.0[known..], "{what}");
            assert!(logits == want.1[4 * 576 * known..], "{what}: logits differ");
        }
        known > 0
    }
}

/// Every call of the saves of a run: the kills are where a save can be torn, not somewhere in a run. Returns how many there were.
fn kill_saves(fault: Fault) -> usize {
    let it = Saving::new();
    fs::create_dir(&it.folder).unwrap();
    finish(&mut it.command(false, TOKENS)).expect(0);
    let want = it.result();
    let (mut kills, mut resumed, mut quiet) = (0, 0, 0);
    let mut at = 0;
    // A call that is no write has no middle; ten such in a row are the end.
    while quiet < 10 {
        let what = format!("{fault:?} at call {at}");
        fs::remove_dir_all(&it.folder).unwrap();
        fs::create_dir(&it.folder).unwrap();
        let mut command = it.command(false, TOKENS);
        let (done, raised) = faulty::run(&mut command, &it.folder, fault, at);
        if raised {
            assert_eq!(done.code, None, "{what}");
            resumed += usize::from(it.check_after_kill(&want, &what));
            kills += 1;
            quiet = 0;
        } else {
            done.expect(0);
            quiet += 1;
        }
        at += 1;
    }
    assert!(resumed + 5 >= kills, "{resumed} of {kills} resumed");
    kills
}

#[test]
fn a_kill_before_any_call_of_a_save_loses_at_most_that_save() {
    assert!(kill_saves(Fault::KillBefore) >= 80);
}

#[test]
fn a_kill_within_any_write_of_a_save_loses_at_most_that_save() {
    assert!(kill_saves(Fault::KillWithin) >= 20);
}

#[test]
fn a_kill_after_any_call_of_a_save_loses_at_most_that_save() {
    assert!(kill_saves(Fault::KillAfter) >= 80);
}
