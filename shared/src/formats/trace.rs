//! The expert trace: which experts each row of each step asked for.
//!
//! A [framed](super::codec) [`TraceHeader`] under the tag [`TAG`], then one record per step and layer, then one end record. All
//! integers are little-endian:
//!
//! | bytes | record |
//! |---|---|
//! | 8 | step, from 0 |
//! | 4 | layer |
//! | 4 | rows |
//! | 1 | mode: 0 prefill, 1 decode, 255 end |
//! | 3 | zero |
//!
//! then for each row 4 bytes sequence, 4 bytes position, and `top_k` 2-byte experts in selection order. Records ascend by (step,
//! layer). The end record has the number of records as its step, zero layer and rows, and is followed by the SHA-256 of all bytes
//! between header and end record, so that a cut or damaged trace is never replayed as a shorter one.
//!
//! Other engines write header-less pairs of little-endian `i32` (layer, expert); [`Trace::open`] tells the two apart.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::codec::CodecError;
use crate::{
    cache::{CacheError, Geometry, GroupBuilder, Key},
    ids::{ExpertIdx, LayerIdx},
};

mod pairs;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use pairs::{Pair, parse_pairs};
pub use reader::TraceReader;
pub use writer::TraceWriter;

/// First bytes of a trace: name and version.
pub const TAG: [u8; 8] = *b"K3TRACE\x01";

/// The fixed part of a record.
const RECORD_BYTES: usize = 20;
/// What follows the end record.
const DIGEST_BYTES: usize = 32;
/// Mode of the end record.
const END: u8 = 255;

/// Experts a layer may have: they are written in two bytes.
const MAX_EXPERTS: u32 = 1 << 16;

/// What a trace was recorded from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceHeader {
    /// Identity of the checkpoint.
    pub identity: String,
    /// All layers of the model, dense ones too.
    pub layers: u32,
    /// Routed experts of one layer.
    pub experts: u32,
    /// Experts one row selects in one layer.
    pub top_k: u32,
    /// Payload of one expert.
    pub expert_bytes: u64,
}

impl TraceHeader {
    /// The shape of the cache keys.
    ///
    /// # Errors
    /// If the numbers are not those of a mixture of experts.
    pub fn geometry(&self) -> Result<Geometry, CacheError> {
        Geometry::new(
            self.layers as usize,
            self.experts as usize,
            self.top_k as usize,
        )
    }

    fn row_bytes(&self) -> u64 {
        8 + 2 * u64::from(self.top_k)
    }
}

/// What a step was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Many rows of a prompt.
    Prefill,
    /// One row per sequence.
    Decode,
}

/// One row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRow {
    /// Which sequence, from 0.
    pub sequence: u32,
    /// Its position in the sequence, from 0.
    pub position: u32,
}

/// All rows of one step in one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Number of the forward step, from 0.
    pub step: u64,
    /// What the step was for.
    pub mode: Mode,
    /// A layer with routed experts.
    pub layer: LayerIdx,
    /// The rows, in the order of the step.
    pub rows: Vec<TraceRow>,
    /// `[rows, top_k]`: experts of each row in selection order.
    pub experts: Vec<ExpertIdx>,
}

