//! Faults that users of other engines have met in public, raised on the five tools as processes: each is an answer, never a crash, and
//! never a plausible text.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;
#[path = "common/process.rs"]
mod process;

use std::{
    fs,
    io::Read as _,
    os::unix::fs::symlink,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use common::{Fixture, TINY_PROMPT};
use k3_shared::formats::trunk::Trunk;
use process::{Done, Setup, finish, ids_of, list, tool};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A refusal: this code, these words, no text, no crash.
#[track_caller]
fn refused(done: Done, code: i32, words: &[&str]) {
    let done = done.expect(code).says(words);
    assert!(done.stdout.is_empty(), "{}", done.text());
    assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
}

fn plan_of(setup: &Setup) -> Command {
    let mut command = tool("k3-plan");
    command.args(["-q", "--budget", "200M", "--probe-cache", "none", "--model"]);
    command.arg(&setup.fixture.model).arg("--trunk");
    command.arg(&setup.fixture.trunk);
    command
}

/// Change `trunk.json` as JSON.
fn edit_record(trunk: &Path, edit: impl FnOnce(&mut Value)) {
    let path = trunk.join("trunk.json");
    let mut record = process::json(&path);
    edit(&mut record);
    fs::write(path, record.to_string()).unwrap();
}

/// Rows 10 and 35.
#[test]
fn a_trunk_record_with_an_empty_list_is_refused_by_field() {
    let setup = Setup::new(&["--budget", "200M"]);
    let path = setup.fixture.trunk.join("trunk.json");
    let whole = fs::read(&path).unwrap();
    for (field, word) in [
        ("layers", "layers"),
        ("files", "data file"),
        ("output", "tiles"),
    ] {
        edit_record(&setup.fixture.trunk, |record| {
            record[field] = Value::Array(Vec::new());
        });
        refused(
            finish(&mut plan_of(&setup)),
            2,
            &["trunk.json", word, "k3-pack --force"],
        );
        refused(
            setup.run_golden(&[]),
            1,
            &["trunk.json", word, "k3-pack --force"],
        );
        fs::write(&path, &whole).unwrap();
    }
    edit_record(&setup.fixture.trunk, |record| {
        record["layers"][0]["tiles"] = Value::Array(Vec::new());
    });
    refused(setup.run_golden(&[]), 1, &["trunk.json", "k3-pack --force"]);
}

/// Rows 29 and 30.
#[test]
fn a_trunk_cut_zeroed_or_of_another_model_is_refused_before_a_token() {
    let setup = Setup::new(&["--budget", "200M"]);
    let data = setup.fixture.trunk.join("trunk.bin");
    let whole = fs::read(&data).unwrap();
    fs::write(&data, &whole[..whole.len() - 4096]).unwrap();
    refused(
        finish(&mut plan_of(&setup)),
        2,
        &["trunk.bin", "bytes instead of", "k3-pack --force"],
    );
    refused(
        setup.run_golden(&[]),
        1,
        &["trunk.bin", "bytes instead of", "k3-pack --force"],
    );
    // As long as it should be, and nothing in it.
    fs::write(&data, vec![0; whole.len()]).unwrap();
    let done = setup
        .run_golden(&["--gen", "2"])
        .expect(1)
        .says(&["trunk.bin", "k3-pack --repair"]);
    assert_eq!(done.text().trim(), "");
    // As long as it should be, and another model's: the same with its tiles in another order.
    let other: Vec<u8> = whole.rchunks(4096).flatten().copied().collect();
    fs::write(&data, other).unwrap();
    let done = setup
        .run_golden(&["--gen", "2"])
        .expect(1)
        .says(&["trunk.bin", "k3-pack --repair"]);
    assert_eq!(done.text().trim(), "");
    fs::write(&data, whole).unwrap();
    setup.run_golden(&["--gen", "2"]).expect(0);
}

/// Packed before there were digests of the embedding: a run would have to trust its rows.
#[test]
fn a_trunk_without_digests_of_its_embedding_is_refused_with_the_command_that_packs_it() {
    let setup = Setup::new(&["--budget", "200M"]);
    edit_record(&setup.fixture.trunk, |record| {
        record.as_object_mut().unwrap().remove("embedding").unwrap();
    });
    setup.replan(&["--budget", "200M"]);
    let command = format!(
        "k3-pack --force {} {}",
        setup.fixture.model.display(),
        setup.fixture.trunk.display()
    );
    refused(
        setup.run_golden(&["--gen", "2"]),
        1,
        &["trunk.json", "embedding", &command],
    );
    setup.run_golden(&["--gen", "2", "--no-verify"]).expect(0);
    setup.fixture.pack(&["--force", "--tile-bytes", "8Ki"]);
    setup.run_golden(&["--gen", "2"]).expect(0);
}

#[test]
fn plan_and_report_say_whether_experts_are_verified() {
    let setup = Setup::new(&["--budget", "200M"]);
    let say = |expected: bool| {
        let mut command = plan_of(&setup);
        let quiet = finish(&mut command).expect(0);
        let plan: Value = serde_json::from_slice(&quiet.stdout).unwrap();
        assert_eq!(plan["experts_verified"], expected);
        let mut loud = tool("k3-plan");
        loud.args(command.get_args().filter(|&arg| arg != "-q"));
        let done = finish(&mut loud).expect(0);
        let says = done.stderr.contains("experts_verified: false");
        assert_eq!(says, !expected, "{}", done.stderr);
        assert_eq!(says, done.stderr.contains("k3-census --hash --experts"));
        setup.replan(&["--budget", "200M"]);
        setup.run_golden(&["--gen", "1"]).expect(0);
        assert_eq!(setup.report()["experts_verified"], expected);
    };
    say(false);
    let mut census = tool("k3-census");
    finish(
        census
            .arg(&setup.fixture.model)
            .args(["-q", "--hash", "--experts"]),
    )
    .expect(0);
    say(true);
    // A plan cannot claim digests that it does not name.
    let mut plan = setup.read_plan();
    plan.expert_digests = None;
    setup.write_plan(&plan);
    refused(
        setup.run_golden(&[]),
        1,
        &["experts_verified", "k3-plan --budget"],
    );
}

/// Row 59.
#[test]
fn numbers_that_are_none_are_usage_errors_that_name_their_flag() {
    let setup = Setup::new(&["--budget", "200M"]);
    let wrong = [
        "abc",
        "1e3",
        "0x10",
        "99999999999999999999999",
        "1 2",
        "",
        "٣",
    ];
    for value in wrong {
        for flag in [
            "--gen",
            "--layers",
            "--threads",
            "--stop-id",
            "--seed",
            "--save-every",
        ] {
            let mut flags = vec!["--ids", "1,2", flag, value];
            if flag == "--save-every" {
                flags.extend(["--state", "/nonexistent/state"]);
            }
            refused(setup.run(&flags), 2, &[flag]);
        }
        let (model, trunk) = (&setup.fixture.model, &setup.fixture.trunk);
        for flag in [
            "--context",
            "--prefill-chunk",
            "--layers",
            "--expert-slots",
            "--threads",
        ] {
            refused(finish(plan_of(&setup).args([flag, value])), 2, &[flag]);
        }
        let mut pack = tool("k3-pack");
        refused(
            finish(pack.arg(model).arg(trunk).args(["--layers", value])),
            2,
            &["--layers"],
        );
        let mut census = tool("k3-census");
        refused(
            finish(census.arg(model).args(["--layers", value])),
            2,
            &["--layers"],
        );
        let mut simcache = tool("k3-simcache");
        refused(
            finish(simcache.args(["/nonexistent", "--slots", value])),
            2,
            &["--slots"],
        );
    }
    for ids in ["1,two", "1.0", "-1", "4294967296", "1;2", "1_0"] {
        let flag = format!("--ids={ids}");
        refused(setup.run(&[&flag, "--gen", "1"]), 2, &["--ids"]);
    }
    for size in ["12X", "-1", "1.5.5G", "18446744073709551616", "G"] {
        let mut plan = tool("k3-plan");
        refused(
            finish(plan.arg(format!("--budget={size}"))),
            2,
            &["--budget"],
        );
    }
}

/// Row 18: a download cache holds links into a folder of blobs.
#[test]
fn a_snapshot_of_links_into_blobs_works_and_a_dangling_one_is_named_with_its_target() {
    let fixture = Fixture::tiny("8Ki");
    let blobs = fixture.path("blobs");
    fs::rename(&fixture.model, &blobs).unwrap();
    fs::create_dir(&fixture.model).unwrap();
    for entry in fs::read_dir(&blobs).unwrap() {
        let name = entry.unwrap().file_name();
        symlink(Path::new("../blobs").join(&name), fixture.model.join(&name)).unwrap();
    }
    let plan = fixture.path("plan.json");
    let setup = Setup { fixture, plan };
    setup.replan(&["--budget", "200M"]);
    setup.run_golden(&["--gen", "2"]).expect(0);
    let shard = "model-00003-of-000016.safetensors";
    fs::remove_file(blobs.join(shard)).unwrap();
    let target = format!("../blobs/{shard}");
    let done = finish(tool("k3-census").arg(&setup.fixture.model)).expect(1);
    assert!(
        done.text().contains(&target) || done.stderr.contains(&target),
        "{}",
        done.stderr
    );
    refused(setup.run_golden(&[]), 1, &[shard, &target]);
}

/// Row 32.
#[test]
fn folders_with_spaces_and_quotes_work_in_every_tool_and_in_the_commands_it_prints() {
    let mut fixture = Fixture::empty();
    (fixture.model, fixture.trunk) = (
        fixture.path("my disk/it's k3"),
        fixture.path("the \"trunk\""),
    );
    k3_tests::synth::tiny(&fixture.model).unwrap();
    finish(tool("k3-census").arg(&fixture.model)).expect(0);
    let done = finish(tool("k3-pack").arg(&fixture.model).arg(&fixture.trunk)).expect(0);
    // The next command as it is printed, typed into a shell.
    let next = done
        .stderr
        .split("next: ")
        .nth(1)
        .unwrap()
        .lines()
        .next()
        .unwrap();
    let programs = tool("k3-plan");
    let folder = Path::new(programs.get_program()).parent().unwrap();
    let line = format!("{next} --budget 200M --probe-cache none -q");
    let mut shell = Command::new("/bin/sh");
    let planned = finish(shell.args(["-c", &line]).env("PATH", folder)).expect(0);
    let trace = fixture.path("a trace");
    let plan = fixture.path("a plan");
    fs::write(&plan, planned.stdout).unwrap();
    let mut run = tool("k3-run");
    run.arg("--plan")
        .arg(&plan)
        .args(["--ids", "1,2", "--gen", "2", "--no-stop", "--trace"]);
    finish(run.arg(&trace)).expect(0);
    finish(tool("k3-simcache").arg(&trace).args(["--slots", "8"])).expect(0);
}

/// Wait at most so long for a process to end by itself.
fn ends_within(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let began = Instant::now();
    while began.elapsed() < patience {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(20));
    }
    None
}

