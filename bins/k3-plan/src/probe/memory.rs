//! How fast memory is read, by all threads together.

use std::{
    hint::black_box,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use k3_shared::direct::AlignedBuf;
use rayon::prelude::*;

/// Readings in each way; the median counts.
const ROUNDS: usize = 3;
/// Memory read by one thread, or less where the host has little: well past any cache, and much of what there is, since weights fill
/// memory, and where a virtual machine's memory lies in several places of its host, one may be half as fast as another.
const MEMORY_BYTES: u64 = 3 << 30;
/// A tile of a trunk, as k3-pack cuts them if not told otherwise, and a task of one, as k3-run does.
const TILE_BYTES: usize = 8 << 20;
const TASK_BYTES: usize = 1 << 20;
/// Tiles of a matrix, and how long one thread works alone between two, while the others fall asleep.
const MATRIX_TILES: usize = 6;
const ALONE: Duration = Duration::from_micros(100);
/// How long tiles are read.
const TILED: Duration = Duration::from_secs(4);
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

/// Memory for every thread, all of it there.
pub(super) struct Memory {
    buffers: Vec<AlignedBuf>,
}

impl Memory {
    /// For `threads`, with at most a quarter of `limit_bytes`.
    pub(super) fn new(threads: usize, limit_bytes: u64) -> Self {
        let threads = threads.max(1);
        let each = MEMORY_BYTES.min(limit_bytes / 4 / threads as u64);
        let each = usize::try_from(each).unwrap_or(0).max(64 * CHUNK);
        let mut buffers: Vec<AlignedBuf> = (0..threads).map(|_| AlignedBuf::zeroed(each)).collect();
        thread::scope(|scope| {
            for buffer in &mut buffers {
                scope.spawn(|| buffer.back_with_memory());
            }
        });
        Self { buffers }
    }

    fn chunks(&self) -> Vec<&[[u8; CHUNK]]> {
        self.buffers
            .iter()
            .map(|buffer| buffer.as_chunks().0)
            .collect()
    }

    /// Bytes a second of every thread through memory of its own, in the best of a few plain loops: the limit.
    pub(super) fn plain_speed(&self) -> f64 {
        let speeds = plain_speeds(&self.chunks());
        log::debug!("memory, each way: {speeds:.0?} bytes a second");
        speeds.into_iter().fold(0.0, f64::max)
    }

    /// Bytes a second a tile at a time, as k3-run comes to weights: its tasks shared out over a pool, whose threads wait for its end
    /// and fall asleep between matrices. Where processors are virtual their host may move them at every waking, next to each
    /// other or far apart, so that both share one path to memory or have one each: this is no constant share of the limit.
    pub(super) fn tiled_speed(&self) -> Option<f64> {
        let threads = self.buffers.len();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let chunks = self.chunks();
        let speed = pool.ok()?.install(|| tiled_speed(&chunks));
        log::debug!("memory, in tiles: {speed:.0} bytes a second");
        Some(speed)
    }
}

/// Bytes a second of a thread for each memory, for each way to read.
fn plain_speeds(memory: &[&[[u8; CHUNK]]]) -> Vec<f64> {
    let start = Barrier::new(memory.len());
    let rates = thread::scope(|scope| {
        let reader = |chunks| {
            let one_turn = |turn: usize| {
                start.wait();
                rate_of(WAYS[turn % WAYS.len()], chunks)
            };
            (0..ROUNDS * WAYS.len()).map(one_turn).collect()
        };
        let readers: Vec<_> = memory
            .iter()
            .map(|chunks| scope.spawn(move || reader(chunks)))
            .collect();
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
    (0..WAYS.len()).map(of_way).collect()
}

/// Bytes a second of the current pool, for at least [`TILED`] and whole passes.
fn tiled_speed(memory: &[&[[u8; CHUNK]]]) -> f64 {
    let start = Instant::now();
    let mut bytes = 0;
    let mut alone = Duration::ZERO;
    while start.elapsed() < TILED {
        for matrix in memory
            .iter()
            .flat_map(|chunks| chunks.chunks(MATRIX_TILES * TILE_BYTES / CHUNK))
        {
            for tile in matrix.chunks(TILE_BYTES / CHUNK) {
                let tasks = tile.par_chunks(TASK_BYTES / CHUNK);
                black_box(
                    tasks
                        .map(side_by_side::<4>)
                        .reduce(|| 0, |all, one| all ^ one),
                );
                bytes += size_of_val(tile);
            }
            let together = Instant::now();
            while together.elapsed() < ALONE {
                std::hint::spin_loop();
            }
            alone += together.elapsed();
        }
    }
    bytes as f64 / start.elapsed().saturating_sub(alone).as_secs_f64()
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
