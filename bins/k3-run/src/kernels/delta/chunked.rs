//! The chunked (UT-transform) form of the recurrence, in f64, as a check on the sequential one (specification 3.4.1).

#![expect(
    clippy::needless_range_loop,
    reason = "written with the indices of the specification"
)]

use super::super::testing::{Rng, relative_l2};
use super::*;

const D_K: usize = 16;
const D_V: usize = 12;
const T: usize = 150;

/// How the transform is built; anything but `Right` is a mistake that must show.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Right,
    MinusKk,
    KkWithDiagonal,
    QkWithoutDiagonal,
}

struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
}

impl Sequence {
    fn random() -> Self {
        let mut rng = Rng(43);
        let mut unit_rows = || {
            let mut x = rng.normals(T * D_K);
            x.chunks_mut(D_K)
                .for_each(|row| super::super::norm::l2_normalize(row, 1e-6, 1.0));
            x
        };
        let (q, k) = (unit_rows(), unit_rows());
        let v = rng.normals(T * D_V);
        let g = (0..T * D_K).map(|_| -rng.unit().abs()).collect();
        let beta = (0..T).map(|_| rng.unit().abs()).collect();
        Self { q, k, v, g, beta }
    }

    /// Outputs and final state of the production form.
    fn sequential(&self) -> (Vec<f32>, Vec<f32>) {
        let (mut state, mut out, mut u) = (vec![0.0; D_K * D_V], vec![0.0; T * D_V], [0.0; D_V]);
        for t in 0..T {
            let alpha: Vec<f32> = self.g[t * D_K..][..D_K].iter().map(|g| exp(*g)).collect();
            let input = DeltaInput {
                q: &self.q[t * D_K..][..D_K],
                k: &self.k[t * D_K..][..D_K],
                v: &self.v[t * D_V..][..D_V],
                alpha: &alpha,
                beta: self.beta[t],
            };
            delta_step(
                Isa::detect(),
                &mut state,
                input,
                &mut u,
                &mut out[t * D_V..][..D_V],
            );
        }
        (out, state)
    }

    fn chunked(&self, size: usize, form: Form) -> (Vec<f64>, Vec<f64>) {
        let (mut state, mut out) = (vec![0.0; D_K * D_V], Vec::new());
        for start in (0..T).step_by(size) {
            self.chunk(start, size.min(T - start), form, &mut state, &mut out);
        }
        (out, state)
    }

    fn chunk(&self, start: usize, c: usize, form: Form, state: &mut [f64], out: &mut Vec<f64>) {
        let at = |x: &[f32], i: usize, d: usize| f64::from(x[(start + i) * (x.len() / T) + d]);
        let mut decay = vec![[0.0; D_K]; c];
        for i in 0..c {
            for d in 0..D_K {
                decay[i][d] = at(&self.g, i, d) + if i > 0 { decay[i - 1][d] } else { 0.0 };
            }
        }
        // Pairwise differences of the cumulated decay are never positive, so nothing overflows.
        let score = |x: &[f32], i: usize, j: usize| -> f64 {
            (0..D_K)
                .map(|d| at(x, i, d) * at(&self.k, j, d) * (decay[i][d] - decay[j][d]).exp())
                .sum()
        };
        // Forward substitution of (I + A_kk) Z = beta (V - (K e^G) S0) gives the pseudo-values U - W S0 directly.
        let mut pseudo: Vec<[f64; D_V]> = Vec::new();
        for i in 0..c {
            let beta = f64::from(self.beta[start + i]);
            let mut z: [f64; D_V] = std::array::from_fn(|e| {
                let read: f64 = (0..D_K)
                    .map(|d| at(&self.k, i, d) * decay[i][d].exp() * state[d * D_V + e])
                    .sum();
                beta * (at(&self.v, i, e) - read)
            });
            let sign = if form == Form::MinusKk { -1.0 } else { 1.0 };
            for (j, earlier) in pseudo.iter().enumerate() {
                let a = sign * beta * score(&self.k, i, j);
                for (z, p) in z.iter_mut().zip(earlier) {
                    *z -= a * p;
                }
            }
            if form == Form::KkWithDiagonal {
                let a = beta * score(&self.k, i, i);
                for z in &mut z {
                    *z /= 1.0 + a;
                }
            }
            pseudo.push(z);
        }
        for i in 0..c {
            let last = if form == Form::QkWithoutDiagonal {
                i
            } else {
                i + 1
            };
            for e in 0..D_V {
                let past: f64 = (0..D_K)
                    .map(|d| at(&self.q, i, d) * decay[i][d].exp() * state[d * D_V + e])
                    .sum();
                out.push(
                    past + (0..last)
                        .map(|j| score(&self.q, i, j) * pseudo[j][e])
                        .sum::<f64>(),
                );
            }
        }
        for d in 0..D_K {
            for e in 0..D_V {
                let written: f64 = (0..c)
                    .map(|i| {
                        at(&self.k, i, d) * (decay[c - 1][d] - decay[i][d]).exp() * pseudo[i][e]
                    })
                    .sum();
                state[d * D_V + e] = decay[c - 1][d].exp() * state[d * D_V + e] + written;
            }
        }
    }
}

#[test]
fn row_02_the_chunked_form_equals_the_sequential_one_at_every_chunk_size() {
    let sequence = Sequence::random();
    let (out, state) = sequence.sequential();
    for size in [1, 7, 16, 64] {
        let (want, want_state) = sequence.chunked(size, Form::Right);
        let errors = (relative_l2(&out, &want), relative_l2(&state, &want_state));
        assert!(
            errors.0 < 1e-6 && errors.1 < 1e-6,
            "chunks of {size}: {errors:?}"
        );
    }
}

#[test]
fn row_02_the_inverse_is_of_i_plus_a_kk() {
    shows(Form::MinusKk);
}

#[test]
fn row_03_a_kk_has_no_diagonal() {
    shows(Form::KkWithDiagonal);
}

#[test]
fn row_03_a_qk_keeps_its_diagonal() {
    shows(Form::QkWithoutDiagonal);
}

/// The recurrence is the right form and not `wrong`.
fn shows(wrong: Form) {
    let sequence = Sequence::random();
    let (out, _) = sequence.sequential();
    assert!(relative_l2(&out, &sequence.chunked(16, Form::Right).0) < 1e-6);
    assert!(relative_l2(&out, &sequence.chunked(16, wrong).0) > 0.02);
}
