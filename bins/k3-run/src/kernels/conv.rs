//! The short depthwise convolution before the KDA recurrence (specification 3.4 step 2).

use rayon::prelude::*;

use super::isa::Isa;
use super::math::{for_each_isa, silu};

/// Taps of the released model, which have a loop of their own: one pass over the channels, the same sums.
const RELEASED_TAPS: usize = 4;

/// Causal convolution of each channel, then [`silu`]; the inputs of a call are split over the current rayon pool.
///
/// Tap `K - 1` multiplies the current input and tap 0 the oldest; products are added oldest first, in f32. Cutting a
/// sequence into calls changes no bit, because `history` carries the raw inputs.
///
/// - `x`, `out`: `[T, channels]`.
/// - `history`: `[K - 1, channels]`, the raw inputs before this call, oldest first; zero at the start of a sequence, and
///   updated. Empty when `K` is 1.
/// - `weights`: `[channels, K]`, `K >= 1`.
///
/// # Panics
/// If the lengths disagree.
pub fn conv_silu(
    isa: Isa,
    x: &[f32],
    history: &mut [f32],
    weights: &[f32],
    channels: usize,
    out: &mut [f32],
) {
    assert!(channels > 0 && !weights.is_empty(), "channels and taps");
    assert!(
        weights.len().is_multiple_of(channels),
        "{} weights for {channels} channels",
        weights.len()
    );
    let taps = weights.len() / channels;
    assert_eq!(
        history.len(),
        (taps - 1) * channels,
        "history of {} inputs",
        taps - 1
    );
    assert_eq!(x.len(), out.len(), "inputs and results");
    assert!(
        x.len().is_multiple_of(channels),
        "{} inputs for {channels} channels",
        x.len()
    );
    let before = &*history;
    if x.len() == channels {
        convolve(isa, x, before, weights, 0, out);
    } else {
        out.par_chunks_exact_mut(channels)
            .enumerate()
            .for_each(|(t, out)| convolve(isa, x, before, weights, t, out));
    }
    remember(x, history);
}

for_each_isa! {
    /// The channels of input `t`.
    fn convolve(x: &[f32], history: &[f32], weights: &[f32], t: usize, out: &mut [f32]) {
        let channels = out.len();
        let taps = weights.len() / channels;
        // Input `t + tap` of history followed by x.
        let input = |tap: usize| match (t + tap).checked_sub(taps - 1) {
            Some(at) => &x[at * channels..][..channels],
            None => &history[(t + tap) * channels..][..channels],
        };
        if taps == RELEASED_TAPS {
            let (w, _) = weights.as_chunks::<RELEASED_TAPS>();
            let inputs: [&[f32]; RELEASED_TAPS] = std::array::from_fn(input);
            let [x0, x1, x2, x3] = inputs;
            for (((((out, w), x0), x1), x2), x3) in out.iter_mut().zip(w).zip(x0).zip(x1).zip(x2).zip(x3) {
                *out = silu(((w[0] * x0 + w[1] * x1) + w[2] * x2) + w[3] * x3);
            }
            return;
        }
        for tap in 0..taps {
            let each = out.iter_mut().zip(input(tap)).zip(weights.chunks_exact(taps));
            if tap == 0 {
                each.for_each(|((out, x), w)| *out = w[0] * x);
            } else {
                each.for_each(|((out, x), w)| *out += w[tap] * x);
            }
        }
        for out in out {
            *out = silu(*out);
        }
    }
}

/// Keeps the last inputs of `history` followed by `x`.
fn remember(x: &[f32], history: &mut [f32]) {
    if x.len() >= history.len() {
        history.copy_from_slice(&x[x.len() - history.len()..]);
    } else {
        let kept = history.len() - x.len();
        history.copy_within(x.len().., 0);
        history[kept..].copy_from_slice(x);
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::super::testing::{Rng, assert_same_bits};
    use super::*;

    #[test]
    fn row_20_the_last_tap_is_the_current_input_and_silu_comes_after() {
        let want = [
            0.239_475_064_0,
            0.825_286_116_1,
            1.761_594_156_0,
            2.857_722_380_5,
            3.928_055_160_2,
        ];
        for isa in Isa::available() {
            let (mut history, mut out) = ([0.0; 3], [0.0; 5]);
            conv_silu(
                isa,
                &[1.0, 2.0, 3.0, 4.0, 5.0],
                &mut history,
                &[0.1, 0.2, 0.3, 0.4],
                1,
                &mut out,
            );
            for (got, want) in out.iter().zip(want) {
                assert!(
                    (f64::from(*got) - want).abs() < 3e-7 * want,
                    "{got} is not {want}"
                );
            }
            assert_eq!(history, [3.0, 4.0, 5.0]);
        }
    }

    #[test]
    fn row_20_cutting_a_sequence_into_calls_changes_no_bit() {
        let mut rng = Rng(31);
        let (channels, t) = (19, 12);
        for taps in 1..=5 {
            let (x, weights) = (rng.normals(t * channels), rng.normals(channels * taps));
            let mut whole = vec![0.0; t * channels];
            let mut end = vec![0.0; (taps - 1) * channels];
            conv_silu(Isa::Scalar, &x, &mut end, &weights, channels, &mut whole);
            for isa in Isa::available() {
                for step in [1, 2, 3, 5, 12] {
                    let mut history = vec![0.0; (taps - 1) * channels];
                    let mut out = vec![0.0; t * channels];
                    for (x, out) in x
                        .chunks(step * channels)
                        .zip(out.chunks_mut(step * channels))
                    {
                        conv_silu(isa, x, &mut history, &weights, channels, out);
                    }
                    assert_same_bits(&out, &whole, &format!("{taps} taps, {step} at a time"));
                    assert_same_bits(&history, &end, "history");
                }
            }
        }
    }

    #[test]
    fn row_21_one_tap_needs_no_history() {
        let mut out = [0.0; 2];
        conv_silu(Isa::Scalar, &[2.0, 3.0], &mut [], &[0.5, -1.0], 2, &mut out);
        assert_eq!(
            out,
            [
                super::super::math::silu(1.0),
                super::super::math::silu(-3.0)
            ]
        );
    }
}
