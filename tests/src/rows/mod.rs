//! Measured rows: what a ladder of runs writes, a JSON line each (`k3.row/1`), and what tables and plots are made from.
//!
//! A row is one run under one plan. It keeps what the plan decided, the machine's measured speeds, every token's seconds, the mean
//! bytes of a generated token and the parts of the step of median time; not the whole report, so that a file of a hundred rows can
//! be committed beside its plots. Rows of one name are repeats; their order in the file is that in which they were run.

mod check;
mod cli;
mod make;
mod plot;
mod spread;
mod table;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

pub use check::{Difference, same_ids};
pub use cli::{Cli, run};
pub use make::{Made, make};
pub use plot::{PLOTS, draw};
use serde::{Deserialize, Serialize};
pub use spread::{Group, Spread, groups, median, settled};
pub use table::table;

/// The schema tag of a row.
pub const SCHEMA: &str = "k3.row/1";

/// One run under one plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// [`SCHEMA`].
    pub schema: String,
    /// The ladder it belongs to: `ladder`, `split`, ...
    pub target: String,
    /// Which of the ladder's rows; repeats share it.
    pub name: String,
    /// Which repeat, from 1.
    pub round: u32,
    /// When it ended, UTC.
    pub date: String,
    /// The revision of the source.
    pub tree: String,
    /// What held the run to its memory.
    pub cap: String,
    /// Where it ran.
    pub machine: Machine,
    /// What was planned.
    pub plan: Planned,
    /// What was measured.
    pub report: Measured,
}

/// The machine of a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its processor.
    pub cpu: String,
    /// Cores the process may use.
    pub cores: usize,
    /// Memory available before the run.
    pub available_bytes: u64,
    /// The kernel's version.
    pub kernel: String,
}

/// A plan's decisions, and the speeds it knew.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Planned {
    /// Layers of the model.
    pub num_layers: usize,
    /// What was asked for.
    pub budget_bytes: u64,
    /// What the ledger adds up to.
    pub total_bytes: u64,
    /// Trunk that stays in memory.
    pub pinned_trunk_bytes: u64,
    /// Trunk that is read for every token.
    pub streamed_trunk_bytes: u64,
    /// Whether the head stays in memory.
    pub head_pinned: bool,
    /// Experts that memory holds.
    pub expert_slots: usize,
    /// Which of them give way.
    pub cache_policy: String,
    /// Positions planned for.
    pub context: usize,
    /// Prompt rows of one step.
    pub prefill_chunk: usize,
    /// The ring that tiles stream through.
    pub stream_buffer_bytes: u64,
    /// Largest read request.
    pub read_bytes: u64,
    /// Requests in flight.
    pub queue_depth: usize,
    /// Seconds a token by the plan.
    pub predicted_seconds_per_token: Option<f64>,
    /// Measured speed of the disk.
    pub disk_bytes_per_second: Option<f64>,
    /// Measured speed of memory.
    pub memory_bytes_per_second: Option<f64>,
    /// Measured rate of operations.
    pub flops_per_second: Option<f64>,
}

/// A run's figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Of the checkpoint.
    pub identity: String,
    /// Instruction set.
    pub isa: String,
    /// Compute threads.
    pub threads: usize,
    /// Tokens of the prompt.
    pub prompt_rows: usize,
    /// SHA-256 of the prompt's ids as little-endian u32.
    pub prompt_sha256: String,
    /// What was generated.
    pub generated_ids: Vec<u32>,
    /// Peak resident size by the plan.
    pub planned_peak_bytes: u64,
    /// Peak resident size as the kernel counted it.
    pub peak_rss_bytes: u64,
    /// Time of the prompt's steps together.
    pub prefill_seconds: f64,
    /// Time of each generated token's step.
    pub decode_seconds: Vec<f64>,
    /// Means over those steps.
    pub token: PerToken,
    /// Where the time of the step of median time went, by part; parts that took none left out.
    pub parts: BTreeMap<String, f64>,
    /// What kept that step from being faster.
    pub bound_by: String,
}

