//! A run that stops and goes on gives what it would have given: whatever stopped it, whatever it goes on with.
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
    process::Child,
    thread,
    time::Duration,
};

use common::TINY_PROMPT;
use k3_shared::formats::plan::Plan;
use process::{Done, Setup, ids_of, list};
use rustix::process::{Pid, Signal, kill_process};

/// Flags of a run that draws its tokens.
const DRAWN: [&str; 6] = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "5"];

/// Tokens and logits of a run.
#[derive(Debug, PartialEq)]
struct Run {
    ids: Vec<u32>,
    logits: Vec<u8>,
}

impl Run {
    /// What both gave, one after the other.
    fn then(mut self, mut next: Self) -> Self {
        self.ids.append(&mut next.ids);
        self.logits.append(&mut next.logits);
        self
    }

    fn last(self, count: usize) -> Self {
        let (ids, row) = (self.ids, 4 * 576);
        Self {
            logits: self.logits[self.logits.len() - count * row..].to_vec(),
            ids: ids[ids.len() - count..].to_vec(),
        }
    }
}

struct Resuming {
    setup: Setup,
    state: PathBuf,
}

impl Resuming {
    fn new() -> Self {
        let setup = Setup::new(&["--budget", "200M", "--prefill-chunk", "5"]);
        let state = setup.path("the state");
        Self { setup, state }
    }

    fn state(&self) -> &str {
        self.state.to_str().unwrap()
    }

