//! What the disk probe reads: the trunk's tiles in order of use, and stretches of shards as long as an expert.

use std::{
    fs, io,
    ops::Range,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use k3_shared::{
    direct::{ALIGN, DirectFile, Mode},
    formats::plan::ReadKind,
    size::Bytes,
    tiles::TILE_ALIGN,
};
use rustix::fs::{Advice, fadvise, statfs};

use super::ProbeError;

/// File systems that lie in memory: tmpfs and ramfs.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// A file is taken for holes if less than one part in this many has blocks, whatever `SEEK_DATA` says: weights do not
/// compress that well.
const LEAST_BLOCKS_PART: u64 = 8;

/// One stretch to read, aligned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The file, by number.
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One file to read from.
#[derive(Debug)]
pub(super) struct TargetFile {
    pub(super) file: DirectFile,
    /// `st_dev` of its folder.
    pub(super) device: u64,
}

/// What one kind of read is measured on.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) kind: ReadKind,
    pub(super) files: Vec<TargetFile>,
    /// In order of use; at random kinds, in file order.
    pub(super) extents: Vec<Extent>,
}

/// Why no figure of a file would be the disk's.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum Doubt {
    #[error("{}: lies in memory ({file_system:#x}), not on a disk", path.display())]
    InMemory { path: PathBuf, file_system: u64 },
    #[error(
        "{}: only {} of {} are data, and holes are read faster than any disk",
        path.display(), Bytes(*data), Bytes(*len)
    )]
    Holes { path: PathBuf, data: u64, len: u64 },
    #[error("{}: there is nothing of {least} bytes or more to read", path.display())]
    TooShort { path: PathBuf, least: u64 },
    #[error(
        "{}: {}/s is what memory does ({}/s), not a disk: the page cache, or a disk in memory, answered",
        path.display(), whole(*speed), whole(*memory)
    )]
    MemorySpeed {
        path: PathBuf,
        speed: f64,
        memory: f64,
    },
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a positive speed, rounded for display"
)]
pub(super) fn whole(speed: f64) -> Bytes {
    Bytes(speed as u64)
}

impl Target {
    /// The trunk: its data files and its tiles, in order of use.
    ///
    /// # Errors
    /// [`ProbeError::Disk`] if a file cannot be used at all; a [`Doubt`] if its speed would not be the disk's.
    pub(super) fn trunk(
        files: &[PathBuf],
        extents: &[Extent],
    ) -> Result<Result<Self, Doubt>, ProbeError> {
        let mut opened = Vec::new();
        let mut data = Vec::new();
        for path in files {
            match open(path)? {
                Ok((file, ranges)) => {
                    opened.push(file);
                    data.push(ranges);
                }
                Err(doubt) => return Ok(Err(doubt)),
            }
        }
        let is_data = |extent: &&Extent| {
            let ranges: &[Range<u64>] = data.get(extent.file).map_or(&[], |r| r);
            covers(ranges, &(extent.offset..extent.offset + extent.len))
        };
        let extents: Vec<Extent> = extents.iter().filter(is_data).cloned().collect();
        if extents.is_empty() {
            let path = files.first().cloned().unwrap_or_default();
            let least = TILE_ALIGN;
            return Ok(Err(Doubt::TooShort { path, least }));
        }
        Ok(Ok(Self {
            kind: ReadKind::Sequential,
            files: opened,
            extents,
        }))
    }