/// What a generated token took, on average.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PerToken {
    /// Trunk read.
    pub trunk_bytes: f64,
    /// Head read.
    pub head_bytes: f64,
    /// Experts read.
    pub expert_bytes: f64,
    /// Everything asked of the disk, widened and padded.
    pub requested_bytes: f64,
    /// Bytes that had to come from memory besides.
    pub touched_bytes: f64,
    /// Operations.
    pub flops: f64,
    /// Distinct experts asked for.
    pub expert_requests: f64,
    /// Those that were there.
    pub expert_hits: f64,
}

/// The least seconds a token that the machine's measured speeds allow, by what they are limited by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Bytes read over the disk's speed.
    pub disk: f64,
    /// Bytes touched and bytes read over memory's.
    pub memory: f64,
    /// Operations over the rate of arithmetic.
    pub arithmetic: f64,
}

impl Limit {
    /// The largest.
    pub fn seconds(self) -> f64 {
        self.disk.max(self.memory).max(self.arithmetic)
    }
}

impl Row {
    /// Seconds of a generated token: the median of the run's.
    pub fn seconds_per_token(&self) -> f64 {
        median(&self.report.decode_seconds)
    }

    /// Bytes read a second of a generated token's time.
    pub fn bytes_per_second(&self) -> f64 {
        self.report.token.requested_bytes / self.seconds_per_token()
    }

    /// The physical limit, where the plan knew the machine's speeds.
    pub fn limit(&self) -> Option<Limit> {
        let token = &self.report.token;
        Some(Limit {
            disk: token.requested_bytes / self.plan.disk_bytes_per_second?,
            memory: (token.touched_bytes + token.requested_bytes)
                / self.plan.memory_bytes_per_second?,
            arithmetic: token.flops / self.plan.flops_per_second?,
        })
    }

    /// Whether nothing of the trunk streams, so that memory beyond goes to experts.
    pub fn trunk_resident(&self) -> bool {
        self.plan.head_pinned && self.plan.streamed_trunk_bytes == 0
    }

    /// A row's name in messages.
    pub fn label(&self) -> String {
        format!("{} \"{}\", round {}", self.target, self.name, self.round)
    }
}

/// Why rows cannot be read or made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RowError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line is not a row.
    #[error("{} line {line}: not a row ({source}); remove the line, or run its ladder again with FRESH=1", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A row of another version.
    #[error("{} line {line}: {found:?} is not {SCHEMA:?}; run its ladder again with FRESH=1", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// Its tag.
        found: String,
    },
    /// A plan or report does not read.
    #[error("{}: {source} (want the {what})", path.display())]
    Input {
        /// The file.
        path: PathBuf,
        /// Which file it should be.
        what: &'static str,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A run that cannot be a row.
    #[error("{}: {why}", path.display())]
    Unusable {
        /// The report.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

/// All rows of a file, in order; none if there is no such file.
///
/// # Errors
/// If it cannot be read, or a line is not a row.
pub fn read(path: &Path) -> Result<Vec<Row>, RowError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => {
            let path = path.to_owned();
            return Err(RowError::Io { path, source });
        }
    };
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.is_empty());
    lines.map(|(text, line)| parse(text, path, line)).collect()
}

fn parse(text: &str, path: &Path, line: usize) -> Result<Row, RowError> {
    let row: Row = serde_json::from_str(text).map_err(|source| RowError::Line {
        path: path.to_owned(),
        line,
        source,
    })?;
    if row.schema == SCHEMA {
        Ok(row)
    } else {
        Err(RowError::Schema {
            path: path.to_owned(),
            line,
            found: row.schema,
        })
    }
}

/// Add a row at the end. The file is replaced whole, so that an interrupted ladder leaves no half of a line.
///
/// # Errors
/// If the file holds something else, or cannot be written.
pub fn append(path: &Path, row: &Row) -> Result<(), RowError> {
    let mut rows = read(path)?;
    rows.push(row.clone());
    let mut text = Vec::new();
    for row in &rows {
        serde_json::to_writer(&mut text, row).map_err(|source| RowError::Input {
            path: path.to_owned(),
            what: "row as JSON",
            source,
        })?;
        text.push(b'\n');
    }
    k3_shared::term::write_atomic(path, &text).map_err(|source| RowError::Io {
        path: path.to_owned(),
        source,
    })
}
