//! A checkpoint folder opened for reading: config, index, shard headers, where every tensor and expert lies, and its identity.
//!
//! # What is authoritative
//! The headers are: every offset, dtype and shape comes from the shard that holds the tensor, and each is checked against
//! `config.json`. `model.safetensors.index.json` only says which shards to open, and may be absent: then every `*.safetensors`
//! file is. Vision shards are neither needed nor opened.
//!
//! # Identity
//! The lower-case hex SHA-256 over these lines, each ended by one `\n`:
//! 1. the compact text of [`Config::to_canonical`], of the whole model;
//! 2. for each needed shard, in byte order of the file names: `NAME SIZE HEADER FIRST LAST`, single spaces between. SIZE is
//!    the file's bytes in decimal; HEADER the hex SHA-256 of everything before the data (length prefix and JSON); FIRST and LAST
//!    those of the first and last 64 KiB of the shard's trunk run (all of it, if shorter). The trunk run reaches from the first byte of
//!    the first to the last byte of the last always-used tensor in the file, embedding and head among them; where there is
//!    none, both are the digest of nothing.
//!
//! Needed are the shards with a text tensor of the opened layers, and those with embedding, head and final vectors. Shards without
//! text tensors (95 and 96 of the release) never count, so a text-only download has the identity of a full one; and the first N layers
//! have the same identity in a full and in a partial download. N is not hashed: record it beside the identity.
//!
//! # Memory
//! The always-used tensors have one record each. Experts in string order (specification 2.2) cost one record a layer, in any
//! other order eight bytes a tensor.

mod assemble;
mod experts;
mod identity;
mod index;
mod shard;
mod slots;

use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
};

use crate::{
    config::{Config, ConfigError, Mlp},
    formats::census::Problem,
    ids::ExpertId,
    names::{Dtype, ExpertTensor, TensorRole},
};

pub use assemble::{Assembly, assemble};
pub use experts::{ExpertOrder, Geometry, InnerRange, LayerExperts};
pub use identity::hex;
pub use index::{INDEX_FILE, Index};
pub use shard::{
    ShardFile, ShardScan, StoredTensor, VISION_PREFIXES, find_shard, find_shards, scan_shard,
    shards_in,
};
pub use slots::{Slots, TooManyTensors};

/// A shard of an opened checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardIdx(pub u32);

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLocation {
    /// The shard.
    pub shard: ShardIdx,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Absolute offset in the file, bytes.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Where a routed expert lies: its six tensors in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLocation {
    /// The shard.
    pub shard: ShardIdx,
    /// Absolute offset in the file, bytes; not aligned to anything.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A shard that was opened.
#[derive(Clone, Debug)]
pub struct Shard {
    /// File name.
    pub name: String,
    /// Where it was found.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

/// A checkpoint whose headers have been read and found right.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder.
    pub dir: PathBuf,
    /// Configuration of the whole model, whatever part of it was opened.
    pub config: Config,
    /// Opened layers: the first so many.
    pub layers: usize,
    shards: Vec<Shard>,
    tensors: BTreeMap<TensorRole, TensorLocation>,
    experts: experts::Experts,
    identity: String,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Its configuration cannot.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The folder cannot be listed.
    #[error("{}: {source} (is this the folder with the checkpoint?)", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The configuration describes more tensors than any checkpoint can have.
    #[error("{}: {source}", path.display())]
    TooManyTensors {
        /// The configuration file.
        path: PathBuf,
        /// How many.
        source: TooManyTensors,
    },
    /// Files are missing or malformed, or tensors are not what the configuration says.
    #[error("{}: {}; `k3-census {}` checks everything", dir.display(), List(problems), dir.display())]
    Problems {
        /// The folder.
        dir: PathBuf,
        /// Everything found wrong.
        problems: Vec<Problem>,
    },
    /// A tensor outside the opened part was asked for.
    #[error("{}: {name} is not among the {layers} opened layers; open more with --layers", dir.display())]
    NotOpened {
        /// The folder.
        dir: PathBuf,
        /// Its name.
        name: String,
        /// Opened layers.
        layers: usize,
    },
    /// The six tensors of an expert do not lie together in the order the others have.
    #[error(
        "{}: the six tensors of expert {} in layer {} are not one block; rewrite the shards in the release's layout",
        dir.display(), id.expert, id.layer
    )]
    NotABlock {
        /// The folder.
        dir: PathBuf,
        /// The expert.
        id: ExpertId,
    },
}

/// Problems in a message: the first twenty, then how many more.
struct List<'a>(&'a [Problem]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 20;
        write!(f, "{} problem(s)", self.0.len())?;
        for problem in self.0.iter().take(SHOWN) {
            write!(f, "\n  {problem}")?;
        }
        if self.0.len() > SHOWN {
            write!(f, "\n  and {} more", self.0.len() - SHOWN)?;
        }
        Ok(())
    }
}

