//! How fast memory is read and values are multiplied, by all threads together.

use std::{
    hint::black_box,
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use k3_shared::direct::AlignedBuf;

/// How long each round of arithmetic runs.
const ARITHMETIC: Duration = Duration::from_millis(150);
/// Readings in each way; the median counts.
const ROUNDS: usize = 3;
/// Memory read by one thread, or less where the host has little: well past any cache, and much of what there is, since weights fill
/// memory, and where a virtual machine's memory lies in several places of its host, one may be half as fast as another.
const MEMORY_BYTES: u64 = 3 << 30;
/// Values multiplied at once: enough independent products to fill the pipelines, in 12 of 16 registers.
const LANES: usize = 48;
/// Bytes of one step of a loop.
const CHUNK: usize = 256;
/// Ways to read, of which the best counts. A processor's own prefetching follows one run of addresses only so far ahead; several
/// runs side by side keep more requests to memory under way. This tool has no unsafe code, and without any cannot ask for
/// prefetches itself.
const WAYS: [Way; 4] = [
    side_by_side::<1>,
    side_by_side::<2>,
    side_by_side::<4>,
    side_by_side::<8>,
];

type Way = fn(&[[u8; CHUNK]]) -> u64;

/// Bytes a second that all threads together read from memory, with at most a quarter of `limit_bytes` of it: the best of a few plain
/// loops.
pub(super) fn memory_speed(threads: usize, limit_bytes: u64) -> f64 {
    let threads = threads.max(1);
    let each = MEMORY_BYTES.min(limit_bytes / 4 / threads as u64);
    let each = usize::try_from(each).unwrap_or(0).max(64 * CHUNK);
    let start = Barrier::new(threads);
    let rates = thread::scope(|scope| {
        let reader = || {
            let mut memory = AlignedBuf::zeroed(each);
            memory.back_with_memory();
            let (chunks, _) = memory.as_chunks();
            let one_turn = |turn: usize| {
                start.wait();
                rate_of(WAYS[turn % WAYS.len()], chunks)
            };
            (0..ROUNDS * WAYS.len()).map(one_turn).collect()
        };
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(reader)).collect();
        let joined = readers.into_iter().map(thread::ScopedJoinHandle::join);
        joined
            .map(Result::unwrap_or_default)
            .collect::<Vec<Vec<f64>>>()
    });
    let of_turn = |turn: usize| -> f64 { rates.iter().filter_map(|of| of.get(turn)).sum() };
    let of_way = |way: usize| {
        let turns = (0..ROUNDS).map(|round| of_turn(round * WAYS.len() + way));
        median(turns.collect())
    };
    let speeds: Vec<f64> = (0..WAYS.len()).map(of_way).collect();
    log::debug!("memory, each way: {speeds:.0?} bytes a second");
    speeds.into_iter().fold(0.0, f64::max)
}

/// Bytes a second of one thread that reads all of this once.
fn rate_of(read: Way, memory: &[[u8; CHUNK]]) -> f64 {
    let start = Instant::now();
    black_box(read(memory));
    size_of_val(memory) as f64 / start.elapsed().as_secs_f64()
}

/// Combine all words, `RUNS` runs of them side by side.
fn side_by_side<const RUNS: usize>(chunks: &[[u8; CHUNK]]) -> u64 {
    let length = chunks.len() / RUNS;
    let (together, rest) = chunks.split_at(length * RUNS);
    let runs: [&[[u8; CHUNK]]; RUNS] = std::array::from_fn(|n| &together[n * length..][..length]);
    let mut sums = [0u64; 8];
    for at in 0..length {
        for run in &runs {
            add(&mut sums, &run[at]);
        }
    }
    for chunk in rest {
        add(&mut sums, chunk);
    }
    sums.into_iter().fold(0, |all, sum| all ^ sum)
}

#[inline]
fn add(sums: &mut [u64; 8], chunk: &[u8; CHUNK]) {
    for words in chunk.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(words.as_chunks().0) {
            *sum ^= u64::from_ne_bytes(*word);
        }
    }
}

/// Multiply-adds a second of all threads, each counted as two.
///
/// This tool has no unsafe code, and without any it cannot call into instructions that only some processors have. So the loop is
/// compiled for every processor of the architecture, and measures what can be had there: how many vector multiplications are
/// issued a second, four lanes each on x86-64. A fused multiply-add takes the same units and counts twice, and wider registers
/// hold more lanes. Where a processor works on 512 bits in two halves the estimate is twice too high; a limit computed from it
/// is then still a limit.
pub(super) fn arithmetic_speed(threads: usize) -> f64 {
    let rounds = (0..ROUNDS).map(|_| products_per_second(threads));
    rounds.fold(0.0, f64::max) * fused_operations_per_product()
}

fn products_per_second(threads: usize) -> f64 {
    const REPEATS: usize = 4096;
    let over = AtomicBool::new(false);
    let one = || {
        let mut products = [1.0f32; LANES];
        let mut work = || {
            // From one again: products that fade to subnormals would be slow on some processors.
            products.fill(1.0);
            let factor = black_box(0.999_999f32);
            for _ in 0..REPEATS {
                for product in &mut products {
                    *product *= factor;
                }
            }
            black_box(&products);
            (LANES * REPEATS) as f64
        };
        // Once for the clock to rise.
        work();
        let start = Instant::now();
        let mut done = 0.0;
        while !over.load(Ordering::Relaxed) {
            done += work();
            if start.elapsed() >= ARITHMETIC {
                over.store(true, Ordering::Relaxed);
            }
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

/// The middle value, or the mean of the two middle ones; zero of none.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = |at: Option<usize>| at.and_then(|at| values.get(at)).copied().unwrap_or(0.0);
    f64::midpoint(
        middle(values.len().checked_sub(1).map(|last| last / 2)),
        middle(Some(values.len() / 2)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_reads_every_word() {
        for len in [1, 5, 8, 40] {
            let mut memory = vec![[0u8; CHUNK]; len];
            memory[0][0] |= 1;
            memory[len / 2][8 * 17] |= 2;
            memory[len - 1][CHUNK - 8] |= 4;
            for read in WAYS {
                assert_eq!(read(&memory), 7, "{len}");
            }
        }
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "the values are kept, not computed")]
    fn the_median_is_between_the_middle_values() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(vec![5.0]), 5.0);
        assert_eq!(median(vec![]), 0.0);
    }
}
