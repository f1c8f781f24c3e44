//! The folders a trunk is written to: made, locked, measured; and files that appear in them only when whole.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use k3_shared::{
    direct::{DirectError, DirectFile, Mode},
    formats::trunk::{EMBEDDING_NAME, FILE_NAME},
};
use rustix::{
    fs::{FlockOperation, flock, statvfs},
    io::Errno,
};

use crate::error::PackError;

/// What a data file is called until it is whole.
const PARTIAL: &str = "partial";

pub(crate) fn folder_error(path: &Path, op: &'static str) -> impl FnOnce(io::Error) -> PackError {
    let path = path.to_owned();
    move |source| PackError::Folder { path, op, source }
}

/// A folder no other k3-pack may write to while this value lives; the lock ends with the process, however it ends.
#[derive(Debug)]
pub(crate) struct LockedFolder {
    /// Its canonical path.
    pub(crate) path: PathBuf,
    handle: File,
}

impl LockedFolder {
    /// Lock a folder for writing.
    ///
    /// # Errors
    /// [`PackError::Busy`] if another process has it locked, else [`PackError::Folder`].
    pub(crate) fn exclusive(path: &Path) -> Result<Self, PackError> {
        Self::lock(path, FlockOperation::NonBlockingLockExclusive)
    }

    /// Lock a folder against writers.
    ///
    /// # Errors
    /// As [`Self::exclusive`].
    pub(crate) fn shared(path: &Path) -> Result<Self, PackError> {
        Self::lock(path, FlockOperation::NonBlockingLockShared)
    }

    fn lock(path: &Path, operation: FlockOperation) -> Result<Self, PackError> {
        let path = path.canonicalize().map_err(folder_error(path, "open"))?;
        let handle = File::open(&path).map_err(folder_error(&path, "open"))?;
        match flock(&handle, operation) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(PackError::Busy { path }),
            // Some network file systems cannot lock a folder; that alone is no reason not to work there.
            Err(e) => log::warn!(
                "{}: cannot be locked ({e}); see to it that no second k3-pack writes here",
                path.display()
            ),
        }
        Ok(Self { path, handle })
    }

    /// Have renames and removals in it reach the disk.
    pub(crate) fn sync(&self) -> Result<(), PackError> {
        self.handle
            .sync_all()
            .map_err(folder_error(&self.path, "sync"))
    }
}

/// Make the trunk folder and the stripes' and lock them all, the trunk's first.
///
/// # Errors
/// If one cannot be made or locked, or two are the same.
pub(crate) fn lock_all(
    trunk_dir: &Path,
    stripes: &[PathBuf],
) -> Result<Vec<LockedFolder>, PackError> {
    let mut folders: Vec<LockedFolder> = Vec::new();
    for path in [trunk_dir]
        .into_iter()
        .chain(stripes.iter().map(PathBuf::as_path))
    {
        fs::create_dir_all(path).map_err(folder_error(path, "make this folder"))?;
        let canonical = path.canonicalize().map_err(folder_error(path, "open"))?;
        if folders.iter().any(|f| f.path == canonical) {
            return Err(PackError::SameFolder {
                path: path.to_owned(),
            });
        }
        folders.push(LockedFolder::exclusive(path)?);
    }
    Ok(folders)
}

/// Remove what killed packers left of records in a folder: the lock says that no packer is at work there but this one. Data files need
/// none of this, their temporary names being always the same.
pub(crate) fn remove_leftovers(folder: &LockedFolder) {
    let Ok(entries) = fs::read_dir(&folder.path) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_record = [FILE_NAME, EMBEDDING_NAME]
            .iter()
            .any(|record| name.starts_with(&format!(".{record}")));
        if is_record && entry.path().extension().is_some_and(|e| e == PARTIAL) {
            // One that stays is in nobody's way but the disk's.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// One file to be written.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    /// Where it will be.
    pub(crate) path: PathBuf,
    /// The folder it is in.
    pub(crate) folder: PathBuf,
    /// Bytes that will be written, not counting holes.
    pub(crate) bytes: u64,
}

/// Whether there is room, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// For the new files beside the old ones.
    Beside,
    /// Only once the files to be replaced are gone.
    Instead,
}

