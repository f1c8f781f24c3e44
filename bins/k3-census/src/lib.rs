//! `k3-census`: says what a checkpoint folder holds, and whether it is whole.
//!
//! Only headers are read (76 MB of the release's 1.56 TB), unless `--hash` asks for every byte. Everything wrong is found in one run:
//! the shards first, each by itself and in parallel, then what lies between them: the index, the configuration, the manifest.
//!
//! Why a tool of its own: 1.56 TB arrive over days, and what is cut or missing must be named before anything is made from it.
//! [`Cli`] has the flags, [`run`] is the tool. The headers are read by [`k3_shared::checkpoint`], which every other tool opens
//! a checkpoint with; the file it writes is [`k3_shared::formats::census`]. Next in the chain: `k3-pack`.
#![forbid(unsafe_code)]

mod expect;
mod files;
mod hash;
mod layers;
mod listing;
mod manifest;
mod survey;
mod table;

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use clap::Parser;
use k3_shared::{
    checkpoint::{ExpertOrder, Slots},
    config::Config,
    formats::census::{
        Census, Problem, SCHEMA,
        digests::{self, ExpertDigests},
    },
    size::Bytes,
    term::{AtomicFile, Outcome},
};

use expect::Expectation;
use manifest::Manifest;
use survey::Survey;

/// Check a checkpoint folder and count what it holds.
///
/// The census goes to standard output as JSON, a table and every problem to standard error. Exit status: 0 the checkpoint is
/// whole, 1 something is wrong with it, 2 usage or environment.
#[derive(Debug, Parser)]
#[command(name = "k3-census", version, max_term_width = 100)]
pub struct Cli {
    /// The folder with config.json and the shards.
    pub model_dir: PathBuf,
    /// Write the census here instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Read every byte: the SHA-256 of every shard, and NaN among the scales.
    #[arg(long)]
    pub hash: bool,
    /// With --hash, also one digest per expert, for k3-run to check what it reads [default file: k3-experts.sha256 beside the
    /// shards].
    #[arg(long, value_name = "FILE", num_args = 0..=1, requires = "hash")]
    pub experts: Option<Option<PathBuf>>,
    /// Compare with an earlier census, or with the lines of sha256sum (needs --hash).
    #[arg(long, value_name = "FILE")]
    pub expect: Option<PathBuf>,
    /// Published file sizes to compare with: those built in if config.json is the release's, none, or a file of `NAME SIZE` lines.
    #[arg(long, value_name = "auto|none|FILE", default_value = "auto")]
    pub manifest: String,
    /// Look at the first N layers only, and at the shard with embedding and head.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub layers: Option<u32>,
    /// Shards read at a time [default: one a core, two with --hash].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Print errors and problems only.
    #[arg(short, long)]
    pub quiet: bool,
    /// Print more; twice for all.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// Take the census and write it to `out` or to `--output`.
///
/// # Errors
/// If the folder or its configuration cannot be read, or an output cannot be written.
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    let dir = cli.model_dir.as_path();
    files::check_folder(dir)?;
    let config = Config::open(dir)?;
    let slots =
        Slots::new(&config).with_context(|| dir.join("config.json").display().to_string())?;
    let manifest = Manifest::choose(&cli.manifest, &config)?;
    let expectation = cli.expect.as_deref().map(Expectation::open).transpose()?;
    if matches!(expectation, Some(Expectation::Digests { .. })) && !cli.hash {
        bail!("--expect with sha256sum lines needs --hash, which reads every byte");
    }
    let first_layers = cli
        .layers
        .map(|n| n as usize)
        .filter(|&n| n < config.num_hidden_layers);
    let mut survey =
        pool(cli, 1)?.install(|| Survey::take(dir, config, &slots, first_layers, &manifest))?;
    let hashed = if cli.hash {
        let outcome =
            pool(cli, 2)?.install(|| hash::all(&mut survey, cli.experts.is_some(), cli.quiet));
        Some(outcome)
    } else {
        None
    };
    if let Some(expectation) = &expectation {
        expectation.compare(dir, &mut survey);
    }
    survey.problems.extend(files::check_small_files(dir));
    let digests = hashed.as_ref().map(|h| h.experts.clone());
    let census = census(dir, survey, hashed.map(|h| h.scale_bytes_nan));
    if let (Some(target), Some(digests)) = (&cli.experts, digests) {
        write_digests(dir, target.as_deref(), &census, digests)?;
    }
    table::print(&census, cli.quiet);
    write_census(cli, &census, out)?;
    Ok(if census.ok {
        Outcome::Done
    } else {
        Outcome::Negative
    })
}

