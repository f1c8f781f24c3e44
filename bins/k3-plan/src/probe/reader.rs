//! Timing one cell of a sweep: so many threads, each with one request in flight, for a moment.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use k3_shared::{
    direct::{ALIGN, AlignedBuf, DirectError},
    formats::plan::ReadKind,
};
use rustix::time::{ClockId, clock_gettime};

use super::{
    ProbeError,
    target::{Extent, Target},
};

/// How one cell reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// The most asked of one call.
    pub(super) request_bytes: u64,
    /// Threads, each with one request in flight.
    pub(super) depth: usize,
}

/// What one cell did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reading {
    pub(super) bytes_per_second: f64,
    /// The share of the time in which the readers, or the cores they have, were computing rather than waiting.
    pub(super) busy: f64,
}

/// One finished request, in seconds since the cell began.
#[derive(Clone, Debug, PartialEq)]
struct Finished {
    time: Range<f64>,
    bytes: u64,
}

/// Where the next extent comes from. Sequential cells go on where the one before stopped, so that no cell reads what the device
/// has just been asked for.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    next: AtomicUsize,
}

impl Cursor {
    fn extent<'a>(&self, kind: ReadKind, extents: &'a [Extent]) -> Option<&'a Extent> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let at = match kind {
            ReadKind::Sequential => turn,
            ReadKind::Random => scatter(turn),
        };
        extents.get(at.checked_rem(extents.len())?)
    }
}

/// Numbers in no order: the mixing steps of splitmix64 (Steele, Lea and Flood 2014).
fn scatter(turn: usize) -> usize {
    let mut x = (turn as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    usize::try_from((x ^ (x >> 31)) >> 1).unwrap_or(turn)
}

/// Read `extents` of `target` as k3-run would for `measured`, counted from when every thread has had an answer. Each thread reads into
/// one of `buffers`, of which there are as many as the shape is deep, each with room for any extent.
///
/// # Errors
/// If a read fails.
pub(super) fn time(
    target: &Target,
    extents: &[Extent],
    shape: Shape,
    buffers: &mut [AlignedBuf],
    measured: Duration,
    cursor: &Cursor,
) -> Result<Reading, ProbeError> {
    let threads = buffers.len().min(shape.depth).max(1);
    let clock = Clock::new(threads, measured);
    let cpu = cpu_seconds();
    let finished = thread::scope(|scope| {
        let readers: Vec<_> = buffers
            .iter_mut()
            .take(threads)
            .map(|buffer| {
                scope.spawn(|| {
                    let finished = read(target, extents, shape, buffer, &clock, cursor);
                    if finished.is_err() {
                        clock.give_up();
                    }
                    finished
                })
            })
            .collect();
        let mut all = Vec::new();
        for reader in readers {
            match reader.join() {
                Ok(finished) => all.extend(finished?),
                Err(_) => return Err(ProbeError::Reader),
            }
        }
        Ok(all)
    })?;
    let wall = clock.start.elapsed().as_secs_f64();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let busy = (cpu_seconds() - cpu) / (wall * threads.min(cores) as f64);
    let window = clock.window();
    Ok(Reading {
        bytes_per_second: rate(&finished, &window),
        busy,
    })
}

/// What one thread read.
fn read(
    target: &Target,
    extents: &[Extent],
    shape: Shape,
    buffer: &mut AlignedBuf,
    clock: &Clock,
    cursor: &Cursor,
) -> Result<Vec<Finished>, DirectError> {
    let request = usize::try_from(shape.request_bytes)
        .unwrap_or(usize::MAX)
        .next_multiple_of(ALIGN);
    let mut finished = Vec::new();
    while let Some(extent) = cursor.extent(target.kind, extents)
        && let Some(file) = target.files.get(extent.file)
    {
        let mut done = 0;
        while done < extent.len {
            if clock.over() {
                return Ok(finished);
            }
            let left = usize::try_from(extent.len - done).unwrap_or(usize::MAX);
            let part = request.min(left);
            let began = clock.seconds();
            // To its own place in the buffer, as a tile is read.
            let place = usize::try_from(done).unwrap_or(usize::MAX);
            match buffer.get_mut(place..place.saturating_add(part)) {
                Some(memory) => file.file.read_exact_at(memory, extent.offset + done)?,
                None => return Ok(finished),
            }
            finished.push(Finished {
                time: began..clock.seconds(),
                bytes: part as u64,
            });
            if finished.len() == 1 {
                clock.first_answer();
            }
            done += part as u64;
        }
    }
    // Nothing to read: nobody need wait for this thread's first answer.
    clock.give_up();
    Ok(finished)
}

/// The time of one cell, shared by its threads.
struct Clock {
    start: Instant,
    measured: Duration,
    /// Threads without an answer so far.
    waiting: AtomicUsize,
    /// Nanoseconds from the start until all had one; meaningless before.
    begin: AtomicU64,
    begun: AtomicBool,
    given_up: AtomicBool,
}

impl Clock {
    fn new(threads: usize, measured: Duration) -> Self {
        Self {
            start: Instant::now(),
            measured,
            waiting: AtomicUsize::new(threads),
            begin: AtomicU64::new(0),
            begun: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
        }
    }

    fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    fn first_answer(&self) {
        if self.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            let nanos = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.begin.store(nanos, Ordering::Relaxed);
            self.begun.store(true, Ordering::Release);
        }
    }

    fn begin(&self) -> Duration {
        Duration::from_nanos(self.begin.load(Ordering::Relaxed))
    }

    /// A thread cannot go on, so the others need not either.
    fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    fn over(&self) -> bool {
        self.given_up.load(Ordering::Relaxed) || self.is_past_window()
    }

    fn is_past_window(&self) -> bool {
        self.begun.load(Ordering::Acquire) && self.start.elapsed() >= self.begin() + self.measured
    }

    fn window(&self) -> Range<f64> {
        let begin = self.begin();
        begin.as_secs_f64()..(begin + self.measured).as_secs_f64()
    }
}