/// A reader that holds the pipe and takes nothing: the first signal cannot be answered, the next one is.
#[test]
fn a_second_signal_ends_a_run_whose_output_nobody_reads() {
    let setup = Setup::new(&["--budget", "200M", "--context", "20000"]);
    for with_state in [false, true] {
        let state = setup.path("state");
        let mut command = setup.command(&["-q", "--no-stop", "--gen", "15000", "--ids"]);
        command.arg(list(&TINY_PROMPT));
        if with_state {
            command.args(["--save-every", "1", "--state"]).arg(&state);
        }
        // A pipe of one page: full after some thousand tokens, were it larger.
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::pipe::fcntl_setpipe_size(&reader, 4096).unwrap();
        let mut filled = &writer;
        std::io::Write::write_all(&mut filled, &[b'.'; 4096]).unwrap();
        let mut child = command
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The first token waits for room by then.
        thread::sleep(Duration::from_millis(700));
        let signal = || kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        signal();
        thread::sleep(Duration::from_millis(300));
        signal();
        let ended = ends_within(&mut child, Duration::from_secs(20));
        if ended.is_none() {
            child.kill().unwrap();
        }
        let code = ended.and_then(|status| status.code());
        assert_eq!(code, Some(130), "with a state: {with_state}");
        let mut stderr = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut stderr)
            .unwrap();
        assert!(stderr.contains("standard output"), "{stderr}");
        drop(reader);
        if with_state && state.exists() {
            setup
                .run(&[
                    "--resume",
                    state.to_str().unwrap(),
                    "--gen",
                    "1",
                    "--no-stop",
                ])
                .expect(0);
        }
    }
}

