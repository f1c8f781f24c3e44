//! Latent attention of one layer of the released model against the multiply-add peak of this machine.
//!
//! Counted are 2 x 104,448 operations for every row and position it sees (96 heads, scores over 576 values, sums over 512), and
//! the cache once a row; the absorbed keys and expanded values are in the time. Run with
//! `cargo bench -p k3-run --bench attention`; `K3_BENCH='avx2 N4096'` keeps the lines whose name contains the words.

use std::hint::black_box;
use std::time::Instant;

use k3_run::kernels::attention::{
    CachedRows, LatentAttention, LatentCache, LatentDims, LatentScratch,
};
use k3_run::kernels::{Isa, Weights};
use rayon::prelude::*;

/// As released.
const DIMS: LatentDims = LatentDims {
    num_heads: 96,
    nope: 128,
    rope: 64,
    value: 128,
    rank: 512,
};

/// Heads that arrive together: a tile of 16 MiB.
const TILE_HEADS: usize = 64;

/// The fastest of this many repetitions counts: other work on the machine only ever adds time.
const REPEATS: usize = 5;

fn fastest(mut work: impl FnMut()) -> f64 {
    work();
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Multiplications and additions a second of all threads together, from registers.
fn fma_rate(isa: Isa, threads: usize) -> f64 {
    const ROUNDS: usize = 1 << 22;
    /// Operations of a round: 24 registers of eight lanes, or 12 of sixteen.
    const OPERATIONS: usize = 2 * 192;
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2(rounds: usize) -> f32 {
        use std::arch::x86_64::{_mm256_cvtss_f32, _mm256_fmadd_ps, _mm256_set1_ps};
        let factor = _mm256_set1_ps(black_box(0.999));
        let mut sums = [factor; 12];
        for _ in 0..2 * rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, factor);
            }
        }
        sums.iter().map(|sum| _mm256_cvtss_f32(*sum)).sum()
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512(rounds: usize) -> f32 {
        use std::arch::x86_64::{_mm512_cvtss_f32, _mm512_fmadd_ps, _mm512_set1_ps};
        let factor = _mm512_set1_ps(black_box(0.999));
        let mut sums = [factor; 12];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, factor);
            }
        }
        sums.iter().map(|sum| _mm512_cvtss_f32(*sum)).sum()
    }
    fn plain(rounds: usize) -> f32 {
        let factor = black_box(0.999_f32);
        let mut sums = [factor; 192];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = sum.mul_add(factor, factor);
            }
        }
        sums.iter().sum()
    }
    let (rounds, sum): (usize, fn(usize) -> f32) = match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx512` exists only if the processor has AVX-512 F.
        Isa::Avx512(_) => (ROUNDS, |rounds| unsafe { avx512(rounds) }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx2` exists only if the processor has AVX2 and FMA.
        Isa::Avx2(_) => (ROUNDS, |rounds| unsafe { avx2(rounds) }),
        _ => (ROUNDS >> 6, plain),
    };
    let seconds = fastest(|| {
        (0..threads).into_par_iter().with_max_len(1).for_each(|_| {
            black_box(sum(black_box(rounds)));
        });
    });
    (threads * rounds * OPERATIONS) as f64 / seconds
}

/// Random values in -1..1.
struct Random(u64);

impl Random {
    fn value(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }
}

/// The attention of `rows` last positions of `positions`.
struct Layer {
    kv: Vec<u8>,
    q: Vec<f32>,
    cache: LatentCache,
    rows: usize,
    positions: usize,
}

impl Layer {
    fn new(rows: usize, positions: usize) -> Self {
        let mut random = Random(1);
        let width = DIMS.rank + DIMS.rope;
        let mut cache = LatentCache::new(positions, width);
        for position in 0..positions {
            cache.store(position, &random.values(width));
        }
        let kv = random.values(DIMS.num_heads * DIMS.kv_rows() * DIMS.rank);
        Self {
            kv: kv
                .iter()
                .flat_map(|v| (v * 0.1).to_le_bytes().into_iter().skip(2))
                .collect(),
            q: random.values(rows * DIMS.num_heads * DIMS.query()),
            cache,
            rows,
            positions,
        }
    }

    fn seconds(&mut self, isa: Isa) -> f64 {
        let sequences = [CachedRows {
            rows: 0..self.rows,
            position: self.positions - self.rows,
            cache: &mut self.cache,
        }];
        let mut scratch = LatentScratch::default();
        scratch.prepare();
        let attention = LatentAttention::new(isa, DIMS, &self.q, &sequences);
        let per_head = attention.head_len();
        let mut out = vec![0.0; DIMS.num_heads * per_head];
        fastest(|| {
            for (tile, out) in out.chunks_mut(TILE_HEADS * per_head).enumerate() {
                let first = tile * TILE_HEADS;
                let heads = first..first + out.len() / per_head;
                let rows = heads.start * DIMS.kv_rows()..heads.end * DIMS.kv_rows();
                let kv = Weights::Bf16(&self.kv).rows(rows, DIMS.rank);
                attention.par_heads(kv, first, &scratch, out);
            }
            black_box(&out);
        })
    }

    /// Operations of scores and sums.
    fn operations(&self) -> f64 {
        let seen: usize = (self.positions - self.rows + 1..=self.positions).sum();
        (2 * DIMS.num_heads * (2 * DIMS.rank + DIMS.rope)) as f64 * seen as f64
    }

    /// Bytes of the cache, each row reading it once.
    fn bytes(&self) -> f64 {
        (self.rows * self.positions * (DIMS.rank + DIMS.rope) * 4) as f64
    }
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
fn main() {
    let threads = rayon::current_num_threads();
    let only = std::env::var("K3_BENCH").unwrap_or_default();
    for isa in Isa::available().into_iter().skip(1).rev() {
        let peak = fma_rate(isa, threads);
        println!(
            "{} | {threads} threads {:.1} GFLOP/s",
            isa.name(),
            peak / 1e9
        );
        println!(
            "{:>9} {:>5} {:>9} {:>8} {:>8} {:>7}",
            "positions", "rows", "ms", "GFLOP/s", "of peak", "GB/s"
        );
        for rows in [1, 2, 64] {
            for positions in [1024, 4096, 16384] {
                let name = format!("{} N{positions} R{rows} ", isa.name());
                if !name.contains(&only) {
                    continue;
                }
                let mut layer = Layer::new(rows, positions);
                let seconds = layer.seconds(isa);
                let rate = layer.operations() / seconds;
                println!(
                    "{positions:>9} {rows:>5} {:>9.2} {:>8.1} {:>6.1} % {:>7.1}",
                    seconds * 1e3,
                    rate / 1e9,
                    rate / peak * 100.0,
                    layer.bytes() / seconds / 1e9,
                );
            }
        }
    }
}
