//! Replays an expert trace against the cache policies k3-run uses.
//!
//! The policies and the group rule are [`k3_shared::cache`], the very code k3-run caches with, and the groups of a k3 trace are
//! rebuilt as k3-run requested them; so for the same slots and policy the hits counted here are the run's, to the last one.
//!
//! Why a tool of its own: which policy and how many slots are worth their memory is a question about a text, and a trace of a
//! run answers it in seconds for every size at once. [`Cli`] has the flags, [`run`] is the tool, [`generated`] makes traces of
//! known statistics. A trace also goes back into `k3-plan --trace`.
#![forbid(unsafe_code)]

pub mod generated;
mod pairs;
mod plot;
mod replay;
mod report;
mod reuse;
mod simulate;
mod stack;
mod table;

use std::{
    io::Write,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::Context as _;
use clap::{Args, Parser, ValueEnum};
use k3_shared::{
    cache::PolicyKind,
    formats::trace::Trace,
    size::Bytes,
    term::{self, Outcome},
};

pub use replay::{Phase, Replay, ReplayError, TraceMode};
pub use report::{Counted, Report, ReuseDistance, Row, TraceFacts};
pub use reuse::{Gap, MOST_TOKENS, Union};
pub use simulate::{CacheSize, simulate};

/// One expert of the released model, for traces that do not say (specification 2.2).
const RELEASED_EXPERT_BYTES: u64 = 17_547_264;

/// Replay an expert trace against cache policies and sizes.
///
/// The trace is one that k3-run --trace wrote, or header-less pairs of little-endian i32 (layer, expert) as other engines write
/// them. Hit rates go to standard output.
#[derive(Debug, Parser)]
#[command(name = "k3-simcache", version, max_term_width = 100)]
pub struct Cli {
    /// The trace; `-` is standard input.
    pub trace: PathBuf,
    #[command(flatten)]
    /// How large the caches are.
    pub sizes: SizeArgs,
    /// Policies to replay; the last two know the future and bound the others.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_values_t = PolicyKind::ALL)]
    pub policy: Vec<PolicyKind>,
    #[command(flatten)]
    /// Which part of the trace.
    pub part: PartArgs,
    /// Bytes the disk reads in a second: adds the time that the misses take.
    #[arg(long, value_name = "SIZE")]
    pub disk_speed: Option<Bytes>,
    /// How the result is written.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
    /// Also draw the miss-ratio curves.
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Write the result here instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Caches replayed at a time (default: one a core).
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Errors only on standard error.
    #[arg(short, long)]
    pub quiet: bool,
    /// More on standard error; twice for all.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// How large the caches are.
#[derive(Debug, Args)]
pub struct SizeArgs {
    /// Cache sizes; each holds as many whole experts as fit.
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        conflicts_with = "slots",
        default_value = "4G,8G,16G,24G,26G,32G,48G,64G,96G,128G,160G,192G"
    )]
    pub capacity: Vec<Bytes>,
    /// Cache sizes in experts, as a plan's `expert_slots` has them.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub slots: Vec<usize>,
    /// Size of one expert (default: the trace's, or 17547264 for header-less traces).
    #[arg(long, value_name = "SIZE")]
    pub expert_bytes: Option<Bytes>,
}

/// Which part of the trace is replayed, and which part is counted.
#[derive(Debug, Clone, Default, Args)]
pub struct PartArgs {
    /// Count decode steps only; prefill steps still fill the cache, as they do in k3-run.
    #[arg(long)]
    pub decode_only: bool,
    /// Header-less traces: replay one pass over the layers, from 1, token by token.
    #[arg(long, value_name = "N|last")]
    pub pass: Option<Pass>,
    /// Replay this many tokens to fill the cache before counting; header-less traces are replayed token by token.
    #[arg(long, value_name = "N")]
    pub warmup_tokens: Option<u64>,
    /// Header-less traces, token by token: a token's experts of a layer are one request group, as in k3-run.
    #[arg(long)]
    pub grouped: bool,
    /// Header-less traces: experts a token selects in a layer.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub top_k: usize,
}

