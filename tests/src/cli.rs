//! The command line of `k3-synth`.

use std::{num::NonZeroUsize, path::PathBuf};

use anyhow::Context as _;
use clap::{Parser, Subcommand, ValueEnum};
use k3_shared::{size::Bytes, term::Outcome};

use crate::synth::{Options, Recipe, WriteOptions};

/// Write a synthetic checkpoint by rule.
///
/// The weights are random but fixed: the same names and shapes give the same bytes everywhere. Nothing is downloaded.
#[derive(Debug, Parser)]
#[command(name = "k3-synth", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    /// Which checkpoint.
    pub what: What,
    /// Replace a checkpoint that k3-synth wrote earlier; others are never replaced.
    #[arg(long, global = true)]
    pub force: bool,
    /// Threads that make and write weights [default: four a core, at most 32].
    #[arg(long, global = true, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Print errors only.
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// Print more; twice for all.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The kinds of synthetic checkpoint.
#[derive(Debug, Subcommand)]
pub enum What {
    /// 6.4 MB with every structure of the release: the checkpoint of the golden files.
    Tiny {
        /// The folder to write.
        out: PathBuf,
    },
    /// A few layers of the released widths, 4 to 12 GB: for benchmarks.
    Slice {
        /// The folder to write.
        out: PathBuf,
        /// Layers.
        #[arg(long, value_name = "2|3|5", value_parser = clap::value_parser!(u32).range(2..=5))]
        slice: u32,
    },
    /// The whole release with real headers and no payload: 1.56 TB of holes in about 140 MB.
    Replica {
        /// The folder to write.
        out: PathBuf,
    },
    /// Any other shape.
    Custom {
        /// The folder to write.
        out: PathBuf,
        /// Its `config.json`, nested or flat.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// How the tensors that the release stores as BF16 are stored.
        #[arg(long, value_enum, default_value_t = StoredDtype::Bf16)]
        dtype: StoredDtype,
        /// Write config.json in the flat form.
        #[arg(long)]
        flat: bool,
    },
}

/// Element type of the tensors outside the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoredDtype {
    /// As the release: BF16, with the few F32 tensors it has.
    Bf16,
    /// F32 everywhere, unrounded.
    F32,
}

/// Do what the command line asks.
///
/// # Errors
/// If the folder holds a checkpoint, the disk is too full, or a file cannot be read or written.
pub fn run(cli: &Cli) -> anyhow::Result<Outcome> {
    let (recipe, out) = match &cli.what {
        What::Tiny { out } => (Recipe::tiny()?, out),
        What::Slice { out, slice } => (Recipe::slice(*slice)?, out),
        What::Replica { out } => (Recipe::replica()?, out),
        What::Custom {
            out,
            config,
            dtype,
            flat,
        } => {
            let text = std::fs::read(config)
                .with_context(|| format!("{} (the config.json to use)", config.display()))?;
            let options = Options {
                dtype_f32: *dtype == StoredDtype::F32,
                flat: *flat,
            };
            (Recipe::custom(&text, config, options)?, out)
        }
    };
    let options = WriteOptions {
        force: cli.force,
        threads: cli.threads,
        quiet: cli.quiet,
    };
    let written = recipe.write(out, &options)?;
    let seconds = written.elapsed.as_secs_f64();
    log::info!(
        "{}: {} shards, {} tensors, {} of files, {} written in {seconds:.2} s ({:.2} GB/s)",
        out.display(),
        written.num_shards,
        written.num_tensors,
        Bytes(written.file_bytes),
        Bytes(written.written_bytes),
        written.written_bytes as f64 / 1e9 / seconds,
    );
    Ok(Outcome::Done)
}
