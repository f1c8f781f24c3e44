//! No space, or an error, at every write of every output: the tool says which file and how many bytes, nothing half-written stands under a
//! final name, and the next run works. Short and interrupted writes are nothing to a user.
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
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use common::TINY_PROMPT;
use faulty::{Fault, assert_refused};
use k3_run::{model::SequenceState, saved};
use k3_shared::{
    config::Config,
    formats::{
        trace::{Trace, cache_groups},
        trunk::Trunk,
    },
};
use packing::Packing;
use process::{Done, Setup, finish, list, tool};
use serde_json::Value;

/// What stands under a final name before a tool replaces it.
const BEFORE: &[u8] = b"what was there before";

/// An output: its name in the folder, and whether bytes under it are whole.
type Output<'a> = (&'static str, &'a dyn Fn(&[u8]) -> bool);

/// A tool that writes files into a folder.
struct Case<'a> {
    folder: PathBuf,
    command: &'a dyn Fn() -> Command,
    outputs: &'a [Output<'a>],
}

impl Case<'_> {
    fn reset(&self) {
        let _ = fs::remove_dir_all(&self.folder);
        fs::create_dir(&self.folder).unwrap();
        for (name, _) in self.outputs {
            fs::write(self.folder.join(name), BEFORE).unwrap();
        }
    }

    /// Everything is whole, and nothing else is left.
    fn check(&self, what: &str, all_are_new: bool) {
        for entry in fs::read_dir(&self.folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let known =
                |&(output, _): &Output<'_>| name == output || name == format!("{output}.previous");
            assert!(self.outputs.iter().any(known), "{what}: {name} is left");
        }
        for (name, is_whole) in self.outputs {
            let bytes = fs::read(self.folder.join(name)).unwrap();
            let is_old = bytes == BEFORE && !all_are_new;
            assert!(is_old || is_whole(&bytes), "{what}: {name} is half written");
        }
    }

    fn run_every_fault(&self, least_calls: usize) {
        for fault in [Fault::Io, Fault::Full] {
            let mut at = 0;
            loop {
                let what = format!("{fault:?} at call {at}");
                self.reset();
                let (done, raised) = faulty::run(&mut (self.command)(), &self.folder, fault, at);
                if !raised {
                    done.expect(0);
                    break;
                }
                self.says_what_failed(&done, fault, &what);
                self.check(&what, false);
                at += 1;
            }
            // Calls that need no space, as the last syncs, do not fail on a full disk.
            assert!(at >= least_calls || fault == Fault::Full, "only {at} calls");
        }
        // Nothing is reset: what a failure leaves must not be in the way.
        finish(&mut (self.command)()).expect(0);
        self.check("after the faults", true);
        for fault in [Fault::Short, Fault::Interrupted] {
            self.reset();
            let (done, raised) = faulty::run(&mut (self.command)(), &self.folder, fault, 0);
            assert!(raised, "{fault:?}");
            done.expect(0);
            self.check(&format!("{fault:?}"), true);
        }
    }

    fn says_what_failed(&self, done: &Done, fault: Fault, what: &str) {
        assert_refused(done, what);
        let names = |(name, _): &Output<'_>| {
            done.stderr
                .contains(self.folder.join(name).to_str().unwrap())
        };
        assert!(self.outputs.iter().any(names), "{what}: {}", done.stderr);
        if fault == Fault::Full {
            assert!(tells_bytes(&done.stderr), "{what}: {}", done.stderr);
            assert!(
                done.stderr.contains("No space left"),
                "{what}: {}",
                done.stderr
            );
        }
    }
}

/// Whether a number is followed by "bytes".
fn tells_bytes(text: &str) -> bool {
    let words: Vec<&str> = text.split_whitespace().collect();
    words
        .windows(2)
        .any(|pair| pair[0].bytes().all(|b| b.is_ascii_digit()) && pair[1] == "bytes")
}

fn is_json(schema: &str) -> impl Fn(&[u8]) -> bool {
    let schema = schema.to_owned();
    move |bytes| {
        let value: Option<Value> = serde_json::from_slice(bytes).ok();
        value.is_some_and(|value| value["schema"] == schema[..])
    }
}

fn tiny() -> Config {
    let text = include_str!("../../bins/k3-plan/tests/tiny.config.json");
    Config::parse(text.as_bytes(), "config.json".as_ref()).unwrap()
}

/// Whether the file at `path` is a state whose tokens are the first of `ids`, with every value.
fn is_state(path: &Path, ids: &[u32]) -> bool {
    let Ok(reader) = saved::Reader::open(path) else {
        return false;
    };
    let known = ids.starts_with(&reader.header.ids);
    known
        && reader
            .read_into(&mut SequenceState::new(&tiny(), 13, 64))
            .is_ok()
}