/// Why a trace could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{}: byte {offset}: cannot be read", path.display())]
    Read {
        /// The trace.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// The header is damaged or of another version.
    #[error("{}: {source} (record the trace again: k3-run --trace FILE)", path.display())]
    Header {
        /// The trace.
        path: PathBuf,
        /// What is wrong with it.
        source: CodecError,
    },
    /// A record that cannot be.
    #[error("{}: byte {offset}: {problem} (record the trace again: k3-run --trace FILE)", path.display())]
    Record {
        /// The trace.
        path: PathBuf,
        /// Where the record or field begins.
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// A file that is neither a trace of ours nor one of pairs.
    #[error("{}: byte {offset}: {problem} (neither a k3 trace, which begins with K3TRACE, nor header-less little-endian i32 pairs of layer and expert)", path.display())]
    NotPairs {
        /// The file.
        path: PathBuf,
        /// Where it cannot be one.
        offset: u64,
        /// What is wrong there.
        problem: String,
    },
    /// The header cannot be written.
    #[error("trace header: {source}")]
    WriteHeader {
        /// Why.
        source: CodecError,
    },
    /// A record to be written does not fit the header.
    #[error("trace record of step {step}, layer {layer}: {problem}")]
    WriteRecord {
        /// Its step.
        step: u64,
        /// Its layer.
        layer: LayerIdx,
        /// What does not fit.
        problem: String,
    },
    /// The destination failed.
    #[error("trace: cannot be written")]
    Write {
        /// The system's reason.
        source: io::Error,
    },
}

/// What is wrong with a record, whether it is to be written or was read.
fn problem_of(
    header: &TraceHeader,
    last: Option<(u64, LayerIdx)>,
    record: &TraceRecord,
) -> Option<String> {
    let top_k = header.top_k as usize;
    if record.layer.0 >= header.layers {
        return Some(format!(
            "layer {} of a model with {}",
            record.layer, header.layers
        ));
    }
    if last.is_some_and(|last| last >= (record.step, record.layer)) {
        return Some(format!(
            "step {}, layer {} does not ascend",
            record.step, record.layer
        ));
    }
    if record.rows.is_empty() || record.rows.len().checked_mul(top_k) != Some(record.experts.len())
    {
        return Some(format!(
            "{} experts for {} rows of {top_k}",
            record.experts.len(),
            record.rows.len()
        ));
    }
    for (row, experts) in record.experts.chunks_exact(top_k).enumerate() {
        for (i, expert) in experts.iter().enumerate() {
            if expert.0 >= header.experts {
                return Some(format!(
                    "row {row} selects expert {expert} of {}",
                    header.experts
                ));
            }
            if experts[..i].contains(expert) {
                return Some(format!("row {row} selects expert {expert} twice"));
            }
        }
    }
    None
}

fn header_problem(header: &TraceHeader) -> Option<String> {
    if header.experts > MAX_EXPERTS {
        return Some(format!(
            "{} experts a layer, the format has room for {MAX_EXPERTS}",
            header.experts
        ));
    }
    header.geometry().err().map(|e| e.to_string())
}

/// A trace of either kind, opened.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one of them")]
pub enum Trace {
    /// Our own format.
    Recorded(TraceReader<BufReader<File>>),
    /// Header-less pairs in request order; the pair at index `i` lies at byte `8 * i`.
    Pairs(Vec<Pair>),
}

impl Trace {
    /// Open a trace of either kind.
    ///
    /// # Errors
    /// If the file cannot be read, or is neither kind.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let io = |source| TraceError::Read {
            path: path.to_owned(),
            offset: 0,
            source,
        };
        let mut file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            // Lengths are checked against the file's, and a pipe has none until it has been read.
            let mut copy = tempfile::tempfile().map_err(io)?;
            io::copy(&mut file, &mut copy).map_err(io)?;
            copy.rewind().map_err(io)?;
            file = copy;
        }
        let bytes = file.metadata().map_err(io)?.len();
        let mut from = BufReader::new(file);
        // Seven bytes: another version is a trace of ours, to be refused as such. No pair begins with them.
        if io::BufRead::fill_buf(&mut from)
            .map_err(io)?
            .starts_with(&TAG[..7])
        {
            return TraceReader::new(from, bytes, path).map(Self::Recorded);
        }
        let mut raw = Vec::new();
        from.read_to_end(&mut raw).map_err(io)?;
        pairs::parse_pairs(&raw, path).map(Self::Pairs)
    }
}

/// One request group of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceGroup {
    /// Number of the forward step.
    pub step: u64,
    /// What the step was for.
    pub mode: Mode,
    /// The layer.
    pub layer: LayerIdx,
    /// Rows of the step.
    pub rows: usize,
    /// Distinct experts in ascending file rank.
    pub keys: Vec<Key>,
}

/// Rebuild the groups that the engine requested: the distinct experts of each step and layer, in ascending file rank.
///
/// # Errors
/// As [`TraceReader::next_record`].
pub fn cache_groups<R: Read>(reader: &mut TraceReader<R>) -> Result<Vec<TraceGroup>, TraceError> {
    let refuse =
        |reader: &TraceReader<R>, e: CacheError| reader.refuse(reader.offset, e.to_string());
    let geometry = reader.header().geometry().map_err(|e| refuse(reader, e))?;
    let mut builder = GroupBuilder::new(geometry);
    let mut groups = Vec::new();
    while let Some(record) = reader.next_record()? {
        let keys = builder
            .group(record.layer, record.experts)
            .map_err(|e| refuse(reader, e))?
            .to_vec();
        groups.push(TraceGroup {
            step: record.step,
            mode: record.mode,
            layer: record.layer,
            rows: record.rows.len(),
            keys,
        });
    }
    Ok(groups)
}
