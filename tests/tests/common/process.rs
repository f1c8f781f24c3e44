//! The five tools as the processes a user starts.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test binary uses its own part"
)]
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]

use std::{
    ffi::OsStr,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
};

use k3_shared::formats::plan::Plan;
use serde_json::Value;

use super::common::{Fixture, TINY_PROMPT};

/// The folder of the binaries, built in this test's profile. Cargo builds other packages' tools for no test.
pub fn bin_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let dir = test.ancestors().nth(2).unwrap();
        let profile = match dir.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            other => other,
        };
        let status = Command::new(env!("CARGO"))
            .args([
                "build",
                "--quiet",
                "--workspace",
                "--bins",
                "--profile",
                profile,
            ])
            .arg("--target-dir")
            .arg(dir.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .unwrap();
        assert!(status.success(), "the tools do not build");
        dir.to_owned()
    })
}

/// A tool to start, without the folders of whoever runs the tests.
pub fn tool(name: &str) -> Command {
    let mut command = Command::new(bin_dir().join(name));
    command.env_remove("K3_MODEL").env_remove("K3_TRUNK");
    command
        .env("HOME", "/nonexistent-home")
        .env_remove("XDG_CACHE_HOME");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// How a process ended.
pub struct Done {
    pub code: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Done {
    pub fn of(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: output.stdout,
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Fail unless it ended with this code; the error output says why it did not.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        self
    }

    /// Fail unless the error output has all of these.
    #[track_caller]
    pub fn says(self, words: &[&str]) -> Self {
        for word in words {
            assert!(
                self.stderr.contains(word),
                "no {word:?} in: {}",
                self.stderr
            );
        }
        self
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }
}

/// Run to the end with nothing on standard input.
pub fn finish(command: &mut Command) -> Done {
    Done::of(command.output().unwrap())
}

/// Run to the end with `input` on standard input.
pub fn finish_with(command: &mut Command, input: &[u8]) -> Done {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    // A tool that refuses its flags never reads its input.
    let _ = child.stdin.take().unwrap().write_all(input);
    Done::of(child.wait_with_output().unwrap())
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A list of numbers as the command line takes it.
pub fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

pub fn ids_of(report: &Value) -> Vec<u32> {
    serde_json::from_value(report["generated_ids"].clone()).unwrap()
}

/// A checkpoint, its trunk and a plan file.
pub struct Setup {
    pub fixture: Fixture,
    pub plan: PathBuf,
}

impl Setup {
    /// The tiny checkpoint with its tokenizer, planned with these flags.
    pub fn new(flags: &[&str]) -> Self {
        let fixture = Fixture::tiny("8Ki");
        k3_tests::tokenizer::write_tiny(&fixture.model).unwrap();
        let plan = fixture.path("plan.json");
        let setup = Self { fixture, plan };
        setup.replan(flags);
        setup
    }

    /// Plan again.
    pub fn replan(&self, flags: &[&str]) {
        self.write_plan(&self.fixture.plan(flags));
    }

    pub fn write_plan(&self, plan: &Plan) {
        fs::write(&self.plan, serde_json::to_vec(plan).unwrap()).unwrap();
    }

    pub fn read_plan(&self) -> Plan {
        serde_json::from_slice(&fs::read(&self.plan).unwrap()).unwrap()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.fixture.path(name)
    }

    /// `k3-run` on the plan, with a report in `report.json`.
    pub fn command<S: AsRef<OsStr>>(&self, flags: &[S]) -> Command {
        let mut command = tool("k3-run");
        command
            .arg("--plan")
            .arg(&self.plan)
            .arg("--json")
            .arg(self.path("report.json"));
        command.args(flags);
        command
    }

    /// Run it to the end.
    pub fn run<S: AsRef<OsStr>>(&self, flags: &[S]) -> Done {
        let _ = fs::remove_file(self.path("report.json"));
        finish(&mut self.command(flags))
    }

    /// Run the golden prompt with more flags.
    pub fn run_golden(&self, flags: &[&str]) -> Done {
        let ids = list(&TINY_PROMPT);
        self.run(&[&["--ids", &ids, "--no-stop"], flags].concat())
    }

    pub fn report(&self) -> Value {
        json(&self.path("report.json"))
    }

    pub fn start(&self, flags: &[&str]) -> Child {
        let _ = fs::remove_file(self.path("report.json"));
        self.command(flags).spawn().unwrap()
    }
}

/// Change one byte of a file.
pub fn poke(path: &Path, offset: u64, change: impl FnOnce(u8) -> u8) {
    use std::os::unix::fs::FileExt as _;
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[change(byte[0])], offset).unwrap();
}

/// Cut a file short by one byte.
pub fn shorten(path: &Path) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
}
