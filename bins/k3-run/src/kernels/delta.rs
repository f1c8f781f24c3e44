//! The gated delta rule of KDA: decay gate and recurrence (specification 3.4 steps 5 and 6).
//!
//! One head advances one token at a time, in prefill too, so prefill equals decode to the bit. Sums over key rows run in
//! ascending order with plain f32 products and additions; columns of values never meet, which is what vectorises.

use super::isa::Isa;
use super::math::{exp, for_each_isa, sigmoid};

/// What one token brings to one head.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInput<'a> {
    /// `[d_k]`, normalised and scaled.
    pub q: &'a [f32],
    /// `[d_k]`, normalised.
    pub k: &'a [f32],
    /// `[d_v]`.
    pub v: &'a [f32],
    /// `[d_k]`, the decay of each key row, in `[e^lambda, 1]`.
    pub alpha: &'a [f32],
    /// How much of the difference is written.
    pub beta: f32,
}

for_each_isa! {
    /// Decay of the key rows of one head: `alpha[d] = exp(lambda * sigmoid(exp_a * (z[d] + dt_bias[d])))`.
    ///
    /// `exp_a` is `exp(A_log[head])`; `lambda` is negative. The bias is inside the product. `alpha` may round to 1.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn decay_gate(z: &[f32], dt_bias: &[f32], exp_a: f32, lambda: f32, alpha: &mut [f32]) {
        assert!(z.len() == alpha.len() && dt_bias.len() == alpha.len(), "gate, bias and decay of one length");
        for ((alpha, z), bias) in alpha.iter_mut().zip(z).zip(dt_bias) {
            *alpha = exp(lambda * sigmoid(exp_a * (z + bias)));
        }
    }
}

/// Advances one head by one token, in the order decay, read, write, output:
///
/// 1. `S[i, :] = alpha[i] * S[i, :]`
/// 2. `u[j] = sum_i k[i] * S[i, j]`
/// 3. `S[i, j] = S[i, j] + k[i] * (beta * (v[j] - u[j]))`
/// 4. `out[j] = sum_i q[i] * S[i, j]`
///
/// - `state`: `[d_k, d_v]`. `u`: `[d_v]` scratch. `out`: `[d_v]`.
///
/// # Panics
/// If the lengths disagree; the state is then untouched.
pub fn delta_step(
    isa: Isa,
    state: &mut [f32],
    input: DeltaInput<'_>,
    u: &mut [f32],
    out: &mut [f32],
) {
    let (d_k, d_v) = (input.k.len(), input.v.len());
    assert!(
        d_v > 0 && input.q.len() == d_k && input.alpha.len() == d_k,
        "queries, keys and decays of one length"
    );
    assert!(
        u.len() == d_v && out.len() == d_v,
        "values, scratch and results of one length"
    );
    assert_eq!(state.len(), d_k * d_v, "state of {d_k} by {d_v}");
    step(isa, state, input, u, out);
}

for_each_isa! {
    fn step(state: &mut [f32], input: DeltaInput<'_>, u: &mut [f32], out: &mut [f32]) {
        let DeltaInput { q, k, v, alpha, beta } = input;
        u.fill(0.0);
        for ((row, alpha), k) in state.chunks_exact_mut(v.len()).zip(alpha).zip(k) {
            for (s, u) in row.iter_mut().zip(u.iter_mut()) {
                *s *= alpha;
                *u += k * *s;
            }
        }
        for (u, v) in u.iter_mut().zip(v) {
            *u = beta * (v - *u);
        }
        out.fill(0.0);
        for ((row, k), q) in state.chunks_exact_mut(v.len()).zip(k).zip(q) {
            for ((s, u), out) in row.iter_mut().zip(u.iter()).zip(out.iter_mut()) {
                *s += k * u;
                *out += q * *s;
            }
        }
    }
}

/// What the tokens of one sequence bring to one head: vectors of token `t` begin at `t * width`, its `beta` is at `t * heads`.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRows<'a> {
    /// Queries from the head's first element on, as [`DeltaInput::q`].
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Decays.
    pub alpha: &'a [f32],
    /// Write strengths.
    pub beta: &'a [f32],
    /// From a token's vectors to the next's.
    pub width: usize,
    /// From a token's write strength to the next's.
    pub heads: usize,
}

impl<'a> DeltaRows<'a> {
    /// From the inputs of all rows and heads, those of `head` from `row` on.
    #[must_use]
    pub fn of(self, row: usize, head: usize, dim: usize) -> Self {
        let from = |x: &'a [f32]| &x[row * self.width + head * dim..];
        Self {
            q: from(self.q),
            k: from(self.k),
            v: from(self.v),
            alpha: from(self.alpha),
            beta: &self.beta[row * self.heads + head..],
            ..self
        }
    }
}

