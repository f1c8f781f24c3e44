//! The pipelines that people start first: doctor, fetch, the ladders and their plots, as `make` runs them.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod common;
#[path = "common/process.rs"]
mod process;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use k3_tests::{rows, synth};
use process::{Done, bin_dir, finish, json, shorten};

/// A folder for one test: models in it, and WORK.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    /// Beside the build, on a disk rather than in memory, so that direct reads are real.
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `NAME=DIR` as make takes it.
    fn set(&self, variable: &str, name: &str) -> String {
        format!("{variable}={}", self.path(name).display())
    }

    /// `make -C pipelines` with the tools of this test's build and nothing of whoever runs it.
    fn make(&self, args: &[&str]) -> Command {
        let profile = bin_dir().file_name().unwrap().to_str().unwrap();
        let mut make = Command::new("make");
        make.args(["-s", "-C"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipelines"));
        make.args(args).arg(self.set("WORK", "work"));
        make.env("PROFILE", profile)
            .env("CARGO_TARGET_DIR", bin_dir().parent().unwrap())
            .env("XDG_CACHE_HOME", self.path("cache"));
        for variable in [
            "K3_MODEL",
            "K3_TRUNK",
            "MAKEFLAGS",
            "MODEL",
            "TRUNK",
            "HF_TOKEN",
        ] {
            make.env_remove(variable);
        }
        make.stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        make
    }

    /// What doctor says of the model and trunk in this folder.
    fn doctor(&self) -> Done {
        let (model, trunk) = (self.set("MODEL", "model"), self.set("TRUNK", "trunk"));
        let budgets = "DOCTOR_BUDGETS=floor,64M";
        let probe = "PROBE=none";
        finish(&mut self.make(&["doctor", &model, &trunk, budgets, probe]))
    }

    fn tiny(&self) {
        synth::tiny(&self.path("model")).unwrap();
    }

    fn pack(&self) {
        let mut pack = Command::new(bin_dir().join("k3-pack"));
        pack.arg("-q")
            .arg(self.path("model"))
            .arg(self.path("trunk"));
        assert!(pack.status().unwrap().success());
    }
}

/// The last line: the command to type next.
fn next(done: &Done) -> String {
    done.text().trim_end().lines().last().unwrap().to_owned()
}

#[test]
fn without_a_model_doctor_says_what_a_download_needs_and_how_to_start_it() {
    let place = Place::new();
    let done = place.doctor().expect(0);
    let text = done.text();
    for words in [
        "no such folder",
        "1.56 TB in 96 files",
        "free at",
        "108.81 GB",
        "floor",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    assert_eq!(
        next(&done),
        format!("make -C pipelines fetch {}", place.set("MODEL", "model"))
    );
    assert!(fs::read_dir(place.path("work")).unwrap().all(|entry| {
        !entry
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with("doctor")
    }));
}

#[test]
fn an_empty_model_folder_is_no_checkpoint() {
    let place = Place::new();
    fs::create_dir(place.path("model")).unwrap();
    let done = place.doctor().expect(0);
    assert!(done.text().contains("no config.json"), "{}", done.text());
    assert!(next(&done).starts_with("make -C pipelines fetch MODEL="));
}

#[test]
fn an_unpacked_model_is_to_be_packed() {
    let place = Place::new();
    place.tiny();
    let done = place.doctor().expect(0);
    assert!(done.text().contains("whole: 16 shards"), "{}", done.text());
    let (model, trunk) = (place.path("model"), place.path("trunk"));
    let want = format!("k3-pack {} {}", model.display(), trunk.display());
    assert!(next(&done).ends_with(&want), "{}", next(&done));

    // The command is one that works.
    shell(&next(&done));
    assert!(trunk.join("trunk.json").exists());
}

#[test]
fn an_interrupted_pack_is_to_be_done_again() {
    let place = Place::new();
    place.tiny();
    fs::create_dir(place.path("trunk")).unwrap();
    fs::write(place.path("trunk/trunk.bin.partial"), "half").unwrap();
    let done = place.doctor().expect(0);
    assert!(done.text().contains("not finished"), "{}", done.text());
    assert!(next(&done).contains("k3-pack "), "{}", next(&done));
}

#[test]
fn a_packed_model_is_ready_and_the_command_generates() {
    let place = Place::new();
    place.tiny();
    place.pack();
    let done = place.doctor().expect(0);
    assert!(
        done.text().contains("made from this model"),
        "{}",
        done.text()
    );
    assert!(done.text().contains("s/token"), "{}", done.text());
    let command = next(&done);
    assert!(
        command.contains("k3-plan --budget auto") && command.contains("--prompt"),
        "{command}"
    );
    let text = shell(&command);
    assert!(!text.is_empty());

    // Without a vocabulary, prompts are ids.
    fs::remove_file(place.path("model/tiktoken.model")).unwrap();
    let command = next(&place.doctor().expect(0));
    assert!(command.contains("--ids"), "{command}");
    assert!(shell(&command).split(|&byte| byte == b',').count() > 1);
}

/// What a command prints, typed at the top of the repository.
fn shell(command: &str) -> Vec<u8> {
    let mut sh = Command::new("sh");
    let output = sh
        .arg("-c")
        .arg(command)
        .current_dir(repository())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {errors}");
    output.stdout
}

#[test]
fn a_cut_trunk_is_wrong_and_to_be_packed_over() {
    let place = Place::new();
    place.tiny();
    place.pack();
    shorten(&place.path("trunk/trunk.bin"));
    let done = place.doctor().expect(2);
    assert!(done.text().contains("WRONG"), "{}", done.text());
    assert!(next(&done).contains("k3-pack --force "), "{}", next(&done));
}

#[test]
fn a_missing_shard_is_named_and_to_be_fetched() {
    let place = Place::new();
    place.tiny();
    fs::remove_file(place.path("model/model-00003-of-000016.safetensors")).unwrap();
    let done = place.doctor().expect(2);
    assert!(
        done.text()
            .contains("model-00003-of-000016.safetensors: is missing")
    );
    assert!(
        next(&done).starts_with("make -C pipelines fetch MODEL="),
        "{}",
        next(&done)
    );
}

#[test]
fn a_census_alone_is_planned_from() {
    let place = Place::new();
    place.tiny();
    let mut census = Command::new(bin_dir().join("k3-census"));
    census
        .arg("-q")
        .arg(place.path("model"))
        .arg("-o")
        .arg(place.path("census.json"));
    assert!(census.status().unwrap().success());
    let (census, model) = (
        place.set("CENSUS", "census.json"),
        place.set("MODEL", "nowhere"),
    );
    let args = [
        "doctor",
        &census,
        &model,
        "PROBE=none",
        "DOCTOR_BUDGETS=floor,64M",
    ];
    let done = finish(&mut place.make(&args)).expect(0);
    assert!(done.text().contains("16 shards") && done.text().contains("s/token"));
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A commit as a client records it.
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// What must not be seen.
const SECRETS: [&str; 2] = ["hf_abcdefghijklmnop", "a secret of another shape"];

/// A client that prints all it is told, records the commit as the real one does, and stops half-way the first time.
const CLIENT: &str = r#"#!/bin/sh
env
printf 'progress 1\rprogress 2\rAuthorization: Bearer abc.def\n' >&2
printf '%s\n' "$*" >>"$FAKE/calls"
while [ $# -gt 0 ]; do
    case $1 in
    --local-dir) shift; to=$1 ;;
    config.json) one=1 ;;
    esac
    shift
done
mkdir -p "$to/.cache/huggingface/download"
printf '%s\netag\n0\n' "$COMMIT" >"$to/.cache/huggingface/download/config.json.metadata"
cp "$FAKE/model/config.json" "$to/"
[ -z "${one:-}" ] || exit 0
for file in "$FAKE"/model/*; do
    [ -e "$to/${file##*/}" ] && continue
    cp "$file" "$to/"
    if [ ! -e "$FAKE/stopped" ]; then
        : >"$FAKE/stopped"
        echo 'connection reset' >&2
        exit 7
    fi
done
"#;

/// A place with a checkpoint to fetch, and a client on the way.
fn with_client() -> Place {
    let place = Place::new();
    place.tiny();
    fs::create_dir(place.path("bin")).unwrap();
    let client = place.path("bin/hf");
    fs::write(&client, CLIENT).unwrap();
    fs::set_permissions(&client, fs::Permissions::from_mode(0o755)).unwrap();
    place
}

/// `make fetch`, in an environment with tokens.
fn fetch(place: &Place, args: &[&str]) -> Done {
    let model = place.set("MODEL", "fetched");
    let mut make = place.make(&[&["fetch", &model, "REPO=someone/tiny"], args].concat());
    let path = std::env::var("PATH").unwrap();
    make.env("PATH", format!("{}:{path}", place.path("bin").display()))
        .env("FAKE", place.path(""))
        .env("COMMIT", COMMIT)
        .env("HF_TOKEN", SECRETS[0])
        .env("HUGGING_FACE_HUB_TOKEN", SECRETS[1]);
    finish(&mut make)
}

#[test]
fn a_fetch_goes_on_where_it_stopped_at_the_revision_it_began_with() {
    let place = with_client();
    let first = fetch(&place, &[]).expect(2);
    assert!(
        first
            .stderr
            .contains("Again: make -C pipelines fetch MODEL="),
        "{}",
        first.stderr
    );
    let second = fetch(&place, &[]).expect(0);
    assert!(second.text().contains(COMMIT) && second.text().contains("Whole."));
    assert_eq!(json(&place.path("fetched/k3-census.json"))["ok"], true);

    let calls = fs::read_to_string(place.path("calls")).unwrap();
    let calls: Vec<&str> = calls.lines().collect();
    assert_eq!(calls.len(), 3, "{calls:?}");
    assert!(
        calls[0].contains("config.json --revision main"),
        "{calls:?}"
    );
    for call in &calls[1..] {
        assert!(call.contains(&format!("--revision {COMMIT}")), "{calls:?}");
    }
    for done in [first, second] {
        let all = format!("{}{}", done.text(), done.stderr);
        for secret in SECRETS {
            assert!(!all.contains(secret), "{all}");
        }
        assert!(!all.contains("abc.def"), "{all}");
        assert!(
            all.contains("HF_TOKEN=(hidden)") && all.contains("progress 2\n"),
            "{all}"
        );
    }
}

#[test]
fn a_folder_of_one_revision_takes_no_other() {
    let place = with_client();
    fs::write(place.path("stopped"), "").unwrap();
    fetch(&place, &[&format!("REVISION={COMMIT}")]).expect(0);
    let other = COMMIT.replace('0', "f");
    let done = fetch(&place, &[&format!("REVISION={other}")]).expect(2);
    assert!(done.stderr.contains("holds revision"), "{}", done.stderr);
}

#[test]
fn a_damaged_download_is_not_whole() {
    let place = with_client();
    fs::write(place.path("stopped"), "").unwrap();
    shorten(&place.path("model/model-00005-of-000016.safetensors"));
    let done = fetch(&place, &[]).expect(2);
    assert!(done.stderr.contains("not whole"), "{}", done.stderr);
}

#[test]
fn without_the_client_fetch_says_what_to_install() {
    let place = with_client();
    fs::remove_file(place.path("bin/hf")).unwrap();
    // A path with what make and the scripts need, and no client that may be installed here.
    let tools = place.path("tools");
    fs::create_dir(&tools).unwrap();
    for tool in [
        "sh", "make", "sed", "awk", "dirname", "cargo", "rustc", "cc",
    ] {
        let found = std::env::split_paths(&std::env::var("PATH").unwrap())
            .map(|dir| dir.join(tool))
            .find(|path| path.exists());
        if let Some(found) = found {
            std::os::unix::fs::symlink(found, tools.join(tool)).unwrap();
        }
    }
    let model = place.set("MODEL", "fetched");
    let script = repository().join("pipelines/scripts/fetch.sh");
    let mut fetch = Command::new("sh");
    fetch
        .arg(script)
        .env("PATH", &tools)
        .env("REPO", "someone/tiny")
        .env("REVISION", "");
    fetch.env("MODEL", model.trim_start_matches("MODEL="));
    fetch.stdout(Stdio::piped()).stderr(Stdio::piped());
    let done = finish(&mut fetch).expect(2);
    assert!(done.stderr.contains("pip install") && done.stderr.contains("huggingface_hub"));
    assert!(!place.path("fetched").exists());
}

/// A ladder on the tiny checkpoint.
fn ladder(place: &Place, target: &str, args: &[&str]) -> Done {
    let (model, trunk) = (place.set("MODEL", "model"), place.set("TRUNK", "trunk"));
    let fixed = [target, &model, &trunk, "PROBE=none", "LADDER_GEN=3"];
    finish(&mut place.make(&[&fixed, args].concat()))
}

fn rows_of(place: &Place, target: &str) -> Vec<rows::Row> {
    rows::read(&place.path("work/rows").join(target).with_extension("jsonl")).unwrap()
}

#[test]
fn a_ladder_runs_each_row_once_and_goes_on_where_it_stopped() {
    let place = Place::new();
    place.tiny();
    place.pack();
    let budgets = "LADDER_BUDGETS=48M 64M";
    ladder(&place, "ladder", &[budgets, "ROUNDS=1"]).expect(0);
    let first = rows_of(&place, "ladder");
    assert_eq!(first.len(), 2);

    let done = ladder(&place, "ladder", &[budgets, "ROUNDS=2"]).expect(0);
    assert_eq!(
        done.text().matches("there already").count(),
        2,
        "{}",
        done.text()
    );
    let second = rows_of(&place, "ladder");
    assert_eq!(second[..2], first[..]);
    let order: Vec<(&str, u32)> = second
        .iter()
        .map(|row| (row.name.as_str(), row.round))
        .collect();
    assert_eq!(order, [("48M", 1), ("64M", 1), ("48M", 2), ("64M", 2)]);
    for row in &second {
        assert!(
            !row.cap.is_empty() && row.report.peak_rss_bytes <= row.plan.budget_bytes,
            "{row:?}"
        );
    }

    ladder(&place, "ladder", &[budgets, "ROUNDS=1", "FRESH=1"]).expect(0);
    assert_eq!(rows_of(&place, "ladder").len(), 2);
}

#[test]
fn a_file_that_holds_no_rows_stops_a_ladder_before_it_runs() {
    let place = Place::new();
    place.tiny();
    place.pack();
    fs::create_dir_all(place.path("work/rows")).unwrap();
    fs::write(place.path("work/.k3-pipelines"), "").unwrap();
    fs::write(place.path("work/rows/ladder.jsonl"), "{}\n").unwrap();
    let done = ladder(&place, "ladder", &["LADDER_BUDGETS=64M", "ROUNDS=1"]).expect(2);
    assert!(done.stderr.contains("line 1: not a row"), "{}", done.stderr);
    assert!(!place.path("work/ladders/ladder/run.json").exists());
}

#[test]
fn a_row_with_other_tokens_fails_its_ladder_by_name() {
    let place = Place::new();
    place.tiny();
    place.pack();
    let args = ["LADDER_BUDGETS=48M 64M", "ROUNDS=1"];
    ladder(&place, "ladder", &args).expect(0);
    let file = place.path("work/rows/ladder.jsonl");
    let mut rows = rows_of(&place, "ladder");
    rows[1].report.generated_ids[0] ^= 1;
    fs::remove_file(&file).unwrap();
    for row in &rows {
        rows::append(&file, row).unwrap();
    }
    let done = ladder(&place, "ladder", &args).expect(2);
    assert!(
        done.stderr.contains("ladder \"64M\", round 1: token 1 is"),
        "{}",
        done.stderr
    );
}

#[test]
fn every_ladder_runs_and_is_drawn() {
    let place = Place::new();
    place.tiny();
    place.pack();
    for (target, args, count) in [
        ("split", &["SPLIT_BUDGET=28M", "ROUNDS=1"][..], 6),
        ("threads", &["THREADS=1 2", "ROUNDS=1"], 4),
        (
            "depth",
            &["READ_SIZES=64Ki 256Ki", "DEPTHS=1 4", "ROUNDS=1"],
            4,
        ),
        ("context", &["CONTEXTS=8 40", "ROUNDS=1"], 2),
        ("replicate", &["REPEATS=2"], 4),
    ] {
        let done = ladder(&place, target, args).expect(0);
        assert!(
            done.text().contains("The same tokens in every row."),
            "{}",
            done.text()
        );
        assert_eq!(
            rows_of(&place, target).len(),
            count,
            "{target}: {}",
            done.text()
        );
    }
    finish(&mut place.make(&["plots"])).expect(0);
    for plot in ["split", "threads", "depth", "context", "replicate"] {
        let svg = place
            .path("work/rows/plots")
            .join(plot)
            .with_extension("svg");
        assert!(
            fs::read_to_string(&svg).unwrap().ends_with("</svg>\n"),
            "{plot}"
        );
    }
    assert!(!place.path("work/rows/plots/ladder.svg").exists());
}

#[test]
fn the_committed_plots_are_those_of_the_committed_rows() {
    let results = repository().join("pipelines/results");
    let mut all = Vec::new();
    for plot in rows::PLOTS {
        let rows = rows::read(&results.join(plot.target).with_extension("jsonl")).unwrap();
        let svg = results.join(plot.name).with_extension("svg");
        assert_eq!(svg.exists(), !rows.is_empty(), "{}", svg.display());
        if !rows.is_empty() {
            let drawn = rows::draw(plot, &rows).unwrap();
            let kept = fs::read_to_string(&svg).unwrap();
            assert!(
                drawn == kept,
                "{}: draw it again: make -C pipelines results",
                svg.display()
            );
        }
        all.extend(rows);
    }
    rows::same_ids(&all).unwrap();
}
