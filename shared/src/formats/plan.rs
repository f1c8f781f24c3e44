//! `plan.json` (`k3.plan/1`): what is pinned, what streams, and how much memory everything takes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The schema tag of one plan.
pub const SCHEMA: &str = "k3.plan/1";
/// The schema tag of a list of plans.
pub const LIST_SCHEMA: &str = "k3.plans/1";

/// One line of the memory ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerLine {
    /// One of the fixed names (`recurrent_state`, `mla_cache`, ...).
    pub name: String,
    /// Bytes set aside.
    pub bytes: u64,
    /// How the number comes about.
    pub why: String,
}

/// What a decode step is expected to read and take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// Trunk payload read for each decoded token.
    pub trunk_bytes_per_token: u64,
    /// Head payload read for each decoded token.
    pub head_bytes_per_token: u64,
    /// Expert payload read for each decoded token, at the expected hit rate.
    pub expert_bytes_per_token: u64,
    /// Expected step time, where the machine was measured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub seconds_per_token: Option<f64>,
}

/// What was measured of the machine, or given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// Sequential direct reads of the trunk, as this plan makes them: its `read_bytes` and `queue_depth`.
    pub disk_bytes_per_second: Option<f64>,
    /// Streaming reads from memory, all threads.
    pub memory_bytes_per_second: Option<f64>,
    /// Fused multiply-adds counted as two, all threads.
    pub flops_per_second: Option<f64>,
    /// When, `YYYY-MM-DD`.
    pub date: String,
    /// Direct reads of one expert each, at random places of the shards, as this plan makes them.
    #[serde(default)]
    pub random_bytes_per_second: Option<f64>,
    /// The request size that the sweep chose.
    #[serde(default)]
    pub read_bytes: Option<u64>,
    /// The requests in flight that the sweep chose.
    #[serde(default)]
    pub queue_depth: Option<usize>,
    /// Weights read from memory as k3-run comes to them: a tile at a time, shared out over all threads.
    #[serde(default)]
    pub weights_bytes_per_second: Option<f64>,
    /// Everything the sweep measured.
    #[serde(default)]
    pub sweep: Vec<SweepCell>,
    /// The speed of each device by itself, at the size and depth chosen.
    #[serde(default)]
    pub devices: Vec<DeviceSpeed>,
}

/// How a disk is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReadKind {
    /// Tiles of the trunk in order of use.
    Sequential,
    /// Whole experts in no order.
    Random,
}

/// One combination that a sweep measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepCell {
    /// What was read.
    pub kind: ReadKind,
    /// Bytes of one read: a request of a tile, or a whole expert widened to 4096 at both ends.
    pub read_bytes: u64,
    /// Reads in flight.
    pub depth: usize,
    /// The median of the rounds; over all devices, as a run meets them.
    pub bytes_per_second: f64,
}

/// What one device does alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceSpeed {
    /// A folder on it.
    pub folder: PathBuf,
    /// Its number (`st_dev`).
    pub device: u64,
    /// What was read.
    pub kind: ReadKind,
    /// The median of the rounds.
    pub bytes_per_second: f64,
}

/// The machine the plan was made on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostRecord {
    /// `MemAvailable`.
    pub available_bytes: u64,
    /// The smallest limit above this process.
    pub limit_bytes: u64,
    /// Which limit that is.
    pub limited_by: String,
    /// Cores to compute with.
    pub cores: usize,
}

/// The digests of every expert, where the census made them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertDigests {
    /// The digest file.
    pub path: PathBuf,
    /// Its own SHA-256, hex.
    pub sha256: String,
}

/// A plan for one budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`SCHEMA`].
    pub schema: String,
    /// The peak resident size asked for.
    pub budget_bytes: u64,
    /// The sum of the ledger.
    pub total_bytes: u64,
    /// Every line.
    pub ledger: Vec<LedgerLine>,
    /// Stored bytes of the pinned tiles.
    pub pinned_trunk_bytes: u64,
    /// Payload bytes read each step because they are not pinned, head apart.
    pub streamed_trunk_bytes: u64,
    /// Inclusive ranges over the tile sequence of the trunk.
    pub pinned_tiles: Vec<[usize; 2]>,
    /// Whether the output head is pinned whole.
    pub head_pinned: bool,
    /// Slots for experts.
    pub expert_slots: usize,
    /// Replacement policy, by its name.
    pub cache_policy: String,
    /// Positions planned for.
    pub context: usize,
    /// Prompt rows of one step.
    pub prefill_chunk: usize,
    /// Compute threads.
    pub threads: usize,
    /// Bytes of the ring that trunk tiles stream through.
    pub stream_buffer_bytes: u64,
    /// Largest single read request.
    pub read_bytes: u64,
    /// Read requests in flight.
    pub queue_depth: usize,
    /// The checkpoint folder, absolute.
    pub model_dir: PathBuf,
    /// The trunk folder, absolute.
    pub trunk_dir: PathBuf,
    /// The trunk's data files, absolute.
    pub trunk_files: Vec<PathBuf>,
    /// More folders in which shards may be found, absolute.
    pub expert_dirs: Vec<PathBuf>,
    /// Digests of every expert, or null.
    pub expert_digests: Option<ExpertDigests>,
    /// Whether a run can check experts: whether there are digests. Plans made before it was said have none of it.
    #[serde(default)]
    pub experts_verified: bool,
    /// Identity of the checkpoint.
    pub identity: String,
    /// Layers planned for (the whole model unless `--layers`).
    pub num_layers: usize,
    /// What a step is expected to read.
    pub predicted: Predicted,
    /// What was measured, or null.
    pub probe: Option<Probe>,
    /// The machine.
    pub host: HostRecord,
}

/// Several plans, for a table of budgets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plans {
    /// [`LIST_SCHEMA`].
    pub schema: String,
    /// One a budget, in the order asked for.
    pub plans: Vec<Plan>,
}

/// Why bytes are no plan. The caller adds the file's name, and how to make one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Nothing but white space.
    #[error("empty where a plan should be")]
    Empty,
    /// A list of plans where one is wanted.
    #[error("holds several plans, of which a run takes one")]
    Several,
    /// Something else.
    #[error("not a plan")]
    Json {
        /// What is wrong, and where.
        #[from]
        source: serde_json::Error,
    },
}

impl Plan {
    /// Read the bytes of a plan; whether it fits a model is [`crate::ledger::check`]'s to say.
    ///
    /// # Errors
    /// If they are no plan, or several.
    pub fn parse(bytes: &[u8]) -> Result<Self, PlanError> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Err(PlanError::Empty);
        }
        let value: serde_json::Value = serde_json::from_slice(bytes)?;
        if value.get("schema").and_then(|s| s.as_str()) == Some(LIST_SCHEMA) {
            return Err(PlanError::Several);
        }
        Ok(serde_json::from_value(value)?)
    }
}
