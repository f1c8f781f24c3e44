//! Speed of the matrix kernels at the released model's shapes, against what this machine can do at all.
//!
//! Every line is a ratio to a limit measured in the same process: the streaming read rate of all threads for one vector,
//! the fused multiply-add rate for many. Run with `cargo bench -p k3-run --bench kernels`; `K3_BENCH=mxfp4` keeps the
//! lines whose name contains the word.

use std::hint::black_box;
use std::time::Instant;

use k3_run::kernels::{Activations, Isa, NanScales, Weights, matmul, par_matmul};
use rayon::prelude::*;

/// Large enough that no cache holds it.
const STREAM_BYTES: usize = 512 << 20;

/// The fastest of this many repetitions counts: other work on the machine only ever adds time.
const REPEATS: usize = 7;

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

/// Bytes a second when every thread only reads.
fn read_rate(bytes: &[u8]) -> f64 {
    let words = bytes.as_chunks::<8>().0;
    let seconds = fastest(|| {
        let sum: u64 = words
            .par_chunks(1 << 17)
            .map(|part| {
                part.iter().fold(0, |sum: u64, word| {
                    sum.wrapping_add(u64::from_le_bytes(*word))
                })
            })
            .reduce(|| 0, u64::wrapping_add);
        black_box(sum);
    });
    bytes.len() as f64 / seconds
}

/// Multiplications and additions a second of one thread, from registers.
fn fma_rate(isa: Isa) -> f64 {
    const ROUNDS: usize = 1 << 22;
    const LANES: usize = 96;
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "only an inlined body is compiled for the caller's features"
    )]
    fn body(rounds: usize) -> f32 {
        let mut sums = [1f32; LANES];
        let factor = black_box(0.999_f32);
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = sum.mul_add(factor, factor);
            }
        }
        sums.iter().sum()
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2(rounds: usize) -> f32 {
        body(rounds)
    }
    let (rounds, sum): (usize, fn(usize) -> f32) = match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx2` exists only if the processor has AVX2 and FMA.
        Isa::Avx2(_) => (ROUNDS, |rounds| unsafe { avx2(rounds) }),
        _ => (ROUNDS >> 6, body),
    };
    let seconds = fastest(|| {
        black_box(sum(black_box(rounds)));
    });
    (2 * rounds * LANES) as f64 / seconds
}

/// A matrix of the model and its stored form.
struct Case {
    name: &'static str,
    rows: usize,
    cols: usize,
    mxfp4: bool,
}

impl Case {
    /// Weights of copy `i` of as many as fit the random bytes; using another each time keeps them out of the caches.
    fn weights<'a>(&self, pool: &'a [u8], i: usize) -> Weights<'a> {
        let count = self.rows * self.cols;
        if self.mxfp4 {
            let bytes = count / 2 + count / 32;
            let at = i % (pool.len() / bytes) * bytes;
            let (packed, scale) = pool[at..at + bytes].split_at(count / 2);
            Weights::Mxfp4 {
                packed,
                scale,
                nan_scales: NanScales::Zero,
            }
        } else {
            let at = i % (pool.len() / (count * 2)) * (count * 2);
            Weights::Bf16(&pool[at..at + count * 2])
        }
    }
}

fn seconds_per_product(isa: Isa, case: &Case, pool: &[u8], t: usize, parallel: bool) -> f64 {
    let mut x = Activations::new();
    let values: Vec<f32> = (0..t * case.cols)
        .map(|i| (i % 251) as f32 / 125.0 - 1.0)
        .collect();
    x.fill(&values, case.cols);
    let mut out = vec![0.0; case.rows * t];
    let bytes = case.weights(pool, 0).num_bytes();
    // Enough copies for about 200 MB of one-vector reads, one where arithmetic dominates.
    let copies = if t > 1 {
        1
    } else {
        (200_000_000 / bytes).max(1)
    };
    let mut next = 0;
    fastest(|| {
        for _ in 0..copies {
            let w = case.weights(pool, next);
            next += 1;
            if parallel {
                par_matmul(isa, w, &x, &mut out);
            } else {
                matmul(isa, w, &x, &mut out);
            }
        }
        black_box(&out);
    }) / copies as f64
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
fn main() {
    let only = std::env::var("K3_BENCH").unwrap_or_default();
    let isa = Isa::detect();
    let threads = rayon::current_num_threads();
    // Bytes like bf16 weights of about 0.02: an exponent that never makes the arithmetic slow.
    let mut seed = 1_u64;
    let mut pool = Vec::with_capacity(STREAM_BYTES);
    while pool.len() < STREAM_BYTES {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let [.., a, b] = seed
            .to_be_bytes()
            .map(|byte| byte ^ (seed >> 33).to_le_bytes()[0]);
        pool.extend([a, 0x3c | (b & 0x80)]);
    }
    let read = read_rate(&pool);
    let fma = fma_rate(isa);
    println!(
        "{} | {threads} threads read {:.1} GB/s | one thread {:.1} GFLOP/s",
        isa.name(),
        read / 1e9,
        fma / 1e9
    );
    println!(
        "{:<28} {:>4} {:>8} {:>9} {:>10} {:>10}",
        "shape", "T", "threads", "GB/s", "G weights/s", "of limit"
    );
    let cases = [
        Case {
            name: "bf16",
            rows: 12288,
            cols: 7168,
            mxfp4: false,
        },
        Case {
            name: "bf16",
            rows: 7168,
            cols: 12288,
            mxfp4: false,
        },
        Case {
            name: "bf16",
            rows: 33792,
            cols: 7168,
            mxfp4: false,
        },
        Case {
            name: "mxfp4",
            rows: 3072,
            cols: 3584,
            mxfp4: true,
        },
        Case {
            name: "mxfp4",
            rows: 3584,
            cols: 3072,
            mxfp4: true,
        },
    ];
    for case in &cases {
        for (t, parallel) in [
            (1, false),
            (1, true),
            (2, true),
            (4, true),
            (8, true),
            (16, true),
            (64, false),
            (64, true),
        ] {
            let name = format!("{} [{}, {}]", case.name, case.rows, case.cols);
            if !format!("{name} T{t} ").contains(&only) {
                continue;
            }
            let seconds = seconds_per_product(isa, case, &pool, t, parallel);
            let weights = (case.rows * case.cols) as f64;
            let bytes = case.weights(&pool, 0).num_bytes() as f64;
            let used = if parallel { threads } else { 1 };
            let of_read = bytes / seconds / read;
            let of_fma = 2.0 * weights * t as f64 / seconds / (fma * used as f64);
            let limit = if t == 1 {
                format!("{:.0} % read", of_read * 100.0)
            } else {
                format!("{:.0} % fma", of_fma * 100.0)
            };
            println!(
                "{name:<28} {t:>4} {used:>8} {:>9.1} {:>10.1} {limit:>11}",
                bytes / seconds / 1e9,
                weights / seconds / 1e9,
            );
        }
    }
}
