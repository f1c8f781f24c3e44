//! Hit rates of every policy on generated traces, in percent of decode requests: a table for each statistics and seed.
//!
//! `cargo run --release -p k3-simcache --example policies [SEED ...]`

use std::io::{Cursor, Write as _};

use k3_shared::{cache::PolicyKind, formats::trace::Trace};
use k3_simcache::{CacheSize, PartArgs, Replay, generated::Statistics, simulate};

const SLOTS: [usize; 8] = [227, 455, 911, 1367, 1481, 1823, 3647, 7294];

fn main() -> anyhow::Result<()> {
    let seeds: Vec<u64> = std::env::args()
        .skip(1)
        .map(|seed| seed.parse())
        .collect::<Result<_, _>>()?;
    let seeds = if seeds.is_empty() { vec![101] } else { seeds };
    let mut out = std::io::stdout().lock();
    for statistics in Statistics::SAMPLES {
        for &seed in &seeds {
            let statistics = Statistics { seed, ..statistics };
            let Statistics {
                zipf,
                repeat,
                window,
                drift,
                ..
            } = statistics;
            writeln!(
                out,
                "\nzipf {zipf}, repeat {repeat} of the last {window}, drift {drift}, seed {seed}\n"
            )?;
            table(&statistics, &mut out)?;
        }
    }
    Ok(())
}

fn table(statistics: &Statistics, out: &mut impl std::io::Write) -> anyhow::Result<()> {
    let trace = statistics.write(Cursor::new(Vec::new()))?.into_inner();
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), trace)?;
    let replay = Replay::new(Trace::open(file.path())?, file.path(), &PartArgs::default())?;
    let sizes = SLOTS.map(|slots| CacheSize {
        slots,
        capacity_bytes: 0,
    });
    let rows = simulate(&replay, &PolicyKind::ALL, &sizes)?;
    write!(out, "| slots |")?;
    SLOTS
        .iter()
        .try_for_each(|slots| write!(out, " {slots} |"))?;
    writeln!(out, "\n|---|{}", "---|".repeat(SLOTS.len()))?;
    for (policy, rows) in PolicyKind::ALL.iter().zip(rows.chunks(SLOTS.len())) {
        write!(out, "| {policy} |")?;
        for row in rows {
            let decode = row.decode.map_or(0.0, |decode| decode.hit_rate);
            write!(out, " {:.1} |", 100.0 * decode)?;
        }
        writeln!(out)?;
    }
    Ok(())
}
