//! A group of queries that meet the same cache: each block of positions is read once for all of them.

#![expect(
    clippy::inline_always,
    reason = "only an inlined body is compiled, and vectorised, for the caller's features"
)]

use std::ops::Range;

use super::super::activations::{LANES, Line};
use super::super::isa::Isa;
use super::super::math::{exp, for_each_isa};
use super::{POSITIONS, QUERIES, cache::even_first, plain};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Widths of the latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentWidths {
    /// Values of the latent, which are attended (`r`).
    pub rank: usize,
    /// Values that take part in a score: the latent and the shared slice (`r + d_r`).
    pub width: usize,
}

impl LatentWidths {
    fn lines(self) -> usize {
        self.width.div_ceil(LANES)
    }

    fn value_lines(self) -> usize {
        self.rank.div_ceil(LANES)
    }
}

/// Scores, later weights, of one block: `[POSITIONS, QUERIES]`.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Scores(pub(super) [[f32; QUERIES]; POSITIONS]);

/// Sixteen running sums in storage order.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Sums(pub(super) [f64; LANES]);

/// One block of positions and the queries that see some of it.
pub(super) struct Block<'a> {
    /// All queries, `[queries, lines]`.
    all: &'a [Line],
    /// Those that see a position of the block.
    pub(super) active: Range<usize>,
    /// How many positions of the block each query sees; ascending.
    pub(super) counts: &'a [usize; QUERIES],
    /// `[positions, lines]`: what the last query sees.
    pub(super) rows: &'a [[f32; LANES]],
    /// What is read after this block.
    pub(super) next: &'a [[f32; LANES]],
    pub(super) lines: usize,
    pub(super) value_lines: usize,
}

impl Block<'_> {
    pub(super) fn positions(&self) -> usize {
        self.rows.len() / self.lines
    }

    /// Query `q`, `[lines]`.
    pub(super) fn query(&self, q: usize) -> &[Line] {
        &self.all[q * self.lines..][..self.lines]
    }

    /// The active queries with their numbers.
    pub(super) fn queries(&self) -> impl Iterator<Item = (usize, &[Line])> {
        self.active.clone().map(|q| (q, self.query(q)))
    }

    /// How many of the queries from `q` on, `most` at most, see as much of the block as `q` does.
    pub(super) fn alike(&self, q: usize, most: usize) -> usize {
        let counts = &self.counts[q..self.active.end];
        counts
            .iter()
            .take(most)
            .take_while(|n| **n == counts[0])
            .count()
    }
}

/// The running softmax of every query.
#[derive(Debug)]
struct Running {
    max: [f32; QUERIES],
    /// What the last block made of the sums before it.
    shrink: [f64; QUERIES],
    total: [f64; QUERIES],
}

/// Buffers for the queries of one group and their results.
#[derive(Debug)]
pub struct Group {
    widths: LatentWidths,
    queries: Vec<Line>,
    scores: Box<Scores>,
    running: Running,
    sums: Vec<Sums>,
    #[cfg(target_arch = "x86_64")]
    tiles: Vec<avx512::Tile>,
}

impl Group {
    /// Buffers for up to [`QUERIES`] queries.
    ///
    /// # Panics
    /// If the rank is zero or more than the width.
    pub fn new(widths: LatentWidths) -> Self {
        assert!(
            widths.rank > 0 && widths.rank <= widths.width,
            "latent width {} of {}",
            widths.rank,
            widths.width
        );
        Self {
            widths,
            queries: vec![Line::default(); QUERIES * widths.lines()],
            scores: Box::new(Scores([[0.0; QUERIES]; POSITIONS])),
            running: Running {
                max: [0.0; QUERIES],
                shrink: [0.0; QUERIES],
                total: [0.0; QUERIES],
            },
            sums: vec![Sums::default(); QUERIES * widths.value_lines()],
            #[cfg(target_arch = "x86_64")]
            tiles: vec![avx512::Tile::default(); 2 * avx512::tiles(widths.lines())],
        }
    }

    /// The widths it was made for.
    pub fn widths(&self) -> LatentWidths {
        self.widths
    }

    /// Values from the begin of one query to the next in [`queries_mut`](Self::queries_mut).
    pub fn stride(&self) -> usize {
        self.widths.lines() * LANES
    }

    /// All queries, each [`stride`](Self::stride) values of which the first `width` are to be set before every
    /// [`attend`](Self::attend).
    pub fn queries_mut(&mut self) -> &mut [f32] {
        as_values(&mut self.queries)
    }