#[test]
fn every_output_of_a_run_fails_whole_and_by_name() {
    let setup = Setup::new(&[
        "--budget",
        "200M",
        "--prefill-chunk",
        "5",
        "--context",
        "64",
    ]);
    let folder = setup.path("out");
    let at = |name: &str| folder.join(name);
    let command = || {
        let mut command = tool("k3-run");
        command.arg("--plan").arg(&setup.plan);
        command.args([
            "--ids",
            &list(&TINY_PROMPT),
            "--gen",
            "3",
            "--no-stop",
            "-q",
            "--force",
        ]);
        for (flag, name) in [
            ("--json", "report.json"),
            ("--trace", "trace"),
            ("--dump-logits", "logits"),
            ("--dump-hidden", "hidden"),
            ("--score", "score.json"),
            ("--state", "state"),
        ] {
            command.arg(flag).arg(at(name));
        }
        command.args(["--save-every", "1"]);
        command
    };
    fs::create_dir(&folder).unwrap();
    finish(&mut command()).expect(0);
    let (logits, hidden) = (
        fs::read(at("logits")).unwrap(),
        fs::read(at("hidden")).unwrap(),
    );
    let report = process::json(&at("report.json"));
    let ids = [&TINY_PROMPT[..], &process::ids_of(&report)].concat();
    // What is kept of a run that fails is whole steps of it.
    let some_logits =
        |bytes: &[u8]| logits.starts_with(bytes) && bytes.len().is_multiple_of(4 * 576);
    let some_hidden =
        |bytes: &[u8]| hidden.starts_with(bytes) && bytes.len().is_multiple_of(4 * 160 * 13);
    let whole_trace = |bytes: &[u8]| {
        let copy = setup.path("trace copy");
        fs::write(&copy, bytes).unwrap();
        match Trace::open(&copy) {
            Ok(Trace::Recorded(mut reader)) => cache_groups(&mut reader).is_ok(),
            _ => false,
        }
    };
    let whole_state = |bytes: &[u8]| {
        let copy = setup.path("state copy");
        fs::write(&copy, bytes).unwrap();
        is_state(&copy, &ids)
    };
    let case = Case {
        folder: folder.clone(),
        command: &command,
        outputs: &[
            ("report.json", &is_json("k3.run/1")),
            ("trace", &whole_trace),
            ("logits", &some_logits),
            ("hidden", &some_hidden),
            ("score.json", &is_json("k3.score/1")),
            ("state", &whole_state),
        ],
    };
    case.run_every_fault(25);
}

#[test]
fn census_plan_and_simulation_fail_whole_and_by_name() {
    let setup = Setup::new(&["--budget", "200M"]);
    let trace = setup.path("a trace");
    setup
        .run_golden(&["--gen", "2", "-q", "--trace", trace.to_str().unwrap()])
        .expect(0);
    let folder = setup.path("out");
    let census = || {
        let mut command = tool("k3-census");
        command
            .arg(&setup.fixture.model)
            .args(["-q", "--hash", "--experts"]);
        command.arg(folder.join("experts"));
        command.arg("-o").arg(folder.join("census.json"));
        command
    };
    let not_empty = |bytes: &[u8]| bytes.ends_with(b"\n");
    Case {
        folder: folder.clone(),
        command: &census,
        outputs: &[
            ("experts", &not_empty),
            ("census.json", &is_json("k3.census/1")),
        ],
    }
    .run_every_fault(4);

    let plan = || {
        let mut command = tool("k3-plan");
        command.args(["-q", "--budget", "60M", "--probe-cache", "none", "--model"]);
        command
            .arg(&setup.fixture.model)
            .arg("--trunk")
            .arg(&setup.fixture.trunk);
        command.arg("-o").arg(folder.join("plan.json"));
        command
    };
    Case {
        folder: folder.clone(),
        command: &plan,
        outputs: &[("plan.json", &is_json("k3.plan/1"))],
    }
    .run_every_fault(2);

    let simcache = || {
        let mut command = tool("k3-simcache");
        command
            .arg(&trace)
            .args(["-q", "--slots", "8,16", "--format", "json", "-o"]);
        command.arg(folder.join("rates.json"));
        command.arg("--plot").arg(folder.join("rates.svg"));
        command
    };
    let svg = |bytes: &[u8]| bytes.trim_ascii_end().ends_with(b"</svg>");
    Case {
        folder: folder.clone(),
        command: &simcache,
        outputs: &[
            ("rates.json", &is_json("k3.simcache/1")),
            ("rates.svg", &svg),
        ],
    }
    .run_every_fault(4);
}

