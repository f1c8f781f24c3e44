//! The system calls behind a [`super::DirectFile`].

use std::{fmt, fs::File, io, ops::Range, os::unix::fs::FileExt as _};

use rustix::{
    fs::{Advice, SeekFrom, fadvise, seek},
    io::Errno,
};

use super::{ALIGN, AlignedBuf};

/// What a file is read and written through: one system call each, with its short counts and interruptions.
pub trait Device: fmt::Debug + Send + Sync {
    /// Read up to `buf.len()` bytes from `offset`; zero is the end of the file.
    ///
    /// # Errors
    /// As `pread`.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Write up to `bytes.len()` bytes at `offset`.
    ///
    /// # Errors
    /// As `pwrite`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;

    /// The length in bytes.
    ///
    /// # Errors
    /// As `fstat`.
    fn len(&self) -> io::Result<u64>;

    /// Whether there are no bytes.
    ///
    /// # Errors
    /// As [`Self::len`].
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Set the length.
    ///
    /// # Errors
    /// As `ftruncate`.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Flush to the disk.
    ///
    /// # Errors
    /// As `fsync`.
    fn sync(&self) -> io::Result<()>;

    /// The first stretch of data that ends after `offset`; `None` if only a hole, or nothing, follows.
    ///
    /// # Errors
    /// As `lseek`, except where holes cannot be asked for: then all is data.
    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>>;

    /// Tell the page cache that these bytes are not needed again.
    fn forget(&self, offset: u64, len: u64);
}

/// A real file, opened once through the page cache and perhaps once past it.
#[derive(Debug)]
pub struct System {
    buffered: File,
    direct: Option<File>,
}

impl System {
    /// `direct` is the same file opened with `O_DIRECT`, if that works.
    pub fn new(buffered: File, direct: Option<File>) -> Self {
        Self { buffered, direct }
    }

    /// Aligned transfers go direct. What is left after a count that ends inside a block cannot, and is finished through the
    /// page cache.
    fn file(&self, memory: &[u8], offset: u64) -> &File {
        let aligned = offset.is_multiple_of(ALIGN as u64)
            && memory.len().is_multiple_of(ALIGN)
            && memory.as_ptr().addr().is_multiple_of(ALIGN);
        match &self.direct {
            Some(direct) if aligned => direct,
            _ => &self.buffered,
        }
    }
}

impl Device for System {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file(buf, offset).read_at(buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.file(bytes, offset).write_at(bytes, offset)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.buffered.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.buffered.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.buffered.sync_all()
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let start = match seek(&self.buffered, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                let end = self.len()?;
                return Ok((offset < end).then_some(offset..end));
            }
            Err(e) => return Err(e.into()),
        };
        let end = match seek(&self.buffered, SeekFrom::Hole(start)) {
            Ok(end) => end,
            // The file shrank in between; the read that follows will say so.
            Err(Errno::NXIO) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        Ok(Some(start..end))
    }

    fn forget(&self, offset: u64, len: u64) {
        // Advice only: where it is not taken, nothing is wrong but the cache's use.
        let _ = fadvise(
            &self.buffered,
            offset,
            std::num::NonZeroU64::new(len),
            Advice::DontNeed,
        );
    }
}

/// One real read, at the second block where there is one: some file systems accept offset 0 and refuse the granularity.
pub(super) fn probe_read(file: &File) -> io::Result<()> {
    let block = ALIGN as u64;
    let offset = if file.metadata()?.len() >= 2 * block {
        block
    } else {
        0
    };
    let mut buf = AlignedBuf::zeroed(ALIGN);
    retry(|| file.read_at(&mut buf, offset))
}

/// One real write into an empty file, taken back.
pub(super) fn probe_write(file: &File) -> io::Result<()> {
    let buf = AlignedBuf::zeroed(ALIGN);
    let result = retry(|| file.write_at(&buf, 0));
    file.set_len(0)?;
    result
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<()> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(|_| ()),
        }
    }
}
