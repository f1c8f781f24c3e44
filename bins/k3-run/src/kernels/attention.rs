//! Absorbed latent attention of one head (specification 3.5): one form for prefill and decode.
//!
//! Every result is a function of the query, the first `n` cache rows and nothing else: positions are visited in order, in
//! blocks of [`POSITIONS`] anchored at position 0, however they came into the cache.

#![expect(
    clippy::inline_always,
    reason = "only an inlined body is compiled, and vectorised, for the caller's features"
)]

use super::activations::{BLOCK, LANES};
use super::isa::Isa;
use super::math::{exp, for_each_isa};
use super::weights::{Weights, bf16};

/// Positions of one block of the running softmax.
pub const POSITIONS: usize = 64;

/// Key rows summed in f32 before the sum is carried into f64.
const KEY_ROWS: usize = 16;

/// Columns whose sums are held in registers.
const STRIP: usize = 32;

/// Absorbs the keys of one head into its query: `out[j] = sum_i q[i] * k[i, j]`.
///
/// Rows are taken in ascending order: f32 fused multiply-adds from +0 over 16 rows, block sums added in f64, one rounding.
///
/// - `k_rows`: `[d_n, r]`, bf16 or f32. `q`: `[d_n]`. `out`: `[r]`.
///
/// # Panics
/// If the lengths disagree or the weights are MXFP4 (the released projection is bf16).
pub fn absorb(isa: Isa, k_rows: Weights<'_>, q: &[f32], out: &mut [f32]) {
    assert_eq!(k_rows.num_rows(out.len()), q.len(), "key rows and queries");
    match k_rows {
        Weights::Bf16(bytes) => absorb_bf16(isa, bytes.as_chunks().0, q, out),
        Weights::F32(bytes) => absorb_f32(isa, bytes.as_chunks().0, q, out),
        Weights::Mxfp4 { .. } => panic!("the keys of the latent cache are stored as bf16 or f32"),
    }
}

for_each_isa! {
    fn absorb_bf16(k: &[[u8; 2]], q: &[f32], out: &mut [f32]) {
        absorb_with(k, bf16, q, out);
    }
}

for_each_isa! {
    fn absorb_f32(k: &[[u8; 4]], q: &[f32], out: &mut [f32]) {
        absorb_with(k, f32::from_le_bytes, q, out);
    }
}

