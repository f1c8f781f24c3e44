//! A disk of the test's making: watched, and as slow as it likes.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test binary uses its own part"
)]

use std::{
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use k3_shared::direct::{Device, Interpose};
use rustix::io::Errno;

type Hook = dyn Fn(&Path, u64, usize) -> Act + Send + Sync;

/// What becomes of a read call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It is made.
    Pass,
    /// It is made for at most so many bytes; zero is the end of the file.
    Short(usize),
    /// It fails.
    Fail(Errno),
}

/// Call `hook` with path, offset and length before every read call.
pub fn before_reads(hook: impl Fn(&Path, u64, usize) + Send + Sync + 'static) -> Interpose {
    on_reads(move |path, offset, len| {
        hook(path, offset, len);
        Act::Pass
    })
}

/// Ask `hook` what becomes of every read call.
pub fn on_reads(hook: impl Fn(&Path, u64, usize) -> Act + Send + Sync + 'static) -> Interpose {
    let hook: Arc<Hook> = Arc::new(hook);
    Interpose::with(move |path, device| {
        Box::new(Watched {
            path: path.to_owned(),
            device,
            hook: Arc::clone(&hook),
        })
    })
}

/// Delays by pseudo-random times, and how many there were. They are the same in every run, only not who meets which.
#[derive(Debug, Default)]
pub struct Delays(AtomicU64);

impl Delays {
    /// The longest.
    const LONGEST: Duration = Duration::from_micros(60);

    pub fn before_reads(this: &Arc<Self>) -> Interpose {
        let this = Arc::clone(this);
        before_reads(move |_, _, _| this.wait())
    }

    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn wait(&self) {
        let number = self.0.fetch_add(1, Ordering::Relaxed);
        // The high bits of a product with the golden ratio are spread evenly.
        match number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60 {
            // Half of the reads are not delayed at all, so that they overtake the others.
            0..8 => {}
            8..12 => thread::yield_now(),
            random => thread::sleep(Self::LONGEST * u32::try_from(random - 11).unwrap_or(1) / 4),
        }
    }
}

struct Watched {
    path: PathBuf,
    device: Box<dyn Device>,
    hook: Arc<Hook>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watched({})", self.path.display())
    }
}

impl Device for Watched {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        match (self.hook)(&self.path, offset, buf.len()) {
            Act::Pass => self.device.read_at(buf, offset),
            Act::Short(0) => Ok(0),
            Act::Short(bytes) => {
                let len = buf.len().min(bytes);
                self.device.read_at(&mut buf[..len], offset)
            }
            Act::Fail(errno) => Err(errno.into()),
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.device.write_at(bytes, offset)
    }

    fn len(&self) -> io::Result<u64> {
        self.device.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.device.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.device.next_data(offset)
    }

    fn forget(&self, offset: u64, len: u64) {
        self.device.forget(offset, len);
    }
}
