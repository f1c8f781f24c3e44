//! What this machine can do at all, by one thread and by all.

use std::hint::black_box;
use std::time::Instant;

use k3_run::kernels::{Isa, limits};
use rayon::prelude::*;

/// The fastest of this many repetitions counts: other work on the machine only ever adds time.
const REPEATS: usize = 7;

/// Seconds of the fastest repetition of `work`, after one that does not count.
pub(crate) fn fastest(mut work: impl FnMut()) -> f64 {
    work();
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Pools of one thread and of all, and what each can do.
pub(crate) struct Limits {
    pub(crate) pools: [rayon::ThreadPool; 2],
    /// Bytes a second.
    pub(crate) read: [f64; 2],
    /// Floating-point operations a second, a multiply-add counting as two.
    pub(crate) arithmetic: [f64; 2],
}

impl Limits {
    pub(crate) fn measure(isa: Isa, bytes: &[u8]) -> Self {
        let pools = [1, 0].map(|threads| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .expect("threads can be started")
        });
        let bytes = &bytes[..bytes.len().min(512 << 20)];
        let read = [0, 1].map(|i| pools[i].install(|| read_rate(isa, bytes)));
        let arithmetic = [0, 1].map(|i| pools[i].install(|| arithmetic_rate(isa)));
        Self {
            pools,
            read,
            arithmetic,
        }
    }

    /// All threads.
    pub(crate) fn threads(&self) -> usize {
        self.pools[1].current_num_threads()
    }
}

fn read_rate(isa: Isa, bytes: &[u8]) -> f64 {
    bytes.len() as f64 / fastest(|| read_all(isa, bytes))
}

fn read_all(isa: Isa, bytes: &[u8]) {
    let sum = bytes
        .par_chunks(1 << 20)
        .map(|part| limits::read(isa, part))
        .reduce(|| 0, |a, b| a ^ b);
    black_box(sum);
}

/// Median seconds of `work`, and of a plain loop over `bytes` that takes turns with it: the rate of a shared memory can halve
/// for minutes, so a share of it is told from neighbours in time.
pub(crate) fn beside_reading(isa: Isa, bytes: &[u8], mut work: impl FnMut()) -> [f64; 2] {
    work();
    let turns: [[f64; 2]; 2 * REPEATS] = std::array::from_fn(|_| {
        let start = Instant::now();
        work();
        let middle = Instant::now();
        read_all(isa, bytes);
        [
            (middle - start).as_secs_f64(),
            middle.elapsed().as_secs_f64(),
        ]
    });
    [0, 1].map(|which| {
        let mut all = turns.map(|turn| turn[which]);
        all.sort_by(f64::total_cmp);
        f64::midpoint(all[REPEATS - 1], all[REPEATS])
    })
}

fn arithmetic_rate(isa: Isa) -> f64 {
    let rounds = if isa == Isa::Scalar { 1 << 14 } else { 1 << 21 };
    let mut operations = 0;
    let seconds = fastest(|| {
        let done = rayon::broadcast(|_| black_box(limits::multiply_add(isa, black_box(rounds))).1);
        operations = done.iter().sum();
    });
    operations as f64 / seconds
}