    /// Attends with the first `visible.len()` queries over the positions each sees; see the [module](super) for the order.
    ///
    /// - `cache`: [`LatentCache::visible`](super::LatentCache::visible) of at least what the last query sees.
    /// - `visible`: positions that each query sees, ascending.
    ///
    /// # Panics
    /// If there are no queries or too many, one sees nothing or more than `cache`, or they are not ascending.
    pub fn attend(&mut self, isa: Isa, scale: f32, cache: &[[f32; LANES]], visible: &[usize]) {
        let (lines, value_lines) = (self.widths.lines(), self.widths.value_lines());
        let count = visible.len();
        assert!(
            (1..=QUERIES).contains(&count),
            "{count} queries of one group"
        );
        let last = visible[count - 1];
        assert!(
            visible[0] > 0 && visible.is_sorted() && last * lines <= cache.len(),
            "visible positions {visible:?} of {}",
            cache.len() / lines
        );
        self.begin(count);
        let mut counts = [0; QUERIES];
        for first in (0..last).step_by(POSITIONS) {
            for (count, visible) in counts.iter_mut().zip(visible) {
                *count = visible.saturating_sub(first).min(POSITIONS);
            }
            let end = last.min(first + POSITIONS);
            let block = Block {
                all: &self.queries,
                active: visible.partition_point(|v| *v <= first)..count,
                counts: &counts,
                rows: &cache[first * lines..end * lines],
                next: &cache[end * lines..last.min(end + POSITIONS) * lines],
                lines,
                value_lines,
            };
            match isa {
                Isa::Scalar => plain::scores(&block, &mut self.scores),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Avx2` exists only if `Avx2::detect` saw AVX2 and FMA.
                Isa::Avx2(_) => unsafe { avx2::scores(&block, &mut self.scores) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Avx512` exists only if `Avx512::detect` saw these features.
                Isa::Avx512(_) => unsafe {
                    avx512::scores(&block, &mut self.tiles, &mut self.scores);
                },
            }
            softmax(isa, &block, scale, &mut self.scores, &mut self.running);
            values(
                isa,
                &block,
                &self.scores,
                &self.running.shrink,
                &mut self.sums,
            );
        }
    }

    fn begin(&mut self, count: usize) {
        for query in self
            .queries
            .chunks_exact_mut(self.widths.lines())
            .take(count)
        {
            let values = as_values(query);
            values[self.widths.width..].fill(0.0);
            even_first(values.as_chunks_mut().0);
        }
        self.running.max.fill(f32::NEG_INFINITY);
        self.running.total.fill(0.0);
        self.sums[..count * self.widths.value_lines()].fill(Sums::default());
    }

    /// The attended latent of query `q`, `[rank]`.
    ///
    /// # Panics
    /// If the length is another.
    pub fn result(&self, isa: Isa, q: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.widths.rank, "values of an attended latent");
        let lines = self.widths.value_lines();
        let sums = &self.sums[q * lines..][..lines];
        divide(isa, sums, self.running.total[q], out);
    }
}

fn as_values(lines: &mut [Line]) -> &mut [f32] {
    let len = lines.len() * LANES;
    // SAFETY: a line is exactly sixteen f32, without padding, and the borrow is passed on.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), len) }
}

fn values(isa: Isa, block: &Block<'_>, weights: &Scores, shrink: &[f64], sums: &mut [Sums]) {
    match isa {
        Isa::Scalar => plain::values(block, weights, shrink, sums),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx2` exists only if `Avx2::detect` saw AVX2 and FMA.
        Isa::Avx2(_) => unsafe { avx2::values(block, weights, shrink, sums) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx512` exists only if `Avx512::detect` saw these features.
        Isa::Avx512(_) => unsafe { avx512::values(block, weights, shrink, sums) },
    }
}

for_each_isa! {
    /// Scores to weights, sixteen queries at a time.
    fn softmax(block: &Block<'_>, scale: f32, scores: &mut Scores, running: &mut Running) {
        for first in (0..QUERIES).step_by(LANES) {
            if first < block.active.end && block.active.start < first + LANES {
                sixteen(first, block, scale, scores, running);
            }
        }
    }
}

/// The softmax of the queries from `first` on. A position that a query does not see gets the score -infinity, which raises
/// no maximum and whose weight of +0 changes no total; the values leave it out.
#[inline(always)]
fn sixteen(
    first: usize,
    block: &Block<'_>,
    scale: f32,
    scores: &mut Scores,
    running: &mut Running,
) {
    let lanes = first..first + LANES;
    let mut seen = [0u32; LANES];
    for (seen, count) in seen.iter_mut().zip(&block.counts[lanes.clone()]) {
        *seen = u32::try_from(*count).unwrap_or(u32::MAX);
    }
    let before: [f32; LANES] = std::array::from_fn(|lane| running.max[first + lane]);
    let mut max = before;
    let rows = &mut scores.0[..block.positions()];
    for (s, row) in (0u32..).zip(rows.iter_mut()) {
        let Some(row) = row[first..].first_chunk_mut::<LANES>() else {
            return;
        };
        for lane in 0..LANES {
            let score = row[lane] * scale;
            let score = if s < seen[lane] {
                score
            } else {
                f32::NEG_INFINITY
            };
            row[lane] = score;
            max[lane] = if score > max[lane] { score } else { max[lane] };
        }
    }
    let mut totals = [0f64; LANES];
    for row in rows.iter_mut() {
        let Some(row) = row[first..].first_chunk_mut::<LANES>() else {
            return;
        };
        for lane in 0..LANES {
            row[lane] = exp(row[lane] - max[lane]);
        }
        for lane in 0..LANES {
            totals[lane] += f64::from(row[lane]);
        }
    }
    for lane in 0..LANES {
        if seen[lane] > 0 {
            let q = first + lane;
            running.shrink[q] = f64::from(exp(before[lane] - max[lane]));
            running.max[q] = max[lane];
            running.total[q] = running.total[q] * running.shrink[q] + totals[lane];
        }
    }
}

for_each_isa! {
    /// Sums over the total, in natural order.
    #[expect(clippy::cast_possible_truncation, reason = "the one rounding of the contract")]
    fn divide(sums: &[Sums], total: f64, out: &mut [f32]) {
        for (sums, out) in sums.iter().zip(out.chunks_mut(LANES)) {
            let mut quotients = [0f32; LANES];
            for (quotient, sum) in quotients.iter_mut().zip(sums.0) {
                *quotient = (sum / total) as f32;
            }
            for (i, out) in out.iter_mut().enumerate() {
                *out = quotients[Line::position(i)];
            }
        }
    }
}
