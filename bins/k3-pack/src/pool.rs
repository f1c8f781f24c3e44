//! Workers that share a list of jobs, and what stops them early.

use std::{
    io,
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use crossbeam_channel::bounded;
use signal_hook::consts::{SIGINT, SIGTERM};

/// How many workers, and the signal that stops them.
#[derive(Debug)]
pub(crate) struct Pool {
    threads: usize,
    signal: Arc<AtomicUsize>,
}

/// How a list of jobs ended, short of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// All were done.
    Whole,
    /// This signal came first.
    Interrupted(u8),
}

impl Pool {
    /// `threads` workers, by default twice the cores (each waits for the disk half of its time), at most 8.
    pub(crate) fn new(threads: Option<NonZeroUsize>) -> io::Result<Self> {
        let pool = Self::without_signals(threads);
        for signal in [SIGINT, SIGTERM] {
            let number = usize::try_from(signal).unwrap_or_default();
            signal_hook::flag::register_usize(signal, Arc::clone(&pool.signal), number)?;
        }
        Ok(pool)
    }

    /// A pool that no signal stops.
    pub(crate) fn without_signals(threads: Option<NonZeroUsize>) -> Self {
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            threads: threads.map_or((2 * cores).min(8), NonZeroUsize::get),
            signal: Arc::default(),
        }
    }

    /// How many workers.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// The signal received, if any.
    pub(crate) fn signal(&self) -> Option<u8> {
        u8::try_from(self.signal.load(Ordering::Relaxed))
            .ok()
            .filter(|&signal| signal > 0)
    }

    /// Do jobs `0..count`, begun in order, each by `work` with a worker's own state; `done` is called here with each result.
    ///
    /// # Errors
    /// The first error of a job; the jobs in progress are finished, no more are begun.
    pub(crate) fn run<W, T: Send, E: Send>(
        &self,
        count: usize,
        worker: impl Fn() -> W + Sync,
        work: impl Fn(&mut W, usize) -> Result<T, E> + Sync,
        mut done: impl FnMut(usize, T),
    ) -> Result<Ended, E> {
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let (sender, results) = bounded(self.threads);
        thread::scope(|scope| {
            for _ in 0..self.threads.min(count) {
                let sender = sender.clone();
                scope.spawn(|| {
                    let sender = sender;
                    let mut state = worker();
                    while self.signal().is_none() && !failed.load(Ordering::Relaxed) {
                        let job = next.fetch_add(1, Ordering::Relaxed);
                        if job >= count {
                            break;
                        }
                        let result = work(&mut state, job);
                        if result.is_err() {
                            failed.store(true, Ordering::Relaxed);
                        }
                        if sender.send((job, result)).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            let mut left = count;
            let mut error = None;
            for (job, result) in results {
                match result {
                    Ok(value) => {
                        left -= 1;
                        done(job, value);
                    }
                    Err(e) => error = error.or(Some(e)),
                }
            }
            match (error, self.signal()) {
                (Some(error), _) => Err(error),
                (None, Some(signal)) if left > 0 => Ok(Ended::Interrupted(signal)),
                _ => Ok(Ended::Whole),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> Pool {
        Pool::without_signals(NonZeroUsize::new(threads))
    }

    #[test]
    fn every_job_is_done_once() {
        for threads in [1, 2, 7] {
            let mut seen = [0; 100];
            let ended = pool(threads).run(
                100,
                || (),
                |(), job| Ok::<_, ()>(job),
                |job, value| {
                    assert_eq!(job, value);
                    seen[job] += 1;
                },
            );
            assert_eq!(ended, Ok(Ended::Whole));
            assert_eq!(seen, [1; 100]);
        }
    }

    #[test]
    fn the_first_error_stops_the_rest() {
        let begun = AtomicUsize::new(0);
        let work = |(): &mut (), job| {
            begun.fetch_add(1, Ordering::Relaxed);
            if job == 3 { Err("bad") } else { Ok(()) }
        };
        let result = pool(2).run(1_000_000, || (), work, |_, ()| ());
        assert_eq!(result, Err("bad"));
        assert!(begun.into_inner() < 1_000_000);
    }

    #[test]
    fn a_signal_stops_between_jobs_and_is_reported() {
        let pool = pool(2);
        let work = |(): &mut (), job| {
            if job == 5 {
                pool.signal.store(15, Ordering::Relaxed);
            }
            Ok::<_, ()>(())
        };
        let mut finished = 0;
        let ended = pool.run(1_000_000, || (), work, |_, ()| finished += 1);
        assert_eq!(ended, Ok(Ended::Interrupted(15)));
        assert!((5..1_000_000).contains(&finished));
    }
}
