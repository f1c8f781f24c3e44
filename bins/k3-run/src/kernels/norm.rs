//! Norms, the small softmax and attention residuals.
//!
//! Sums run in f64 over eight lanes, lane `i % 8`, then the tree `s[j] = a[j] + a[j+4]`, `t[j] = s[j] + s[j+2]`, `t[0] +
//! t[1]`. The product of two f32 is exact in f64, so this is the error of a few f64 additions, and the same on every
//! instruction set without any code of its own.

use super::math::exp;

const LANES: usize = 8;

/// `sum a[i] b[i]` in f64, in the order of the module documentation.
///
/// # Panics
/// If the lengths differ.
pub fn dot_f64(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of one length");
    let mut lanes = [0f64; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += f64::from(*a) * f64::from(*b);
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// `sum x[i]^2` in f64.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    dot_f64(x, x)
}

/// `(sum / n + eps)^(-1/2)`: what an RMS norm multiplies by (specification 3.3).
#[expect(
    clippy::cast_possible_truncation,
    reason = "one rounding, to the precision of the values"
)]
fn inverse_rms(x: &[f32], eps: f64) -> f32 {
    (1.0 / (sum_of_squares(x) / x.len() as f64 + eps).sqrt()) as f32
}

/// RMS norm: `out[i] = w[i] * (x[i] * (mean(x^2) + eps)^(-1/2))`, eps inside the root (specification 3.3).
///
/// # Panics
/// If the lengths differ.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f64, out: &mut [f32]) {
    assert!(
        x.len() == w.len() && x.len() == out.len(),
        "values, weights and results of one length"
    );
    let inverse = inverse_rms(x, eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
        *out = w * (x * inverse);
    }
}

/// [`rms_norm`] in place.
///
/// # Panics
/// If the lengths differ.
pub fn rms_norm_in_place(x: &mut [f32], w: &[f32], eps: f64) {
    assert_eq!(x.len(), w.len(), "values and weights of one length");
    let inverse = inverse_rms(x, eps);
    for (x, w) in x.iter_mut().zip(w) {
        *x = w * (*x * inverse);
    }
}

/// `x[i] *= scale * (sum(x^2) + eps)^(-1/2)`: the sum, not the mean, eps inside the root (specification 3.4 step 3).
#[expect(
    clippy::cast_possible_truncation,
    reason = "one rounding, to the precision of the values"
)]
pub fn l2_normalize(x: &mut [f32], eps: f64, scale: f64) {
    let factor = (scale / (sum_of_squares(x) + eps).sqrt()) as f32;
    for x in x {
        *x *= factor;
    }
}

/// Softmax of a few values, in place: the largest is subtracted, the exponentials are summed in ascending order in f64.
#[expect(
    clippy::cast_possible_truncation,
    reason = "one rounding, to the precision of the values"
)]
pub fn softmax_in_place(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0f64;
    for x in &mut *x {
        *x = exp(*x - max);
        sum += f64::from(*x);
    }
    for x in x {
        *x = (f64::from(*x) / sum) as f32;
    }
}

