//! What was measured earlier: one small file for each machine and set of disks, in the user's cache folder.
//!
//! A file says what it was measured on, and counts only for that. Whatever cannot be read is ignored with a warning: the cache
//! saves half a minute, and is never worth refusing to plan.

use std::{
    env, fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use k3_shared::{checkpoint::hex, formats::plan::Probe, host, term};
use rustix::fs::statvfs;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The schema tag of a file.
const SCHEMA: &str = "k3.probe/2";

/// What measurements depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    /// The processor's name.
    cpu: String,
    /// Cores this process may use.
    cores: usize,
    /// Compute threads.
    threads: usize,
    /// Folders of the trunk's data files, in order.
    trunk: Vec<Folder>,
    /// Folders with shards, in order.
    shards: Vec<Folder>,
    /// Bytes of one read of an expert.
    expert_bytes: u64,
}

/// A folder and the disk it is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Folder {
    path: PathBuf,
    device: u64,
    /// `f_fsid`: what remains when a device is mounted under another number.
    file_system: String,
}

/// One file.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    schema: String,
    key: Key,
    probe: Probe,
}

impl Key {
    /// The key of this machine for a trunk in `trunk_dirs` and shards in `shard_dirs`. Folders that do not exist are on no disk.
    pub(crate) fn new(
        cores: usize,
        threads: usize,
        trunk_dirs: &[PathBuf],
        shard_dirs: &[PathBuf],
        expert_bytes: u64,
    ) -> Self {
        let folders = |dirs: &[PathBuf]| dirs.iter().filter_map(|dir| Folder::new(dir)).collect();
        Self {
            cpu: host::cpu_model(),
            cores,
            threads,
            trunk: folders(trunk_dirs),
            shards: folders(shard_dirs),
            expert_bytes,
        }
    }

    fn file_name(&self) -> String {
        // Keys are plain data; they always have a form.
        let json = serde_json::to_vec(self).unwrap_or_default();
        let digest = hex(Sha256::digest(json));
        format!("probe-{}.json", digest.get(..16).unwrap_or(&digest))
    }
}

impl Folder {
    fn new(path: &Path) -> Option<Self> {
        let device = fs::metadata(path).ok()?.dev();
        let file_system =
            statvfs(path).map_or_else(|_| String::new(), |space| format!("{:016x}", space.f_fsid));
        Some(Self {
            path: path.canonicalize().ok()?,
            device,
            file_system,
        })
    }
}

/// The folder of measurements: as given (`none` is nowhere), else `k3` in `$XDG_CACHE_HOME`, else in `~/.cache`.
pub(crate) fn folder(given: Option<&Path>) -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    match given {
        Some(path) if path == Path::new("none") => None,
        Some(path) => Some(path.to_owned()),
        None => {
            // The rule of the XDG base directories: a path that is not absolute is to be ignored.
            let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.filter(|path| path.is_absolute());
            let home = || Some(PathBuf::from(set("HOME")?).join(".cache"));
            Some(cache.or_else(home)?.join("k3"))
        }
    }
}

/// What was measured for `key`, if anything was.
pub(crate) fn load(folder: &Path, key: &Key) -> Option<Probe> {
    let path = folder.join(key.file_name());
    let ignored = |why: &str| {
        log::warn!(
            "{}: {why}; ignored (--probe measures again)",
            path.display()
        );
        None
    };
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => return ignored(&error.to_string()),
    };
    match serde_json::from_slice::<Record>(&bytes) {
        Err(error) => ignored(&format!("not a measurement: {error}")),
        Ok(record) if record.schema != SCHEMA => {
            ignored(&format!("schema is {:?}, not {SCHEMA:?}", record.schema))
        }
        Ok(record) if record.key != *key => ignored("measured on another machine or disk"),
        Ok(record) if !is_sane(&record.probe) => ignored("a speed that is none"),
        Ok(record) => Some(record.probe),
    }
}

/// Keep what was measured for `key`, in place of what was.
///
/// # Errors
/// If the folder or the file cannot be written.
pub(crate) fn store(folder: &Path, key: Key, probe: &Probe) -> anyhow::Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let path = folder.join(key.file_name());
    let record = Record {
        schema: SCHEMA.to_owned(),
        key,
        probe: probe.clone(),
    };
    let mut json = serde_json::to_vec_pretty(&record)?;
    json.push(b'\n');
    term::write_atomic(&path, &json)?;
    Ok(path)
}

/// Whether every speed is a positive number, and the sweep's choice one that can be followed.
fn is_sane(probe: &Probe) -> bool {
    let speeds = [
        probe.disk_bytes_per_second,
        probe.random_bytes_per_second,
        probe.memory_bytes_per_second,
        probe.weights_bytes_per_second,
        probe.flops_per_second,
    ];
    let cells = probe.sweep.iter().map(|cell| cell.bytes_per_second);
    speeds
        .into_iter()
        .flatten()
        .chain(cells)
        .all(|speed| speed.is_finite() && speed > 0.0)
        && probe
            .queue_depth
            .is_none_or(|depth| (1..=1024).contains(&depth))
        && probe.read_bytes.is_none_or(|bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(threads: usize, dir: &Path) -> Key {
        Key::new(4, threads, &[dir.to_owned()], &[dir.join("missing")], 100)
    }

    fn probe() -> Probe {
        Probe {
            disk_bytes_per_second: Some(1.5e9),
            date: "2026-11-30".into(),
            queue_depth: Some(4),
            ..Probe::default()
        }
    }

    #[test]
    fn what_is_stored_is_loaded_for_its_own_key_only() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("not there yet/k3");
        assert_eq!(load(&cache, &key(2, dir.path())), None);
        store(&cache, key(2, dir.path()), &probe()).unwrap();
        assert_eq!(load(&cache, &key(2, dir.path())), Some(probe()));
        assert_eq!(load(&cache, &key(3, dir.path())), None);
        assert_eq!(load(&cache, &key(2, &cache)), None, "another folder");
        let again = Probe {
            date: "2026-12-01".into(),
            ..probe()
        };
        store(&cache, key(2, dir.path()), &again).unwrap();
        assert_eq!(load(&cache, &key(2, dir.path())), Some(again));
        assert_eq!(fs::read_dir(&cache).unwrap().count(), 1);
    }

    #[test]
    fn what_is_damaged_or_foreign_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = store(dir.path(), key(2, dir.path()), &probe()).unwrap();
        let good = fs::read_to_string(&path).unwrap();
        for (from, to) in [
            ("k3.probe/2", "k3.probe/9"),
            ("\"threads\": 2", "\"threads\": 7"),
            ("1500000000.0", "-1.0"),
            ("\"queue_depth\": 4", "\"queue_depth\": 0"),
            ("}", ""),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good, "{from}");
            fs::write(&path, bad).unwrap();
            assert_eq!(load(dir.path(), &key(2, dir.path())), None, "{from}");
        }
        fs::write(&path, good).unwrap();
        assert!(load(dir.path(), &key(2, dir.path())).is_some());
    }

    #[test]
    fn none_is_nowhere_and_a_folder_is_itself() {
        assert_eq!(folder(Some(Path::new("none"))), None);
        assert_eq!(folder(Some(Path::new("/x/y"))), Some("/x/y".into()));
    }
}
