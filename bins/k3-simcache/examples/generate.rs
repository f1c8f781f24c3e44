//! Write a generated trace: `generate FILE DECODED_TOKENS [ZIPF REPEAT WINDOW DRIFT SEED]`.
//!
//! `cargo run --release -p k3-simcache --example generate -- ten-million.trace 6794`

use std::{fs::File, io::BufWriter};

use anyhow::Context as _;
use k3_simcache::generated::Statistics;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: f64| -> anyhow::Result<f64> {
        args.get(index).map_or(Ok(default), |arg| {
            arg.parse().with_context(|| format!("{arg}: not a number"))
        })
    };
    let path = args
        .first()
        .context("usage: generate FILE DECODED_TOKENS [ZIPF REPEAT WINDOW DRIFT SEED]")?;
    let statistics = Statistics {
        prompt: 0,
        decoded: number(1, 64.0)? as u32,
        zipf: number(2, 0.8)?,
        repeat: number(3, 0.3)?,
        window: number(4, 2.0)? as u32,
        drift: number(5, 0.1)?,
        seed: number(6, 1.0)? as u64,
        ..Statistics::RELEASED
    };
    statistics.write(BufWriter::new(
        File::create(path).context("cannot create the trace")?,
    ))?;
    Ok(())
}
