//! The command line.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{Parser, ValueEnum};
use k3_shared::{
    cache::{CacheError, PolicyKind},
    size::Bytes,
};

use crate::budget::Budget;

/// Decide what stays in memory and what streams from disk.
///
/// The plan goes to stdout as JSON, the ledger to stderr: k3-plan --budget 32G | k3-run --prompt-file p.txt
#[derive(Clone, Debug, Parser)]
#[command(name = "k3-plan", version)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the command line"
)]
pub struct Cli {
    /// Peak resident size of the whole k3-run process: a size, `auto`, or a preset; several, comma-separated, make a table.
    #[arg(
        long,
        value_name = "SIZE|auto|PRESET",
        value_delimiter = ',',
        default_value = "auto"
    )]
    pub budget: Vec<Budget>,
    /// The checkpoint folder (else $`K3_MODEL`, else ~/k3model).
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// The trunk folder that k3-pack wrote (else $`K3_TRUNK`, else ~/k3trunk).
    #[arg(long, value_name = "DIR")]
    pub trunk: Option<PathBuf>,
    /// Plan from a census instead of a trunk, before packing or downloading; `kimi-k3` is the built-in one of the release.
    #[arg(long, value_name = "FILE|kimi-k3")]
    pub census: Option<PathBuf>,
    /// Plan for the first N layers only.
    #[arg(long, value_name = "N")]
    pub layers: Option<NonZeroUsize>,
    /// Positions to hold, prompt and answer together; lowered to fit before the plan is refused.
    #[arg(long, value_name = "N", default_value = "4096")]
    pub context: NonZeroUsize,
    /// Prompt rows of one step; lowered to fit before the plan is refused.
    #[arg(long, value_name = "N", default_value = "64")]
    pub prefill_chunk: NonZeroUsize,
    /// Compute threads (default: the cores this process may use).
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Read requests in flight; lowered to 4 to fit.
    #[arg(long, value_name = "N", default_value = "8")]
    pub queue_depth: NonZeroUsize,
    /// Largest single read request, rounded up to 4096.
    #[arg(long, value_name = "SIZE", default_value = "4Mi")]
    pub read_size: Bytes,
    /// Ring that trunk tiles stream through, at most; lowered to 64Mi to fit.
    #[arg(long, value_name = "SIZE", default_value = "256Mi")]
    pub stream_buffers: Bytes,
    /// A split by hand: pin this much of the trunk.
    #[arg(long, value_name = "SIZE")]
    pub pin: Option<Bytes>,
    /// Which tiles to pin first: in order of use, or spread evenly over the layers.
    #[arg(long, value_enum, default_value_t = PinOrder::Sequence)]
    pub pin_order: PinOrder,
    /// A split by hand: this many expert slots.
    #[arg(long, value_name = "N", conflicts_with = "expert_mem")]
    pub expert_slots: Option<usize>,
    /// A split by hand: as many expert slots as this holds.
    #[arg(long, value_name = "SIZE")]
    pub expert_mem: Option<Bytes>,
    /// Replacement policy of the expert slots.
    #[arg(long, value_name = "NAME", default_value_t = PolicyKind::DEFAULT, value_parser = engine_policy)]
    pub cache_policy: PolicyKind,
    /// Expect the hit rate that this trace of an earlier run gives with the planned slots and policy.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Measure disk, memory and arithmetic first.
    #[arg(long)]
    pub probe: bool,
    /// Disk speed in bytes a second, given instead of measured.
    #[arg(long, value_name = "SIZE")]
    pub disk_speed: Option<Bytes>,
    /// Memory speed in bytes a second, given instead of measured.
    #[arg(long, value_name = "SIZE")]
    pub memory_speed: Option<Bytes>,
    /// More folders in which shards may be found.
    #[arg(long, value_name = "DIR,...", value_delimiter = ',')]
    pub experts_from: Vec<PathBuf>,
    /// List the presets and exit.
    #[arg(long)]
    pub list_presets: bool,
    /// Say why the memory is spent as it is, and what more would buy.
    #[arg(long)]
    pub explain: bool,
    /// Write the plan to this file, replacing it whole, instead of stdout (`-`).
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Print errors only.
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say more; twice for all.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The order in which tiles are pinned. Either way more memory pins a superset, and the head comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PinOrder {
    /// Layer 0 first, then on in order of use.
    Sequence,
    /// Evenly over the layers, so that reads never pause for a long pinned stretch.
    Spread,
}

/// A policy that k3-run can follow.
fn engine_policy(name: &str) -> Result<PolicyKind, CacheError> {
    let kind: PolicyKind = name.parse()?;
    if kind.is_replay_only() {
        return Err(CacheError::ReplayOnly { kind });
    }
    Ok(kind)
}