/// What a power cut leaves is what was synced: no file is renamed with bytes of it under way, and no rename is left to chance.
fn assert_durable(calls: &[(String, PathBuf)], folders: &[&Path]) {
    let files: BTreeSet<&PathBuf> = calls
        .iter()
        .filter(|(name, _)| name != "fsync")
        .map(|(_, path)| path)
        .collect();
    assert!(!files.is_empty());
    for file in files {
        let last = calls.iter().rposition(|(_, path)| path == file).unwrap();
        assert_eq!(calls[last].0, "fsync", "{}: its last bytes", file.display());
        let folder = file.parent().unwrap();
        let synced = calls[last..]
            .iter()
            .any(|(name, path)| name == "fsync" && path == folder);
        assert!(synced, "{}: its name", file.display());
    }
    for folder in folders {
        assert!(
            calls.iter().any(|(_, path)| path == folder),
            "{}",
            folder.display()
        );
    }
}

#[test]
fn every_file_and_folder_is_synced_before_the_next_step() {
    let it = Packing::new();
    finish(&mut it.command("4Ki")).expect(0);
    let calls = faulty::calls(&mut it.command("16Ki"), &it.fixture.trunk);
    assert_durable(&calls, &[&it.fixture.trunk, &it.stripe]);
    // The record, without which there is no trunk, is begun when all it names is on disk.
    let is_record = |path: &Path| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .contains("trunk.json")
    };
    let record = calls.iter().position(|(_, path)| is_record(path)).unwrap();
    let is_data = |path: &Path| path.to_string_lossy().contains(".bin");
    let data = calls.iter().rposition(|(_, path)| is_data(path)).unwrap();
    assert!(data < record, "{calls:?}");

    let setup = Setup::new(&["--budget", "200M"]);
    let folder = setup.path("out");
    fs::create_dir(&folder).unwrap();
    let mut run = tool("k3-run");
    run.arg("--plan")
        .arg(&setup.plan)
        .args(["-q", "--ids", "1,2", "--gen", "3", "--no-stop"]);
    for (flag, name) in [
        ("--json", "report"),
        ("--trace", "trace"),
        ("--state", "state"),
        ("--dump-logits", "logits"),
    ] {
        run.arg(flag).arg(folder.join(name));
    }
    let calls = faulty::calls(run.args(["--save-every", "1"]), &folder);
    assert_durable(&calls, &[&folder]);
}

#[test]
fn packing_fails_whole_and_by_name() {
    let it = Packing::new();
    finish(&mut it.command("4Ki")).expect(0);
    let old = it.files();
    finish(&mut it.command("16Ki")).expect(0);
    let new = it.files();
    assert_eq!(old.len(), 4, "record, digests and two data files");
    let (mut kept, mut gone) = (0, 0);
    for fault in [Fault::Io, Fault::Full] {
        let mut at = 0;
        loop {
            let what = format!("{fault:?} at call {at}");
            finish(&mut it.command("4Ki")).expect(0);
            let mut command = it.command("16Ki");
            let (done, raised) = faulty::run(&mut command, &it.fixture.trunk, fault, at);
            if !raised {
                done.expect(0);
                break;
            }
            assert_refused(&done, &what);
            assert!(
                done.stderr.contains(it.fixture.trunk.to_str().unwrap()),
                "{what}: {}",
                done.stderr
            );
            assert!(
                fault != Fault::Full || tells_bytes(&done.stderr),
                "{what}: {}",
                done.stderr
            );
            let left = it.files();
            if Trunk::open(&it.fixture.trunk).is_ok() {
                // A record there vouches for all of its files.
                assert!(left == old || left == new, "{what}");
                assert!(it.is_usable(), "{what}");
                kept += 1;
            } else {
                gone += 1;
            }
            let is_old_or_new = |file| old.contains(file) || new.contains(file);
            assert!(
                left.iter().all(is_old_or_new),
                "{what}: a half-written file"
            );
            at += 1;
        }
        assert!(at > 20, "{fault:?}: only {at} calls");
    }
    assert!(
        kept > 20,
        "{kept} times the old trunk stayed, {gone} times none did"
    );
    for fault in [Fault::Short, Fault::Interrupted] {
        let (done, raised) = faulty::run(&mut it.command("16Ki"), &it.fixture.trunk, fault, 0);
        done.expect(0);
        assert!(raised && it.files() == new, "{fault:?}");
    }
}