    fn flags<'a>(logits: &'a Path, flags: &[&'a str]) -> Vec<&'a str> {
        let dump = ["-q", "--no-stop", "--dump-logits", logits.to_str().unwrap()];
        [&dump[..], flags].concat()
    }

    fn try_run(&self, flags: &[&str]) -> (Done, Run) {
        let logits = self.setup.path("logits.f32");
        let _ = fs::remove_file(&logits);
        let done = self.setup.run(&Self::flags(&logits, flags));
        let ids = match fs::read(self.setup.path("report.json")) {
            Ok(_) => ids_of(&self.setup.report()),
            Err(_) => Vec::new(),
        };
        let logits = fs::read(&logits).unwrap_or_default();
        (done, Run { ids, logits })
    }

    fn run(&self, flags: &[&str]) -> Run {
        let (done, run) = self.try_run(flags);
        done.expect(0);
        run
    }

    /// A run of the golden prompt.
    fn golden(&self, flags: &[&str]) -> Run {
        self.run(&[&["--ids", &list(&TINY_PROMPT)], flags].concat())
    }

    fn start(&self, flags: &[&str]) -> Child {
        let logits = self.setup.path("logits.f32");
        self.setup.start(&Self::flags(&logits, flags))
    }
}

fn stop(child: &Child, signal: Signal) {
    // A run that has already ended needs no signal.
    let _ = kill_process(Pid::from_child(child), signal);
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one_at_any_budget_drawn_or_not() {
    let it = Resuming::new();
    for drawn in [&[][..], &DRAWN] {
        let want = it.golden(&[drawn, &["--gen", "9"]].concat());
        let saving = ["--force", "--state", it.state(), "--gen"];
        let mut got = it.golden(&[drawn, &saving, &["2"]].concat());
        // Neither budget nor cache nor chunk need be the same; how tokens are drawn comes with the state.
        for (budget, count) in [("floor", "1"), ("60M", "2"), ("200M", "4")] {
            it.setup
                .replan(&["--budget", budget, "--prefill-chunk", "3"]);
            let more = [
                "--resume",
                it.state(),
                "--state",
                it.state(),
                "--gen",
                count,
            ];
            got = got.then(it.run(&more));
            let report = it.setup.report();
            assert_eq!(report["resumed"]["path"], it.state());
            assert_eq!(report["saved"]["tokens"], 12 + got.ids.len());
        }
        assert_eq!(got.ids, want.ids);
        assert!(got == want, "logits differ in some bit");
    }
}

#[test]
fn a_second_prompt_goes_on_and_a_prompt_can_be_saved_alone() {
    let it = Resuming::new();
    let saving = ["--state", it.state(), "--gen"];
    let first = it.golden(&[&saving[..], &["3"]].concat());
    let second = [7, 7, 300, 1];
    let got = it.run(&[
        "--resume",
        it.state(),
        "--ids",
        &list(&second),
        "--gen",
        "4",
    ]);
    let whole = [&TINY_PROMPT[..], &first.ids, &second].concat();
    let want = it.run(&["--ids", &list(&whole), "--gen", "4"]);
    assert_eq!(got, want);

    let prompt = it.golden(&["--force", "--state", it.state(), "--gen", "0"]);
    assert!(prompt.ids.is_empty());
    let got = it.run(&["--resume", it.state(), "--gen", "4"]);
    let want = it.golden(&["--gen", "4"]);
    assert_eq!(got, want);
}

#[test]
fn characters_split_between_two_runs_come_out_whole() {
    let it = Resuming::new();
    let prompt = list(&TINY_PROMPT);
    let text = |flags: &[&str]| {
        let done = it
            .setup
            .run(&[&["-q", "--no-stop"], flags].concat())
            .expect(0);
        done.text().strip_suffix('\n').unwrap().to_owned()
    };
    let want = text(&["--ids", &prompt, "--gen", "24"]);
    let mut got = text(&["--ids", &prompt, "--gen", "1", "--state", it.state()]);
    for _ in 1..23 {
        got += &text(&["--resume", it.state(), "--gen", "1", "--state", it.state()]);
    }
    got += &text(&["--resume", it.state(), "--gen", "1"]);
    assert_eq!(got, want);
}

#[test]
fn an_interrupt_finishes_the_step_and_saves_and_the_run_goes_on_from_it() {
    let it = Resuming::new();
    let prompt = list(&TINY_PROMPT);
    let want = it.run(&["--ids", &prompt, "--gen", "400"]);
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let _ = fs::remove_file(&it.state);
        let child = it.start(&["--ids", &prompt, "--gen", "400", "--state", it.state()]);
        thread::sleep(Duration::from_millis(400));
        stop(&child, signal);
        let done = Done::of(child.wait_with_output().unwrap()).expect(code);
        assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
        let report = it.setup.report();
        assert_eq!(report["finish"], "interrupted");
        let generated = ids_of(&report).len();
        assert!(
            generated > 0 && generated < 400,
            "{generated} tokens in time"
        );
        assert_eq!(report["saved"]["tokens"], 12 + generated);
        assert_eq!(report["saved"]["position"], 12 + generated - 1);
        let rest = (400 - generated).to_string();
        let got = it.run(&["--resume", it.state(), "--gen", &rest]);
        let want = Run {
            ids: want.ids.clone(),
            logits: want.logits.clone(),
        };
        assert!(got == want.last(400 - generated), "from {generated} on");
    }
}

/// Moments are drawn from a fixed seed; what a run has done by then is up to the machine.
#[test]
fn two_hundred_kills_lose_at_most_the_last_interval() {
    let it = Resuming::new();
    let prompt = list(&TINY_PROMPT);
    let saving = ["--state", it.state(), "--save-every", "1"];
    let all = 40;
    let want = it.run(&["--ids", &prompt, "--gen", &all.to_string()]);
    let began = std::time::Instant::now();
    it.run(
        &[
            &["--ids", &prompt, "--gen", &all.to_string(), "--force"],
            &saving[..],
        ]
        .concat(),
    );
    let longest = u64::try_from(began.elapsed().as_micros()).unwrap();
    let mut random = 12345u64;
    let (mut resumed, mut nothing) = (0, 0);
    for _ in 0..200 {
        // Often it goes on from where the one before was killed, until all tokens are there.
        let saved = k3_run::saved::Reader::open(&it.state).ok();
        let so_far = saved.map_or(0, |state| state.header.ids.len().saturating_sub(12));
        let from_start = so_far == 0 || so_far >= all;
        if from_start {
            let _ = fs::remove_file(&it.state);
        }
        let count = (if from_start { all } else { all - so_far }).to_string();
        let begin = if from_start {
            ["--ids", &prompt]
        } else {
            ["--resume", it.state()]
        };
        let child = it.start(&[&begin[..], &["--gen", &count], &saving].concat());
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        thread::sleep(Duration::from_micros((random >> 33) % longest));
        stop(&child, Signal::KILL);
        let done = Done::of(child.wait_with_output().unwrap());
        assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
        if !it.state.exists() {
            nothing += 1;
            continue;
        }
        let state = k3_run::saved::Reader::open(&it.state).unwrap();
        let known = state.header.ids.len().max(12) - 12;
        assert_eq!(state.header.ids[12..], want.ids[..known]);
        if known < all {
            resumed += 1;
        }
    }
    assert!(
        resumed > 20 && nothing < 180,
        "{resumed} resumed, {nothing} with nothing saved"
    );
    // The last of them goes on to the end, with all its logits.
    if let Ok(state) = k3_run::saved::Reader::open(&it.state) {
        let left = (12 + all).saturating_sub(state.header.ids.len());
        if left > 0 {
            let got = it.run(&["--resume", it.state(), "--gen", &left.to_string()]);
            assert!(got == want.last(left), "the last {left} tokens");
        }
    }
}

#[test]
fn what_cannot_be_gone_on_from_is_refused_and_named() {
    let it = Resuming::new();
    it.golden(&["--gen", "2", "--state", it.state()]);
    let refused = |code: i32, flags: &[&str], words: &[&str]| {
        let (done, run) = it.try_run(flags);
        let done = done.expect(code).says(words);
        assert!(done.stdout.is_empty() && run.ids.is_empty(), "{flags:?}");
        assert!(!done.stderr.contains("panicked"));
    };
    let resume = ["--resume", it.state(), "--gen", "1"];
    // Made with something else.
    let eps = [&resume[..], &["--mla-norm-eps", "1e-5"]].concat();
    refused(1, &eps, &["--mla-norm-eps 1e-6", it.state()]);
    let other = [&resume[..], &["--allow-nan-scales"]].concat();
    refused(1, &other, &["--allow-nan-scales"]);
    // The plan has no room for more.
    let many = ["--resume", it.state(), "--gen", "100000"];
    refused(2, &many, &["k3-plan --context"]);
    // A state there is not replaced by accident.
    let again = ["--ids", "1,2", "--gen", "1", "--state", it.state()];
    refused(2, &again, &["--force", "--resume", it.state()]);
    // Flags that go with nothing.
    refused(2, &["--ids", "1", "--save-every", "1"], &["--state"]);
    refused(2, &["--gen", "1"], &["--resume"]);
    let both = ["--resume", it.state(), "--recompute"];
    refused(2, &both, &["--recompute"]);
    refused(2, &["--resume", "/nowhere/state"], &["/nowhere/state"]);
    let nowhere = ["--ids", "1", "--gen", "1", "--state", "/nowhere/state"];
    refused(2, &nowhere, &["/nowhere/state"]);
    // Of another checkpoint.
    let mut plan: Plan = it.setup.read_plan();
    let planned = plan.identity.clone();
    it.run(&resume);
    let bytes = fs::read(&it.state).unwrap();
    let at = bytes
        .windows(planned.len())
        .position(|window| window == planned.as_bytes())
        .unwrap();
    plan.identity = planned;
    let mut other = bytes.clone();
    other[at] ^= 1;
    fs::write(&it.state, &other).unwrap();
    refused(1, &resume, &[it.state()]);
    // Damaged, cut, empty, something else.
    let mut damaged = bytes.clone();
    *damaged.last_mut().unwrap() ^= 1;
    for wrong in [
        &damaged[..],
        &bytes[..bytes.len() - 1],
        b"",
        b"k3.plan/1 {}",
    ] {
        fs::write(&it.state, wrong).unwrap();
        refused(1, &resume, &[it.state()]);
    }
}
