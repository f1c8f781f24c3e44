//! Absorb, attend and expand for the heads of a tile, split over the threads.

use std::{ops::Range, sync::Mutex};

use rayon::prelude::*;

use super::super::activations::Activations;
use super::super::isa::Isa;
use super::super::matmul::matmul;
use super::super::weights::Weights;
use super::{Group, LatentCache, LatentWidths, QUERIES, Strided, absorb};

/// Most rows of one task: bounds what a thread holds.
const TASK_ROWS: usize = 64;
/// Most attended latents a thread holds: rows of a task times its heads.
pub const TASK_LATENTS: usize = 2 * TASK_ROWS;
/// Queries from which on more of them make a block no cheaper.
const ENOUGH_QUERIES: usize = 32;
/// Fewest rows that a task is cut down to.
const FEWEST_ROWS: usize = 4;

/// Dimensions of the latent attention of a layer (specification 3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentDims {
    /// Heads (`H_m`).
    pub num_heads: usize,
    /// Query width of a head that meets the latent through the keys (`d_n`).
    pub nope: usize,
    /// Query width of a head that meets the shared slice (`d_r`).
    pub rope: usize,
    /// Value width of a head (`d_v`).
    pub value: usize,
    /// Width of the latent (`r`).
    pub rank: usize,
}

impl LatentDims {
    /// Query width of one head.
    pub fn query(self) -> usize {
        self.nope + self.rope
    }

    /// Widths of a cached position.
    pub fn widths(self) -> LatentWidths {
        LatentWidths {
            rank: self.rank,
            width: self.rank + self.rope,
        }
    }

    /// Rows of the key and value expansion that belong to one head: its keys, then its values.
    pub fn kv_rows(self) -> usize {
        self.nope + self.value
    }
}

/// One sequence's part in a step.
#[derive(Debug)]
pub struct CachedRows<'a> {
    /// Rows of the step that are this sequence's, in order.
    pub rows: Range<usize>,
    /// Position of the first of them.
    pub position: usize,
    /// The sequence's cache, these positions included.
    pub cache: &'a mut LatentCache,
}

/// Buffers of every thread, grown by the first step and then kept.
#[derive(Debug, Default)]
pub struct LatentScratch(Vec<Mutex<ThreadScratch>>);

#[derive(Debug, Default)]
struct ThreadScratch {
    group: Option<Group>,
    /// `[heads, rows, rank]` of one task.
    attended: Vec<f32>,
    values_in: Activations,
}

impl LatentScratch {
    /// Makes sure that every thread of the current pool has its own.
    pub fn prepare(&mut self) {
        let threads = rayon::current_num_threads();
        if self.0.len() < threads {
            self.0.resize_with(threads, Mutex::default);
        }
    }
}

/// The queries of a step, attended tile by tile of whole heads.
#[derive(Clone, Copy, Debug)]
pub struct LatentAttention<'a> {
    isa: Isa,
    dims: LatentDims,
    /// `[rows, heads * (nope + rope)]`.
    q: &'a [f32],
    sequences: &'a [CachedRows<'a>],
    rows: usize,
    rows_per_task: usize,
}

