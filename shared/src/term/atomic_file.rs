//! Output files that appear whole or not at all.

use std::{
    fs,
    io::{self, Seek as _, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use super::NamedWrite;

/// An output file that appears under its name only when it is complete and on disk.
///
/// It is written beside the target, synced, renamed, and the folder synced; dropped before [`Self::commit`], it leaves nothing.
/// A link is followed, so that the file it names is replaced and the link stays. A target that is no regular file (`/dev/null`,
/// `/dev/stdout`, a named pipe) is never replaced: what was written is copied into it at [`Self::commit`].
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// A file beside the target, renamed over it.
    Beside(io::BufWriter<NamedWrite<tempfile::NamedTempFile>>),
    /// A file without a name, copied into a device or pipe.
    Spooled(io::BufWriter<NamedWrite<fs::File>>),
}

impl AtomicFile {
    /// Begin to replace `target`. `-`-style names are the caller's business.
    ///
    /// # Errors
    /// If no file can be made in the folder of `target`, or `target` is a device that cannot be written.
    pub fn create(target: &Path) -> io::Result<Self> {
        // Follow links, so that the link stays; a target that is not there yet has none to follow.
        let target = match fs::metadata(target) {
            Ok(metadata) if !metadata.is_file() && !metadata.is_dir() => {
                let spool = NamedWrite::new(tempfile::tempfile()?, target);
                let place = Place::Spooled(io::BufWriter::new(spool));
                let target = target.to_owned();
                return Ok(Self { target, place });
            }
            Ok(_) => target.canonicalize()?,
            Err(_) => target.to_owned(),
        };
        let folder = parent(&target);
        let name = target.file_name().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{}: names no file", target.display()),
            )
        })?;
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(name);
        let file = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(".partial")
            .tempfile_in(folder)
            .map_err(|e| {
                io::Error::new(
                    e.kind(),
                    format!("{}: cannot write in this folder: {e}", folder.display()),
                )
            })?;
        let place = Place::Beside(io::BufWriter::new(NamedWrite::new(file, &target)));
        Ok(Self { target, place })
    }

    /// Keep only the first `len` bytes of what was written.
    ///
    /// # Errors
    /// If what is buffered cannot be written, or the file cannot be cut.
    pub fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.flush()?;
        let cut = || {
            let mut file = match &self.place {
                Place::Beside(file) => file.get_ref().get_ref().as_file(),
                Place::Spooled(file) => file.get_ref().get_ref(),
            };
            file.set_len(len)?;
            file.seek(io::SeekFrom::Start(len)).map(|_| ())
        };
        cut().map_err(|e| at(&self.target, &e))
    }

    /// Sync, rename over the target, sync the folder; or copy into a target that is no regular file.
    ///
    /// # Errors
    /// If any of them fails; a regular file is then as it was.
    pub fn commit(self) -> io::Result<()> {
        let target = self.target;
        // What a write says names the target already.
        match self.place {
            Place::Beside(file) => {
                let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
                publish(file.into_inner(), &target).map_err(|e| at(&target, &e))
            }
            Place::Spooled(file) => {
                let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
                copy(file.into_inner(), &target).map_err(|e| at(&target, &e))
            }
        }
    }
}

fn publish(file: tempfile::NamedTempFile, target: &Path) -> io::Result<()> {
    file.as_file().sync_all()?;
    // A temporary file is private by default; an output file gets what the umask leaves, like any other.
    let mode = 0o666 & !umask();
    fs::set_permissions(file.path(), fs::Permissions::from_mode(mode))?;
    file.persist(target).map_err(|e| e.error)?;
    fs::File::open(parent(target))?.sync_all()
}

fn copy(mut file: fs::File, target: &Path) -> io::Result<()> {
    file.rewind()?;
    let mut target = fs::OpenOptions::new().write(true).open(target)?;
    io::copy(&mut file, &mut target).map(|_| ())
}

impl io::Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.place {
            Place::Beside(file) => file.write(bytes),
            Place::Spooled(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.place {
            Place::Beside(file) => file.flush(),
            Place::Spooled(file) => file.flush(),
        }
    }
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Replace `target` with `bytes`, all or nothing.
///
/// # Errors
/// As [`AtomicFile::create`] and [`AtomicFile::commit`].
pub fn write_atomic(target: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = AtomicFile::create(target)?;
    file.write_all(bytes)?;
    file.commit()
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

fn umask() -> u32 {
    // The mask can only be read by setting it, which would race with other threads; the kernel also prints it.
    fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let line = status.lines().find_map(|l| l.strip_prefix("Umask:"))?;
            u32::from_str_radix(line.trim(), 8).ok()
        })
        .unwrap_or(0o022)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_file_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out.json");
        write_atomic(&target, b"old").unwrap();
        let mut file = AtomicFile::create(&target).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read(&target).unwrap(), b"old");
        write_atomic(&target, b"new").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        let mut file = AtomicFile::create(&target).unwrap();
        file.write_all(b"whole, cut").unwrap();
        file.truncate(5).unwrap();
        file.write_all(b"!").unwrap();
        file.commit().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"whole!");
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            1,
            "no temporary is left"
        );
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = write_atomic(Path::new("/nonexistent-folder/x"), b"").unwrap_err();
        assert!(error.to_string().contains("/nonexistent-folder"), "{error}");
    }

    #[test]
    fn a_link_stays_and_the_file_it_names_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        write_atomic(&link, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
    }

    /// A rename over `/dev/null`, which the superuser may do, breaks every program on the machine.
    #[test]
    fn a_target_that_is_no_regular_file_is_written_into() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        // Dropped, it writes nothing; were the pipe opened, this would wait for a reader.
        drop(AtomicFile::create(&pipe).unwrap());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        let mut file = AtomicFile::create(&pipe).unwrap();
        file.write_all(b"whole, cut").unwrap();
        file.truncate(5).unwrap();
        file.commit().unwrap();
        assert_eq!(reader.join().unwrap(), b"whole");
        assert!(!fs::metadata(&pipe).unwrap().is_file());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
