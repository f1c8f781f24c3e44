//! Absorbing the keys of a head into its queries.

use super::super::isa::Isa;
use super::super::weights::{Weights, bf16};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Key rows summed in f32 before the sum is carried into f64.
pub(super) const KEY_ROWS: usize = 16;

/// Queries that share one widening of the keys.
const TILE: usize = 4;

/// Vectors of one length at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    /// The first vector and all that follows.
    pub values: &'a [f32],
    /// From the begin of one vector to that of the next.
    pub stride: usize,
    /// Length of each.
    pub len: usize,
}

impl<'a> Strided<'a> {
    fn get(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..self.len]
    }
}

/// Absorbs the keys of one head into queries: `out[t, j] = sum_i q[t, i] * k[i, j]`.
///
/// Rows are taken in ascending order: f32 fused multiply-adds from +0 over 16 rows, block sums added in f64, one rounding.
///
/// - `k_rows`: `[d_n, r]`, bf16 or f32. `q`: vectors of `d_n`.
/// - `out`: one chunk of `stride` values a query, of which the first `r` are set; their number is that of the queries.
///
/// # Panics
/// If the lengths disagree or the weights are MXFP4 (the released projection is bf16).
pub fn absorb(
    isa: Isa,
    k_rows: Weights<'_>,
    r: usize,
    q: Strided<'_>,
    out: &mut [f32],
    stride: usize,
) {
    assert_eq!(k_rows.num_rows(r), q.len, "key rows and queries");
    assert!(r > 0 && r <= stride, "{r} of every {stride} values");
    for (tile, out) in out.chunks_mut(TILE * stride).enumerate() {
        let first = tile * TILE;
        let count = out.len().div_ceil(stride);
        if count == TILE {
            let mut queries: [&[f32]; TILE] = [&[]; TILE];
            for (t, query) in queries.iter_mut().enumerate() {
                *query = q.get(first + t);
            }
            absorb_tile(isa, k_rows, r, &queries, out, stride);
        } else {
            for (t, out) in out.chunks_mut(stride).enumerate() {
                absorb_tile(isa, k_rows, r, &[q.get(first + t)], out, stride);
            }
        }
    }
}

fn absorb_tile<const T: usize>(
    isa: Isa,
    k_rows: Weights<'_>,
    r: usize,
    q: &[&[f32]; T],
    out: &mut [f32],
    stride: usize,
) {
    match k_rows {
        Weights::Bf16(bytes) => {
            strips(isa, bytes.as_chunks::<2>().0, bf16, (r, stride), q, out);
        }
        Weights::F32(bytes) => {
            strips(
                isa,
                bytes.as_chunks::<4>().0,
                f32::from_le_bytes,
                (r, stride),
                q,
                out,
            );
        }
        Weights::Mxfp4 { .. } => panic!("the keys of the latent cache are stored as bf16 or f32"),
    }
}

/// The columns that fill registers by the instruction set, the rest by the plain body.
fn strips<const T: usize, const BYTES: usize>(
    isa: Isa,
    k: &[[u8; BYTES]],
    widen: impl Fn([u8; BYTES]) -> f32,
    (r, stride): (usize, usize),
    q: &[&[f32]; T],
    out: &mut [f32],
) {
    let done = match isa {
        Isa::Scalar => 0,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx2` exists only if `Avx2::detect` saw AVX2 and FMA.
        Isa::Avx2(_) => unsafe { avx2::absorb(k, r, q, out, stride) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx512` exists only if `Avx512::detect` saw these features.
        Isa::Avx512(_) => unsafe { avx512::absorb(k, r, q, out, stride) },
    };
    for (q, out) in q.iter().zip(out.chunks_mut(stride)) {
        for (j, out) in out[..r].iter_mut().enumerate().skip(done) {
            *out = column(k[j..].iter().step_by(r).map(|w| widen(*w)), q);
        }
    }
}

/// One column of keys by one query: the order that every body keeps.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the one rounding of the contract"
)]
fn column(mut keys: impl Iterator<Item = f32>, q: &[f32]) -> f32 {
    let mut total = 0f64;
    for q in q.chunks(KEY_ROWS) {
        let products = q.iter().zip(keys.by_ref());
        let sum = products.fold(0f32, |sum, (q, k)| q.mul_add(k, sum));
        total += f64::from(sum);
    }
    total as f32
}
