//! All heads of a step, split over threads, against one query at a time.

use super::super::super::testing::{Rng, assert_same_bits, bf16_bytes};
use super::super::super::{Activations, Isa, Weights, matmul, widen};
use super::super::{CachedRows, LatentAttention, LatentCache, LatentDims, LatentScratch};
use super::reference;

const DIMS: LatentDims = LatentDims {
    num_heads: 5,
    nope: 24,
    rope: 8,
    value: 20,
    rank: 32,
};

/// A step of sequences of `(position, rows)`: keys and values, queries, caches filled up to and with the step's rows.
struct Step {
    kv: Vec<f32>,
    q: Vec<f32>,
    caches: Vec<LatentCache>,
    parts: Vec<(usize, usize)>,
}

impl Step {
    fn new(parts: &[(usize, usize)]) -> Self {
        let mut rng = Rng(61);
        let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        let narrow = bf16_bytes(&rng.normals(DIMS.num_heads * DIMS.kv_rows() * DIMS.rank));
        let mut kv = vec![0.0; narrow.len() / 2];
        widen(Weights::Bf16(&narrow), &mut kv);
        let caches = parts.iter().map(|(position, rows)| {
            let mut cache = LatentCache::new(position + rows, DIMS.widths().width);
            for position in 0..position + rows {
                cache.store(position, &rng.normals(DIMS.widths().width));
            }
            cache
        });
        let caches = caches.collect();
        Self {
            kv,
            q: rng.normals(rows * DIMS.num_heads * DIMS.query()),
            caches,
            parts: parts.to_vec(),
        }
    }

    /// `[rows, heads * value]`, one query at a time.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the scale is f32 in the arithmetic"
    )]
    fn want(&self) -> Vec<f32> {
        let (rank, scale) = (DIMS.rank, (1.0 / (DIMS.query() as f64).sqrt()) as f32);
        let mut out = Vec::new();
        let mut queries = self.q.chunks(DIMS.query());
        let steps = self.parts.iter().zip(&self.caches);
        for (position, cache) in
            steps.flat_map(|(part, cache)| (part.0..part.0 + part.1).map(move |p| (p, cache)))
        {
            let seen: Vec<f32> = (0..=position).flat_map(|p| cache.load(p)).collect();
            for kv in self.kv.chunks(DIMS.kv_rows() * rank) {
                let (keys, values) = kv.split_at(DIMS.nope * rank);
                let (nope, rope) = queries.next().unwrap().split_at(DIMS.nope);
                let mut q = reference::absorb(keys, nope, rank);
                q.extend(rope);
                let mut latent = vec![0.0; rank];
                reference::attend(&q, &seen, rank, scale, &mut latent);
                let mut x = Activations::new();
                x.fill(&latent, rank);
                let mut head = vec![0.0; DIMS.value];
                matmul(
                    Isa::Scalar,
                    Weights::F32(&super::f32_bytes(values)),
                    &x,
                    &mut head,
                );
                out.extend(head);
            }
        }
        out
    }

    /// The same on `threads` threads, heads arriving in two tiles.
    fn got(&mut self, isa: Isa, threads: usize) -> Vec<f32> {
        let mut first = 0;
        let parts = self.parts.iter().zip(&mut self.caches);
        let sequences: Vec<CachedRows<'_>> = parts
            .map(|((position, rows), cache)| {
                let range = first..first + rows;
                first = range.end;
                CachedRows {
                    rows: range,
                    position: *position,
                    cache,
                }
            })
            .collect();
        let kv = bf16_bytes(&self.kv);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let mut scratch = LatentScratch::default();
            scratch.prepare();
            let attention = LatentAttention::new(isa, DIMS, &self.q, &sequences);
            let mut by_head = vec![f32::NAN; DIMS.num_heads * attention.head_len()];
            for heads in [0..3, 3..5] {
                let rows = heads.start * DIMS.kv_rows()..heads.end * DIMS.kv_rows();
                let kv = Weights::Bf16(&kv).rows(rows, DIMS.rank);
                let out = &mut by_head
                    [heads.start * attention.head_len()..heads.end * attention.head_len()];
                attention.par_heads(kv, heads.start, &scratch, out);
            }
            let width = DIMS.num_heads * DIMS.value;
            let mut out = vec![f32::NAN; first * width];
            for (index, out) in out.chunks_mut(7 * width).enumerate() {
                attention.gather(&by_head, index * 7, out);
            }
            out
        })
    }
}

#[test]
fn steps_of_any_rows_and_sequences_have_the_bits_of_lone_queries() {
    for parts in [
        &[(0, 1)][..],
        &[(70, 1)],
        &[(63, 3)],
        &[(0, 17)],
        &[(50, 70)],
        &[(0, 131)],
        &[(10, 1), (90, 1), (0, 1)],
        &[(60, 5), (0, 40), (3, 1), (120, 30)],
    ] {
        let mut step = Step::new(parts);
        let want = step.want();
        for isa in Isa::available() {
            for threads in [1, 2, 3, 9] {
                let got = step.got(isa, threads);
                assert_same_bits(
                    &got,
                    &want,
                    &format!("{isa:?} {parts:?} on {threads} threads"),
                );
            }
        }
    }
}
