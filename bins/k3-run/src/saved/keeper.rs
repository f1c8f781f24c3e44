//! When to save, and where to: two files in turn.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, Instant},
};

use k3_shared::{size::Bytes, term::NamedWrite};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with, statvfs};

use super::{Header, SavedError, write};
use crate::model::SequenceState;

/// How often to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval {
    /// Every so many tokens, of the prompt or generated.
    Tokens(u64),
    /// Every so much time.
    Time(Duration),
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is neither a number of tokens nor a time as 90s, 30m or 2h");
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        let seconds = match &text[digits.len()..] {
            "" if number > 0 => return Ok(Self::Tokens(number)),
            "s" => Some(number),
            "m" => number.checked_mul(60),
            "h" => number.checked_mul(3600),
            _ => None,
        };
        match seconds {
            Some(seconds) if seconds > 0 => Ok(Self::Time(Duration::from_secs(seconds))),
            _ => Err(wrong()),
        }
    }
}

/// Where the state before the last is.
pub fn previous(path: &Path) -> PathBuf {
    with_suffix(path, ".previous")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Saves a sequence again and again.
///
/// A state is written to `FILE.partial`, synced, and changes places with `FILE`, which becomes `FILE.previous` until the next
/// save: `FILE` is whole at every moment, and never more than two states are on the disk.
#[derive(Debug)]
pub struct Keeper {
    path: PathBuf,
    partial: PathBuf,
    /// Held from the start, so that a folder that cannot be written is found out before the run, and one run saves here.
    file: Option<File>,
    /// Whether the partial file is this run's, to be removed at the end.
    is_ours: bool,
    interval: Option<Interval>,
    tokens: u64,
    since: Instant,
}

impl Keeper {
    /// Prepare to save to `path`; an existing state there may be `replace`d, or is an error.
    ///
    /// - `bytes`: how large a state can become.
    ///
    /// # Errors
    /// If it is there, the folder cannot be written or has no room for two states, or another run saves there.
    pub fn open(
        path: &Path,
        interval: Option<Interval>,
        replace: bool,
        bytes: u64,
    ) -> Result<Self, SavedError> {
        if !replace && fs::symlink_metadata(path).is_ok() {
            return Err(SavedError::Exists {
                path: path.to_owned(),
            });
        }
        let mut keeper = Self {
            path: path.to_owned(),
            partial: with_suffix(path, ".partial"),
            file: None,
            is_ours: false,
            interval,
            tokens: 0,
            since: Instant::now(),
        };
        keeper.file = Some(keeper.open_partial()?);
        keeper.is_ours = true;
        keeper.check_room(bytes)?;
        Ok(keeper)
    }

    /// Where the state is saved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is time to save, `tokens` more being computed.
    pub fn is_due(&mut self, tokens: u64) -> bool {
        self.tokens += tokens;
        match self.interval {
            None => false,
            Some(Interval::Tokens(every)) => self.tokens >= every,
            Some(Interval::Time(every)) => self.since.elapsed() >= every,
        }
    }

    /// Save.
    ///
    /// # Errors
    /// If it cannot be written; what was saved before is as it was.
    pub fn save(&mut self, header: &Header, state: &SequenceState) -> Result<(), SavedError> {
        let file = match self.file.take() {
            Some(file) => file,
            None => self.open_partial()?,
        };
        self.write(file, header, state)
            .map_err(|source| SavedError::Write {
                path: self.path.clone(),
                source,
            })?;
        self.file = Some(self.open_partial()?);
        self.tokens = 0;
        self.since = Instant::now();
        Ok(())
    }

    fn write(&self, file: File, header: &Header, state: &SequenceState) -> io::Result<()> {
        file.set_len(0)?;
        // Two states at a time are on the disk, not three.
        match fs::remove_file(previous(&self.path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut out = BufWriter::with_capacity(1 << 20, NamedWrite::new(file, &self.path));
        write(&mut out, header, state)?;
        out.flush()?;
        out.get_ref().get_ref().sync_all()?;
        if renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::EXCHANGE).is_ok() {
            fs::rename(&self.partial, previous(&self.path))?;
        } else {
            // The first one, or a file system that cannot exchange.
            fs::rename(&self.partial, &self.path)?;
        }
        let folder = self.path.parent().filter(|p| !p.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }

    fn open_partial(&self) -> Result<File, SavedError> {
        let failed = |source| SavedError::Write {
            path: self.partial.clone(),
            source,
        };
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.partial)
            .map_err(failed)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            if error == rustix::io::Errno::WOULDBLOCK {
                SavedError::Busy {
                    path: self.path.clone(),
                }
            } else {
                failed(error.into())
            }
        })?;
        Ok(file)
    }

    /// A state and the one before it have to fit beside what else is there, of which their own old files do not count.
    fn check_room(&self, bytes: u64) -> Result<(), SavedError> {
        let Ok(space) = statvfs(&self.partial) else {
            return Ok(());
        };
        let own = [
            self.path.clone(),
            self.partial.clone(),
            previous(&self.path),
        ];
        let own = own
            .iter()
            .filter_map(|path| Some(fs::metadata(path).ok()?.len()));
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        let room = free.saturating_add(own.sum());
        let needed = bytes.saturating_mul(2);
        if room < needed {
            return Err(SavedError::NoRoom {
                path: self.path.clone(),
                needed: Bytes(needed),
                free: Bytes(free),
            });
        }
        Ok(())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // What was never written, or could not be saved whole, is of no use.
        if self.is_ours {
            let _ = fs::remove_file(&self.partial);
        }
    }
}