#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the one rounding of the contract"
)]
fn absorb_with<E: Copy>(k: &[E], widen: impl Fn(E) -> f32, q: &[f32], out: &mut [f32]) {
    let cols = out.len();
    for (first, out) in (0..).step_by(STRIP).zip(out.chunks_mut(STRIP)) {
        let width = out.len();
        let mut sums = [0f64; STRIP];
        for (q, k) in q.chunks(KEY_ROWS).zip(k.chunks(KEY_ROWS * cols)) {
            let mut block = [0f32; STRIP];
            for (q, row) in q.iter().zip(k.chunks_exact(cols)) {
                // A constant width where there is one lets the strip stay in registers.
                if let Some(row) = row[first..].first_chunk::<STRIP>() {
                    for (sum, w) in block.iter_mut().zip(row) {
                        *sum = q.mul_add(widen(*w), *sum);
                    }
                } else {
                    for (sum, w) in block.iter_mut().zip(&row[first..first + width]) {
                        *sum = q.mul_add(widen(*w), *sum);
                    }
                }
            }
            for (total, sum) in sums.iter_mut().zip(block) {
                *total += f64::from(sum);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum as f32;
        }
    }
}

/// Attends with one absorbed query over the latent cache: `out = sum_s softmax_s(scale * q . cache[s]) * cache[s, ..r]`.
///
/// Scores use the dot order of the [kernels](super). Per block of positions: the running maximum is raised, the sums so far
/// are scaled by `exp(old - new)` in f64, weights `exp(score - max)` are applied by f32 fused multiply-adds from +0 in
/// ascending position, and the block sums are added in f64; weights themselves are summed in f64, ascending.
///
/// - `q`: `[r + d_r]`, the absorbed part, then the part that meets the unnormalised slots.
/// - `cache`: `[n, r + d_r]`, exactly the visible positions. `out`: `[r]`. `sums`: `[r]` scratch.
///
/// # Panics
/// If the lengths disagree or no position is visible.
pub fn attend(
    isa: Isa,
    q: &[f32],
    cache: &[f32],
    r: usize,
    scale: f32,
    out: &mut [f32],
    sums: &mut [f64],
) {
    assert!(
        r > 0 && r <= q.len() && out.len() == r && sums.len() == r,
        "latent width {r}"
    );
    assert!(
        !cache.is_empty() && cache.len().is_multiple_of(q.len()),
        "{} values of cache",
        cache.len()
    );
    attend_body(isa, q, cache, scale, out, sums);
}

for_each_isa! {
    #[expect(clippy::cast_possible_truncation, reason = "the one rounding of the contract")]
    fn attend_body(q: &[f32], cache: &[f32], scale: f32, out: &mut [f32], sums: &mut [f64]) {
        let width = q.len();
        let mut max = f32::NEG_INFINITY;
        let mut total = 0f64;
        sums.fill(0.0);
        for block in cache.chunks(POSITIONS * width) {
            let mut weights = [0f32; POSITIONS];
            let weights = &mut weights[..block.len() / width];
            let mut raised = max;
            for (score, row) in weights.iter_mut().zip(block.chunks_exact(width)) {
                *score = dot(q, row) * scale;
                raised = if *score > raised { *score } else { raised };
            }
            let shrink = f64::from(exp(max - raised));
            max = raised;
            let mut block_total = 0f64;
            for weight in &mut *weights {
                *weight = exp(*weight - max);
                block_total += f64::from(*weight);
            }
            total = total * shrink + block_total;
            for (first, sums) in (0..).step_by(STRIP).zip(sums.chunks_mut(STRIP)) {
                mix(weights, block, width, first, shrink, sums);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums.iter()) {
            *out = (sum / total) as f32;
        }
    }
}

/// The values of one block of positions for the columns from `first` on.
#[inline(always)]
fn mix(weights: &[f32], block: &[f32], width: usize, first: usize, shrink: f64, sums: &mut [f64]) {
    let mut strip = [0f32; STRIP];
    for (weight, row) in weights.iter().zip(block.chunks_exact(width)) {
        // A constant width where there is one lets the strip stay in registers; excess columns are dropped below.
        if let Some(row) = row[first..].first_chunk::<STRIP>() {
            for (sum, c) in strip.iter_mut().zip(row) {
                *sum = weight.mul_add(*c, *sum);
            }
        } else {
            for (sum, c) in strip.iter_mut().zip(&row[first..]) {
                *sum = weight.mul_add(*c, *sum);
            }
        }
    }
    for (total, sum) in sums.iter_mut().zip(strip) {
        *total = *total * shrink + f64::from(sum);
    }
}

/// The dot order of the kernels, on vectors in natural order.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the one rounding of the contract"
)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f64; LANES];
    for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
        let mut block = [0f32; LANES];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for lane in 0..LANES {
                block[lane] = a[lane].mul_add(b[lane], block[lane]);
            }
        }
        for ((sum, a), b) in block.iter_mut().zip(a_rest).zip(b_rest) {
            *sum = a.mul_add(*b, *sum);
        }
        for (lane, sum) in lanes.iter_mut().zip(block) {
            *lane += f64::from(sum);
        }
    }
    let pair = |j: usize| lanes[2 * j] + lanes[2 * j + 1];
    let quad = |j: usize| pair(j) + pair(j + 4);
    ((quad(0) + quad(2)) + (quad(1) + quad(3))) as f32
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rng, assert_same_bits, bf16_bytes, f32_bytes, relative_l2};
    use super::super::weights::widen;
    use super::super::{Activations, matmul};
    use super::*;

    fn attended(isa: Isa, q: &[f32], cache: &[f32], r: usize, scale: f32) -> Vec<f32> {
        // Scratch that was used before must not matter.
        let (mut out, mut sums) = (vec![f32::NAN; r], vec![f64::NAN; r]);
        attend(isa, q, cache, r, scale, &mut out, &mut sums);
        out
    }

    fn in_f64(q: &[f32], cache: &[f32], r: usize, scale: f32) -> Vec<f64> {
        let rows: Vec<&[f32]> = cache.chunks(q.len()).collect();
        let scores: Vec<f64> = rows
            .iter()
            .map(|row| {
                f64::from(scale)
                    * row
                        .iter()
                        .zip(q)
                        .map(|(a, b)| f64::from(*a) * f64::from(*b))
                        .sum::<f64>()
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let total: f64 = p.iter().sum();
        (0..r)
            .map(|j| {
                rows.iter()
                    .zip(&p)
                    .map(|(row, p)| p * f64::from(row[j]))
                    .sum::<f64>()
                    / total
            })
            .collect()
    }

    #[test]
    fn attention_is_close_to_f64_and_the_same_on_every_isa() {
        let mut rng = Rng(51);
        for (r, d_r) in [(1, 0), (5, 3), (32, 8), (40, 8), (512, 64)] {
            for n in [1, 2, 63, 64, 65, 128, 200] {
                let (q, cache) = (rng.normals(r + d_r), rng.normals(n * (r + d_r)));
                let scale = 1.0 / ((r + d_r) as f32).sqrt();
                let want = attended(Isa::Scalar, &q, &cache, r, scale);
                let got = attended(Isa::detect(), &q, &cache, r, scale);
                assert_same_bits(&got, &want, &format!("r {r} d_r {d_r} n {n}"));
                let error = relative_l2(&got, &in_f64(&q, &cache, r, scale));
                assert!(error < 1e-6, "r {r} d_r {d_r} n {n}: {error:.2e}");
            }
        }
    }

    #[test]
    fn scores_have_the_bits_of_the_matrix_kernels() {
        let mut rng = Rng(52);
        for width in [1, 15, 16, 40, 129, 576] {
            let (q, cache) = (rng.normals(width), rng.normals(width * 3));
            let mut x = Activations::new();
            x.fill(&q, width);
            let mut want = [0.0; 3];
            matmul(
                Isa::detect(),
                Weights::F32(&f32_bytes(&cache)),
                &x,
                &mut want,
            );
            let got: Vec<f32> = cache.chunks(width).map(|row| dot(&q, row)).collect();
            assert_same_bits(&got, &want, &format!("width {width}"));
        }
    }

    #[test]
    fn row_04_earlier_positions_may_be_permuted() {
        let mut rng = Rng(53);
        let (r, width, n) = (32, 40, 50);
        let (q, cache) = (rng.normals(width), rng.normals(n * width));
        let reversed: Vec<f32> = cache[..(n - 1) * width]
            .chunks(width)
            .rev()
            .chain([&cache[(n - 1) * width..]])
            .flatten()
            .copied()
            .collect();
        let a = attended(Isa::detect(), &q, &cache, r, 0.2);
        let b: Vec<f64> = attended(Isa::detect(), &q, &reversed, r, 0.2)
            .into_iter()
            .map(f64::from)
            .collect();
        assert!(relative_l2(&a, &b) < 1e-6);
    }

    #[test]
    fn row_04_the_slots_past_the_latent_take_part_in_the_score() {
        let q = [0.0, 0.0, 1.0];
        let cache = [1.0, 2.0, 50.0, 3.0, 4.0, -50.0];
        assert_eq!(attended(Isa::detect(), &q, &cache, 2, 1.0), [1.0, 2.0]);
    }

    #[test]
    fn a_maximum_that_rises_late_rescales_what_came_before() {
        let width = 2;
        let mut cache: Vec<f32> = (0..300).flat_map(|s| [1.0, s as f32]).collect();
        cache.extend([3.0, 400.0]);
        let got = attended(Isa::detect(), &[0.0, 1.0], &cache, 1, 1.0);
        assert_eq!(got, [3.0], "the last position outweighs all others");
        let even = attended(Isa::detect(), &[0.0, 0.0], &cache[..300 * width], 1, 1.0);
        assert_eq!(even, [1.0]);
    }

    #[test]
    fn a_nan_in_a_visible_position_reaches_the_result() {
        let mut cache = vec![1.0; 130 * 4];
        cache[70 * 4] = f32::NAN;
        assert!(
            attended(Isa::detect(), &[1.0; 4], &cache, 3, 1.0)
                .iter()
                .all(|v| v.is_nan())
        );
    }

    #[test]
    fn absorb_is_the_transposed_product_on_every_isa() {
        let mut rng = Rng(54);
        for (rows, cols) in [(1, 1), (16, 32), (24, 32), (17, 45), (128, 512)] {
            let (k, q) = (rng.normals(rows * cols), rng.normals(rows));
            let (narrow, wide) = (bf16_bytes(&k), f32_bytes(&k));
            for w in [Weights::Bf16(&narrow), Weights::F32(&wide)] {
                let mut values = vec![0.0; rows * cols];
                widen(w, &mut values);
                let want: Vec<f64> = (0..cols)
                    .map(|j| {
                        (0..rows)
                            .map(|i| f64::from(q[i]) * f64::from(values[i * cols + j]))
                            .sum()
                    })
                    .collect();
                let (mut scalar, mut got) = (vec![0.0; cols], vec![0.0; cols]);
                absorb(Isa::Scalar, w, &q, &mut scalar);
                absorb(Isa::detect(), w, &q, &mut got);
                assert_same_bits(&got, &scalar, &format!("[{rows}, {cols}]"));
                assert!(relative_l2(&got, &want) < 3e-7, "[{rows}, {cols}]");
            }
        }
    }
}