/// Value columns taken at once: their part of the state, 128 key rows high, stays in the first-level cache from token to
/// token, and their sums in registers.
const COLUMNS: usize = 64;

/// Advances one head by the tokens whose results `out` has room for, each as [`delta_step`] does, to the bit.
///
/// - `state`: `[dim, dim]`. `out`: `[tokens, dim]`.
///
/// # Panics
/// If the state is not `dim` by `dim`, or a vector is missing.
pub fn delta_rows(isa: Isa, state: &mut [f32], rows: DeltaRows<'_>, dim: usize, out: &mut [f32]) {
    assert_eq!(state.len(), dim * dim, "state of {dim} by {dim}");
    assert!(dim > 0 && out.len().is_multiple_of(dim), "whole results");
    all_columns(isa, state, rows, dim, out);
}

for_each_isa! {
    fn all_columns(state: &mut [f32], rows: DeltaRows<'_>, dim: usize, out: &mut [f32]) {
        let mut first = 0;
        while first + COLUMNS <= dim {
            columns::<COLUMNS>(state, rows, dim, first, out);
            first += COLUMNS;
        }
        while first + 8 <= dim {
            columns::<8>(state, rows, dim, first, out);
            first += 8;
        }
        while first < dim {
            columns::<1>(state, rows, dim, first, out);
            first += 1;
        }
    }
}

/// `W` value columns from `first` on, through all tokens.
#[expect(clippy::inline_always, reason = "compiled for the caller's features")]
#[inline(always)]
fn columns<const W: usize>(
    state: &mut [f32],
    rows: DeltaRows<'_>,
    dim: usize,
    first: usize,
    out: &mut [f32],
) {
    for (t, out) in out.chunks_exact_mut(dim).enumerate() {
        let at = t * rows.width;
        let (q, k, alpha) = (
            &rows.q[at..][..dim],
            &rows.k[at..][..dim],
            &rows.alpha[at..][..dim],
        );
        let v = &rows.v[at + first..][..W];
        let beta = rows.beta[t * rows.heads];
        let mut u = [0f32; W];
        for ((row, alpha), k) in state.chunks_exact_mut(dim).zip(alpha).zip(k) {
            if let Some(row) = row[first..].first_chunk_mut::<W>() {
                for (s, u) in row.iter_mut().zip(&mut u) {
                    *s *= alpha;
                    *u += k * *s;
                }
            }
        }
        for (u, v) in u.iter_mut().zip(v) {
            *u = beta * (v - *u);
        }
        let mut sums = [0f32; W];
        for ((row, k), q) in state.chunks_exact_mut(dim).zip(k).zip(q) {
            if let Some(row) = row[first..].first_chunk_mut::<W>() {
                for ((s, u), sum) in row.iter_mut().zip(&u).zip(&mut sums) {
                    *s += k * u;
                    *sum += q * *s;
                }
            }
        }
        out[first..first + W].copy_from_slice(&sums);
    }
}