/// A shard taken away between planning and running, and one taken away in the middle of a run.
#[test]
fn a_shard_that_vanishes_during_the_run_stops_it_and_is_named() {
    let setup = Setup::new(&["--budget", "floor"]);
    let shard = setup
        .fixture
        .model
        .join("model-00005-of-000016.safetensors");
    let child = setup.start(&["--ids", "1,2,3", "--no-stop", "--gen", "4000"]);
    thread::sleep(Duration::from_millis(500));
    fs::rename(&shard, setup.path("elsewhere")).unwrap();
    let done = Done::of(child.wait_with_output().unwrap()).expect(1);
    let done = done.says(&[shard.to_str().unwrap()]);
    assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
    let report = setup.report();
    assert_eq!(report["finish"], "error");
    assert!(ids_of(&report).len() < 4000);
}

/// Row 24's other half: what stands under a temporary name is nobody's trunk.
#[test]
fn a_trunk_under_its_temporary_name_is_not_used() {
    let setup = Setup::new(&["--budget", "200M"]);
    let data = setup.fixture.trunk.join("trunk.bin");
    fs::rename(&data, setup.fixture.trunk.join("trunk.bin.partial")).unwrap();
    assert!(Trunk::open(&setup.fixture.trunk).is_err());
    refused(finish(&mut plan_of(&setup)), 2, &["trunk.bin", "k3-pack"]);
    refused(setup.run_golden(&[]), 2, &["trunk.bin", "k3-pack"]);
}

/// Row 65, of the other stream: who reads the errors is gone, and the work is done all the same.
#[test]
fn a_closed_error_stream_ends_no_tool() {
    let setup = Setup::new(&["--budget", "200M"]);
    let closed = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        writer
    };
    let trace = setup.path("a trace");
    let ids = list(&TINY_PROMPT);
    let mut run = setup.command(&["--ids", &ids, "--gen", "2", "--no-stop", "--trace"]);
    run.arg(&trace);
    let mut census = tool("k3-census");
    census.arg(&setup.fixture.model);
    let mut pack = tool("k3-pack");
    pack.arg(&setup.fixture.model)
        .arg(setup.path("other trunk"));
    let mut plan = tool("k3-plan");
    plan.args(plan_of(&setup).get_args().filter(|&arg| arg != "-q"));
    let mut simcache = tool("k3-simcache");
    simcache.arg(&trace).args(["--slots", "8"]);
    for command in [&mut run, &mut census, &mut pack, &mut plan, &mut simcache] {
        finish(command.stderr(closed())).expect(0);
    }
    // A refusal is one whether or not its words arrive.
    let mut wrong = setup.command(&["--ids", "1", "--gen", "100000"]);
    finish(wrong.stderr(closed())).expect(2);
}
