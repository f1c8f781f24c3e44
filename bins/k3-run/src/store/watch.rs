//! Files must stay what they were when the run began: hours pass, and a download or a re-pack may write over them.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::model::SourceError;

/// What tells a file from another, or from itself rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

/// The files of a run as they were when it began.
#[derive(Debug, Default)]
pub(super) struct Watch(Vec<(PathBuf, Stamp)>);

impl Watch {
    /// Watch `paths` from now on.
    ///
    /// # Errors
    /// If one is not there.
    pub(super) fn over<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> Result<Self, SourceError> {
        let stamped = paths.map(|path| {
            let stamp = Stamp::of(path)
                .map_err(|e| SourceError::Other(format!("{}: {e}", path.display())))?;
            Ok((path.clone(), stamp))
        });
        stamped.collect::<Result<_, _>>().map(Self)
    }

    /// Whether all are what they were.
    ///
    /// # Errors
    /// [`SourceError::Changed`] names the first that is not.
    pub(super) fn check(&self) -> Result<(), SourceError> {
        for (path, stamp) in &self.0 {
            let what = match Stamp::of(path) {
                Ok(now) if now == *stamp => continue,
                Ok(now) if now.inode != stamp.inode || now.device != stamp.device => {
                    "was replaced by another file".to_owned()
                }
                Ok(now) if now.bytes != stamp.bytes => {
                    format!("had {} bytes and has {}", stamp.bytes, now.bytes)
                }
                Ok(_) => "was written to".to_owned(),
                Err(error) => format!("cannot be found: {error}"),
            };
            return Err(SourceError::Changed {
                path: path.clone(),
                what,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, time::SystemTime};

    use super::*;

    #[test]
    fn a_file_that_is_written_to_cut_replaced_or_removed_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        let reset = || {
            for path in &paths {
                fs::write(path, b"weights").unwrap();
                let file = File::options().write(true).open(path).unwrap();
                file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
            }
            Watch::over(paths.iter()).unwrap()
        };
        let notices = |watch: &Watch, word: &str| {
            let error = watch.check().unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("/b:"), "{error}");
        };
        let watch = reset();
        watch.check().unwrap();
        File::open(&paths[1]).unwrap();
        watch.check().unwrap();
        fs::write(&paths[1], b"WEIGHTS").unwrap();
        notices(&watch, "written to");
        let watch = reset();
        fs::write(&paths[1], b"weight").unwrap();
        notices(&watch, "had 7 bytes and has 6");
        let watch = reset();
        fs::rename(&paths[1], dir.path().join("c")).unwrap();
        notices(&watch, "No such file");
        fs::copy(dir.path().join("c"), &paths[1]).unwrap();
        notices(&watch, "replaced");
    }
}
