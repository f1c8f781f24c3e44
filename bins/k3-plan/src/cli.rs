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
    /// Read requests in flight; lowered to 4 to fit [default: as the probe found best, else 8].
    #[arg(long, value_name = "N")]
    pub queue_depth: Option<NonZeroUsize>,
    /// Largest single read request, rounded up to 4096 [default: as the probe found best, else 4Mi].
    #[arg(long, value_name = "SIZE")]
    pub read_size: Option<Bytes>,
    /// Ring that trunk tiles stream through, at most; lowered to 64Mi to fit [default: 256Mi, or two tiles more than reads in flight].
    #[arg(long, value_name = "SIZE")]
    pub stream_buffers: Option<Bytes>,
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
    /// Replacement policy of the expert slots [default: the best by the trace, else reuse-odds].
    #[arg(long, value_name = "NAME", value_parser = engine_policy)]
    pub cache_policy: Option<PolicyKind>,
    /// Divide the memory, choose the policy and expect the hits by this trace of an earlier run.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Measure disk, memory and arithmetic first, and keep what is found; without, what was found earlier counts.
    #[arg(long)]
    pub probe: bool,
    /// Where measurements are kept; `none` is nowhere [default: `$XDG_CACHE_HOME/k3`, else ~/.cache/k3].
    #[arg(long, value_name = "DIR|none")]
    pub probe_cache: Option<PathBuf>,
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
