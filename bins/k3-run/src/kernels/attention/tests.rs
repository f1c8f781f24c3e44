//! Groups against the order as it is written down, one query and one position at a time.

use super::super::testing::{Rng, assert_same_bits, bf16_bytes, f32_bytes, relative_l2};
use super::super::weights::widen;
use super::super::{Activations, Isa, Weights, matmul};
use super::*;

mod reference;
use reference::{attend, dot};

fn attended(isa: Isa, q: &[f32], cache: &[f32], r: usize, scale: f32) -> Vec<f32> {
    let visible = [cache.len() / q.len()];
    grouped(isa, q, cache, (r, q.len()), scale, &visible)
}

/// Queries `[visible.len(), width]` as one group over a natural-order cache `[n, width]`.
fn grouped(
    isa: Isa,
    q: &[f32],
    cache: &[f32],
    (rank, width): (usize, usize),
    scale: f32,
    visible: &[usize],
) -> Vec<f32> {
    let mut stored = LatentCache::new(cache.len() / width, width);
    for (position, values) in cache.chunks_exact(width).enumerate() {
        stored.store(position, values);
    }
    let mut group = Group::new(LatentWidths { rank, width });
    let stride = group.stride();
    // Buffers that were used before must not matter.
    group.queries_mut().fill(f32::NAN);
    group.attend(isa, 1.0, stored.visible(1), &[1; QUERIES]);
    group.queries_mut().fill(f32::NAN);
    for (into, q) in group
        .queries_mut()
        .chunks_exact_mut(stride)
        .zip(q.chunks(width))
    {
        into[..width].copy_from_slice(q);
    }
    let last = visible[visible.len() - 1];
    group.attend(isa, scale, stored.visible(last), visible);
    let mut out = vec![f32::NAN; visible.len() * rank];
    for (q, out) in out.chunks_exact_mut(rank).enumerate() {
        group.result(isa, q, out);
    }
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

/// `(r, d_r)`: ragged, of the tests' model, of the released model.
const WIDTHS: [(usize, usize); 6] = [(1, 0), (5, 3), (17, 4), (32, 8), (130, 20), (512, 64)];

#[test]
fn one_query_is_close_to_f64_and_has_the_bits_of_the_written_order_on_every_isa() {
    let mut rng = Rng(51);
    for (r, d_r) in WIDTHS {
        for n in [1, 2, 63, 64, 65, 128, 200] {
            let (q, cache) = (rng.normals(r + d_r), rng.normals(n * (r + d_r)));
            let scale = 1.0 / ((r + d_r) as f32).sqrt();
            let mut want = vec![0.0; r];
            attend(&q, &cache, r, scale, &mut want);
            let error = relative_l2(&want, &in_f64(&q, &cache, r, scale));
            assert!(error < 1e-6, "r {r} d_r {d_r} n {n}: {error:.2e}");
            for isa in Isa::available() {
                let got = attended(isa, &q, &cache, r, scale);
                assert_same_bits(&got, &want, &format!("{isa:?} r {r} d_r {d_r} n {n}"));
            }
        }
    }
}

#[test]
fn a_group_of_any_size_gives_each_query_what_it_gets_alone() {
    let mut rng = Rng(55);
    for (r, d_r) in WIDTHS {
        let (width, n) = (r + d_r, 150);
        let (q, cache) = (rng.normals(QUERIES * width), rng.normals(n * width));
        let scale = 1.0 / (width as f32).sqrt();
        for count in (1..=QUERIES).filter(|count| width < 100 || count % 5 < 2) {
            // Alike, one more each, in pairs, and from the first position on.
            let ways: [&dyn Fn(usize) -> usize; 5] =
                [&|_| 130, &|q| 50 + q, &|q| 60 + q / 2, &|q| 1 + q, &|q| {
                    if q < 3 { 64 } else { 128 + q / 4 }
                }];
            for visible in ways {
                let visible: Vec<usize> = (0..count).map(visible).collect();
                let mut want = vec![0.0; count * r];
                for ((want, q), n) in want.chunks_mut(r).zip(q.chunks(width)).zip(&visible) {
                    attend(q, &cache[..n * width], r, scale, want);
                }
                for isa in Isa::available() {
                    let got = grouped(isa, &q, &cache, (r, width), scale, &visible);
                    assert_same_bits(&got, &want, &format!("{isa:?} r {r} {visible:?}"));
                }
            }
        }
    }
}

#[test]
fn a_long_context_of_the_release_has_the_bits_of_the_written_order() {
    let mut rng = Rng(58);
    let (r, width, n) = (512, 576, 4_500);
    let (q, cache) = (rng.normals(5 * width), rng.normals(n * width));
    let visible = [4_095, 4_096, 4_097, 4_480, n];
    let scale = 1.0 / 192f32.sqrt();
    let mut want = vec![0.0; 5 * r];
    for ((want, q), n) in want.chunks_mut(r).zip(q.chunks(width)).zip(visible) {
        attend(q, &cache[..n * width], r, scale, want);
    }
    for isa in Isa::available() {
        let got = grouped(isa, &q, &cache, (r, width), scale, &visible);
        assert_same_bits(&got, &want, &format!("{isa:?}"));
    }
}

#[test]
fn what_a_query_does_not_see_never_reaches_it_not_even_nan() {
    let mut rng = Rng(56);
    let (r, width, n) = (33, 40, 140);
    let q = rng.normals(QUERIES * width);
    let clean = rng.normals(n * width);
    for first_bad in [1, 63, 64, 100, 129] {
        let visible: Vec<usize> = (0..QUERIES)
            .map(|q| (first_bad + q).min(n).max(1) - 15.min(q))
            .collect();
        let mut visible = visible;
        visible.sort_unstable();
        let mut cache = clean.clone();
        cache[first_bad * width..].fill(f32::NAN);
        cache[first_bad * width + 1] = f32::INFINITY;
        for isa in Isa::available() {
            let got = grouped(isa, &q, &cache, (r, width), 0.2, &visible);
            let want = grouped(isa, &q, &clean, (r, width), 0.2, &visible);
            for ((got, want), n) in got.chunks(r).zip(want.chunks(r)).zip(&visible) {
                if *n <= first_bad {
                    assert_same_bits(got, want, &format!("{isa:?} {n} of {first_bad}"));
                } else {
                    assert!(got.iter().any(|v| v.is_nan()), "{isa:?} {n} of {first_bad}");
                }
            }
        }
    }
}

#[test]
fn scores_that_overflow_give_the_same_bits_on_every_isa() {
    let mut rng = Rng(57);
    let (r, width, n) = (20, 24, 70);
    let cache = rng.normals(n * width);
    for factor in [1e20, -1e20, 1e38, 0.0, -0.0] {
        let q: Vec<f32> = rng.normals(5 * width).iter().map(|v| v * factor).collect();
        let mut want = vec![0.0; 5 * r];
        for (want, q) in want.chunks_mut(r).zip(q.chunks(width)) {
            attend(q, &cache, r, 1e10, want);
        }
        for isa in Isa::available() {
            let got = grouped(isa, &q, &cache, (r, width), 1e10, &[n; 5]);
            assert_same_bits(&got, &want, &format!("{isa:?} factor {factor}"));
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
fn absorb_is_the_transposed_product_for_any_number_of_queries_on_every_isa() {
    let mut rng = Rng(54);
    for (rows, cols) in [(1, 1), (16, 32), (24, 32), (17, 45), (128, 512)] {
        for count in [1, 3, 4, 5, 9] {
            let (k, q) = (rng.normals(rows * cols), rng.normals((rows + 2) * count));
            let (narrow, wide) = (bf16_bytes(&k), f32_bytes(&k));
            for w in [Weights::Bf16(&narrow), Weights::F32(&wide)] {
                let mut values = vec![0.0; rows * cols];
                widen(w, &mut values);
                let queries = || q.chunks(rows + 2).map(|q| &q[..rows]);
                let want: Vec<f32> = queries()
                    .flat_map(|q| reference::absorb(&values, q, cols))
                    .collect();
                let exact: Vec<f64> = queries()
                    .flat_map(|q| {
                        (0..cols)
                            .map(|j| {
                                (0..rows)
                                    .map(|i| f64::from(q[i]) * f64::from(values[i * cols + j]))
                                    .sum()
                            })
                            .collect::<Vec<f64>>()
                    })
                    .collect();
                assert!(relative_l2(&want, &exact) < 3e-7, "[{rows}, {cols}]");
                let q = Strided {
                    values: &q,
                    stride: rows + 2,
                    len: rows,
                };
                for isa in Isa::available() {
                    let mut out = vec![7.0; count * (cols + 3)];
                    absorb(isa, w, cols, q, &mut out, cols + 3);
                    let got: Vec<f32> = out
                        .chunks(cols + 3)
                        .flat_map(|v| v[..cols].to_vec())
                        .collect();
                    assert_same_bits(&got, &want, &format!("{isa:?} [{rows}, {cols}] x {count}"));
                    assert!(out.chunks(cols + 3).all(|v| v[cols..] == [7.0; 3]));
                }
            }
        }
    }
}

mod heads;