/// A pool of `--threads` threads, or `per_core` a core.
fn pool(cli: &Cli, per_core: usize) -> anyhow::Result<rayon::ThreadPool> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cli.threads.map_or(per_core * cores, usize::from);
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("census-{i}"))
        .build()
        .context("cannot start threads")
}

fn census(dir: &Path, mut survey: Survey, scale_bytes_nan: Option<u64>) -> Census {
    let checkpoint = &survey.assembly.checkpoint;
    let layers = layers::records(checkpoint, &mut survey.problems);
    let orders = checkpoint.config.layers().take(checkpoint.layers);
    let unordered = orders.filter(|&l| checkpoint.expert_order(l) == Some(ExpertOrder::Blocks));
    let unordered = unordered.count();
    if unordered > 0 {
        log::info!(
            "{unordered} layers hold their experts in another order than the release; k3 reads them all the same"
        );
    }
    let sum = survey.classes.sum();
    let shards: Vec<_> = survey.shards.into_iter().map(|s| s.record).collect();
    let expert_bytes = checkpoint.config.moe.expert_bytes();
    let total: u64 = layers.iter().map(|l| l.expert_bytes_total).sum();
    Census {
        schema: SCHEMA.into(),
        model_dir: std::path::absolute(dir)
            .unwrap_or_else(|_| dir.to_owned())
            .display()
            .to_string(),
        identity: survey.assembly.identity.clone(),
        first_layers: survey.first_layers,
        ok: survey.problems.is_empty(),
        problems: survey.problems,
        num_shards: shards.len() as u64,
        num_tensors: sum.tensors,
        total_bytes: sum.bytes,
        total_file_bytes: shards.iter().map(|s| s.bytes).fold(0, u64::saturating_add),
        total_params: sum.params,
        expert_bytes,
        num_experts_total: total / expert_bytes,
        scale_bytes_nan,
        classes: survey.classes,
        layers,
        shards,
        trunk_exceptions: survey.trunk_exceptions,
        config: checkpoint.config.to_canonical(),
    }
}

fn write_digests(
    dir: &Path,
    target: Option<&Path>,
    census: &Census,
    computed: Vec<(k3_shared::ids::ExpertId, digests::Digest)>,
) -> anyhow::Result<()> {
    let path = target.map_or_else(|| dir.join(digests::FILE_NAME), Path::to_owned);
    // Digests of a damaged checkpoint would bless the damage.
    let digests = census
        .identity
        .as_ref()
        .filter(|_| census.ok)
        .and_then(|identity| ExpertDigests::new(identity.clone(), census.layers.len(), computed));
    let Some(digests) = digests else {
        log::warn!(
            "{}: not written, since the checkpoint is not whole",
            path.display()
        );
        return Ok(());
    };
    let write = || -> std::io::Result<()> {
        let mut file = AtomicFile::create(&path)?;
        digests.write(&mut file)?;
        file.commit()
    };
    write()
        .with_context(|| format!("{}: cannot be written (try --experts FILE)", path.display()))?;
    log::info!("{}: digests of {} experts", path.display(), digests.len());
    Ok(())
}

fn write_census(cli: &Cli, census: &Census, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec_pretty(census)?;
    text.push(b'\n');
    let file = cli.output.as_deref();
    if let Some(path) = file.filter(|path| *path != Path::new("-")) {
        let mut file = AtomicFile::create(path)?;
        file.write_all(&text)?;
        file.commit()?;
    } else {
        out.write_all(&text)?;
        out.flush()?;
    }
    Ok(())
}

/// `n` of a thing, for messages.
fn problem_count(problems: &[Problem]) -> String {
    match problems.len() {
        0 => "no problems".into(),
        1 => "1 problem".into(),
        n => format!("{n} problems"),
    }
}

/// A size for messages.
fn size(bytes: u64) -> String {
    Bytes(bytes).to_string()
}
