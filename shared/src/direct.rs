//! Aligned buffers and `O_DIRECT` reads and writes, with a probe and a buffered fallback.
//!
//! Weights are read once per step and are far larger than memory, so the page cache only costs: it evicts what others hold
//! and hides what a run really reads. Direct transfers need file offset, length and memory aligned to [`ALIGN`]; a file system
//! may refuse them in whole or in part, so [`Mode::Auto`] makes one real transfer before it believes in them.
//!
//! A read either fills what was asked for or is an error that names file, byte and counts: a short read never becomes
//! zeros (specification 4, rows 36-38).

mod buffer;
mod device;
mod error;
mod interpose;
#[cfg(test)]
mod tests;

use std::{
    fs::{File, OpenOptions},
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs::OFlags;

pub use self::{
    buffer::{AlignedBuf, HUGE_PAGE},
    device::{Device, System},
    error::DirectError,
    interpose::Interpose,
};

/// What direct transfers align file offset, length and memory to.
pub const ALIGN: usize = 4096;
/// The most asked of one system call. Linux moves at most `0x7fff_f000` bytes a call; staying below half of that keeps every
/// call's length aligned.
const MAX_TRANSFER: usize = 1 << 29;

/// How a file is to be accessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// `O_DIRECT` if one real transfer succeeds, else through the page cache.
    #[default]
    Auto,
    /// `O_DIRECT`, or an error where the file system refuses.
    Direct,
    /// Through the page cache, which is told to drop what was read.
    Buffered,
}

/// A file read, and perhaps written, at given offsets. Shared freely between threads.
#[derive(Debug)]
pub struct DirectFile {
    path: PathBuf,
    device: Box<dyn Device>,
    direct: bool,
    /// Why [`Mode::Auto`] did without `O_DIRECT`.
    refusal: Option<io::Error>,
    requested: AtomicU64,
    /// The most asked of one read call.
    max_transfer: usize,
}

/// The smallest aligned range that covers `len` bytes from `offset`; `None` past the end of `u64`.
pub fn covering(offset: u64, len: usize) -> Option<Range<u64>> {
    let align = ALIGN as u64;
    let start = offset / align * align;
    let end = offset
        .checked_add(len as u64)?
        .checked_next_multiple_of(align)?;
    Some(start..end)
}

/// The largest buffer [`DirectFile::read_covering`] can need for `len` bytes, whatever their offset.
pub const fn covering_bytes(len: usize) -> usize {
    // The payload may begin at the last byte of a block.
    len.saturating_add(ALIGN - 1).next_multiple_of(ALIGN)
}

impl DirectFile {
    /// Open a file for reading.
    ///
    /// # Errors
    /// [`DirectError::Open`]; [`DirectError::Refused`] only with [`Mode::Direct`].
    pub fn open(path: &Path, mode: Mode) -> Result<Self, DirectError> {
        Self::with_options(
            path,
            mode,
            OpenOptions::new().read(true),
            device::probe_read,
        )
    }

