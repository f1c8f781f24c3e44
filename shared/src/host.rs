//! Memory, cgroup limits, cores and peak resident size of this machine and process.
//!
//! Memory is the smallest of `MemAvailable` and what every cgroup above this process leaves it; cores are those the affinity
//! mask allows, hyper-threads of one core counted once, and no more than the CPU quota of any of those cgroups. A container
//! that sees the host's `/proc` therefore still plans for its own limits.
//!
//! Every reader takes the root of the tree it reads, so that tests run on fixture trees of other machines.

mod cgroup;
mod cpu;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::formats::plan::HostRecord;

/// What this machine can give a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// `MemAvailable` of `/proc/meminfo`.
    pub available_bytes: u64,
    /// What this process may come to occupy: the smallest of `MemAvailable` and the room in every cgroup above it.
    pub limit_bytes: u64,
    /// Which of them that is: `MemAvailable`, or the path of a cgroup limit file.
    pub limited_by: String,
    /// Cores to compute with: affinity, physical cores and CPU quota, rounded down, at least one.
    pub cores: usize,
}

/// Why the machine could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// A file of `/proc` could not be read.
    #[error("{}: {source} (k3 needs /proc mounted)", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of `/proc` lacks a field.
    #[error("{}: no readable {field} line (k3 needs Linux 3.14 or later)", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
    },
}

impl Host {
    /// Measure this machine, as this process sees it.
    ///
    /// # Errors
    /// If `/proc/meminfo` or `/proc/self/status` cannot be read. Cgroup files that are missing set no limit.
    pub fn detect() -> Result<Self, HostError> {
        Self::detect_at(Path::new("/"))
    }

    /// As [`Self::detect`], of the machine whose `/proc` and `/sys` lie under `root`.
    ///
    /// # Errors
    /// As [`Self::detect`].
    pub fn detect_at(root: &Path) -> Result<Self, HostError> {
        let meminfo = root.join("proc/meminfo");
        let available_bytes = kib_field(&meminfo, "MemAvailable")?;
        let groups = cgroup::Groups::read(root);
        let (limit_bytes, limited_by) = match groups.memory_room() {
            Some(room) if room.bytes < available_bytes => (room.bytes, room.limited_by),
            _ => (available_bytes, "MemAvailable".to_owned()),
        };
        let physical = cpu::usable_cores(root)?;
        let cores = groups
            .cpu_quota()
            .map_or(physical, |quota| quota.min(physical))
            .max(1);
        Ok(Self {
            available_bytes,
            limit_bytes,
            limited_by,
            cores,
        })
    }

    /// The form plans record.
    pub fn record(&self) -> HostRecord {
        HostRecord {
            available_bytes: self.available_bytes,
            limit_bytes: self.limit_bytes,
            limited_by: self.limited_by.clone(),
            cores: self.cores,
        }
    }
}

/// Peak resident size of this process since it began, or since [`reset_peak_rss`].
///
/// # Errors
/// If `/proc/self/status` cannot be read.
pub fn peak_rss_bytes() -> Result<u64, HostError> {
    kib_field(Path::new("/proc/self/status"), "VmHWM")
}

/// Resident size of this process now.
///
/// # Errors
/// If `/proc/self/status` cannot be read.
pub fn rss_bytes() -> Result<u64, HostError> {
    kib_field(Path::new("/proc/self/status"), "VmRSS")
}

/// Let [`peak_rss_bytes`] begin anew at the present resident size.
///
/// # Errors
/// If the kernel does not offer `/proc/self/clear_refs`.
pub fn reset_peak_rss() -> io::Result<()> {
    fs::write("/proc/self/clear_refs", "5")
}

/// Have the system back `values` with memory now, not when they are first written: what a plan promises is then taken while it
/// still can be refused, not after hours of work.
pub fn back_with_memory<T: Copy>(values: &mut [T]) {
    const PAGE: usize = 4096;
    let step = (PAGE / size_of::<T>().max(1)).max(1);
    let mut at = 0;
    while let Some(value) = values.get_mut(at) {
        // A value the compiler cannot know to be there already.
        *value = std::hint::black_box(*value);
        at += step;
    }
}

/// The value of a `Name:   123 kB` line, in bytes.
fn kib_field(path: &Path, field: &'static str) -> Result<u64, HostError> {
    let text = read(path)?;
    text.lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .and_then(|value| {
            let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        })
        .ok_or_else(|| HostError::Field {
            path: path.to_owned(),
            field,
        })
}

fn read(path: &Path) -> Result<String, HostError> {
    fs::read_to_string(path).map_err(|source| HostError::Io {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests;
