//! Why bytes could not be moved.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A transfer that failed; every variant names the file and, where there is one, the byte.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectError {
    /// The file cannot be opened.
    #[error("{}: cannot open: {source}{}", path.display(), more_files(source))]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Direct I/O was demanded, or its trial transfer failed for another reason than being unsupported.
    #[error("{}: trial of direct I/O failed: {source} (--buffered goes through the page cache)", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A read failed.
    #[error("{}: reading {wanted} bytes at byte {offset} failed after {got} before them: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where the failing call began.
        offset: u64,
        /// Bytes still wanted there.
        wanted: usize,
        /// Bytes had before it.
        got: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The file ends before what was wanted.
    #[error(
        "{}: file is shorter than expected: wanted {wanted} bytes at byte {offset}, got {got} ({})",
        path.display(),
        remedy(path)
    )]
    Short {
        /// The file.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Bytes wanted.
        wanted: u64,
        /// Bytes there were.
        got: u64,
    },
    /// The device or the quota is full.
    #[error("{}: no space left: {got} of {wanted} bytes written at byte {offset}: {source} (free some, then re-run)", path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// Where the write began.
        offset: u64,
        /// Bytes to be written.
        wanted: usize,
        /// Bytes that were.
        got: usize,
        /// What the system said.
        source: io::Error,
    },
    /// A write failed.
    #[error("{}: {got} of {wanted} bytes written at byte {offset}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Where the write began.
        offset: u64,
        /// Bytes to be written.
        wanted: usize,
        /// Bytes that were.
        got: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The caller's range or memory is not aligned, or ends past the last possible byte.
    #[error("{}: {len} bytes at byte {offset}: not an aligned range", path.display())]
    Misaligned {
        /// The file.
        path: PathBuf,
        /// Where the transfer was to begin.
        offset: u64,
        /// Its length.
        len: usize,
    },
    /// The caller's buffer cannot hold the blocks that cover the range.
    #[error("{}: the blocks around {wanted} bytes at byte {offset} do not fit a buffer of {capacity}", path.display())]
    BufferTooSmall {
        /// The file.
        path: PathBuf,
        /// Where the read was to begin.
        offset: u64,
        /// Bytes wanted.
        wanted: usize,
        /// What the buffer holds.
        capacity: usize,
    },
    /// A call other than a transfer failed.
    #[error("{}: {op}: {source}", path.display())]
    Query {
        /// The file.
        path: PathBuf,
        /// What was asked.
        op: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

fn remedy(path: &Path) -> String {
    let folder = path.parent().unwrap_or(path).display();
    if path.extension().is_some_and(|e| e == "safetensors") {
        format!("what else is missing: k3-census {folder}")
    } else {
        format!("make the trunk anew: k3-pack --force MODEL_DIR {folder}")
    }
}

/// What to type when a process has as many files open as it may: a checkpoint's shards take two each.
fn more_files(source: &io::Error) -> &'static str {
    if source.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) {
        " (allow more: ulimit -n 1024)"
    } else {
        ""
    }
}
