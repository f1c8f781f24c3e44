//! How many tiles each folder of a striped trunk gets: in proportion to how fast its disk reads.
//!
//! All folders of a trunk are read at once, and a step waits for the slowest. So each disk is measured for a moment, with a file
//! that has no name by the time it is written: whatever becomes of the process, nothing stays behind. Where that cannot be done,
//! shares are equal, and a line says so.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use k3_shared::{
    direct::{AlignedBuf, DirectError, DirectFile, Mode},
    size::Bytes,
};
use rustix::fs::statvfs;

use crate::{error::PackError, folders::folder_error};

/// One request, as long as a tile.
const BLOCK: usize = 16 << 20;
/// Blocks of the file, at most.
const BLOCKS: u64 = 16;
/// Fewer blocks than this say nothing.
const LEAST_BLOCKS: u64 = 4;
/// How long the file is written, at most: what is there by then is read.
const WRITING: Duration = Duration::from_secs(3);
/// How long it is read.
const READING: Duration = Duration::from_millis(1500);
/// Reads in flight.
const DEPTH: u64 = 4;
/// What is left free of the disk: the file may take one part in this many.
const FREE_PART: u64 = 8;
/// What the fastest disk counts.
const SCALE: f64 = 1000.0;

/// Why a disk was not measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShareError {
    /// No direct transfers, or one failed.
    #[error(transparent)]
    Direct(#[from] DirectError),
    /// The folder cannot be asked.
    #[error("{}: {source}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Too little room for a file that would say something.
    #[error("{}: {} free are too few to measure with", path.display(), Bytes(*free))]
    Room {
        /// The folder.
        path: PathBuf,
        /// Bytes available.
        free: u64,
    },
    /// The disk took too long to write.
    #[error("{}: {blocks} blocks of 16.78 MB written in 3 s are too few to measure with", path.display())]
    Slow {
        /// The folder.
        path: PathBuf,
        /// Blocks written.
        blocks: u64,
    },
}

/// A folder and its share.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Share {
    /// Its weight among all.
    pub(crate) weight: u32,
    /// What its disk reads a second, if that was measured.
    pub(crate) bytes_per_second: Option<f64>,
}

/// The shares of `folders`, by `measure`, which returns the bytes a second that the disk of a folder reads.
///
/// Each device is measured once; folders on one device divide what it does. With a single device there is nothing to measure.
///
/// # Errors
/// If a folder cannot be looked at. That a disk cannot be measured is no error.
pub(crate) fn shares(
    folders: &[&Path],
    measure: &mut dyn FnMut(&Path) -> Result<f64, ShareError>,
) -> Result<Vec<Share>, PackError> {
    let mut devices = Vec::new();
    for folder in folders {
        let metadata = fs::metadata(folder).map_err(folder_error(folder, "look at"))?;
        devices.push(metadata.dev());
    }
    Ok(shares_on(folders, &devices, measure))
}

fn shares_on(
    folders: &[&Path],
    devices: &[u64],
    measure: &mut dyn FnMut(&Path) -> Result<f64, ShareError>,
) -> Vec<Share> {
    let equal = Share {
        weight: 1,
        bytes_per_second: None,
    };
    let on = |device: &u64| devices.iter().filter(|other| *other == device).count();
    if devices
        .first()
        .is_none_or(|first| on(first) == devices.len())
    {
        return vec![equal; folders.len()];
    }
    let mut known: Vec<(u64, f64)> = Vec::new();
    for (folder, device) in folders.iter().zip(devices) {
        if known.iter().any(|(measured, _)| measured == device) {
            continue;
        }
        match measure(folder) {
            Ok(speed) if speed.is_finite() && speed > 0.0 => known.push((*device, speed)),
            Ok(_) => {
                log::warn!(
                    "{}: read at no speed; equal shares for all folders",
                    folder.display()
                );
                return vec![equal; folders.len()];
            }
            Err(error) => {
                log::warn!("{error}; equal shares for all folders (or give --stripe-weights)");
                return vec![equal; folders.len()];
            }
        }
    }
    let speed_of = |device: &u64| {
        let found = known.iter().find(|(measured, _)| measured == device);
        found.map_or(0.0, |(_, speed)| speed / on(device) as f64)
    };
    let fastest = devices
        .iter()
        .map(speed_of)
        .fold(f64::MIN_POSITIVE, f64::max);
    devices
        .iter()
        .map(|device| Share {
            weight: weight(speed_of(device) / fastest),
            bytes_per_second: Some(speed_of(device)),
        })
        .collect()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 0 and SCALE"
)]
fn weight(part: f64) -> u32 {
    ((part * SCALE).round() as u32).max(1)
}

/// What the disk of `folder` reads a second, past the page cache.
///
/// # Errors
/// If it cannot be measured.
pub(crate) fn measure(folder: &Path) -> Result<f64, ShareError> {
    let at = |source| ShareError::Folder {
        path: folder.to_owned(),
        source,
    };
    let space = statvfs(folder).map_err(|e| at(e.into()))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    let blocks = (free / FREE_PART / BLOCK as u64).min(BLOCKS);
    if blocks < LEAST_BLOCKS {
        let path = folder.to_owned();
        return Err(ShareError::Room { path, free });
    }
    let path = folder.join("k3-pack-speed.partial");
    let file = DirectFile::create(&path, Mode::Direct);
    // Without its name the file is gone as soon as it is closed; also where it could be made but not be used.
    let removed = fs::remove_file(&path);
    let file = file?;
    removed.map_err(at)?;
    let written = write(&file, blocks)?;
    if written < LEAST_BLOCKS {
        let path = folder.to_owned();
        return Err(ShareError::Slow {
            path,
            blocks: written,
        });
    }
    Ok(read(&file, written)?)
}