    /// Stretches of `expert_bytes` in the shards on one device. Where experts are smaller than a block, or shards shorter than an
    /// expert, whole blocks count.
    ///
    /// # Errors
    /// As [`Self::trunk`].
    pub(super) fn experts(
        shards: &[PathBuf],
        expert_bytes: u64,
    ) -> Result<Result<Self, Doubt>, ProbeError> {
        let mut files = Vec::new();
        let mut extents = Vec::new();
        for path in shards {
            let (file, ranges) = match open(path)? {
                Ok(found) => found,
                Err(doubt) => return Ok(Err(doubt)),
            };
            for range in ranges {
                let last = range.end / TILE_ALIGN * TILE_ALIGN;
                let mut offset = range.start.next_multiple_of(TILE_ALIGN);
                while offset + expert_bytes <= last {
                    extents.push(Extent {
                        file: files.len(),
                        offset,
                        len: expert_bytes,
                    });
                    offset += expert_bytes;
                }
            }
            files.push(file);
        }
        if extents.is_empty() {
            let path = shards.first().cloned().unwrap_or_default();
            let least = expert_bytes;
            return Ok(Err(Doubt::TooShort { path, least }));
        }
        Ok(Ok(Self {
            kind: ReadKind::Random,
            files,
            extents,
        }))
    }

    /// The devices read from, each with the first file on it.
    pub(super) fn devices(&self) -> Vec<(u64, PathBuf)> {
        let mut devices: Vec<(u64, PathBuf)> = Vec::new();
        for file in &self.files {
            if devices.iter().all(|(device, _)| *device != file.device) {
                devices.push((file.device, folder_of(file.file.path())));
            }
        }
        devices
    }

    /// The extents on one device.
    pub(super) fn on_device(&self, device: u64) -> Vec<Extent> {
        let on_it = |extent: &&Extent| {
            self.files
                .get(extent.file)
                .is_some_and(|file| file.device == device)
        };
        self.extents.iter().filter(on_it).cloned().collect()
    }

    /// Why reads go through the page cache, if they do.
    pub(super) fn fallback(&self) -> Option<String> {
        self.files.iter().find_map(|file| file.file.fallback())
    }

    /// The first file, to name in messages.
    pub(super) fn path(&self) -> PathBuf {
        self.files
            .first()
            .map(|file| file.file.path().to_owned())
            .unwrap_or_default()
    }
}

pub(super) fn folder_of(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new(".")).to_owned()
}

/// Open a file past the page cache and see whether there is a disk behind it; returns its data ranges.
#[expect(
    clippy::type_complexity,
    reason = "a doubt is an answer, an error is none"
)]
fn open(path: &Path) -> Result<Result<(TargetFile, Vec<Range<u64>>), Doubt>, ProbeError> {
    let at = |source| ProbeError::Look {
        path: path.to_owned(),
        source,
    };
    let file = DirectFile::open(path, Mode::Auto)?;
    let metadata = fs::metadata(path).map_err(at)?;
    let space = statfs(path).map_err(|e| at(e.into()))?;
    let file_system = u64::try_from(space.f_type).unwrap_or(0);
    if IN_MEMORY.contains(&file_system) {
        let path = path.to_owned();
        return Ok(Err(Doubt::InMemory { path, file_system }));
    }
    let len = metadata.len();
    let ranges = file.data_ranges(0..len)?;
    let data: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let blocks = metadata.blocks().saturating_mul(512);
    if len > 0 && (data < len / 2 || blocks < len / LEAST_BLOCKS_PART) {
        return Ok(Err(Doubt::Holes {
            path: path.to_owned(),
            data: data.min(blocks),
            len,
        }));
    }
    if !file.is_direct() {
        // What others left in the page cache would answer for the disk.
        let plain = fs::File::open(path).map_err(at)?;
        fadvise(&plain, 0, None, Advice::DontNeed).map_err(|e| at(e.into()))?;
    }
    let device = metadata.dev();
    Ok(Ok((TargetFile { file, device }, ranges)))
}

/// Whether one of ascending, disjoint ranges holds all of `wanted`. The last block of a file may reach past its end.
fn covers(ranges: &[Range<u64>], wanted: &Range<u64>) -> bool {
    let after = ranges.partition_point(|range| range.start <= wanted.start);
    after
        .checked_sub(1)
        .and_then(|at| ranges.get(at))
        .is_some_and(|range| range.end >= wanted.end)
}

