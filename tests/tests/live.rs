//! The live line and the last five lines, on a terminal and off it, over a fast disk and a slow one.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
#[path = "common/disk.rs"]
mod disk;
#[path = "common/terminal.rs"]
mod terminal;

use std::{
    env, fs, io,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use clap::Parser as _;
use common::{Fixture, TINY_PROMPT};
use terminal::{Screen, Session, is_plain};

const NUM_TOKENS: usize = 40;

/// A run in a process of its own, because a disk cannot be made slow from outside: this test, started again.
struct Run {
    fixture: Fixture,
}

impl Run {
    fn new() -> Self {
        let fixture = Fixture::tiny("8Ki");
        // Without a tokenizer the text is the ids, one long line that wraps.
        fs::remove_file(fixture.model.join("tiktoken.model")).unwrap();
        let plan = fixture.plan(&["--budget", "floor", "--prefill-chunk", "4"]);
        fs::write(
            fixture.path("plan.json"),
            serde_json::to_vec(&plan).unwrap(),
        )
        .unwrap();
        Self { fixture }
    }

    /// `k3-run` over a disk where every read takes `delay_us` longer.
    fn command(&self, delay_us: u32, flags: &[&str]) -> Command {
        let mut line = vec!["k3-run".to_owned(), "--plan".into()];
        line.push(self.fixture.path("plan.json").to_str().unwrap().into());
        let ids = TINY_PROMPT.map(|id| id.to_string()).join(",");
        line.extend(["--ids".into(), ids, "--no-stop".into()]);
        line.extend(["--gen".into(), NUM_TOKENS.to_string()]);
        line.extend(flags.iter().map(ToString::to_string));
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "as_k3_run", "--ignored", "--nocapture", "-q"]);
        command
            .env("K3_LIVE_LINE", serde_json::to_string(&line).unwrap())
            .env("K3_LIVE_DELAY", delay_us.to_string())
            .stdin(Stdio::null());
        command
    }

    /// What it prints, undisturbed.
    fn text(&self) -> Vec<u8> {
        let output = self.command(0, &["-q"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        output.stdout
    }
}

#[test]
#[ignore = "the process that the tests of this file start on a terminal"]
fn as_k3_run() {
    let line: Vec<String> = serde_json::from_str(&env::var("K3_LIVE_LINE").unwrap()).unwrap();
    let delay: u64 = env::var("K3_LIVE_DELAY").unwrap().parse().unwrap();
    let disk = disk::before_reads(move |_, _, _| {
        if delay > 0 {
            thread::sleep(Duration::from_micros(delay));
        }
    });
    let outcome = k3_run::run_on(
        &k3_run::Cli::parse_from(line),
        &disk,
        &mut io::stdout().lock(),
    );
    if let Err(error) = &outcome {
        panic!("{error:#}");
    }
    // The harness has nothing to add.
    std::process::exit(0);
}

/// The lines that were drawn, in order.
fn frames(session: &Session) -> Vec<String> {
    let text = std::str::from_utf8(&session.bytes).unwrap();
    let starts = text.split(['\r', '\n', '\x1b']).map(|part| {
        let after = part.trim_start_matches("[K").trim_start_matches("[2K");
        after.trim_end().to_owned()
    });
    let is_frame = |line: &String| line.starts_with("prompt ") || line.starts_with("token ");
    let mut frames: Vec<String> = starts.filter(is_frame).collect();
    frames.dedup();
    frames
}

/// Whether the last lines are the five of the summary; none is longer than the screen is wide.
fn assert_summary(lines: &[String], columns: u16) {
    let begins = [
        "40 tokens at ",
        "bound by ",
        "peak memory ",
        "read: trunk ",
        "a token: predicted ",
    ];
    let lines: Vec<&String> = lines.iter().filter(|line| !line.is_empty()).collect();
    let last = &lines[lines.len() - 5..];
    for (line, begin) in last.iter().zip(begins) {
        assert!(line.starts_with(begin), "{line:?} instead of {begin:?}");
        assert!(line.len() < usize::from(columns), "{line:?}");
    }
    assert!(last[0].contains("; a prompt of 12 in "), "{}", last[0]);
    assert!(last[3].contains("(hit "), "{}", last[3]);
    assert!(last[4].contains("; measured "), "{}", last[4]);
}

fn assert_frames(frames: &[String], columns: u16, is_slow: bool) {
    for frame in frames {
        assert!(frame.len() < usize::from(columns), "{columns}: {frame:?}");
        assert!(frame.contains("  layer "), "{frame:?}");
    }
    let has = |begin: &str, words: &[&str]| {
        frames
            .iter()
            .any(|f| f.starts_with(begin) && words.iter().all(|word| f.contains(word)))
    };
    assert!(
        frames[0].starts_with("prompt 0/12  layer 1/"),
        "{}",
        frames[0]
    );
    if is_slow {
        assert!(
            has("prompt ", &["GB/s", "hits", "s/token", " left"]),
            "{frames:#?}"
        );
        assert!(
            has("token ", &["GB/s", "hits", "s/token", " left"]),
            "{frames:#?}"
        );
        assert!(
            has("token ", &["[#", "-]"]) || columns < 100,
            "no bar: {frames:#?}"
        );
        assert!(
            has("token 40/40", &[]) || has("token 39/40", &[]),
            "{frames:#?}"
        );
    }
}

#[test]
fn text_and_line_share_a_terminal_and_the_text_stays_whole() {
    let run = Run::new();
    let text = run.text();
    let text = std::str::from_utf8(&text).unwrap();
    // The harness speaks first.
    let text = text.trim().lines().last().unwrap();
    assert_eq!(text.split(',').count(), NUM_TOKENS);
    for columns in [80, 120] {
        for delay_us in [0, 1000] {
            let session = terminal::run(&mut run.command(delay_us, &[]), columns, true);
            assert!(session.status.success());
            let mut screen = Screen::new(columns);
            screen.write(&session.bytes);
            let lines = screen.lines();
            let first = lines
                .iter()
                .position(|l| text.starts_with(l.as_str()) && !l.is_empty());
            let first = first.unwrap_or_else(|| panic!("no text in {lines:#?}"));
            let num_lines = text.len().div_ceil(usize::from(columns));
            assert_eq!(lines[first..first + num_lines].concat(), text, "{lines:#?}");
            assert_summary(&lines, columns);
            // Text, summary, and what the harness says first: no frame is left over.
            let others = lines.iter().filter(|line| !line.is_empty()).count();
            assert_eq!(others, num_lines + 5 + 1, "{lines:#?}");
            let frames = frames(&session);
            assert_frames(&frames, columns, delay_us > 0);
            if let Some(dir) = env::var_os("K3_FRAMES") {
                let path = std::path::Path::new(&dir).join(format!("{columns}-{delay_us}.txt"));
                fs::write(path, [frames, lines].concat().join("\n")).unwrap();
            }
        }
    }
}

#[test]
fn text_that_goes_elsewhere_is_the_same_bytes_and_the_line_stays_on_the_terminal() {
    let run = Run::new();
    let text = run.text();
    for columns in [80, 120] {
        let out = run.fixture.path("out.txt");
        let mut command = run.command(1000, &[]);
        command.stdout(fs::File::create(&out).unwrap());
        let session = terminal::run(&mut command, columns, false);
        assert!(session.status.success());
        assert_eq!(fs::read(&out).unwrap(), text);
        assert_frames(&frames(&session), columns, true);
        let mut screen = Screen::new(columns);
        screen.write(&session.bytes);
        let lines = screen.lines();
        assert_summary(&lines, columns);
        assert_eq!(
            lines.iter().filter(|line| !line.is_empty()).count(),
            5,
            "{lines:#?}"
        );
    }
}

#[test]
fn nothing_is_drawn_off_a_terminal_or_when_quiet() {
    let run = Run::new();
    let text = run.text();
    let output = run.command(0, &[]).output().unwrap();
    assert_eq!(output.stdout, text);
    assert!(
        is_plain(&output.stderr),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let lines = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<String> = lines.lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 5, "{lines:#?}");
    assert_summary(&lines, 80);
    let quiet = terminal::run(&mut run.command(0, &["-q"]), 80, true);
    let bytes: Vec<u8> = quiet
        .bytes
        .iter()
        .copied()
        .filter(|&b| b != b'\r')
        .collect();
    assert_eq!(bytes, text);
}