/// Bytes a second within a window. A request that is only partly within it counts for its part of the time: so neither the ramp
/// at the start nor the requests that end last bias a deep queue against a shallow one.
fn rate(finished: &[Finished], window: &Range<f64>) -> f64 {
    let within = |request: &Finished| {
        let both = request.time.end.min(window.end) - request.time.start.max(window.start);
        let length = (request.time.end - request.time.start).max(1e-9);
        request.bytes as f64 * both.max(0.0) / length
    };
    finished.iter().map(within).sum::<f64>() / (window.end - window.start)
}

/// Seconds this process has computed so far, all threads.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(start: f64, end: f64, bytes: u64) -> Finished {
        Finished {
            time: start..end,
            bytes,
        }
    }

    #[test]
    fn requests_count_for_their_part_of_the_window() {
        let all = [
            finished(0.0, 1.0, 100), // before
            finished(0.5, 1.5, 100), // half
            finished(1.5, 2.0, 50),  // whole
            finished(1.0, 5.0, 400), // a quarter
            finished(2.0, 3.0, 100), // after
        ];
        assert!((rate(&all, &(1.0..2.0)) - (50.0 + 50.0 + 100.0)).abs() < 1e-9);
        assert!(rate(&[], &(1.0..2.0)).abs() < 1e-9);
    }

    /// A device that serves one request after the other, and one that serves all at once, have the same speed at any depth.
    #[test]
    fn the_speed_does_not_depend_on_how_a_device_shares_its_time() {
        for depth in [1_u32, 4, 16] {
            let unit = 0.01;
            let depth_f = f64::from(depth);
            let in_turn: Vec<_> = (0..200 * depth)
                .map(|n| {
                    finished(
                        f64::from(n + 1 - depth.min(n + 1)) * unit,
                        f64::from(n + 1) * unit,
                        1000,
                    )
                })
                .collect();
            let shared: Vec<_> = (0..200 * depth)
                .map(|n| {
                    let turn = f64::from(n / depth);
                    finished(turn * unit * depth_f, (turn + 1.0) * unit * depth_f, 1000)
                })
                .collect();
            let window = unit * depth_f..unit * depth_f + 0.5;
            for served in [in_turn, shared] {
                let speed = rate(&served, &window);
                assert!((speed / 100_000.0 - 1.0).abs() < 0.02, "{depth}: {speed}");
            }
        }
    }

    #[test]
    fn random_extents_come_in_no_order_and_all_come() {
        let extents: Vec<Extent> = (0..64)
            .map(|n| Extent {
                file: 0,
                offset: n,
                len: 1,
            })
            .collect();
        let cursor = Cursor::default();
        let order: Vec<u64> = (0..2000)
            .map(|_| cursor.extent(ReadKind::Random, &extents).unwrap().offset)
            .collect();
        let next = order
            .windows(2)
            .filter(|pair| pair[1] == pair[0] + 1)
            .count();
        assert!(next < 100, "{next} of 2000 follow the one before");
        let distinct: std::collections::BTreeSet<u64> = order.into_iter().collect();
        assert_eq!(distinct.len(), 64);
        let cursor = Cursor::default();
        let two: Vec<u64> = (0..2)
            .map(|_| {
                cursor
                    .extent(ReadKind::Sequential, &extents)
                    .unwrap()
                    .offset
            })
            .collect();
        assert_eq!(two, [0, 1]);
        assert_eq!(cursor.extent(ReadKind::Random, &[]), None);
    }
}