/// The shards of a checkpoint: those of `dir`, then those that only a further folder has, as k3-run finds them.
///
/// # Errors
/// If a folder that exists cannot be listed.
pub(super) fn shards(dir: &Path, more: &[PathBuf]) -> io::Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = Vec::new();
    for folder in std::iter::once(dir).chain(more.iter().map(PathBuf::as_path)) {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        let mut here = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let is_shard = path.extension().is_some_and(|end| end == "safetensors");
            let known = found.iter().any(|p| p.file_name() == path.file_name());
            if is_shard && !known {
                here.push(path);
            }
        }
        here.sort_unstable();
        found.extend(here);
    }
    Ok(found)
}

const _: () = assert!(ALIGN as u64 == TILE_ALIGN);

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder on a disk, not in memory.
    fn folder() -> tempfile::TempDir {
        let here = std::env::current_exe().unwrap();
        tempfile::tempdir_in(here.parent().unwrap()).unwrap()
    }

    #[test]
    fn holes_are_no_disk() {
        let dir = folder();
        let path = dir.path().join("trunk.bin");
        let file = fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let extents = [Extent {
            file: 0,
            offset: 0,
            len: 1 << 20,
        }];
        let doubt = Target::trunk(&[path], &extents).unwrap().unwrap_err();
        assert!(matches!(doubt, Doubt::Holes { data: 0, .. }), "{doubt}");
    }

    #[test]
    fn only_stretches_of_data_are_read() {
        let dir = folder();
        let path = dir.path().join("model-1.safetensors");
        // Data, a hole, data: on file systems that cannot tell, all is data.
        let file = fs::File::create(&path).unwrap();
        file.set_len(500 << 10).unwrap();
        let data = vec![1; 200 << 10];
        let write = |at| std::os::unix::fs::FileExt::write_all_at(&file, &data, at);
        write(0).unwrap();
        write(300 << 10).unwrap();
        file.sync_all().unwrap();
        let target = Target::experts(std::slice::from_ref(&path), 64 << 10);
        let target = target.unwrap().unwrap();
        let ranges = target.files[0].file.data_ranges(0..500 << 10).unwrap();
        for extent in &target.extents {
            assert!(covers(
                &ranges,
                &(extent.offset..extent.offset + extent.len)
            ));
            assert_eq!((extent.offset % 4096, extent.len), (0, 64 << 10));
        }
        assert!(target.extents.len() >= 3, "{:?}", target.extents);
        let none = Target::experts(&[path], 1 << 20).unwrap().unwrap_err();
        assert!(matches!(none, Doubt::TooShort { .. }), "{none}");
    }

    #[test]
    fn a_range_covers_what_lies_within_it() {
        let ranges = [0..10, 20..30];
        for (wanted, held) in [
            (0..10, true),
            (20..25, true),
            (5..21, false),
            (10..11, false),
            (29..31, false),
        ] {
            assert_eq!(covers(&ranges, &wanted), held, "{wanted:?}");
        }
        assert!(!covers(&[], &(0..1)));
    }

    #[test]
    fn shards_of_further_folders_count_where_the_first_lacks_them() {
        let dir = folder();
        let (first, second) = (dir.path().join("a"), dir.path().join("b"));
        for folder in [&first, &second] {
            fs::create_dir(folder).unwrap();
        }
        let put = |folder: &Path, name| fs::write(folder.join(name), [0; 64]).unwrap();
        put(&first, "m-1.safetensors");
        put(&first, "config.json");
        put(&second, "m-1.safetensors");
        put(&second, "m-2.safetensors");
        let missing = dir.path().join("c");
        let found = shards(&first, &[missing, second.clone()]).unwrap();
        assert_eq!(
            found,
            [
                first.join("m-1.safetensors"),
                second.join("m-2.safetensors")
            ]
        );
    }
}
