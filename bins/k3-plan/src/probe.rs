//! Measuring the machine: direct reads of the trunk, streaming reads of memory, multiply-adds.

use std::{
    fs::File,
    hint::black_box,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use k3_shared::{formats::plan::Probe, host::Host, size::Bytes, tiles::TILE_ALIGN};
use rustix::fs::{Advice, Mode, OFlags};

/// How long each measurement runs.
const DURATION: Duration = Duration::from_millis(1500);
/// Memory is streamed over this much a thread, well past any cache, or less where the host has little.
const MEMORY_BYTES: u64 = 256 << 20;
/// Values multiplied at once: enough independent products to fill the pipelines, in 12 of 16 registers.
const LANES: usize = 48;

/// How the disk is to be read, as the run will.
#[derive(Clone, Copy, Debug)]
pub struct DiskProbe {
    /// Bytes of one request.
    pub read_bytes: u64,
    /// Requests in flight.
    pub queue_depth: usize,
}

/// Measure disk (if there is a file to read), memory and arithmetic.
///
/// # Errors
/// If the file cannot be read.
pub fn measure(
    file: Option<&Path>,
    disk: DiskProbe,
    threads: usize,
    host: &Host,
) -> io::Result<Probe> {
    let disk_bytes_per_second = match file {
        Some(path) => Some(disk_speed(path, disk)?),
        None => None,
    };
    let each = MEMORY_BYTES.min(host.limit_bytes / 4 / threads.max(1) as u64);
    Ok(Probe {
        disk_bytes_per_second,
        memory_bytes_per_second: Some(memory_speed(threads, each)),
        flops_per_second: Some(arithmetic_speed(threads)),
        date: today(),
    })
}

/// Read the file front to back with the planned request size and depth, again from the start where it is short.
fn disk_speed(path: &Path, probe: DiskProbe) -> io::Result<f64> {
    let at = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let file = open(path).map_err(at)?;
    let metadata = file.metadata().map_err(at)?;
    if metadata.blocks().saturating_mul(512) < metadata.len() / 2 {
        log::warn!(
            "{}: mostly holes, which are read faster than any disk; give --disk-speed instead",
            path.display()
        );
    }
    let read_bytes = probe.read_bytes.clamp(TILE_ALIGN, 1 << 30);
    let requests = (metadata.len() / read_bytes).max(1);
    let next = AtomicU64::new(0);
    let total = AtomicU64::new(0);
    let start = Instant::now();
    thread::scope(|scope| {
        let read = || -> io::Result<()> {
            let length = usize::try_from(read_bytes).unwrap_or(usize::MAX);
            let mut block = vec![0u8; length + 4096];
            let shift = block.as_ptr().align_offset(4096);
            let aligned = block.get_mut(shift..shift + length).unwrap_or_default();
            while start.elapsed() < DURATION {
                let request = next.fetch_add(1, Ordering::Relaxed) % requests;
                let bytes = file.read_at(aligned, request * read_bytes)?;
                if bytes == 0 {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "empty file"));
                }
                total.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            Ok(())
        };
        let readers: Vec<_> = (0..probe.queue_depth.max(1))
            .map(|_| scope.spawn(read))
            .collect();
        readers.into_iter().try_for_each(|reader| {
            reader
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a reader panicked")))
        })
    })
    .map_err(at)?;
    Ok(total.into_inner() as f64 / start.elapsed().as_secs_f64())
}

/// Open past the page cache; where the file system refuses, drop its pages first and say so.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        let file = File::from(file);
        let mut block = vec![0u8; 2 * 4096];
        let shift = block.as_ptr().align_offset(4096);
        let aligned = block.get_mut(shift..shift + 4096).unwrap_or_default();
        if file.read_at(aligned, 0).is_ok() {
            return Ok(file);
        }
    }
    log::warn!(
        "{}: no O_DIRECT here; reads are buffered, and the measured speed may be memory's",
        path.display()
    );
    let file = File::open(path)?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(file)
}

