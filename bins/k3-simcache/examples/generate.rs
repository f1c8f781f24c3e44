//! Write a trace of stated statistics: ten million requests of the released shape with
//! `cargo run --release -p k3-simcache --example generate -- ten-million.trace --decoded 6794`.

use std::{fs::File, io::BufWriter, path::PathBuf};

use anyhow::Context as _;
use clap::Parser;
use k3_simcache::generated::Statistics;

/// Write a generated trace of the released model's shape.
#[derive(Debug, Parser)]
struct Args {
    /// The trace.
    file: PathBuf,
    /// Rows of the prompt.
    #[arg(long, default_value_t = 0)]
    prompt: u32,
    /// Decoded rows.
    #[arg(long, default_value_t = 64)]
    decoded: u32,
    /// Popularity falls as rank to this power.
    #[arg(long, default_value_t = 0.8)]
    zipf: f64,
    /// Probability that a choice repeats a recent one.
    #[arg(long, default_value_t = 0.3)]
    repeat: f64,
    /// Tokens back that choices repeat.
    #[arg(long, default_value_t = 2)]
    window: u32,
    /// Pairs of ranks that change in each layer after each token.
    #[arg(long, default_value_t = 0.1)]
    drift: f64,
    /// Chooses all that is drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let Args {
        file,
        prompt,
        decoded,
        zipf,
        repeat,
        window,
        drift,
        seed,
    } = Args::parse();
    let statistics = Statistics {
        prompt,
        decoded,
        zipf,
        repeat,
        window,
        drift,
        seed,
        ..Statistics::RELEASED
    };
    let to = File::create(&file).with_context(|| file.display().to_string())?;
    statistics.write(BufWriter::new(to))?;
    Ok(())
}