/// A pass over the layers in a header-less trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// By number, from 1.
    Number(usize),
    /// The last one.
    Last,
}

impl FromStr for Pass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "last" => Ok(Self::Last),
            Ok(number) if number > 0 => Ok(Self::Number(number)),
            _ => Err("passes count from 1, or write `last`".to_owned()),
        }
    }
}

/// How the result is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Hit rates and bytes read, a row a size and a column a policy.
    Table,
    /// One object, `k3.simcache/1`.
    Json,
    /// A line a policy and size.
    Csv,
}

/// Replay, and write the result to `out` or to the file that `cli` names.
///
/// # Errors
/// If the trace cannot be read or holds no such part, a size holds no expert, or an output cannot be written.
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    let path = if cli.trace == Path::new("-") {
        Path::new("/dev/stdin")
    } else {
        &cli.trace
    };
    let replay = Replay::new(Trace::open(path)?, path, &cli.part)?;
    for warning in &replay.warnings {
        log::warn!("{}: {warning}", path.display());
    }
    let expert_bytes = match (cli.sizes.expert_bytes, replay.expert_bytes) {
        (Some(Bytes(bytes)), _) | (None, Some(bytes)) => bytes,
        (None, None) => RELEASED_EXPERT_BYTES,
    };
    let sizes = cache_sizes(&cli.sizes, expert_bytes)?;
    if cli.disk_speed == Some(Bytes(0)) {
        anyhow::bail!(
            "--disk-speed 0: a disk that reads nothing takes forever; give bytes a second, as 3G"
        );
    }
    log::debug!(
        "{}: {} requests; {} caches to replay",
        path.display(),
        replay.facts.requests,
        cli.policy.len() * sizes.len()
    );
    let rows = pool(cli.threads)?.install(|| simulate(&replay, &cli.policy, &sizes))?;
    let report = Report::new(&replay, rows, expert_bytes, cli.disk_speed);

    // All of it before any file is replaced: a failure leaves old results whole.
    let mut text = Vec::new();
    match cli.format {
        Format::Table => table::write(&report, &cli.policy, &sizes, &mut text)?,
        Format::Json => report.write_json(&mut text)?,
        Format::Csv => report.write_csv(&mut text)?,
    }
    if let Some(file) = &cli.plot {
        let svg = plot::miss_ratio_curves(&report, &cli.policy)?;
        term::write_atomic(file, svg.as_bytes()).context("--plot")?;
    }
    match &cli.output {
        Some(file) if file != Path::new("-") => {
            term::write_atomic(file, &text).context("--output")?;
        }
        _ => {
            out.write_all(&text)?;
            out.flush()?;
        }
    }
    Ok(Outcome::Done)
}

fn cache_sizes(args: &SizeArgs, expert_bytes: u64) -> anyhow::Result<Vec<CacheSize>> {
    if expert_bytes == 0 {
        anyhow::bail!(
            "an expert of 0 bytes: give --expert-bytes, as 17547264 for the released model"
        );
    }
    if !args.slots.is_empty() {
        let size = |&slots: &usize| {
            let capacity_bytes = u64::try_from(slots)
                .ok()
                .and_then(|n| n.checked_mul(expert_bytes));
            let capacity_bytes = capacity_bytes.filter(|_| slots > 0).with_context(|| {
                format!("--slots {slots}: give at least 1 and no more than there are experts")
            })?;
            Ok(CacheSize {
                slots,
                capacity_bytes,
            })
        };
        return args.slots.iter().map(size).collect();
    }
    let size = |&Bytes(capacity_bytes): &Bytes| {
        let slots = usize::try_from(capacity_bytes / expert_bytes)?;
        if slots == 0 {
            anyhow::bail!(
                "--capacity {capacity_bytes} bytes holds no expert of {expert_bytes} bytes: give at least that, or --slots"
            );
        }
        Ok(CacheSize {
            slots,
            capacity_bytes,
        })
    };
    args.capacity.iter().map(size).collect()
}

fn pool(threads: Option<usize>) -> anyhow::Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads.unwrap_or(0))
        .thread_name(|i| format!("replay-{i}"))
        .build()
        .context("cannot start the replay threads: lower --threads")
}