/// Bytes a second that all threads together sum up from memory.
fn memory_speed(threads: usize, bytes_each: u64) -> f64 {
    let words = usize::try_from(bytes_each / 8).unwrap_or(0).max(1 << 10);
    per_second(
        threads,
        || vec![1u64; words],
        |block| {
            let sum = block.iter().fold(0u64, |sum, word| sum.wrapping_add(*word));
            black_box(sum);
            block.len() as f64 * 8.0
        },
    )
}

/// Multiply-adds a second of all threads, each counted as two.
///
/// This tool has no unsafe code, and without any it cannot call into instructions that only some processors have. So the loop is
/// compiled for every processor of the architecture, and measures what can be had there: how many vector multiplications are
/// issued a second, four lanes each on x86-64. A fused multiply-add takes the same units and counts twice, and wider registers
/// hold more lanes. Where a processor works on 512 bits in two halves the estimate is twice too high; a limit computed from it
/// is then still a limit.
fn arithmetic_speed(threads: usize) -> f64 {
    const ROUNDS: usize = 4096;
    let products = per_second(
        threads,
        || [1.0f32; LANES],
        |products| {
            // From one again: products that fade to subnormals would be slow on some processors.
            products.fill(1.0);
            let factor = black_box(0.999_999f32);
            for _ in 0..ROUNDS {
                for product in products.iter_mut() {
                    *product *= factor;
                }
            }
            black_box(&*products);
            (LANES * ROUNDS) as f64
        },
    );
    products * fused_operations_per_product()
}

/// Operations of the widest fused multiply-add of this processor for each lane of the loop's multiplication.
#[cfg(target_arch = "x86_64")]
fn fused_operations_per_product() -> f64 {
    let fused = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    if fused && is_x86_feature_detected!("avx512f") {
        8.0
    } else if fused {
        4.0
    } else {
        1.0
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fused_operations_per_product() -> f64 {
    2.0
}

/// Work a second of `threads` threads, each with a state of its own; `work` says how much it did.
fn per_second<S>(
    threads: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S) -> f64 + Sync,
) -> f64 {
    let one = || {
        let mut state = state();
        // Once for page faults and the clock to rise.
        work(&mut state);
        let start = Instant::now();
        let mut done = 0.0;
        while start.elapsed() < DURATION {
            done += work(&mut state);
        }
        done / start.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(one)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or(0.0))
            .sum()
    })
}

/// The date by UTC, `YYYY-MM-DD`.
pub fn today() -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs());
    date(seconds / 86_400)
}

/// The date so many days after 1970-01-01.
fn date(days: u64) -> String {
    // Eras of 400 years begin on 1 March, so that the leap day is the last of a year.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + carry)
}

/// One line about what was measured.
pub fn summary(probe: &Probe) -> String {
    let rate = |speed: Option<f64>| match speed {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive speed, rounded for display"
        )]
        Some(speed) => format!("{}/s", Bytes(speed as u64)),
        None => "not measured".to_owned(),
    };
    let flops = probe.flops_per_second.map_or_else(
        || "not measured".to_owned(),
        |f| format!("{:.0} Gflop/s", f / 1e9),
    );
    format!(
        "disk {}, memory {}, arithmetic {flops} ({})",
        rate(probe.disk_bytes_per_second),
        rate(probe.memory_bytes_per_second),
        probe.date
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        for (days, text) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_453, "2025-12-31"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(date(days), text, "{days}");
        }
    }

    #[test]
    fn a_file_shorter_than_a_request_is_measured_and_an_empty_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let probe = DiskProbe {
            read_bytes: 1 << 20,
            queue_depth: 2,
        };
        let path = dir.path().join("trunk.bin");
        std::fs::write(&path, vec![1u8; 8192]).unwrap();
        assert!(disk_speed(&path, probe).unwrap() > 0.0);
        std::fs::write(&path, b"").unwrap();
        let error = disk_speed(&path, probe).unwrap_err();
        assert!(error.to_string().contains("trunk.bin"), "{error}");
    }
}
