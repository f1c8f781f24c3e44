//! k3-simcache as a process: exit codes, streams, outputs.
#![expect(clippy::unwrap_used, reason = "a helper of tests fails its test")]

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
};

fn simcache() -> Command {
    Command::new(env!("CARGO_BIN_EXE_k3-simcache"))
}

fn pairs() -> Vec<u8> {
    let request = |i: i32| [1 + i / 4 % 3, i * 7 % 10];
    (0..240)
        .flat_map(request)
        .flat_map(i32::to_le_bytes)
        .collect()
}

fn run(dir: &Path, args: &[&str]) -> Output {
    fs::write(dir.join("t.bin"), pairs()).unwrap();
    simcache().current_dir(dir).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_table_goes_to_stdout_and_the_warning_to_stderr() {
    let dir = tempfile::tempdir().unwrap();
    let out = run(
        dir.path(),
        &["t.bin", "--slots", "4,30", "--policy", "lru,belady"],
    );
    assert_eq!(out.status.code(), Some(0));
    let table = text(&out.stdout);
    assert!(table.contains("| cache GB | slots |"), "{table}");
    assert!(
        table.contains("Hit rate, %") && table.contains("Read, GB") && !table.contains("seconds"),
        "{table}"
    );
    let warning = text(&out.stderr);
    assert!(
        warning.contains("t.bin: no header") && warning.contains("artefact"),
        "{warning}"
    );
    let out = run(
        dir.path(),
        &[
            "-q",
            "t.bin",
            "--slots",
            "4",
            "--policy",
            "lru",
            "--disk-speed",
            "2G",
        ],
    );
    assert_eq!(text(&out.stderr), "");
    assert!(text(&out.stdout).contains("Read, seconds"));
}

#[test]
fn json_is_one_object_and_the_same_from_a_file_a_pipe_and_one_thread() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--format", "json", "--slots", "4,12"];
    let out = run(dir.path(), &[&["t.bin"], &args[..]].concat());
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["schema"], "k3.simcache/1");
    assert_eq!(
        report["rows"].as_array().unwrap().len(),
        22,
        "eleven policies at two sizes"
    );
    for row in report["rows"].as_array().unwrap() {
        let count = |field: &str| row[field].as_u64().unwrap();
        assert_eq!(
            row["hit_rate"],
            count("hits") as f64 / count("requests") as f64
        );
        assert_eq!(
            count("bytes_read"),
            (count("requests") - count("hits")) * 17_547_264
        );
    }
    let one = run(
        dir.path(),
        &[&["t.bin", "--threads", "1"], &args[..]].concat(),
    );
    assert_eq!(one.stdout, out.stdout);
    let mut child = simcache()
        .arg("-")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&pairs()).unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, out.stdout);
}

#[test]
fn csv_has_a_line_a_policy_and_size() {
    let dir = tempfile::tempdir().unwrap();
    let out = run(
        dir.path(),
        &[
            "t.bin",
            "--format",
            "csv",
            "--slots",
            "4,30",
            "--policy",
            "lru,sieve",
        ],
    );
    let lines: Vec<&str> = text(&out.stdout).lines().collect();
    assert_eq!(lines.len(), 5);
    assert_eq!(
        lines[0],
        "policy,capacity_bytes,slots,requests,hits,hit_rate,bytes_read,bytes_per_token,prefill_requests,prefill_hits,\
         decode_requests,decode_hits"
    );
    assert!(
        lines[4].starts_with("sieve,526417920,30,240,210,0.875,"),
        "{}",
        lines[4]
    );
}

#[test]
fn outputs_replace_their_files() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("out.json"), "old").unwrap();
    let args = [
        "t.bin",
        "--format",
        "json",
        "-o",
        "out.json",
        "--plot",
        "curves.svg",
        "--slots",
        "4,8,30",
    ];
    let out = run(dir.path(), &args);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(text(&out.stdout), "");
    let report = fs::read(dir.path().join("out.json")).unwrap();
    assert!(serde_json::from_slice::<serde_json::Value>(&report).is_ok());
    let svg = fs::read_to_string(dir.path().join("curves.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for policy in k3_shared::cache::PolicyKind::ALL {
        let label = |line: &str| line.trim().starts_with(policy.name());
        assert!(svg.lines().any(label), "{policy} has no label");
    }
    // Two lines between three sizes; a dashed one is many, and has its dots as the others.
    let curves = |line: &&str| line.starts_with("<polyline") && line.matches(',').count() == 3;
    assert!(svg.lines().filter(curves).count() >= 9, "a curve a policy");
    for note in [
        "cache size, GB",
        "requests that miss, %",
        "no policy misses less",
        "one token: ",
    ] {
        assert!(svg.contains(note), "{note}");
    }
    // A single size still draws.
    assert_eq!(
        run(dir.path(), &["t.bin", "--plot", "one.svg", "--slots", "4"])
            .status
            .code(),
        Some(0)
    );
}

#[test]
fn a_closed_pipe_is_success() {
    // The trace arrives only after the reader of the result has gone.
    let mut child = simcache()
        .args(["-", "--slots", "4"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    child.stdin.take().unwrap().write_all(&pairs()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    assert!(
        !text(&out.stderr).contains("k3-simcache:"),
        "{}",
        text(&out.stderr)
    );
}

#[test]
fn a_bad_trace_is_an_error_that_names_file_byte_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let mut cut = pairs();
    cut.truncate(100);
    fs::write(dir.path().join("cut.bin"), cut).unwrap();
    fs::write(dir.path().join("v9.trace"), b"K3TRACE\x09 and more").unwrap();
    fs::write(
        dir.path().join("plan.json"),
        br#"{"schema": "k3.plan/1"}.."#,
    )
    .unwrap();
    for (file, facts) in [
        ("cut.bin", ["cut.bin: byte 96", "cut short"]),
        ("v9.trace", ["v9.trace: byte 0", "k3-run --trace"]),
        ("plan.json", ["plan.json: byte", "K3TRACE"]),
        ("nowhere", ["nowhere", "No such file"]),
    ] {
        let out = run(dir.path(), &[file, "-o", "out"]);
        assert_eq!(out.status.code(), Some(2), "{file}");
        assert_eq!(text(&out.stdout), "");
        let error = text(&out.stderr);
        assert!(facts.iter().all(|fact| error.contains(fact)), "{error}");
        assert!(
            !dir.path().join("out").exists(),
            "no output of a failed run"
        );
    }
}

#[test]
fn usage_errors_are_2_and_help_is_0() {
    let dir = tempfile::tempdir().unwrap();
    for args in [
        &["t.bin", "--policy", "mru"][..],
        &["t.bin", "--capacity", "8Q"],
        &["t.bin", "--capacity", "8G", "--slots", "9"],
        &["t.bin", "--pass", "0"],
        &["t.bin", "--capacity", "1K"],
        &[],
    ] {
        assert_eq!(run(dir.path(), args).status.code(), Some(2), "{args:?}");
    }
    let error = run(dir.path(), &["t.bin", "--policy", "mru"]).stderr;
    assert!(text(&error).contains("layer-distance"), "{}", text(&error));
    let help = run(dir.path(), &["--help"]);
    assert_eq!(help.status.code(), Some(0));
    for flag in [
        "--capacity",
        "--slots",
        "--expert-bytes",
        "--policy",
        "--decode-only",
        "--pass",
        "--warmup-tokens",
        "--disk-speed",
        "--format",
        "--plot",
        "--output",
        "--threads",
        "--quiet",
        "--verbose",
    ] {
        assert!(text(&help.stdout).contains(flag), "{flag}");
    }
}