    /// Open an existing file for reading and writing.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_write(path: &Path, mode: Mode) -> Result<Self, DirectError> {
        Self::with_options(
            path,
            mode,
            OpenOptions::new().read(true).write(true),
            device::probe_read,
        )
    }

    /// Make an empty file, or empty an existing one, for reading and writing.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn create(path: &Path, mode: Mode) -> Result<Self, DirectError> {
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)
            .map_err(|source| DirectError::Open {
                path: path.to_owned(),
                source,
            })?;
        Self::with_options(
            path,
            mode,
            OpenOptions::new().read(true).write(true),
            device::probe_write,
        )
    }

    /// A file on a device of the caller's making, so that tests can stand in for the disk.
    pub fn with_device(path: PathBuf, device: Box<dyn Device>, direct: bool) -> Self {
        Self {
            path,
            device,
            direct,
            refusal: None,
            requested: AtomicU64::new(0),
            max_transfer: MAX_TRANSFER,
        }
    }

    fn with_options(
        path: &Path,
        mode: Mode,
        options: &OpenOptions,
        probe: fn(&File) -> io::Result<()>,
    ) -> Result<Self, DirectError> {
        let buffered = options.open(path).map_err(|source| DirectError::Open {
            path: path.to_owned(),
            source,
        })?;
        let direct = match mode {
            Mode::Buffered => None,
            Mode::Auto | Mode::Direct => Some(open_direct(path, options, probe)),
        };
        let (direct, refusal) = match direct {
            None => (None, None),
            Some(Ok(file)) => (Some(file), None),
            Some(Err(source)) if is_full(&source) => {
                return Err(DirectError::Full {
                    path: path.to_owned(),
                    offset: 0,
                    wanted: ALIGN,
                    got: 0,
                    source,
                });
            }
            Some(Err(source)) if mode == Mode::Direct || !is_refusal(&source) => {
                return Err(DirectError::Refused {
                    path: path.to_owned(),
                    source,
                });
            }
            Some(Err(source)) => (None, Some(source)),
        };
        let is_direct = direct.is_some();
        let device = Box::new(System::new(buffered, direct));
        Ok(Self {
            refusal,
            ..Self::with_device(path.to_owned(), device, is_direct)
        })
    }

    /// The file's path, as it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Why [`Mode::Auto`] fell back to the page cache, as a line to print; `None` if it did not.
    pub fn fallback(&self) -> Option<String> {
        let refusal = self.refusal.as_ref()?;
        Some(format!(
            "{}: no direct I/O here ({refusal}); going through the page cache",
            self.path.display()
        ))
    }

    /// The file's length in bytes.
    ///
    /// # Errors
    /// [`DirectError::Query`].
    pub fn len(&self) -> Result<u64, DirectError> {
        self.device.len().map_err(|e| self.query("length", e))
    }

    /// Whether the file has no bytes.
    ///
    /// # Errors
    /// As [`Self::len`].
    pub fn is_empty(&self) -> Result<bool, DirectError> {
        Ok(self.len()? == 0)
    }

    /// Ask for at most `bytes` in one read call, rounded down to whole blocks.
    #[must_use]
    pub fn with_max_transfer(mut self, bytes: usize) -> Self {
        self.max_transfer = (bytes / ALIGN * ALIGN).clamp(ALIGN, MAX_TRANSFER);
        self
    }

    /// Bytes asked for so far by reads, widened to blocks and padded; not by writes.
    pub fn bytes_requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    /// Fill `buf` from `offset`. In direct mode both, and the memory, must be aligned to [`ALIGN`].
    ///
    /// # Errors
    /// [`DirectError::Misaligned`], [`DirectError::Read`], or [`DirectError::Short`] when the file ends first.
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DirectError> {
        let wanted = buf.len();
        self.fill(buf, offset, wanted)
    }

    /// Read the `len` bytes from `offset`, at any alignment: whole blocks are read into `buf`, whose length is set to them.
    ///
    /// Returns where in `buf` the payload lies. The last block may reach past the end of the file.
    ///
    /// # Errors
    /// As [`Self::read_exact_at`]; [`DirectError::BufferTooSmall`] if the capacity is below the covering blocks
    /// ([`covering_bytes`] always suffices).
    pub fn read_covering(
        &self,
        buf: &mut AlignedBuf,
        offset: u64,
        len: usize,
    ) -> Result<Range<usize>, DirectError> {
        let too_small = |capacity| DirectError::BufferTooSmall {
            path: self.path.clone(),
            offset,
            wanted: len,
            capacity,
        };
        let blocks = covering(offset, len).ok_or_else(|| too_small(buf.capacity()))?;
        let total = usize::try_from(blocks.end - blocks.start)
            .ok()
            .filter(|&total| total <= buf.capacity())
            .ok_or_else(|| too_small(buf.capacity()))?;
        let skip = usize::try_from(offset - blocks.start).map_err(|_| too_small(buf.capacity()))?;
        buf.set_len(total);
        self.fill(buf, blocks.start, skip + len)?;
        Ok(skip..skip + len)
    }

    /// Read into `buf` until it is full, or until the file ends and `needed` bytes are there.
    fn fill(&self, buf: &mut [u8], offset: u64, needed: usize) -> Result<(), DirectError> {
        self.check_aligned(buf, offset)?;
        self.requested
            .fetch_add(buf.len() as u64, Ordering::Relaxed);
        let total = buf.len();
        let mut done = 0;
        while done < total {
            let end = total.min(done + self.max_transfer);
            let at = offset + done as u64;
            match self.device.read_at(&mut buf[done..end], at) {
                // Once the payload is covered a short count is the end of the file, not worth a call to confirm.
                Ok(n) if n > 0 && n < end - done && done + n >= needed => break,
                Ok(0) if done >= needed => break,
                Ok(0) => {
                    return Err(DirectError::Short {
                        path: self.path.clone(),
                        offset,
                        wanted: needed as u64,
                        got: done as u64,
                    });
                }
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(DirectError::Read {
                        path: self.path.clone(),
                        offset: at,
                        wanted: needed.saturating_sub(done),
                        got: done,
                        source,
                    });
                }
            }
        }
        if !self.direct {
            self.device.forget(offset, total as u64);
        }
        Ok(())
    }

    /// Write all of `bytes` at `offset`. In direct mode both, and the memory, must be aligned to [`ALIGN`].
    ///
    /// # Errors
    /// [`DirectError::Misaligned`], [`DirectError::Full`], [`DirectError::Write`].
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> Result<(), DirectError> {
        self.check_aligned(bytes, offset)?;
        let mut done = 0;
        while done < bytes.len() {
            let end = bytes.len().min(done + MAX_TRANSFER);
            let result = match self
                .device
                .write_at(&bytes[done..end], offset + done as u64)
            {
                Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                other => other,
            };
            match result {
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.write_error(offset, bytes.len(), done, source)),
            }
        }
        Ok(())
    }

    fn write_error(
        &self,
        offset: u64,
        wanted: usize,
        got: usize,
        source: io::Error,
    ) -> DirectError {
        let path = self.path.clone();
        if is_full(&source) {
            DirectError::Full {
                path,
                offset,
                wanted,
                got,
                source,
            }
        } else {
            DirectError::Write {
                path,
                offset,
                wanted,
                got,
                source,
            }
        }
    }

    fn check_aligned(&self, memory: &[u8], offset: u64) -> Result<(), DirectError> {
        let aligned = offset.is_multiple_of(ALIGN as u64)
            && memory.len().is_multiple_of(ALIGN)
            && memory.as_ptr().addr().is_multiple_of(ALIGN);
        // Past the end of u64 no byte has an address; the sums above rely on it.
        if (self.direct && !aligned) || offset.checked_add(memory.len() as u64).is_none() {
            return Err(DirectError::Misaligned {
                path: self.path.clone(),
                offset,
                len: memory.len(),
            });
        }
        Ok(())
    }

    /// Set the file's length; what is added is a hole.
    ///
    /// # Errors
    /// [`DirectError::Query`].
    pub fn set_len(&self, len: u64) -> Result<(), DirectError> {
        self.device
            .set_len(len)
            .map_err(|e| self.query("set the length", e))
    }

    /// Have everything written reach the disk.
    ///
    /// # Errors
    /// [`DirectError::Query`].
    pub fn sync(&self) -> Result<(), DirectError> {
        self.device.sync().map_err(|e| self.query("sync", e))
    }

    /// The parts of `range` that are not holes, ascending; all of it where the file system does not tell.
    ///
    /// # Errors
    /// [`DirectError::Query`]; [`DirectError::Short`] if the file ends inside `range`: what is cut off is not a hole.
    pub fn data_ranges(&self, range: Range<u64>) -> Result<Vec<Range<u64>>, DirectError> {
        let mut ranges = Vec::new();
        let mut next = range.start;
        while next < range.end {
            let found = self
                .device
                .next_data(next)
                .map_err(|e| self.query("look for holes", e))?;
            match found {
                Some(data) if data.start < range.end => {
                    ranges.push(data.start.max(next)..data.end.min(range.end));
                    // A device that does not move on must not hang the caller.
                    next = data.end.max(next + 1);
                }
                _ => break,
            }
        }
        // Asked last, so that a file cut meanwhile is noticed.
        let len = self.len()?;
        if len < range.end {
            return Err(DirectError::Short {
                path: self.path.clone(),
                offset: range.start,
                wanted: range.end - range.start,
                got: len.saturating_sub(range.start),
            });
        }
        Ok(ranges)
    }

    fn query(&self, op: &'static str, source: io::Error) -> DirectError {
        DirectError::Query {
            path: self.path.clone(),
            op,
            source,
        }
    }
}

fn open_direct(
    path: &Path,
    options: &OpenOptions,
    probe: fn(&File) -> io::Result<()>,
) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let file = options
        .clone()
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open(path)?;
    probe(&file)?;
    Ok(file)
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Whether an error says that direct transfers, or this alignment, are not had here, rather than that the file is bad.
fn is_refusal(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let code = error.raw_os_error();
    [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS, Errno::NOTTY]
        .iter()
        .any(|errno| code == Some(errno.raw_os_error()))
}
