//! Why a trunk was not packed or repaired.

use std::{io, path::PathBuf};

use k3_shared::{direct::DirectError, formats::trunk::TrunkError, size::Bytes};

use k3_shared::term::shell;

/// What keeps a trunk from being packed or repaired.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum PackError {
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] k3_shared::checkpoint::CheckpointError),
    /// A read or write failed.
    #[error(transparent)]
    Direct(#[from] DirectError),
    /// The existing trunk cannot be used.
    #[error(transparent)]
    Trunk(#[from] TrunkError),
    /// There is a trunk, and no `--force`.
    #[error("{}: exists; replace it with --force, or check it with --verify", path.display())]
    Exists {
        /// The file in the way.
        path: PathBuf,
    },
    /// Another process holds the folder.
    #[error("{}: another k3-pack is at work in this folder; wait for it, or choose another", path.display())]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// A call on a folder or a file in it failed.
    #[error("{}: {op}: {source}", path.display())]
    Folder {
        /// The folder or file.
        path: PathBuf,
        /// What was tried.
        op: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Two stripes in one folder.
    #[error("--stripe {}: named twice; each stripe needs its own folder, on its own disk", path.display())]
    SameFolder {
        /// The folder.
        path: PathBuf,
    },
    /// Weights and folders do not pair.
    #[error("--stripe-weights: {given} weights for {folders} folders (TRUNK_DIR is the first)")]
    Weights {
        /// Weights given.
        given: usize,
        /// Folders to weigh.
        folders: usize,
    },
    /// The file system is too full.
    #[error(
        "{}: {} needed, {} free ({needed} and {free} bytes); free some, or spread the tiles: --stripe DIR2",
        path.display(), Bytes(*needed), Bytes(*free)
    )]
    NoSpace {
        /// The folder.
        path: PathBuf,
        /// Bytes to be written there.
        needed: u64,
        /// Bytes available.
        free: u64,
    },
    /// A trunk of another checkpoint was to be repaired.
    #[error(
        "{}: identity is {recorded}, but {} has {found}; pack it anew: k3-pack --force {} {}",
        trunk.display(), model.display(), shell(model), shell(trunk)
    )]
    OtherCheckpoint {
        /// The trunk folder.
        trunk: PathBuf,
        /// The checkpoint folder.
        model: PathBuf,
        /// The identity in trunk.json.
        recorded: String,
        /// The checkpoint's.
        found: String,
    },
    /// The trunk does not hold the layer.
    #[error("--repair {layer}: the trunk has layers 0 to {last}")]
    NoLayer {
        /// The layer asked for.
        layer: u32,
        /// The last there is.
        last: usize,
    },
    /// The checkpoint no longer has the bytes that were packed.
    #[error(
        "{}: the rows of tile {tile} ({tensor}) hash to {found}, but {recorded} was packed: the shard itself has changed; \
         check it: k3-census --hash {}",
        shard.display(), shell(shard.parent().unwrap_or(shard))
    )]
    SourceChanged {
        /// The shard.
        shard: PathBuf,
        /// The tile's number.
        tile: usize,
        /// Its first tensor.
        tensor: String,
        /// The digest of the shard's bytes.
        found: String,
        /// The digest in trunk.json.
        recorded: String,
    },
    /// The records could not be written.
    #[error("trunk.json: {0}")]
    Json(#[from] serde_json::Error),
}
