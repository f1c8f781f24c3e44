//! Latent attention of one layer, by context.
//!
//! Counted are 2 x 104,448 operations for every row and position it sees (96 heads, scores over 576 values, sums over 512), and
//! the cache once a row; the absorbed keys and expanded values are in the time.

use std::hint::black_box;

use k3_run::kernels::attention::{
    CachedRows, LatentAttention, LatentCache, LatentDims, LatentScratch,
};
use k3_run::kernels::{Isa, Weights};

use crate::Options;
use crate::limits::{Limits, fastest};

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
pub(crate) fn run(options: &Options, limits: &Limits) {
    println!(
        "\n{:<34} {:>4} {:>10} {:>8} {:>9} {:>7}",
        "latent attention, all threads", "rows", "ms", "GB/s", "GFLOP/s", "% FMA"
    );
    for rows in [1, 2, 64] {
        for positions in [1024, 4096, 16384] {
            let name = format!("attention of {positions} positions");
            if !options.wants(&format!("{name} x{rows} ")) {
                continue;
            }
            let mut layer = Layer::new(rows, positions);
            let seconds = limits.pools[1].install(|| layer.seconds(options.isa));
            let rate = layer.operations() / seconds;
            println!(
                "{name:<34} {rows:>4} {:>10.2} {:>8.1} {:>9.1} {:>7.1}",
                seconds * 1e3,
                layer.bytes() / seconds / 1e9,
                rate / 1e9,
                100.0 * rate / limits.arithmetic[1],
            );
        }
    }
}
