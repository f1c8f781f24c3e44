//! One query at a time, on values in their natural order.

use super::super::super::activations::{BLOCK, LANES};
use super::super::super::math::exp;
use super::POSITIONS;

/// Attends with one absorbed query over the latent cache in the order of the module's documentation.
///
/// - `q`: `[r + d_r]`. `cache`: `[n, r + d_r]`, exactly the visible positions. `out`: `[r]`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the one rounding of the contract"
)]
pub(super) fn attend(q: &[f32], cache: &[f32], r: usize, scale: f32, out: &mut [f32]) {
    let width = q.len();
    let mut max = f32::NEG_INFINITY;
    let mut total = 0f64;
    let mut sums = vec![0f64; r];
    for block in cache.chunks(POSITIONS * width) {
        let mut weights: Vec<f32> = block.chunks(width).map(|row| dot(q, row) * scale).collect();
        let mut raised = max;
        for score in &weights {
            raised = if *score > raised { *score } else { raised };
        }
        let shrink = f64::from(exp(max - raised));
        max = raised;
        let mut block_total = 0f64;
        for weight in &mut weights {
            *weight = exp(*weight - max);
            block_total += f64::from(*weight);
        }
        total = total * shrink + block_total;
        for (j, total) in sums.iter_mut().enumerate() {
            let mut sum = 0f32;
            for (weight, row) in weights.iter().zip(block.chunks(width)) {
                sum = weight.mul_add(row[j], sum);
            }
            *total = *total * shrink + f64::from(sum);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = (sum / total) as f32;
    }
}

/// The dot order of the kernels, on vectors in natural order.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the one rounding of the contract"
)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
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

/// Absorbs the keys `[rows, cols]` of a head into one query, a column at a time.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the one rounding of the contract"
)]
pub(super) fn absorb(k: &[f32], q: &[f32], cols: usize) -> Vec<f32> {
    let column = |j: usize| {
        let mut total = 0f64;
        for (q, k) in q.chunks(16).zip(k.chunks(16 * cols)) {
            let mut sum = 0f32;
            for (q, row) in q.iter().zip(k.chunks(cols)) {
                sum = q.mul_add(row[j], sum);
            }
            total += f64::from(sum);
        }
        total as f32
    };
    (0..cols).map(column).collect()
}
