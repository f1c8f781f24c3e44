//! Terminal habits: outcomes and exit codes, atomic output files, progress and log on stderr.

mod atomic_file;
mod named_write;

use std::{
    error::Error,
    io::{self, IsTerminal as _, Write as _},
    path::Path,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub use self::{
    atomic_file::{AtomicFile, write_atomic},
    named_write::NamedWrite,
};

/// How a tool ended, short of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The work was done: exit 0.
    Done,
    /// The work was done and the answer is no, or the run stopped rather than print a wrong token: exit 1.
    Negative,
    /// A signal ended the run after its output so far was kept: exit 128 + the signal.
    Interrupted(u8),
}

/// Turn the result of a tool's `run` into its exit code, printing an error once, on stderr.
///
/// A closed pipe is a success: the reader has had all it wanted.
pub fn exit<E: AsRef<dyn Error + 'static>>(tool: &str, result: Result<Outcome, E>) -> ExitCode {
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Negative) => ExitCode::from(1),
        Ok(Outcome::Interrupted(signal)) => ExitCode::from(128u8.saturating_add(signal)),
        Err(error) if is_broken_pipe(error.as_ref()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("{tool}: {}", chain(error.as_ref())));
            ExitCode::from(2)
        }
    }
}

/// Write a line to stderr. Where nobody reads it there is nobody to tell: `eprintln!` would end the process with a panic.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// An error and its sources on one line; a source that a message before it already tells is not told again.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let told = source.to_string();
        if !text.contains(&told) {
            text.push_str(": ");
            text.push_str(&told);
        }
        next = source.source();
    }
    text
}

/// A path as a shell takes it, for commands that a message tells people to type.
pub fn shell(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+,:@%=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Whether an error, or anything in its chain of sources, is a write to a closed pipe.
pub fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && io.kind() == io::ErrorKind::BrokenPipe
        {
            return true;
        }
        if let Some(json) = error.downcast_ref::<serde_json::Error>()
            && json.io_error_kind() == Some(io::ErrorKind::BrokenPipe)
        {
            return true;
        }
        next = error.source();
    }
    false
}

/// A stderr progress bar in bytes with rate and time left; hidden off a terminal and when `quiet`.
pub fn byte_progress(label: &str, total_bytes: u64, quiet: bool) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total_bytes), draw_target(quiet));
    bar.set_style(style(
        "{msg} [{bar:30}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} eta {eta}",
    ));
    bar.set_message(label.to_owned());
    bar
}

fn draw_target(quiet: bool) -> ProgressDrawTarget {
    if quiet || !io::stderr().is_terminal() {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr()
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Takes a line of the log where something else is drawn on the terminal.
pub type LogSink = Arc<dyn Fn(&str) + Send + Sync>;

static SINK: Mutex<Option<LogSink>> = Mutex::new(None);

/// Give the lines of the log to `sink`, which makes room for them, or to standard error again.
pub fn log_through(sink: Option<LogSink>) {
    *SINK.lock().unwrap_or_else(PoisonError::into_inner) = sink;
}

struct StderrLog;

impl log::Log for StderrLog {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = match record.level() {
            level @ (log::Level::Error | log::Level::Warn) => {
                format!("{}: {}", level.as_str().to_lowercase(), record.args())
            }
            _ => record.args().to_string(),
        };
        let sink = SINK.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match sink {
            Some(sink) => sink(&line),
            None => say(format_args!("{line}")),
        }
    }

    fn flush(&self) {}
}

/// Send the log to stderr: errors only with `quiet`, else warnings and notes, `-v` debug, `-vv` trace.
pub fn init_log(quiet: bool, verbose: u8) {
    let level = match (quiet, verbose) {
        (true, _) => log::LevelFilter::Error,
        (false, 0) => log::LevelFilter::Info,
        (false, 1) => log::LevelFilter::Debug,
        (false, _) => log::LevelFilter::Trace,
    };
    // A second call, as tests make, keeps the first logger.
    if log::set_logger(&StderrLog).is_ok() {
        log::set_max_level(level);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_spaces_is_quoted() {
        assert_eq!(shell("/a/b-c".as_ref()), "/a/b-c");
        assert_eq!(shell("/a b/it's".as_ref()), r"'/a b/it'\''s'");
    }

    #[test]
    fn a_source_is_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("f.json: {source}; make it again")]
        struct Inner {
            source: io::Error,
        }
        #[derive(Debug, thiserror::Error)]
        #[error("plan")]
        struct Outer {
            source: Inner,
        }
        let source = Inner {
            source: io::Error::other("gone"),
        };
        assert_eq!(
            chain(&Outer { source }),
            "plan: f.json: gone; make it again"
        );
    }

    #[test]
    fn a_closed_pipe_is_found_down_the_chain() {
        let io = io::Error::new(io::ErrorKind::BrokenPipe, "gone");
        assert!(is_broken_pipe(&io));
        assert!(!is_broken_pipe(&io::Error::other("x")));
    }
}
