//! `census.json` (`k3.census/1`): what a checkpoint folder holds and everything that is wrong with it.
//!
//! k3-census writes it and k3-plan reads it, so that a plan can be made before anything is packed, and with
//! [`Census::of_release`] before anything is downloaded.

pub mod digests;
mod release;

use std::{collections::BTreeMap, fmt, io, path::Path, path::PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    config::{Mixer, Mlp},
    ids::LayerIdx,
    names::{ExpertTensor, TensorClass, TensorRole},
};

/// The schema this module reads and writes.
pub const SCHEMA: &str = "k3.census/1";

/// Something wrong with a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// File name inside the folder.
    pub file: String,
    /// The tensor, where one is at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// Absolute byte offset in the file, where one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// What is wrong, and what would fix it.
    pub message: String,
}

impl Problem {
    /// A problem of a whole file.
    pub fn of(file: &str, message: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            tensor: None,
            offset: None,
            message: message.into(),
        }
    }

    /// A problem at a byte of a file.
    pub fn at(file: &str, offset: u64, message: impl Into<String>) -> Self {
        Self {
            offset: Some(offset),
            ..Self::of(file, message)
        }
    }

    /// A problem of a tensor.
    pub fn in_tensor(
        file: &str,
        tensor: impl Into<String>,
        offset: Option<u64>,
        message: impl Into<String>,
    ) -> Self {
        Self {
            tensor: Some(tensor.into()),
            offset,
            ..Self::of(file, message)
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(tensor) = &self.tensor {
            write!(f, ": {tensor}")?;
        }
        if let Some(offset) = self.offset {
            write!(f, " at byte {offset}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// Problems of one file: a hundred by name, the rest by number, so that a hostile file cannot make the list grow.
#[derive(Debug)]
pub struct ProblemList<'f> {
    file: &'f str,
    named: Vec<Problem>,
    more: usize,
}

impl<'f> ProblemList<'f> {
    const MAX_NAMED: usize = 100;

    /// An empty list for `file`.
    pub fn new(file: &'f str) -> Self {
        Self {
            file,
            named: Vec::new(),
            more: 0,
        }
    }

    /// A problem of the whole file.
    pub fn file(&mut self, message: impl Into<String>) {
        self.push(None, None, message.into());
    }

    /// A problem at a byte.
    pub fn at(&mut self, offset: u64, message: impl Into<String>) {
        self.push(None, Some(offset), message.into());
    }

    /// A problem of a tensor.
    pub fn tensor(&mut self, tensor: &str, offset: u64, message: impl Into<String>) {
        self.push(Some(tensor), Some(offset), message.into());
    }

    fn push(&mut self, tensor: Option<&str>, offset: Option<u64>, message: String) {
        if self.named.len() < Self::MAX_NAMED {
            self.named.push(Problem {
                file: self.file.into(),
                tensor: tensor.map(Into::into),
                offset,
                message,
            });
        } else {
            self.more += 1;
        }
    }

    /// The problems, and one that counts those not named.
    pub fn into_vec(mut self) -> Vec<Problem> {
        if self.more > 0 {
            let message = format!("{} more problems of the same kinds", self.more);
            self.named.push(Problem::of(self.file, message));
        }
        self.named
    }
}

/// How many tensors a class has, and how large they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassTotals {
    /// Tensors.
    pub tensors: u64,
    /// Weights: a packed byte is two, a scale byte none.
    pub params: u64,
    /// Stored bytes.
    pub bytes: u64,
}

impl ClassTotals {
    /// Add one tensor; sums saturate rather than wrap, since headers are checked one by one and not together.
    pub fn add(&mut self, params: u64, bytes: u64) {
        self.tensors = self.tensors.saturating_add(1);
        self.params = self.params.saturating_add(params);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Add another class or another shard's share of this one.
    pub fn merge(&mut self, other: Self) {
        self.tensors = self.tensors.saturating_add(other.tensors);
        self.params = self.params.saturating_add(other.params);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// Totals by class; every class has an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Classes(BTreeMap<TensorClass, ClassTotals>);

/// Every class, in the order of the census.
pub const ALL_CLASSES: [TensorClass; 13] = [
    TensorClass::RoutedExperts,
    TensorClass::SharedExperts,
    TensorClass::KdaAttention,
    TensorClass::MlaAttention,
    TensorClass::Router,
    TensorClass::LatentProjections,
    TensorClass::DenseMlp,
    TensorClass::Norms,
    TensorClass::AttentionResiduals,
    TensorClass::Embedding,
    TensorClass::OutputHead,
    TensorClass::Final,
    TensorClass::Vision,
];

impl Default for Classes {
    fn default() -> Self {
        Self(ALL_CLASSES.map(|c| (c, ClassTotals::default())).into())
    }
}

impl Classes {
    /// The totals of one class.
    pub fn get(&self, class: TensorClass) -> ClassTotals {
        self.0.get(&class).copied().unwrap_or_default()
    }

    /// The totals of one class, to add to.
    pub fn get_mut(&mut self, class: TensorClass) -> &mut ClassTotals {
        self.0.entry(class).or_default()
    }

    /// Every class with its totals, in the order of the census.
    pub fn iter(&self) -> impl Iterator<Item = (TensorClass, ClassTotals)> {
        self.0.iter().map(|(class, totals)| (*class, *totals))
    }

    /// Everything together.
    pub fn sum(&self) -> ClassTotals {
        self.0
            .values()
            .fold(ClassTotals::default(), |mut sum, one| {
                sum.merge(*one);
                sum
            })
    }

    /// Add another shard's share.
    pub fn merge(&mut self, other: &Self) {
        for (class, totals) in other.iter() {
            self.get_mut(class).merge(totals);
        }
    }
}

/// Weights in a tensor of `elements` elements: 4-bit weights are packed two to a byte, and scales are none.
pub fn params(role: Option<TensorRole>, elements: u64) -> u64 {
    match role {
        Some(TensorRole::Expert(_, tensor)) if ExpertTensor::is_packed(tensor) => {
            elements.saturating_mul(2)
        }
        Some(TensorRole::Expert(..)) => 0,
        _ => elements,
    }
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Zero-based.
    pub layer: LayerIdx,
    /// Its token mixer.
    pub mixer: Mixer,
    /// Its channel mixer.
    pub mlp: Mlp,
    /// File with its always-used tensors (the first of them, if there are several).
    pub shard: String,
    /// Absolute offset of the first always-used tensor.
    pub trunk_offset: u64,
    /// Payload bytes of the always-used tensors.
    pub trunk_bytes: u64,
    /// Whether they lie in one run without a gap.
    pub contiguous: bool,
    /// Bytes of all its routed experts.
    pub expert_bytes_total: u64,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// Its name.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// The size the manifest has for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_bytes: Option<u64>,
    /// Tensors in it.
    pub tensors: u64,
    /// Bytes before the tensor data: the length prefix and the JSON.
    pub header_bytes: u64,
    /// SHA-256 of the whole file, lower-case hex, where it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// An always-used tensor stored otherwise than the release stores it (legal: F32 for BF16, a shorter `A_log`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrunkException {
    /// Its name.
    pub tensor: String,
    /// Element type found, as in the header.
    pub dtype: String,
    /// Shape found.
    pub shape: Vec<u64>,
}

/// A census.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Census {
    /// [`SCHEMA`].
    pub schema: String,
    /// The folder.
    pub model_dir: String,
    /// Identity of the checkpoint (see [`crate::checkpoint`]); null where problems leave none, and for the built-in census.
    pub identity: Option<String>,
    /// `--layers N`, when only the first N layers were looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_layers: Option<usize>,
    /// Whether there are no problems.
    pub ok: bool,
    /// Everything that is wrong.
    pub problems: Vec<Problem>,
    /// Shards looked at.
    pub num_shards: u64,
    /// Tensors in them.
    pub num_tensors: u64,
    /// Their data.
    pub total_bytes: u64,
    /// The shards, headers included.
    pub total_file_bytes: u64,
    /// Weights.
    pub total_params: u64,
    /// Bytes of one routed expert.
    pub expert_bytes: u64,
    /// Routed experts found whole.
    pub num_experts_total: u64,
    /// Bytes of value 255 (NaN) among the scales; null unless `--hash` read them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_bytes_nan: Option<u64>,
    /// Totals by class.
    pub classes: Classes,
    /// The layers looked at.
    pub layers: Vec<LayerRecord>,
    /// The files looked at, in the order of their names.
    pub shards: Vec<ShardRecord>,
    /// Always-used tensors stored otherwise than the release stores them.
    pub trunk_exceptions: Vec<TrunkException>,
    /// The configuration in canonical form, of the whole model.
    pub config: Value,
}

/// Why a census could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CensusError {
    /// The file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is no census of a version known here.
    #[error("{}: {reason}; make one with `k3-census MODEL_DIR -o {}`", path.display(), path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Census {
    /// Read a census file.
    ///
    /// # Errors
    /// If it cannot be read, or as [`Self::parse`].
    pub fn open(path: &Path) -> Result<Self, CensusError> {
        let bytes = std::fs::read(path).map_err(|source| CensusError::Io {
            path: path.into(),
            source,
        })?;
        Self::parse(&bytes, path)
    }

    /// Read the bytes of a census; `path` is for messages.
    ///
    /// # Errors
    /// If they are not JSON, of another schema, or lack a field.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, CensusError> {
        #[derive(Deserialize)]
        struct Kind {
            schema: String,
        }
        let format = |reason: String| CensusError::Format {
            path: path.into(),
            reason,
        };
        let kind: Kind =
            serde_json::from_slice(bytes).map_err(|e| format(format!("is no census: {e}")))?;
        if kind.schema != SCHEMA {
            return Err(format(format!(
                "has schema {:?} instead of {SCHEMA:?}",
                kind.schema
            )));
        }
        serde_json::from_slice(bytes).map_err(|e| format(e.to_string()))
    }
}

#[cfg(test)]
mod tests;