#[cfg(test)]
mod chunked;

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::super::testing::{Rng, assert_same_bits};
    use super::*;

    #[test]
    fn row_16_decay_has_the_bias_inside_the_product_with_exp_a() {
        for (a_log, z, want) in [
            (0.0, 0.0, 0.082_084_998_623_9),
            (0.5, 1.0, 0.015_091_995_757),
            (-0.5, -2.0, 0.317_969_704_348),
            (1.0, 3.0, 0.006_747_631_569_26),
            (0.0, 20.0, 0.006_737_947_068_53),
            (0.0, -20.0, 0.999_999_989_694),
        ] {
            for isa in Isa::available() {
                // The bias takes part of z away and gives it back, so it must enter before the product.
                let mut alpha = [0.0];
                decay_gate(isa, &[z - 0.25], &[0.25], exp(a_log), -5.0, &mut alpha);
                let got = f64::from(alpha[0]);
                assert!(
                    (got - want).abs() < 1.5e-6 * want,
                    "A_log {a_log} z {z}: {got} is not {want}"
                );
            }
        }
    }

    #[test]
    fn row_35_alpha_stays_between_e_to_lambda_and_one_and_may_be_one() {
        let mut rng = Rng(41);
        let z: Vec<f32> = (0..4000).map(|_| rng.normal() * 40.0).collect();
        let mut alpha = vec![0.0; z.len()];
        decay_gate(
            Isa::detect(),
            &z,
            &vec![0.0; z.len()],
            1.5,
            -5.0,
            &mut alpha,
        );
        assert!(alpha.iter().all(|a| (exp(-5.0)..=1.0).contains(a)));
        assert!(
            alpha.contains(&1.0),
            "rounding to exactly 1 is legitimate and must not be cut off"
        );
    }

    #[test]
    fn row_18_order_is_decay_read_write_output() {
        let mut state = [0.0; 4];
        let (mut u, mut out) = ([0.0; 2], [0.0; 2]);
        let alpha = |g: [f32; 2]| g.map(exp);
        let first = DeltaInput {
            q: &[1.0, 1.0],
            k: &[1.0, 0.0],
            v: &[2.0, 3.0],
            alpha: &alpha([-1.0, -2.0]),
            beta: 0.5,
        };
        delta_step(Isa::Scalar, &mut state, first, &mut u, &mut out);
        assert_eq!(out, [1.0, 1.5]);
        let second = DeltaInput {
            q: &[0.5, -0.5],
            k: &[0.6, 0.8],
            v: &[-1.0, 4.0],
            alpha: &alpha([-0.5, -0.25]),
            beta: 0.9,
        };
        delta_step(Isa::Scalar, &mut state, second, &mut u, &mut out);
        let want = [0.426_017_985_48, 0.144_026_978_21];
        let want_state = [
            -0.129_985_274_03,
            2.775_022_088_95,
            -0.982_021_245_00,
            2.486_968_132_51,
        ];
        for (got, want) in out.iter().chain(&state).zip(want.iter().chain(&want_state)) {
            assert!((f64::from(*got) - want).abs() < 5e-7, "{got} is not {want}");
        }
    }

    #[test]
    fn row_17_decay_scales_key_rows_not_value_columns() {
        let mut state = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        let (mut u, mut out) = ([0.0; 3], [0.0; 3]);
        let input = DeltaInput {
            q: &[1.0, 0.0],
            k: &[0.0, 0.0],
            v: &[0.0; 3],
            alpha: &[0.5, 0.25],
            beta: 1.0,
        };
        delta_step(Isa::Scalar, &mut state, input, &mut u, &mut out);
        assert_eq!(state, [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]);
        assert_eq!(out, [0.5; 3]);
    }

    #[test]
    fn many_tokens_give_the_bits_of_one_after_the_other() {
        let mut rng = Rng(44);
        for (dim, heads, tokens) in [(1, 2, 3), (7, 1, 2), (24, 3, 5), (77, 2, 3), (128, 2, 9)] {
            let width = dim * heads;
            let start = rng.normals(dim * dim);
            let [q, k, v] = [(); 3].map(|()| rng.normals(tokens * width));
            let alpha: Vec<f32> = (0..tokens * width).map(|_| rng.unit().abs()).collect();
            let beta: Vec<f32> = (0..tokens * heads).map(|_| rng.unit().abs()).collect();
            let head = heads - 1;
            let (mut want_state, mut want) = (start.clone(), vec![0.0; tokens * dim]);
            let mut u = vec![0.0; dim];
            for t in 0..tokens {
                let at = t * width + head * dim..t * width + (head + 1) * dim;
                let input = DeltaInput {
                    q: &q[at.clone()],
                    k: &k[at.clone()],
                    v: &v[at.clone()],
                    alpha: &alpha[at],
                    beta: beta[t * heads + head],
                };
                let out = &mut want[t * dim..(t + 1) * dim];
                delta_step(Isa::Scalar, &mut want_state, input, &mut u, out);
            }
            let rows = DeltaRows {
                q: &q[head * dim..],
                k: &k[head * dim..],
                v: &v[head * dim..],
                alpha: &alpha[head * dim..],
                beta: &beta[head..],
                width,
                heads,
            };
            for isa in Isa::available() {
                let (mut state, mut out) = (start.clone(), vec![0.0; tokens * dim]);
                delta_rows(isa, &mut state, rows, dim, &mut out);
                assert_same_bits(&out, &want, &format!("{dim} wide, {tokens} tokens"));
                assert_same_bits(&state, &want_state, &format!("state {dim} wide"));
            }
        }
    }

    #[test]
    fn every_isa_gives_the_same_bits() {
        let mut rng = Rng(42);
        for (d_k, d_v) in [(1, 1), (3, 5), (16, 16), (7, 33), (128, 128)] {
            let mut state = rng.normals(d_k * d_v);
            let (q, k, v) = (rng.normals(d_k), rng.normals(d_k), rng.normals(d_v));
            let alpha: Vec<f32> = (0..d_k).map(|_| rng.unit().abs()).collect();
            let input = DeltaInput {
                q: &q,
                k: &k,
                v: &v,
                alpha: &alpha,
                beta: 0.7,
            };
            let mut other = state.clone();
            let (mut u, mut want, mut got) = (vec![0.0; d_v], vec![0.0; d_v], vec![0.0; d_v]);
            delta_step(Isa::Scalar, &mut state, input, &mut u, &mut want);
            delta_step(Isa::detect(), &mut other, input, &mut u, &mut got);
            assert_same_bits(&got, &want, &format!("[{d_k}, {d_v}] out"));
            assert_same_bits(&other, &state, &format!("[{d_k}, {d_v}] state"));
        }
    }
}
