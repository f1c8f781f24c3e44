//! Tools whose writes fail: `tests/preload/fail_writes.rs` between them and the C library.
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
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use super::process::{Done, finish};

/// What goes wrong, as the library names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing; calls are logged.
    None,
    /// The disk is full from one call on.
    Full,
    /// One call fails.
    Io,
    /// Every write is short.
    Short,
    /// Every second write is interrupted.
    Interrupted,
    /// Killed before a call.
    KillBefore,
    /// Killed when half of a write is done.
    KillWithin,
    /// Killed after a call.
    KillAfter,
}

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Full => "full",
            Self::Io => "io",
            Self::Short => "short",
            Self::Interrupted => "interrupted",
            Self::KillBefore => "kill-before",
            Self::KillWithin => "kill-within",
            Self::KillAfter => "kill-after",
        }
    }
}

/// The compiled library.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("preload/fail_writes.rs");
        // Test binaries run beside each other: each compiles its own.
        let name = format!("fail-writes-{}.so", std::process::id());
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let done = finish(
            Command::new(rustc)
                .args([
                    "--edition",
                    "2024",
                    "-O",
                    "--crate-type",
                    "cdylib",
                    "-Cpanic=abort",
                    "-o",
                ])
                .args([&library, &source]),
        );
        done.expect(0);
        library
    })
}

/// Run `command` with the fault on files in `folder` at call number `at`; also whether it was raised.
pub fn run(command: &mut Command, folder: &Path, fault: Fault, at: usize) -> (Done, bool) {
    let log = folder.with_extension("fault");
    let _ = fs::remove_file(&log);
    command
        .env("LD_PRELOAD", library())
        .env("K3_FAULT_DIR", folder.canonicalize().unwrap())
        .env("K3_FAULT_LOG", &log)
        .env("K3_FAULT", fault.name())
        .env("K3_FAULT_AT", at.to_string());
    let done = finish(command);
    (done, log.exists())
}

/// The calls of a run without a fault, in order: each a name and a path.
pub fn calls(command: &mut Command, folder: &Path) -> Vec<(String, PathBuf)> {
    run(command, folder, Fault::None, 0).0.expect(0);
    let log = fs::read_to_string(folder.with_extension("fault")).unwrap();
    let call = |line: &str| {
        let (name, path) = line.split_once(' ').unwrap();
        (name.to_owned(), path.into())
    };
    log.lines().map(call).collect()
}

/// A refusal, and not a crash.
pub fn assert_refused(done: &Done, what: &str) {
    let code = done.code;
    assert!(
        matches!(code, Some(1 | 2)),
        "{what}: {code:?}: {}",
        done.stderr
    );
    assert!(!done.stderr.contains("panicked"), "{what}: {}", done.stderr);
}
