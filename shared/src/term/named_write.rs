//! Writes that say what failed.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use rustix::fs::statvfs;

use crate::size::Bytes;

/// A destination with a name: a write that fails says which file it was for, how many bytes at which place, and, of a full disk, what
/// room is left.
#[derive(Debug)]
pub struct NamedWrite<W> {
    to: W,
    path: PathBuf,
    bytes: u64,
}

impl<W> NamedWrite<W> {
    /// Write to `to`, which errors call `path`.
    pub fn new(to: W, path: &Path) -> Self {
        Self {
            to,
            path: path.to_owned(),
            bytes: 0,
        }
    }

    /// The destination.
    pub fn get_ref(&self) -> &W {
        &self.to
    }

    /// The destination, without its name.
    pub fn into_inner(self) -> W {
        self.to
    }
}

impl<W: Write> Write for NamedWrite<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.to.write(bytes) {
            Ok(count) => {
                self.bytes += count as u64;
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                let text = format!(
                    "{}: {} bytes at byte {} cannot be written: {error}{}",
                    self.path.display(),
                    bytes.len(),
                    self.bytes,
                    room(&self.path, &error)
                );
                Err(io::Error::new(error.kind(), text))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// What is free where `path` is, if the disk being full is the error.
fn room(path: &Path, error: &io::Error) -> String {
    let kind = error.kind();
    if kind != io::ErrorKind::StorageFull && kind != io::ErrorKind::QuotaExceeded {
        return String::new();
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    match statvfs(folder.unwrap_or(Path::new("."))) {
        Ok(disk) => {
            let free = Bytes(disk.f_bavail.saturating_mul(disk.f_frsize));
            format!(" ({free} free there; free some, then re-run)")
        }
        Err(_) => " (free some, then re-run)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_to_a_full_device_names_file_place_and_bytes() {
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let mut to = NamedWrite::new(full, Path::new("/dev/out.json"));
        let error = to.write_all(&[0; 77]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        let text = error.to_string();
        for word in [
            "/dev/out.json: 77 bytes at byte 0",
            "No space left",
            "free there",
        ] {
            assert!(text.contains(word), "{text}");
        }
    }
}
