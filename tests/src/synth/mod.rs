//! Synthetic checkpoints: random weights by a fixed rule, in the release's files, names, dtypes and order.
//!
//! Every byte of a checkpoint follows from its `config.json`: a tensor's name seeds a counter-based stream, and a rule turns
//! the stream into values ([`Stream`], [`Rule`]). So a block of a file is made where and when it is written, several at a time,
//! and nothing larger than a block is held. Source: test-checkpoint specification.

mod config;
mod folder;
mod layout;
mod recipe;
mod rule;
mod stream;
mod write;

use std::{
    io,
    path::{Path, PathBuf},
};

use k3_shared::{config::ConfigError, direct::DirectError, size::Bytes};

pub use self::{
    layout::{Shard, Tensor},
    recipe::{Options, Recipe},
    rule::Rule,
    stream::{Stream, fnv1a},
    write::{WriteOptions, Written},
};

/// Why a synthetic checkpoint could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// The configuration is not one of this model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no slice of that many layers.
    #[error("no slice has {layers} layers; use --slice 2, 3 or 5")]
    NoSuchSlice {
        /// The layers asked for.
        layers: u32,
    },
    /// Sizes do not fit 64 bits.
    #[error("{tensor}: the checkpoint is too large to be addressed; use smaller dimensions")]
    TooLarge {
        /// The tensor that passed the limit.
        tensor: String,
    },
    /// A shard of the replica would not have its published size.
    #[error(
        "{file}: laid out as {made} bytes, published as {published}; the manifest and the tensor table disagree"
    )]
    NotAsPublished {
        /// The shard.
        file: String,
        /// By our layout.
        made: u64,
        /// By the manifest.
        published: u64,
    },
    /// The folder holds a checkpoint already.
    #[error("{}: holds {found} already; choose another folder, or replace it with --force", dir.display())]
    Occupied {
        /// The folder.
        dir: PathBuf,
        /// One of its files.
        found: String,
    },
    /// The folder holds a checkpoint that is not ours to replace.
    #[error("{}: {found} was not written by k3-synth and is not replaced, not even with --force; choose another folder", dir.display())]
    NotOurs {
        /// The folder.
        dir: PathBuf,
        /// One of its files.
        found: String,
    },
    /// The disk has too little room.
    #[error("{}: needs {needed} bytes ({}), {available} are free; make room or choose another disk", dir.display(), Bytes(*needed))]
    NoSpace {
        /// The folder.
        dir: PathBuf,
        /// Bytes to be written.
        needed: u64,
        /// Bytes free, with what --force would replace.
        available: u64,
    },
    /// A file or folder operation failed.
    #[error("{}: cannot {op}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was being done.
        op: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A shard could not be written.
    #[error(transparent)]
    Direct(#[from] DirectError),
    /// The threads could not be started.
    #[error("cannot start threads: {0}; use a smaller --threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

/// For `map_err`: an I/O error at `path` while doing `op`.
fn at<'a>(path: &'a Path, op: &'static str) -> impl FnOnce(io::Error) -> SynthError + 'a {
    move |source| SynthError::Io {
        path: path.to_owned(),
        op,
        source,
    }
}

/// Write the tiny checkpoint (test-checkpoint specification 1) into `dir`, which is made if missing.
///
/// # Errors
/// If `dir` holds a checkpoint, the disk is too full, or a file cannot be written.
pub fn tiny(dir: &Path) -> Result<Written, SynthError> {
    Recipe::tiny()?.write(dir, &WriteOptions::silent())
}

/// Write a slice of 2, 3 or 5 layers of the released widths (test-checkpoint specification 2) into `dir`.
///
/// # Errors
/// As [`tiny`]; [`SynthError::NoSuchSlice`] for other numbers.
pub fn slice(dir: &Path, layers: u32) -> Result<Written, SynthError> {
    Recipe::slice(layers)?.write(dir, &WriteOptions::silent())
}

/// Write the whole release into `dir`, headers real and payload holes.
///
/// # Errors
/// As [`tiny`].
pub fn replica(dir: &Path) -> Result<Written, SynthError> {
    Recipe::replica()?.write(dir, &WriteOptions::silent())
}

/// Write a checkpoint of any shape, given as a nested or flat `config.json`, into `dir`.
///
/// # Errors
/// As [`tiny`]; [`SynthError::Config`] with every problem of the configuration.
pub fn custom(
    dir: &Path,
    config_json: &serde_json::Value,
    options: Options,
) -> Result<Written, SynthError> {
    let text = config_json.to_string();
    let recipe = Recipe::custom(text.as_bytes(), Path::new("config.json"), options)?;
    recipe.write(dir, &WriteOptions::silent())
}
