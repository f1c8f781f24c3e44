//! Measuring the machine: direct reads of trunk and experts, streaming reads of memory, multiply-adds.
//!
//! The disk is read as k3-run reads it: threads with one request in flight each, tiles in order of use cut into requests, whole
//! experts at random places; past the page cache, or with a printed line where the file system refuses. A figure that cannot be
//! a disk's (holes, a file system in memory, the speed of the page cache) is not stored.

mod arithmetic;
mod disk;
mod memory;
mod reader;
pub(crate) mod sweep;
mod target;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use k3_shared::{
    direct::DirectError,
    formats::plan::{Probe, ReadKind},
    host::Host,
    size::Bytes,
};

use crate::cost::Depth;
use disk::{Sweeper, Swept, Wishes};
use memory::Memory;
use sweep::speed_at;
pub use target::Extent;
use target::{Doubt, Target, shards, whole};

/// What is to be measured.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// Data files of the trunk; none without a trunk.
    pub trunk_files: &'a [PathBuf],
    /// Its tiles, in order of use.
    pub tiles: &'a [Extent],
    /// Folders with shards, the checkpoint's first.
    pub shard_dirs: Vec<PathBuf>,
    /// Bytes of one read of an expert, widened at both ends; 0 for a model without.
    pub expert_bytes: u64,
    /// The experts' share of the bytes that a token reads with nothing in memory.
    pub expert_share: f64,
    /// Compute threads.
    pub threads: usize,
    /// A request size given by hand.
    pub read_bytes: Option<u64>,
    /// A depth given by hand.
    pub queue_depth: Option<usize>,
    /// Whether the disk is to be measured.
    pub disk: bool,
}

/// Why the machine could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A read failed, or a file cannot be opened.
    #[error(transparent)]
    Disk(#[from] DirectError),
    /// A file or folder cannot be looked at.
    #[error("{}: {source} (give --disk-speed, or mend it and --probe again)", path.display())]
    Look {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A reader thread panicked.
    #[error("a reader thread of the probe panicked; please report this")]
    Reader,
}

/// Measure memory, arithmetic and the disks of `subject`.
///
/// # Errors
/// If a file cannot be read.
pub fn measure(subject: &Subject<'_>, host: &Host) -> Result<Probe, ProbeError> {
    let threads = subject.threads;
    log::info!(
        "measuring memory, arithmetic and disk: about 25 s; other work on this machine counts"
    );
    let memory = Memory::new(threads, host.limit_bytes);
    let memory_speed = memory.plain_speed();
    let mut probe = Probe {
        memory_bytes_per_second: Some(memory_speed),
        flops_per_second: Some(arithmetic::arithmetic_speed(threads)),
        date: today(),
        ..Probe::default()
    };
    if subject.disk {
        measure_disk(subject, host, memory_speed, &mut probe)?;
    }
    // Last, since k3-run comes to its weights when it has read them, and where processors are virtual that has moved them.
    probe.weights_bytes_per_second = memory.tiled_speed();
    Ok(probe)
}

fn measure_disk(
    subject: &Subject<'_>,
    host: &Host,
    memory_speed: f64,
    probe: &mut Probe,
) -> Result<(), ProbeError> {
    let wishes = Wishes {
        read_bytes: subject.read_bytes,
        depth: subject.queue_depth,
        memory_bytes: host.limit_bytes / 4,
        memory_speed,
        expert_share: subject.expert_share,
    };
    let swept = sweep_disk(subject, wishes)?;
    probe.sweep = swept.cells;
    probe.devices = swept.devices;
    if let Some(chosen) = swept.chosen {
        probe.read_bytes = Some(chosen.read_bytes);
        probe.queue_depth = Some(chosen.depth);
        let depth = Depth {
            trunk: chosen.depth,
            experts: chosen.depth,
        };
        set_speeds(probe, chosen.read_bytes, depth);
    }
    Ok(())
}

/// Set the disk's figures to what its sweep says of `read_bytes` and so many in flight; as they are without a sweep.
pub(crate) fn set_speeds(probe: &mut Probe, read_bytes: u64, depth: Depth) {
    let chosen = probe.queue_depth.unwrap_or(0);
    let speed = |kind, depth| speed_at(&probe.sweep, chosen, kind, read_bytes, depth);
    let sequential = speed(ReadKind::Sequential, depth.trunk);
    let random = speed(ReadKind::Random, depth.experts);
    if sequential.is_some() {
        probe.disk_bytes_per_second = sequential;
        probe.random_bytes_per_second = random;
    }
}

fn sweep_disk(subject: &Subject<'_>, wishes: Wishes) -> Result<Swept, ProbeError> {
    let mut doubts = Vec::new();
    let trunk = match subject.trunk_files {
        [] => {
            log::warn!("there is no trunk to read from: give --disk-speed, or pack first");
            None
        }
        files => believe(Target::trunk(files, subject.tiles)?, &mut doubts),
    };
    let mut experts = Vec::new();
    if trunk.is_some() && subject.expert_bytes > 0 {
        for shards in shards_by_device(&subject.shard_dirs)?.values() {
            let target = Target::experts(shards, subject.expert_bytes)?;
            experts.extend(believe(target, &mut doubts));
        }
    }
    if let Some(line) = trunk.iter().chain(&experts).find_map(Target::fallback) {
        log::warn!("{line}; so did these measurements, which dropped their pages first");
    }
    let mut swept = match &trunk {
        Some(_) => Sweeper::new(trunk, experts, wishes).sweep()?,
        None => Swept::default(),
    };
    swept.doubts.extend(doubts);
    for doubt in &swept.doubts {
        log::warn!("{doubt}; not taken for a disk's speed: give --disk-speed");
    }
    Ok(swept)
}

/// What there is no doubt about.
fn believe(target: Result<Target, Doubt>, doubts: &mut Vec<Doubt>) -> Option<Target> {
    target.map_err(|doubt| doubts.push(doubt)).ok()
}

/// The shards on each device, in the order of their names.
fn shards_by_device(dirs: &[PathBuf]) -> Result<BTreeMap<u64, Vec<PathBuf>>, ProbeError> {
    let Some((first, more)) = dirs.split_first() else {
        return Ok(BTreeMap::new());
    };
    let look = |path: &PathBuf| {
        let path = path.clone();
        move |source| ProbeError::Look { path, source }
    };
    let mut devices: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    for shard in shards(first, more).map_err(look(first))? {
        let device = fs::metadata(&shard).map_err(look(&shard))?.dev();
        devices.entry(device).or_default().push(shard);
    }
    Ok(devices)
}

/// The date by UTC, `YYYY-MM-DD`.
pub fn today() -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs());
    date(seconds / 86_400)
}

