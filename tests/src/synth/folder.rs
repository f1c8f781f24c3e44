//! The folder a checkpoint is written into: whether it is free, ours to replace, and on a disk with room.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use k3_shared::term;
use serde::{Deserialize, Serialize};

use super::{SynthError, at};

/// What says that a folder's checkpoint came from here. It is the first file written and the last removed.
const MARKER: &str = "k3-synth.json";
const SCHEMA: &str = "k3.synth/1";
/// Suffix of a shard that is not finished.
const PARTIAL: &str = ".partial";

/// Body of the marker.
#[derive(Serialize, Deserialize)]
struct Marker {
    schema: String,
    kind: String,
    files: Vec<String>,
}

/// Name under which `target` is written until it is whole.
pub(super) fn partial(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(PARTIAL);
    PathBuf::from(name)
}

/// Make `dir` ready to take `files` of `needed` bytes in all: refuse a folder that holds a checkpoint, or with `force` empty it
/// of one that k3-synth wrote.
pub(super) fn prepare(
    dir: &Path,
    kind: &str,
    files: Vec<String>,
    needed: u64,
    force: bool,
) -> Result<(), SynthError> {
    let ours = marked_files(dir)?;
    if let Some(found) = first_in_the_way(dir, &files, &[])?
        && !force
    {
        let dir = dir.to_owned();
        return Err(SynthError::Occupied { dir, found });
    }
    if let Some(found) = first_in_the_way(dir, &files, &ours)? {
        let dir = dir.to_owned();
        return Err(SynthError::NotOurs { dir, found });
    }
    let existing: Vec<PathBuf> = ours
        .iter()
        .map(|name| dir.join(name))
        .flat_map(|path| [partial(&path), path])
        .collect();
    check_space(dir, &existing, needed)?;
    fs::create_dir_all(dir).map_err(at(dir, "make the folder"))?;
    for path in &existing {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(at(path, "remove the old file")(e));
            }
            _ => {}
        }
    }
    let marker = Marker {
        schema: SCHEMA.into(),
        kind: kind.into(),
        files,
    };
    let path = dir.join(MARKER);
    let text = serde_json::to_vec_pretty(&marker).map_err(|e| at(&path, "write")(e.into()))?;
    term::write_atomic(&path, &text).map_err(at(&path, "write"))
}

/// Files of an earlier checkpoint of ours in `dir`, finished or not; none without a marker.
fn marked_files(dir: &Path) -> Result<Vec<String>, SynthError> {
    let path = dir.join(MARKER);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound) => return Ok(Vec::new()),
        Err(e) => return Err(at(&path, "read")(e)),
    };
    let marker: Marker = serde_json::from_slice(&text).map_err(|e| at(&path, "read")(e.into()))?;
    // Names only: a marker must not reach out of its folder.
    let plain = |name: &String| Path::new(name).file_name() == Some(name.as_ref());
    let known = marker.schema == SCHEMA;
    Ok(marker
        .files
        .into_iter()
        .filter(|name| known && plain(name))
        .collect())
}

/// A file of `dir` that makes it a checkpoint or would be overwritten by one of `files`, other than `except`.
fn first_in_the_way(
    dir: &Path,
    files: &[String],
    except: &[String],
) -> Result<Option<String>, SynthError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(at(dir, "list the folder")(e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at(dir, "list the folder"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let checkpoint = name == "config.json"
            || name.ends_with(".safetensors")
            || name.ends_with(".safetensors.index.json")
            || files.contains(&name);
        if checkpoint && !except.contains(&name) {
            found.push(name);
        }
    }
    Ok(found.into_iter().min())
}

/// Refuse if the disk of `dir` has less than `needed` bytes free, not counting what `existing` files take.
fn check_space(dir: &Path, existing: &[PathBuf], needed: u64) -> Result<(), SynthError> {
    let taken: u64 = existing
        .iter()
        .filter_map(|path| fs::metadata(path).ok())
        .map(|metadata| metadata.blocks().saturating_mul(512))
        .sum();
    let absolute = std::path::absolute(dir).map_err(at(dir, "find the folder"))?;
    let disk = absolute.ancestors().find(|folder| folder.exists());
    let disk = disk.unwrap_or(Path::new("/"));
    let stat =
        rustix::fs::statvfs(disk).map_err(|e| at(disk, "ask for the free space")(e.into()))?;
    let available = stat
        .f_bavail
        .saturating_mul(stat.f_frsize)
        .saturating_add(taken);
    if needed > available {
        return Err(SynthError::NoSpace {
            dir: dir.to_owned(),
            needed,
            available,
        });
    }
    Ok(())
}
