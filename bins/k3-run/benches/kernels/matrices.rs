//! Matrix times one vector and times many.

use std::hint::black_box;

use k3_run::kernels::{Activations, Weights, par_matmul};

use crate::Options;
use crate::limits::{Limits, beside_reading, fastest};
use crate::pool::{EXPERT_BYTES, INNER, LATENT, Pool, next};

/// Vectors at once; one is what decoding does, the others prefill chunks and what they leave to each expert.
const TOKENS: [usize; 10] = [1, 2, 4, 6, 8, 16, 24, 32, 64, 256];

/// Bytes one repetition reads at least, so that no cache holds them.
const READ_BYTES: usize = 256 << 20;

fn vectors(cols: usize, count: usize) -> Activations {
    let values: Vec<f32> = (0..count * cols)
        .map(|i| (i % 251) as f32 / 125.0 - 1.0)
        .collect();
    let mut x = Activations::new();
    x.fill(&values, cols);
    x
}

/// A kernel's time for `weights` weights in `bytes` bytes and `tokens` vectors.
struct Line<'a> {
    name: &'a str,
    weights: usize,
    bytes: usize,
    tokens: usize,
}

impl Line<'_> {
    /// Times `work` by one thread and by all: one vector against reading as many bytes of `pool` by as many threads.
    #[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
    fn run(&self, options: &Options, limits: &Limits, pool: &Pool, mut work: impl FnMut() + Send) {
        let bytes = &pool.bytes()[..self.bytes.min(pool.bytes().len())];
        let times = [0, 1].map(|i| {
            limits.pools[i].install(|| {
                if self.tokens == 1 {
                    beside_reading(options.isa, bytes, &mut work)
                } else {
                    [fastest(&mut work), f64::NAN]
                }
            })
        });
        let seconds = times.map(|[work, _]| work);
        let threads = limits.threads() as f64;
        let per_core =
            |i: usize| self.weights as f64 / seconds[i] / 1e9 / if i == 0 { 1.0 } else { threads };
        let share = |i: usize| {
            if self.tokens == 1 {
                let [work, read] = times[i];
                read / bytes.len() as f64 * self.bytes as f64 / work
            } else {
                (2 * self.weights * self.tokens) as f64 / seconds[i] / limits.arithmetic[i]
            }
        };
        println!(
            "{:<24} {:>4} {:>8.1} {:>8.1} {:>9.1} {:>9.1} {:>8.0} {:>8.0} {:>8.2}  {}",
            self.name,
            self.tokens,
            self.bytes as f64 / seconds[0] / 1e9,
            self.bytes as f64 / seconds[1] / 1e9,
            per_core(0),
            per_core(1),
            100.0 * share(0),
            100.0 * share(1),
            seconds[0] / seconds[1],
            if self.tokens == 1 {
                "reading, in turns"
            } else {
                "multiply-adds"
            },
        );
    }
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
fn heading(threads: usize) {
    println!(
        "\n{:<24} {:>4} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8}",
        "", "", "GB/s", "GB/s", "Gw/s/core", "Gw/s/core", "% of", "% of", "times"
    );
    println!(
        "{:<24} {:>4} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8}  limit",
        "shape",
        "rows",
        "1 thr",
        format!("{threads} thr"),
        "1 thr",
        format!("{threads} thr"),
        "limit, 1",
        format!("limit, {threads}"),
        "faster"
    );
}

/// What the engine multiplies at a time: a tile of the trunk as k3-pack cuts it.
const TILE: (usize, usize) = (585, 7168);

/// bf16 at the shapes of the trunk and the head.
pub(crate) fn dense(options: &Options, limits: &Limits, pool: &Pool) {
    heading(limits.threads());
    for (rows, cols) in [
        (12288, 7168),
        (7168, 12288),
        (33792, 7168),
        (163_840, 7168),
        TILE,
    ] {
        let name = format!("bf16 [{rows}, {cols}]");
        for tokens in TOKENS {
            // The head meets the last row only; larger shapes tell nothing more about many vectors.
            if !options.wants(&format!("{name} x{tokens} "))
                || (tokens > 1 && ![(12288, 7168), TILE].contains(&(rows, cols)))
            {
                continue;
            }
            let weights = rows * cols;
            let least = if tokens == 1 {
                READ_BYTES
            } else {
                READ_BYTES / 4
            };
            let copies = least.div_ceil(weights * 2);
            let line = Line {
                name: &name,
                weights: weights * copies,
                bytes: weights * copies * 2,
                tokens,
            };
            let x = vectors(cols, tokens);
            let mut out = vec![0.0; rows * tokens];
            let (mut i, isa) = (0, options.isa);
            line.run(options, limits, pool, || {
                for _ in 0..copies {
                    par_matmul(isa, pool.bf16(weights, i), &x, &mut out);
                    i += 1;
                }
                black_box(&out);
            });
        }
    }
}

/// Routed experts, each time others, in random order.
pub(crate) fn experts(options: &Options, limits: &Limits, pool: &mut Pool) {
    let names = ["mxfp4 [3072, 3584]", "mxfp4 [3584, 3072]", "mxfp4 expert"];
    let wanted = |name: &str, tokens: usize| options.wants(&format!("{name} x{tokens} "));
    if !names
        .iter()
        .any(|name| TOKENS.iter().any(|&t| wanted(name, t)))
    {
        return;
    }
    pool.fill_with_experts();
    let pool = &*pool;
    let mut seed = 1;
    for (name, matrices) in names.into_iter().zip([&[0][..], &[2], &[0, 1, 2]]) {
        for tokens in TOKENS {
            if !wanted(name, tokens) {
                continue;
            }
            let bytes = EXPERT_BYTES / 3 * matrices.len();
            let copies = if tokens == 1 {
                READ_BYTES.div_ceil(bytes)
            } else {
                4
            };
            let weights = LATENT * INNER * matrices.len() * copies;
            let line = Line {
                name,
                weights,
                bytes: bytes * copies,
                tokens,
            };
            let (latent, inner) = (vectors(LATENT, tokens), vectors(INNER, tokens));
            let mut out = vec![0.0; LATENT * tokens];
            let isa = options.isa;
            line.run(options, limits, pool, || {
                for _ in 0..copies {
                    let expert = usize::try_from(next(&mut seed)).unwrap_or(0) % pool.num_experts();
                    for &matrix in matrices {
                        let w: Weights<'_> = pool.expert(expert, matrix);
                        if matrix == 2 {
                            par_matmul(isa, w, &inner, &mut out);
                        } else {
                            par_matmul(isa, w, &latent, &mut out[..INNER * tokens]);
                        }
                    }
                }
                black_box(&out);
            });
        }
    }
}