/// The date so many days after 1970-01-01.
fn date(days: u64) -> String {
    // Eras of 400 years begin on 1 March, so that the leap day is the last of a year.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + carry)
}

/// A few lines about what was measured.
pub(crate) fn summary(probe: &Probe) -> String {
    let rate = |speed: Option<f64>| match speed {
        Some(speed) => format!("{}/s", whole(speed)),
        None => "not measured".to_owned(),
    };
    let flops = probe.flops_per_second.map_or_else(
        || "not measured".to_owned(),
        |f| format!("{:.0} Gflop/s", f / 1e9),
    );
    let mut text = format!(
        "disk {} in order, {} for experts; memory {}, arithmetic {flops}",
        rate(probe.disk_bytes_per_second),
        rate(probe.random_bytes_per_second),
        rate(probe.memory_bytes_per_second)
    );
    let mut devices: Vec<u64> = probe.devices.iter().map(|one| one.device).collect();
    devices.sort_unstable();
    devices.dedup();
    if devices.len() > 1 {
        for one in &probe.devices {
            let what = match one.kind {
                ReadKind::Sequential => "in order",
                ReadKind::Random => "experts",
            };
            let speed = whole(one.bytes_per_second);
            let _ = write!(text, "\n  {}: {what} {speed}/s", one.folder.display());
        }
    }
    text
}

/// The sweep as a table: a row a size, a column a depth, GB a second.
pub(crate) fn sweep_table(probe: &Probe) -> String {
    let mut depths: Vec<usize> = probe.sweep.iter().map(|cell| cell.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let mut rows: Vec<(ReadKind, u64)> = probe
        .sweep
        .iter()
        .map(|cell| (cell.kind, cell.read_bytes))
        .collect();
    rows.dedup();
    let mut text = String::from("GB/s by reads in flight:");
    for depth in &depths {
        let _ = write!(text, "{depth:>7}");
    }
    for (kind, read_bytes) in rows {
        let what = match kind {
            ReadKind::Sequential => "in order, ",
            ReadKind::Random => "experts, ",
        };
        let label = format!("{what}{}", Bytes(read_bytes));
        let _ = write!(text, "\n{label:>24}");
        for depth in &depths {
            let cell = probe.sweep.iter().find(|cell| {
                (cell.kind, cell.read_bytes, cell.depth) == (kind, read_bytes, *depth)
            });
            let speed = cell.map_or_else(String::new, |cell| {
                format!("{:.2}", cell.bytes_per_second / 1e9)
            });
            let _ = write!(text, "{speed:>7}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        for (days, text) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_453, "2025-12-31"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(date(days), text, "{days}");
        }
    }
}
