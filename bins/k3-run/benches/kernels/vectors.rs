//! What is not a matrix: recurrence, convolution, norms, gates, for one row and for many.

use std::hint::black_box;

use k3_run::kernels::{
    DeltaInput, Isa, attention_residual, conv_silu, delta_step, math::situ_slice, rms_norm,
};
use rayon::prelude::*;

use crate::Options;
use crate::limits::{Limits, fastest};

const HIDDEN: usize = 7168;
const HEADS: usize = 96;
const HEAD_DIM: usize = 128;
const DENSE_INNER: usize = 33792;

fn values(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 251) as f32 / 500.0).collect()
}

/// Prints one kernel's microseconds a row, GB/s of the bytes it must read and write, and GFLOP/s.
#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
fn line(
    limits: &Limits,
    name: &str,
    rows: usize,
    bytes: usize,
    flops: usize,
    work: impl FnMut() + Send,
) {
    let seconds = limits.pools[1].install(|| fastest(work));
    println!(
        "{name:<34} {rows:>4} {:>10.1} {:>8.1} {:>9.1} {:>7.1}",
        seconds * 1e6 / rows as f64,
        bytes as f64 / seconds / 1e9,
        flops as f64 / seconds / 1e9,
        100.0 * flops as f64 / seconds / limits.arithmetic[1],
    );
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
pub(crate) fn run(options: &Options, limits: &Limits) {
    println!(
        "\n{:<34} {:>4} {:>10} {:>8} {:>9} {:>7}",
        "kernel, all threads", "rows", "us a row", "GB/s", "GFLOP/s", "% FMA"
    );
    for rows in [1, 64] {
        let wants = |name: &str| options.wants(&format!("{name} x{rows} "));
        if wants("delta") {
            delta(limits, options.isa, rows);
        }
        if wants("conv") {
            conv(limits, options.isa, rows);
        }
        if wants("norm") {
            norm(limits, rows);
        }
        if wants("residual") {
            residual(limits, rows);
        }
        if wants("situ") {
            situ(limits, options.isa, rows);
        }
    }
}

/// Every head of one KDA layer.
fn delta(limits: &Limits, isa: Isa, rows: usize) {
    let mut states = vec![0.0; HEADS * HEAD_DIM * HEAD_DIM];
    let (x, alpha) = (values(HEAD_DIM), vec![0.9; HEAD_DIM]);
    let bytes = 2 * 4 * states.len();
    // Decay; read: product and sum; write: product and sum; output: product and sum.
    let flops = rows * 7 * states.len();
    line(limits, "delta 96 x [128, 128]", rows, bytes, flops, || {
        states
            .par_chunks_mut(HEAD_DIM * HEAD_DIM)
            .for_each(|state| {
                let (mut u, mut out) = ([0.0; HEAD_DIM], [0.0; HEAD_DIM]);
                for _ in 0..rows {
                    let input = DeltaInput {
                        q: &x,
                        k: &x,
                        v: &x,
                        alpha: &alpha,
                        beta: 0.5,
                    };
                    delta_step(isa, state, input, &mut u, &mut out);
                }
                black_box(&out);
            });
    });
}

fn conv(limits: &Limits, isa: Isa, rows: usize) {
    let width = HEADS * HEAD_DIM;
    let (x, taps) = (values(rows * width), values(width * 4));
    let (mut history, mut out) = (vec![0.0; 3 * width], vec![0.0; rows * width]);
    let bytes = 4 * (2 * x.len() + 2 * history.len() + taps.len());
    line(
        limits,
        "conv [12288] 4 taps, one thread",
        rows,
        bytes,
        rows * width * 8,
        || {
            conv_silu(isa, &x, &mut history, &taps, width, &mut out);
            black_box(&out);
        },
    );
}

fn norm(limits: &Limits, rows: usize) {
    let (x, w) = (values(rows * HIDDEN), values(HIDDEN));
    let mut out = vec![0.0; x.len()];
    line(
        limits,
        "norm [7168]",
        rows,
        8 * x.len(),
        4 * x.len(),
        || {
            out.par_chunks_mut(HIDDEN)
                .zip(x.par_chunks(HIDDEN))
                .for_each(|(out, x)| rms_norm(x, &w, 1e-5, out));
            black_box(&out);
        },
    );
}

/// The most sources the model mixes: eight snapshots and the running sum.
fn residual(limits: &Limits, rows: usize) {
    const SOURCES: usize = 9;
    let (x, w) = (values(SOURCES * HIDDEN), values(HIDDEN));
    let sources: [&[f32]; SOURCES] = std::array::from_fn(|i| &x[i * HIDDEN..(i + 1) * HIDDEN]);
    let mut out = vec![0.0; rows * HIDDEN];
    let bytes = 4 * rows * (x.len() + HIDDEN);
    line(
        limits,
        "residual of nine [7168]",
        rows,
        bytes,
        rows * x.len() * 6,
        || {
            out.par_chunks_mut(HIDDEN).for_each(|out| {
                attention_residual(sources.iter().copied(), &w, 1e-5, out, &mut [0.0; SOURCES]);
            });
            black_box(&out);
        },
    );
}

fn situ(limits: &Limits, isa: Isa, rows: usize) {
    let gate = values(rows * DENSE_INNER);
    let (inner, mut up) = (gate.clone(), gate.clone());
    line(limits, "situ [33792]", rows, 12 * gate.len(), 0, || {
        up.par_chunks_mut(4096)
            .zip(gate.par_chunks(4096))
            .for_each(|(up, gate)| situ_slice(isa, gate, &inner[..gate.len()], (4.0, 25.0), up));
        black_box(&up);
    });
}