/// Compare what will be written with the free space of each file system.
///
/// # Errors
/// [`PackError::NoSpace`] naming the first folder on a file system that is too full even without the old files.
pub(crate) fn check_space(demands: &[Demand]) -> Result<Room, PackError> {
    struct Disk<'a> {
        folder: &'a Path,
        needed: u64,
        free: u64,
        freed: u64,
    }
    let mut disks: BTreeMap<u64, Disk<'_>> = BTreeMap::new();
    for demand in demands {
        let folder = &demand.folder;
        let device = fs::metadata(folder)
            .map_err(folder_error(folder, "look at"))?
            .dev();
        let space = statvfs(folder)
            .map_err(io::Error::from)
            .map_err(folder_error(folder, "ask for free space"))?;
        let disk = disks.entry(device).or_insert(Disk {
            folder,
            needed: 0,
            free: space.f_bavail.saturating_mul(space.f_frsize),
            freed: 0,
        });
        disk.needed = disk.needed.saturating_add(demand.bytes);
        disk.freed += fs::metadata(&demand.path).map_or(0, |m| m.blocks() * 512);
    }
    let mut room = Room::Beside;
    for disk in disks.values() {
        room = match judge(disk.needed, disk.free, disk.freed) {
            Some(Room::Beside) => room,
            Some(Room::Instead) => Room::Instead,
            None => {
                return Err(PackError::NoSpace {
                    path: disk.folder.to_owned(),
                    needed: disk.needed,
                    free: disk.free.saturating_add(disk.freed),
                });
            }
        };
    }
    Ok(room)
}

fn judge(needed: u64, free: u64, freed: u64) -> Option<Room> {
    if needed <= free {
        Some(Room::Beside)
    } else if needed <= free.saturating_add(freed) {
        Some(Room::Instead)
    } else {
        None
    }
}

/// A file under a temporary name, removed unless [`Self::publish`]ed.
#[derive(Debug)]
pub(crate) struct PartialFile {
    /// The open file.
    pub(crate) file: DirectFile,
    target: PathBuf,
    published: bool,
}

impl PartialFile {
    /// Begin to write what will be `target`. What a killed process left under the temporary name is overwritten.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub(crate) fn create(target: &Path, mode: Mode) -> Result<Self, DirectError> {
        let path = partial_path(target);
        let file = DirectFile::create(&path, mode).inspect_err(|_| {
            // As when dropped: it may be there, and failed its trial.
            let _ = fs::remove_file(&path);
        })?;
        Ok(Self {
            file,
            target: target.to_owned(),
            published: false,
        })
    }

    /// Rename to the target, which is replaced.
    ///
    /// # Errors
    /// If the rename fails.
    pub(crate) fn publish(mut self) -> Result<(), PackError> {
        fs::rename(self.file.path(), &self.target)
            .map_err(folder_error(&self.target, "rename to"))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.published {
            // What cannot be removed is overwritten next time, and no tool reads it.
            let _ = fs::remove_file(self.file.path());
        }
    }
}

fn partial_path(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".");
    name.push(PARTIAL);
    name.into()
}

/// Remove a file if it is there.
///
/// # Errors
/// If it is and cannot be.
pub(crate) fn remove(path: &Path) -> Result<(), PackError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(folder_error(path, "remove")(e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locked_folder_is_refused_to_a_second_writer_but_readers_share() {
        let dir = tempfile::tempdir().unwrap();
        let lock = LockedFolder::exclusive(dir.path()).unwrap();
        for second in [
            LockedFolder::exclusive(dir.path()),
            LockedFolder::shared(dir.path()),
        ] {
            assert!(matches!(second, Err(PackError::Busy { .. })));
        }
        drop(lock);
        let _readers = [(); 2].map(|()| LockedFolder::shared(dir.path()).unwrap());
        assert!(LockedFolder::exclusive(dir.path()).is_err());
    }

    #[test]
    fn a_stripe_must_be_another_folder() {
        let dir = tempfile::tempdir().unwrap();
        let trunk = dir.path().join("trunk");
        let error = lock_all(&trunk, &[dir.path().join("trunk/../trunk")]).unwrap_err();
        assert!(matches!(error, PackError::SameFolder { .. }), "{error}");
    }

    #[test]
    fn the_old_files_space_counts_only_where_it_must() {
        assert_eq!(judge(100, 100, 50), Some(Room::Beside));
        assert_eq!(judge(101, 100, 50), Some(Room::Instead));
        assert_eq!(judge(150, 100, 50), Some(Room::Instead));
        assert_eq!(judge(151, 100, 50), None);
    }

    #[test]
    fn a_full_file_system_is_refused_with_both_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let demand = |bytes| Demand {
            path: dir.path().join("trunk.bin"),
            folder: dir.path().to_owned(),
            bytes,
        };
        assert_eq!(check_space(&[demand(1)]).unwrap(), Room::Beside);
        // Two files of one file system add up.
        let error = check_space(&[demand(1 << 62), demand(1 << 62)]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("9223372036854775808 and"), "{text}");
        assert!(text.contains(dir.path().to_str().unwrap()), "{text}");
    }

    #[test]
    fn a_partial_file_is_gone_unless_published() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("trunk.bin");
        drop(PartialFile::create(&target, Mode::Auto).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let file = PartialFile::create(&target, Mode::Auto).unwrap();
        assert!(!target.exists());
        file.publish().unwrap();
        assert!(target.exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