impl Checkpoint {
    /// Open the first `layers` layers (all by default) of the checkpoint in `dir`, with embedding, head and final vectors.
    ///
    /// # Errors
    /// If a file or tensor is missing, malformed, or not what `config.json` says; all of it is named.
    pub fn open(dir: &Path, layers: Option<usize>) -> Result<Self, CheckpointError> {
        Self::open_in(dir, &[], layers)
    }

    /// As [`Self::open`], with shards taken from `dir` or else from the first of `expert_dirs` that has them.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(
        dir: &Path,
        expert_dirs: &[PathBuf],
        layers: Option<usize>,
    ) -> Result<Self, CheckpointError> {
        let config = Config::open(dir)?;
        let slots = Slots::new(&config).map_err(|source| CheckpointError::TooManyTensors {
            path: dir.join("config.json"),
            source,
        })?;
        let layers = layers.map_or(config.num_hidden_layers, |n| {
            n.min(config.num_hidden_layers)
        });
        let mut problems = Vec::new();
        let index = match Index::open(dir, &config, &slots) {
            Ok(index) => index,
            Err(problem) => {
                problems.push(problem);
                None
            }
        };
        let folders: Vec<&Path> = std::iter::once(dir)
            .chain(expert_dirs.iter().map(PathBuf::as_path))
            .collect();
        let files = find_shards(&folders, index.as_ref(), &config, &slots, layers)?;
        let scans = files
            .iter()
            .map(|file| scan_shard(&config, file, &mut |_| {}))
            .collect();
        let assembly = assemble(dir, config, &slots, layers, index.as_ref(), scans);
        problems.extend(assembly.problems);
        if problems.is_empty() {
            Ok(assembly.checkpoint)
        } else {
            Err(CheckpointError::Problems {
                dir: dir.into(),
                problems,
            })
        }
    }

    /// Where an always-used tensor lies: one of an opened layer, the embedding, the head, a final vector.
    ///
    /// An expert's tensor is found too, from its table.
    ///
    /// # Errors
    /// If the tensor is not one of the opened part of the model.
    pub fn tensor(&self, role: TensorRole) -> Result<TensorLocation, CheckpointError> {
        if let TensorRole::Expert(id, tensor) = role {
            let (shard, offset) = self.expert_tensor(id, tensor)?;
            let spec = role.spec(&self.config);
            return Ok(TensorLocation {
                shard,
                dtype: spec.dtype,
                bytes: spec.bytes(),
                shape: spec.shape,
                offset,
            });
        }
        let found = self.tensors.get(&role).cloned();
        found.ok_or_else(|| self.not_opened(role.name()))
    }

    /// The block of a routed expert.
    ///
    /// # Errors
    /// If the expert is not one of the opened part of the model, or its tensors are not one block.
    pub fn expert(&self, id: ExpertId) -> Result<ExpertLocation, CheckpointError> {
        self.check_expert(id)?;
        let found = self.experts.block(id);
        found.ok_or_else(|| CheckpointError::NotABlock {
            dir: self.dir.clone(),
            id,
        })
    }

    /// Shard and absolute offset of one tensor of an expert, wherever it lies.
    ///
    /// # Errors
    /// If the expert is not one of the opened part of the model.
    pub fn expert_tensor(
        &self,
        id: ExpertId,
        tensor: ExpertTensor,
    ) -> Result<(ShardIdx, u64), CheckpointError> {
        self.check_expert(id)?;
        let found = self.experts.tensor(id, tensor);
        found.ok_or_else(|| self.not_opened(TensorRole::Expert(id, tensor).name()))
    }

    /// Where the six tensors lie inside every expert's block, in the order of [`ExpertTensor::ALL`].
    pub fn expert_layout(&self) -> [InnerRange; 6] {
        self.experts.layout()
    }

    /// In what order the experts of a layer lie.
    pub fn expert_order(&self, layer: crate::ids::LayerIdx) -> Option<ExpertOrder> {
        self.experts.order(layer)
    }

    /// The opened shards, in byte order of their names; [`ShardIdx`] counts along them.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The file of a shard.
    ///
    /// # Panics
    /// If `shard` is not one that this checkpoint handed out.
    pub fn shard_path(&self, shard: ShardIdx) -> &Path {
        &self.shards[shard.0 as usize].path
    }

    /// The identity of the opened part, hex; see the module's description.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    fn check_expert(&self, id: ExpertId) -> Result<(), CheckpointError> {
        let opened = id.layer.get() < self.layers
            && self.config.mlp(id.layer) == Mlp::Moe
            && id.expert.get() < self.config.moe.num_experts;
        if opened {
            Ok(())
        } else {
            Err(self.not_opened(TensorRole::Expert(id, ExpertTensor::W1Packed).name()))
        }
    }

    fn not_opened(&self, name: String) -> CheckpointError {
        CheckpointError::NotOpened {
            dir: self.dir.clone(),
            name,
            layers: self.layers,
        }
    }
}

#[cfg(test)]
mod tests;