/// Write so many blocks, or as many as there is time for.
fn write(file: &DirectFile, blocks: u64) -> Result<u64, DirectError> {
    let mut block = AlignedBuf::zeroed(BLOCK);
    let begun = Instant::now();
    let mut written = 0;
    while written < blocks && begun.elapsed() < WRITING {
        fill(&mut block, written);
        file.write_all_at(&block, written * BLOCK as u64)?;
        written += 1;
    }
    file.sync()?;
    Ok(written)
}

/// Bytes that no file system or disk can make shorter: splitmix64 (Steele, Lea and Flood 2014).
fn fill(block: &mut [u8], number: u64) {
    let mut state = number.wrapping_mul(0xd134_2543_de82_ef95);
    for word in block.as_chunks_mut::<8>().0 {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        *word = (x ^ (x >> 31)).to_le_bytes();
    }
}

/// Read the blocks, several at a time, again and again.
fn read(file: &DirectFile, blocks: u64) -> Result<f64, DirectError> {
    let next = AtomicU64::new(0);
    let begun = Instant::now();
    let reader = || -> Result<(), DirectError> {
        let mut block = AlignedBuf::zeroed(BLOCK);
        while begun.elapsed() < READING {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            file.read_exact_at(&mut block, turn % blocks * BLOCK as u64)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (0..DEPTH).map(|_| scope.spawn(reader)).collect();
        // A reader that panics is a bug of ours, and is one of this thread too.
        readers
            .into_iter()
            .try_for_each(|reader| match reader.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
    })?;
    let bytes = next.into_inner().saturating_mul(BLOCK as u64);
    Ok(bytes as f64 / begun.elapsed().as_secs_f64())
}

/// Say who gets how much.
pub(crate) fn tell(folders: &[&Path], shares: &[Share]) {
    let whole: f64 = shares.iter().map(|share| f64::from(share.weight)).sum();
    for (folder, share) in folders.iter().zip(shares) {
        let percent = 100.0 * f64::from(share.weight) / whole;
        match share.bytes_per_second {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a positive speed, rounded for display"
            )]
            Some(speed) => log::info!(
                "{}: {percent:.1} % of the tiles, for {}/s",
                folder.display(),
                Bytes(speed as u64)
            ),
            None => log::info!("{}: {percent:.1} % of the tiles", folder.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(shares: &[Share]) -> Vec<u32> {
        shares.iter().map(|share| share.weight).collect()
    }

    fn paths(names: &[&'static str]) -> Vec<&'static Path> {
        names.iter().map(|&name| Path::new(name)).collect()
    }

    #[test]
    fn shares_follow_the_speeds_of_the_disks() {
        let folders = paths(&["/a", "/b", "/c"]);
        let mut speeds = |folder: &Path| {
            Ok(match folder.to_str() {
                Some("/a") => 3.0e9,
                Some("/b") => 1.5e9,
                _ => 0.3e9,
            })
        };
        let found = shares_on(&folders, &[1, 2, 3], &mut speeds);
        assert_eq!(weights(&found), [1000, 500, 100]);
        assert_eq!(found[1].bytes_per_second, Some(1.5e9));
    }

    #[test]
    fn folders_of_one_disk_divide_its_speed_and_it_is_measured_once() {
        let folders = paths(&["/a", "/b", "/c"]);
        let mut asked = Vec::new();
        let mut speeds = |folder: &Path| {
            asked.push(folder.to_owned());
            Ok(2.0e9)
        };
        let found = shares_on(&folders, &[7, 7, 8], &mut speeds);
        assert_eq!(weights(&found), [500, 500, 1000]);
        assert_eq!(asked, [Path::new("/a"), Path::new("/c")]);
    }

    #[test]
    fn one_disk_is_not_measured() {
        let folders = paths(&["/a", "/b"]);
        let mut never = |_: &Path| -> Result<f64, ShareError> { unreachable!("one disk") };
        assert_eq!(weights(&shares_on(&folders, &[7, 7], &mut never)), [1, 1]);
        assert_eq!(weights(&shares_on(&[], &[], &mut never)), [0; 0]);
    }

    #[test]
    fn a_disk_that_cannot_be_measured_makes_all_shares_equal() {
        let folders = paths(&["/a", "/b"]);
        for answer in [None, Some(0.0), Some(f64::NAN)] {
            let mut speeds = |folder: &Path| match answer {
                _ if folder == Path::new("/a") => Ok(1e9),
                Some(speed) => Ok(speed),
                None => Err(ShareError::Room {
                    path: folder.to_owned(),
                    free: 3,
                }),
            };
            let found = shares_on(&folders, &[1, 2], &mut speeds);
            assert_eq!(weights(&found), [1, 1], "{answer:?}");
        }
    }

    #[test]
    fn a_measured_folder_is_left_as_it_was() {
        let here = std::env::current_exe().unwrap();
        let dir = tempfile::tempdir_in(here.parent().unwrap()).unwrap();
        // Where there are no direct transfers, that is the answer; either way no file stays.
        if let Ok(speed) = measure(dir.path()) {
            assert!(speed > 1e6, "{speed}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let missing = measure(&dir.path().join("missing")).unwrap_err();
        assert!(missing.to_string().contains("missing"), "{missing}");
    }

    #[test]
    fn blocks_differ_and_repeat_nothing() {
        let mut blocks = [[0; 64], [0; 64]];
        for (number, block) in (0..).zip(&mut blocks) {
            fill(block, number);
        }
        let words: std::collections::BTreeSet<_> = blocks
            .iter()
            .flat_map(|block| block.as_chunks::<8>().0)
            .collect();
        assert_eq!(words.len(), 16);
    }
}
