//! Matrix times a few vectors, straight from the stored bytes.

use rayon::prelude::*;

use super::activations::Activations;
use super::isa::Isa;
use super::scalar;
use super::weights::Weights;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Weight bytes of one parallel task: long enough for the processor to stream, short enough to balance.
const TASK_BYTES: usize = 256 << 10;
/// Where memory alone is the limit, with one vector and nothing to decode: a memory that is being streamed loses a few percent at
/// every border.
const STREAM_BYTES: usize = 1 << 20;

/// With at least [`MANY`] vectors a task has up to this many rows: the vectors, by then larger than the weights of a few rows,
/// are read again for every task.
const MANY_ROWS: usize = 48;
const MANY: usize = 64;

/// Rows of a smaller task are a multiple of this, so that the kernels' row groups are full.
const TASK_ROWS: usize = 24;
/// With many vectors the kernels take rows in pairs.
const PAIR_ROWS: usize = 2;

/// Multiplies on the current thread: `out[row][t] = w[row] . x[t]`.
///
/// - `w`: `[rows, cols]`, where `cols` is that of `x`.
/// - `out`: `[rows, T]`; all `T` results of a weight row are adjacent.
///
/// The order of every sum is that of the [module](super) documentation, whatever `isa`, `T` or the other rows are.
///
/// # Panics
/// If the lengths disagree.
pub fn matmul(isa: Isa, w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    check(w, x, out);
    serial(isa, w, x, out);
}

/// [`matmul`] with the output rows split over the current rayon pool. A row is never split, and nothing is allocated.
///
/// # Panics
/// If the lengths disagree.
pub fn par_matmul(isa: Isa, w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    check(w, x, out);
    let num_tokens = x.num_rows();
    if out.is_empty() {
        return;
    }
    let (num_rows, rows) = split(w, out.len(), num_tokens);
    if rows >= num_rows {
        return serial(isa, w, x, out);
    }
    out.par_chunks_mut(rows * num_tokens)
        .enumerate()
        .for_each(|(task, out)| rows_of(isa, w, x, task * rows, out));
}

/// Two [`par_matmul`] of matrices of the same shape and kind, split alike; `then` is given the results of the same rows of
/// both, `[some rows, T]`, as soon as they are there.
///
/// # Panics
/// If the lengths disagree.
pub fn par_matmul_pair(
    isa: Isa,
    w: [Weights<'_>; 2],
    x: &Activations,
    out: [&mut [f32]; 2],
    then: impl Fn(&mut [f32], &mut [f32]) + Sync,
) {
    let [first, second] = out;
    check(w[0], x, first);
    check(w[1], x, second);
    if first.is_empty() {
        return;
    }
    assert_eq!(first.len(), second.len(), "results of the same shape");
    let (_, rows) = split(w[0], first.len(), x.num_rows());
    let each = rows * x.num_rows();
    first
        .par_chunks_mut(each)
        .zip(second.par_chunks_mut(each))
        .enumerate()
        .for_each(|(task, (first, second))| {
            rows_of(isa, w[0], x, task * rows, first);
            rows_of(isa, w[1], x, task * rows, second);
            then(first, second);
        });
}

/// Rows there are, and rows of a task on the current pool.
fn split(w: Weights<'_>, results: usize, num_tokens: usize) -> (usize, usize) {
    let num_rows = results / num_tokens;
    let threads = rayon::current_num_threads();
    let bytes = w.num_bytes();
    let rows = match w {
        Weights::Bf16(_) | Weights::F32(_) if num_tokens == 1 => {
            task_rows(num_rows, bytes, STREAM_BYTES, threads)
        }
        _ if num_tokens >= MANY => equal_rows(num_rows, threads),
        // The work grows with weights and vectors alike.
        _ => task_rows(num_rows, bytes * num_tokens, TASK_BYTES, threads),
    };
    (num_rows, rows)
}

/// The results of the rows from `first` on, as many as `out` takes.
fn rows_of(isa: Isa, w: Weights<'_>, x: &Activations, first: usize, out: &mut [f32]) {
    let rows = first..first + out.len() / x.num_rows();
    serial(isa, w.rows(rows, x.cols()), x, out);
}

/// Rows of one task: about `task_bytes` of all `bytes`, at least two tasks a thread where there are that many row groups.
fn task_rows(num_rows: usize, bytes: usize, task_bytes: usize, threads: usize) -> usize {
    if threads <= 1 {
        return num_rows;
    }
    let by_bytes = num_rows * task_bytes / bytes.max(1);
    let by_threads = num_rows.div_ceil(threads * 2);
    by_bytes.min(by_threads).max(1).next_multiple_of(TASK_ROWS)
}

/// Rows of one task with many vectors, up to [`MANY_ROWS`]: such tasks are few, so they are made equal and as many for each thread.
fn equal_rows(num_rows: usize, threads: usize) -> usize {
    if threads <= 1 {
        return num_rows;
    }
    let tasks = num_rows.div_ceil(MANY_ROWS).next_multiple_of(threads);
    num_rows.div_ceil(tasks).next_multiple_of(PAIR_ROWS)
}

fn check(w: Weights<'_>, x: &Activations, out: &[f32]) {
    if x.num_rows() == 0 {
        assert!(
            out.is_empty(),
            "no vectors, but {} results asked for",
            out.len()
        );
        return;
    }
    let rows = w.num_rows(x.cols());
    assert_eq!(
        out.len(),
        rows * x.num_rows(),
        "results of {rows} rows times {} vectors",
        x.num_rows()
    );
}

fn serial(isa: Isa, w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    if out.is_empty() {
        return;
    }
    match isa {
        Isa::Scalar => scalar::matmul(w, x, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx2` exists only if `detect` saw AVX2 and FMA.
        Isa::Avx2(_) => unsafe { avx2::matmul(w, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx512` exists only if `detect` saw all the features that its bodies are compiled for.
        Isa::Avx512(_) => unsafe { avx512::matmul(w, x, out) },
    }
}

/// `[rows, T]` results of [`matmul`] to `T` vectors `[T, rows]`.
///
/// # Panics
/// If the lengths differ or `t` does not divide them.
pub fn transpose(out: &[f32], t: usize, into: &mut [f32]) {
    assert_eq!(out.len(), into.len(), "transposed lengths");
    if t <= 1 {
        into.copy_from_slice(out);
        return;
    }
    assert!(
        out.len().is_multiple_of(t),
        "{} results are not rows of {t}",
        out.len()
    );
    let rows = out.len() / t;
    for (first, block) in (0..).step_by(16).zip(out.chunks(16 * t)) {
        for (token, vector) in into.chunks_exact_mut(rows).enumerate() {
            for (value, results) in vector[first..].iter_mut().zip(block.chunks_exact(t)) {
                *value = results[token];
            }
        }
    }
}

#[cfg(test)]
mod tests;