impl<'a> LatentAttention<'a> {
    /// - `q`: `[rows, num_heads * (nope + rope)]`.
    /// - `sequences`: whose rows are all the rows of the step.
    ///
    /// # Panics
    /// If the length is not that of whole rows.
    pub fn new(isa: Isa, dims: LatentDims, q: &'a [f32], sequences: &'a [CachedRows<'a>]) -> Self {
        let width = dims.num_heads * dims.query();
        assert!(
            q.len().is_multiple_of(width),
            "queries of {} rows",
            q.len() / width
        );
        let rows = q.len() / width;
        let by_threads = (2 * rayon::current_num_threads())
            .div_ceil(dims.num_heads)
            .min(rows.div_ceil(FEWEST_ROWS));
        let parts = rows.div_ceil(TASK_ROWS).max(by_threads).max(1);
        Self {
            isa,
            dims,
            q,
            sequences,
            rows,
            rows_per_task: rows.div_ceil(parts),
        }
    }

    /// Values of one head in the results, an internal layout that [`gather`](Self::gather) reads.
    pub fn head_len(&self) -> usize {
        self.row_parts() * self.part_len()
    }

    fn row_parts(&self) -> usize {
        self.rows.div_ceil(self.rows_per_task.max(1))
    }

    fn part_len(&self) -> usize {
        self.rows_per_task * self.dims.value
    }

    /// Attends with the heads of one tile, on all threads of the current pool; nothing is allocated once buffers have grown.
    ///
    /// - `kv`: `[heads * (nope + value), rank]`, whole heads from `first_head` on, bf16 or f32.
    /// - `out`: [`head_len`](Self::head_len) values for each of these heads.
    ///
    /// # Panics
    /// If the lengths disagree or `scratch` was not [prepared](LatentScratch::prepare).
    pub fn par_heads(
        &self,
        kv: Weights<'_>,
        first_head: usize,
        scratch: &LatentScratch,
        out: &mut [f32],
    ) {
        if out.is_empty() {
            return;
        }
        let heads = out.len() / self.head_len();
        let rows = heads * self.dims.kv_rows();
        assert_eq!(kv.num_rows(self.dims.rank), rows, "rows of {heads} heads");
        let task_heads = self.heads_per_task(heads);
        let parts = self.row_parts();
        // Tasks are claimed one by one, so that no thread is left with several while others have none.
        out.par_chunks_mut(task_heads * self.part_len())
            .enumerate()
            .with_max_len(1)
            .for_each(|(task, out)| {
                let first = task * task_heads / parts;
                let begin = task % parts * self.rows_per_task;
                let task = Task {
                    heads: first_head + first..first_head + first + out.len() / self.part_len(),
                    rows: if parts == 1 {
                        0..self.rows
                    } else {
                        begin..self.rows.min(begin + self.rows_per_task)
                    },
                    kv: kv.rows(first * self.dims.kv_rows()..rows, self.dims.rank),
                };
                let thread = rayon::current_thread_index().unwrap_or(0);
                let mut own = scratch.0[thread]
                    .lock()
                    .expect("a panicking task ends the step");
                self.run(&task, &mut own, out);
            });
    }

    /// Few rows: several heads a task, as many as fill a group and still give every thread a task.
    fn heads_per_task(&self, heads: usize) -> usize {
        if self.row_parts() > 1 {
            return 1;
        }
        let longest = self.sequences.iter().map(|s| s.rows.len()).max();
        (ENOUGH_QUERIES / longest.unwrap_or(1).max(1))
            .min(TASK_LATENTS / self.rows)
            .min(heads.div_ceil(rayon::current_num_threads()))
            .max(1)
    }

    fn run(&self, task: &Task<'_>, own: &mut ThreadScratch, out: &mut [f32]) {
        let (dims, rows) = (self.dims, task.rows.len());
        let len = task.heads.len() * rows * dims.rank;
        if own.attended.len() < len {
            own.attended.resize(len, 0.0);
        }
        let group = match &mut own.group {
            Some(group) if group.widths() == dims.widths() => group,
            other => other.insert(Group::new(dims.widths())),
        };
        let attended = &mut own.attended[..len];
        let per_group = (QUERIES / task.heads.len()).max(1);
        for sequence in self.sequences {
            let mut begin = sequence.rows.start.max(task.rows.start);
            let end = sequence.rows.end.min(task.rows.end);
            while begin < end {
                let part = begin..end.min(begin + per_group);
                begin = part.end;
                self.attend(task, sequence, part, group, attended);
            }
        }
        let heads = attended.chunks_exact(rows * dims.rank);
        for ((index, attended), out) in heads.enumerate().zip(out.chunks_mut(self.part_len())) {
            own.values_in.fill(attended, dims.rank);
            let values = task.head(index, dims, dims.nope..dims.kv_rows());
            matmul(
                self.isa,
                values,
                &own.values_in,
                &mut out[..rows * dims.value],
            );
        }
    }

    /// Rows `part` of one sequence, by all heads of the task: queries are ordered by row, so that each sees at least what the
    /// one before it does.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the scale is f32 in the arithmetic"
    )]
    fn attend(
        &self,
        task: &Task<'_>,
        sequence: &CachedRows<'_>,
        part: Range<usize>,
        group: &mut Group,
        attended: &mut [f32],
    ) {
        let (dims, heads) = (self.dims, task.heads.len());
        let (width, stride) = (dims.num_heads * dims.query(), group.stride());
        let queries = &mut group.queries_mut()[..part.len() * heads * stride];
        for (index, head) in task.heads.clone().enumerate() {
            let q = Strided {
                values: &self.q[part.start * width + head * dims.query()..],
                stride: width,
                len: dims.nope,
            };
            let keys = task.head(index, dims, 0..dims.nope);
            let queries = &mut queries[index * stride..];
            absorb(self.isa, keys, dims.rank, q, queries, heads * stride);
            for (row, query) in queries.chunks_mut(heads * stride).enumerate() {
                let rope = &q.values[row * width + dims.nope..][..dims.rope];
                query[dims.rank..dims.rank + dims.rope].copy_from_slice(rope);
            }
        }
        let mut visible = [0; QUERIES];
        let visible = &mut visible[..part.len() * heads];
        for (row, visible) in part.clone().zip(visible.chunks_mut(heads)) {
            visible.fill(sequence.position + row - sequence.rows.start + 1);
        }
        let cache = sequence.cache.visible(visible[visible.len() - 1]);
        // The unrotated slots count in the scale: nope + rope.
        let scale = (1.0 / (dims.query() as f64).sqrt()) as f32;
        group.attend(self.isa, scale, cache, visible);
        for (row, first) in part.zip((0..).step_by(heads)) {
            for index in 0..heads {
                let at = index * task.rows.len() + row - task.rows.start;
                let out = &mut attended[at * dims.rank..][..dims.rank];
                group.result(self.isa, first + index, out);
            }
        }
    }

    /// Lays the results of all heads side by side: `out` becomes `[rows, num_heads * value]` for the rows from `first` on.
    ///
    /// - `by_head`: what [`par_heads`](Self::par_heads) wrote, of all heads.
    ///
    /// # Panics
    /// If the lengths disagree.
    pub fn gather(&self, by_head: &[f32], first: usize, out: &mut [f32]) {
        let value = self.dims.value;
        let width = self.dims.num_heads * value;
        for (head, results) in by_head.chunks_exact(self.head_len()).enumerate() {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                let (part, row) = (row / self.rows_per_task, row % self.rows_per_task);
                let rows = self
                    .rows_per_task
                    .min(self.rows - part * self.rows_per_task);
                let results = &results[part * self.part_len()..][..rows * value];
                let out = &mut out[head * value..(head + 1) * value];
                for (out, results) in out.iter_mut().zip(results.chunks_exact(rows)) {
                    *out = results[row];
                }
            }
        }
    }
}

/// Some heads by some rows.
struct Task<'a> {
    heads: Range<usize>,
    rows: Range<usize>,
    /// Keys and values of these heads, and perhaps of more.
    kv: Weights<'a>,
}

impl Task<'_> {
    /// The given rows of the task's head `index`.
    fn head(&self, index: usize, dims: LatentDims, rows: Range<usize>) -> Weights<'_> {
        let first = index * dims.kv_rows();
        self.kv
            .rows(first + rows.start..first + rows.end, dims.rank)
    }
}