/// Attention residual: mixes `sources` by the softmax of their scores (specification 3.2).
///
/// The raw vectors are mixed; their normalised form is only scored, against the element-wise product of the residual's
/// norm weight and projection.
///
/// - `sources`: `m` vectors of `[hidden]`, snapshots first, the running stream last; gone through twice.
/// - `norm_w_times_proj`, `out`: `[hidden]`.
/// - `probs`: `[m]`, receives the mixing weights.
///
/// # Panics
/// If the lengths differ.
#[expect(clippy::cast_possible_truncation, reason = "scores are f32")]
pub fn attention_residual<'a>(
    sources: impl ExactSizeIterator<Item = &'a [f32]> + Clone,
    norm_w_times_proj: &[f32],
    eps: f64,
    out: &mut [f32],
    probs: &mut [f32],
) {
    assert_eq!(sources.len(), probs.len(), "one weight a source");
    assert_eq!(
        norm_w_times_proj.len(),
        out.len(),
        "weights and result of one length"
    );
    for (score, source) in probs.iter_mut().zip(sources.clone()) {
        let mean = sum_of_squares(source) / source.len() as f64;
        *score = (dot_f64(source, norm_w_times_proj) / (mean + eps).sqrt()) as f32;
    }
    softmax_in_place(probs);
    out.fill(0.0);
    for (p, source) in probs.iter().zip(sources) {
        for (out, v) in out.iter_mut().zip(source) {
            *out += p * v;
        }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::super::testing::{Rng, relative_l2};
    use super::*;

    fn close(got: &[f32], want: &[f64], tolerance: f64) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((f64::from(*g) - w).abs() <= tolerance, "{g} is not {w}");
        }
    }

    #[test]
    fn row_15_rms_norm_has_eps_inside_the_root_of_the_mean() {
        let mut out = [0.0; 2];
        rms_norm(&[3.0, 4.0], &[1.0, 1.0], 1e-5, &mut out);
        close(&out, &[0.848_527_798_1, 1.131_370_397_4], 1.5e-7);
        // Where eps weighs as much as the values, outside the root would be far off.
        rms_norm(&[3e-3, 3e-3], &[1.0, 2.0], 9e-6, &mut out);
        close(
            &out,
            &[std::f64::consts::FRAC_1_SQRT_2, std::f64::consts::SQRT_2],
            2e-7,
        );
        let mut x = [3e-3, 3e-3];
        rms_norm_in_place(&mut x, &[1.0, 2.0], 9e-6);
        assert_eq!(x, out);
    }

    #[test]
    fn row_14_l2_normalize_uses_the_sum_and_has_eps_1e_6_inside_the_root() {
        let mut x = [3.0, 4.0];
        l2_normalize(&mut x, 1e-6, 1.0);
        close(&x, &[0.599_999_988_0, 0.799_999_984_0], 6e-8);
        let mut x = [1e-3, 0.0, 0.0, 0.0];
        l2_normalize(&mut x, 1e-6, 1.0);
        close(&x, &[std::f64::consts::FRAC_1_SQRT_2, 0.0, 0.0, 0.0], 6e-8);
        let mut x = [3.0, 4.0];
        l2_normalize(&mut x, 0.0, 0.5);
        close(&x, &[0.3, 0.4], 6e-8);
    }

    #[test]
    fn row_22_attention_residual_scores_normalised_and_mixes_raw_vectors() {
        let sources: [&[f32]; 3] = [
            &[1.0, 2.0, 3.0, 4.0],
            &[0.0, -1.0, 0.5, 2.0],
            &[10.0, 0.0, 0.0, -10.0],
        ];
        let weights: Vec<f32> = [(1.0, 0.3), (0.5, -0.2), (2.0, 0.1), (1.0, 0.4)]
            .map(|(w, p)| w * p)
            .to_vec();
        let (mut out, mut probs) = ([0.0; 4], [0.0; 3]);
        attention_residual(sources.into_iter(), &weights, 1e-5, &mut out, &mut probs);
        close(&probs, &[0.415_210_53, 0.429_152_89, 0.155_636_58], 6e-8);
        close(
            &out,
            &[1.971_576_31, 0.401_268_18, 1.460_208_04, 0.962_782_13],
            4e-7,
        );
    }

    #[test]
    fn softmax_sums_to_one_and_survives_large_values() {
        let mut x = [1000.0, 1000.0, 999.0, -1e30];
        softmax_in_place(&mut x);
        let e = (-1f64).exp();
        close(
            &x,
            &[1.0 / (2.0 + e), 1.0 / (2.0 + e), e / (2.0 + e), 0.0],
            1e-7,
        );
        let mut one = [-5.0];
        softmax_in_place(&mut one);
        assert_eq!(one, [1.0]);
    }

    #[test]
    fn a_nan_reaches_every_result() {
        let mut x = [1.0, f32::NAN, 2.0];
        softmax_in_place(&mut x);
        assert!(x.iter().all(|v| v.is_nan()));
        let mut out = [0.0; 3];
        rms_norm(&[1.0, f32::NAN, 2.0], &[1.0; 3], 1e-5, &mut out);
        assert!(out.iter().all(|v| v.is_nan()));
    }

    #[test]
    fn sums_follow_the_written_order_at_every_length() {
        let mut rng = Rng(21);
        for n in 0..40 {
            let (a, b) = (rng.normals(n), rng.normals(n));
            let lane = |l: usize| {
                (l..n)
                    .step_by(8)
                    .fold(0.0, |s, i| s + f64::from(a[i]) * f64::from(b[i]))
            };
            let s = |j: usize| lane(j) + lane(j + 4);
            let want = (s(0) + s(2)) + (s(1) + s(3));
            assert_eq!(dot_f64(&a, &b).to_bits(), want.to_bits(), "length {n}");
        }
    }

    #[test]
    fn rms_norm_is_within_f32_rounding_at_model_width() {
        let mut rng = Rng(22);
        let (x, w) = (rng.normals(7168), rng.normals(7168));
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 7168.0;
        let want: Vec<f64> = x
            .iter()
            .zip(&w)
            .map(|(x, w)| f64::from(*w) * f64::from(*x) / (mean + 1e-5).sqrt())
            .collect();
        let mut out = vec![0.0; 7168];
        rms_norm(&x, &w, 1e-5, &mut out);
        assert!(relative_l2(&out, &want) < 1e-7);
    }
}
