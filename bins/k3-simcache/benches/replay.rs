//! How fast traces are replayed, and in how much memory: `cargo bench -p k3-simcache [-- table|policies|ten-million]`.
//!
//! With `K3_SHARED_DATA` the table is also made for the recorded trace there.

use std::{
    error::Error,
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Parser as _;
use k3_shared::{cache::PolicyKind, formats::trace::Trace, host};
use k3_simcache::{CacheSize, Cli, PartArgs, Replay, generated::Statistics, run, simulate};

type Done = Result<(), Box<dyn Error>>;
type Measure = fn(&Path) -> Done;

/// What the default table may take on 100,096 requests.
const TABLE_SECONDS: f64 = 1.0;
const REQUESTS_PER_TOKEN: u32 = 92 * 16;

fn main() -> Done {
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let all: [(&str, Measure); 3] = [
        ("table", table),
        ("policies", policies),
        ("ten-million", ten_million),
    ];
    let folder = tempfile::tempdir()?;
    for (name, measure) in all {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            measure(folder.path())?;
        }
    }
    Ok(())
}

fn say(line: &str) -> Done {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

fn generated(folder: &Path, decoded: u32) -> Result<PathBuf, Box<dyn Error>> {
    let path = folder.join(format!("{decoded}.trace"));
    let statistics = Statistics {
        zipf: 0.8,
        repeat: 0.3,
        window: 2,
        drift: 0.1,
        prompt: 0,
        decoded,
        ..Statistics::RELEASED
    };
    statistics.write(BufWriter::new(File::create(&path)?))?;
    Ok(path)
}

/// The default table, from the file to the text: 12 sizes of all policies.
fn table(folder: &Path) -> Done {
    let mut traces = vec![("generated", generated(folder, 68)?)];
    if let Some(data) = std::env::var_os("K3_SHARED_DATA") {
        traces.push(("recorded", PathBuf::from(data).join("expert_trace.bin")));
    }
    for (what, path) in traces {
        let cli = Cli::try_parse_from(["k3-simcache".as_ref(), path.as_os_str()])?;
        let mut best = f64::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            run(&cli, &mut Vec::new())?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        say(&format!(
            "table, {what}: {} requests, {} policies x {} sizes: {best:.3} s, {:.0} % of the {TABLE_SECONDS} s allowed",
            68 * REQUESTS_PER_TOKEN,
            PolicyKind::ALL.len(),
            cli.sizes.capacity.len(),
            100.0 * best / TABLE_SECONDS
        ))?;
    }
    Ok(())
}

/// Each policy alone: what a request costs with few and with many slots.
fn policies(folder: &Path) -> Done {
    let path = generated(folder, 679)?;
    let replay = Replay::new(Trace::open(&path)?, &path, &PartArgs::default())?;
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    say("nanoseconds a request, one thread (lru at these sizes is read off the stack of all):")?;
    for policy in PolicyKind::ALL {
        let cost = |slots: usize| -> Result<f64, Box<dyn Error>> {
            let start = Instant::now();
            let sizes = [CacheSize {
                slots,
                capacity_bytes: 0,
            }];
            one.install(|| simulate(&replay, &[policy], &sizes))?;
            Ok(start.elapsed().as_secs_f64() * 1e9 / replay.facts.requests as f64)
        };
        let (few, many) = (cost(1_000)?, cost(60_000)?);
        say(&format!(
            "{policy:>16} {few:6.0} at 1,000 slots, {many:6.0} at 60,000"
        ))?;
    }
    Ok(())
}

/// Ten million requests under every online policy, and the peak memory of it all.
fn ten_million(folder: &Path) -> Done {
    let path = generated(folder, 6794)?;
    // Where the kernel lets us: else the peak is that of the measurements before, too.
    let _ = host::reset_peak_rss();
    let start = Instant::now();
    let replay = Replay::new(Trace::open(&path)?, &path, &PartArgs::default())?;
    let read = start.elapsed().as_secs_f64();
    let requests = replay.facts.requests;
    let online: Vec<PolicyKind> = PolicyKind::ALL
        .into_iter()
        .filter(|policy| !policy.is_replay_only())
        .collect();
    let start = Instant::now();
    simulate(
        &replay,
        &online,
        &[CacheSize {
            slots: 911,
            capacity_bytes: 0,
        }],
    )?;
    let simulated = start.elapsed().as_secs_f64();
    let peak = host::peak_rss_bytes().unwrap_or(0) as f64;
    let distinct = replay.facts.distinct_experts;
    say(&format!(
        "ten-million: {requests} requests of {distinct} experts: read in {read:.2} s, {} online policies in {simulated:.2} s; peak \
         {:.0} MB, {:.1} bytes a request",
        online.len(),
        peak / 1e6,
        peak / requests as f64
    ))
}
