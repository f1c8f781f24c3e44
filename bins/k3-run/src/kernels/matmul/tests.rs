#![expect(clippy::float_cmp, reason = "these results are exact")]

use super::super::testing::{Rng, assert_same_bits, bf16_bytes, f32_bytes, relative_l2};
use super::super::weights::{NanScales, SCALES, widen};
use super::*;

/// Stored bytes of a random matrix.
enum Stored {
    Bf16(Vec<u8>),
    F32(Vec<u8>),
    Mxfp4(Vec<u8>, Vec<u8>),
}

impl Stored {
    fn random(kind: usize, rows: usize, cols: usize, rng: &mut Rng) -> Self {
        match kind {
            0 => Self::Bf16(bf16_bytes(&rng.normals(rows * cols))),
            1 => Self::F32(f32_bytes(&rng.normals(rows * cols))),
            _ => Self::Mxfp4(
                (0..rows * cols / 2).map(|_| rng.byte()).collect(),
                (0..rows * cols / 32)
                    .map(|_| 120 + rng.byte() % 8)
                    .collect(),
            ),
        }
    }

    fn weights(&self) -> Weights<'_> {
        match self {
            Self::Bf16(bytes) => Weights::Bf16(bytes),
            Self::F32(bytes) => Weights::F32(bytes),
            Self::Mxfp4(packed, scale) => Weights::Mxfp4 {
                packed,
                scale,
                nan_scales: NanScales::Propagate,
            },
        }
    }
}

/// The order of the module documentation, written with nothing shared: lanes by index, one element at a time.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the one rounding of the contract"
)]
fn by_the_book(w: Weights<'_>, row: usize, x: &[f32]) -> f32 {
    let cols = x.len();
    let mut lanes = [0f64; 16];
    let mut wide = vec![0.0; cols];
    widen(w.rows(row..row + 1, cols), &mut wide);
    for start in (0..cols).step_by(128) {
        let mut block = [0f32; 16];
        let end = cols.min(start + 128);
        if let Weights::Mxfp4 { .. } = w {
            for group in (start..end).step_by(32) {
                for (lane, sum) in block.iter_mut().enumerate() {
                    let (i, j) = (group + lane, group + lane + 16);
                    // A power of two times both products is exact, so scaling first gives the same bits in range.
                    *sum += wide[j].mul_add(x[j], wide[i] * x[i]);
                }
            }
        } else {
            for i in start..end {
                block[i % 16] = wide[i].mul_add(x[i], block[i % 16]);
            }
        }
        for (lane, sum) in lanes.iter_mut().zip(block) {
            *lane += f64::from(sum);
        }
    }
    let s: Vec<f64> = (0..8).map(|j| lanes[2 * j] + lanes[2 * j + 1]).collect();
    let t: Vec<f64> = (0..4).map(|j| s[j] + s[j + 4]).collect();
    let u: Vec<f64> = (0..2).map(|j| t[j] + t[j + 2]).collect();
    (u[0] + u[1]) as f32
}

fn run(isa: Isa, w: Weights<'_>, x: &[f32], cols: usize, rows: usize) -> Vec<f32> {
    let mut vectors = Activations::new();
    vectors.fill(x, cols);
    let mut out = vec![f32::NAN; rows * vectors.num_rows()];
    matmul(isa, w, &vectors, &mut out);
    out
}

#[test]
fn every_isa_and_batch_size_gives_the_bits_of_the_written_order() {
    let mut rng = Rng(1);
    let widths = (1..40).chain([
        63, 64, 96, 127, 128, 129, 160, 191, 255, 256, 257, 300, 1024, 1056, 1151, 2080,
    ]);
    for cols in widths {
        for kind in 0..3 {
            if kind == 2 && cols % 32 != 0 {
                continue;
            }
            let rows = 1 + cols % 14;
            let stored = Stored::random(kind, rows, cols, &mut rng);
            let x = rng.normals(17 * cols);
            for t in (1..=9).chain([12, 15, 16, 17]) {
                let x = &x[..t * cols];
                let want: Vec<f32> = (0..rows)
                    .flat_map(|row| x.chunks(cols).map(move |x| (row, x)))
                    .map(|(row, x)| by_the_book(stored.weights(), row, x))
                    .collect();
                for isa in Isa::available() {
                    let got = run(isa, stored.weights(), x, cols, rows);
                    assert_same_bits(
                        &got,
                        &want,
                        &format!("{} kind {kind} [{rows}, {cols}] T {t}", isa.name()),
                    );
                }
            }
        }
    }
}

#[test]
fn every_width_up_to_300_is_the_same_scalar_or_not() {
    let mut rng = Rng(2);
    for cols in 1..=300 {
        for kind in 0..2 {
            let stored = Stored::random(kind, 5, cols, &mut rng);
            let x = rng.normals(2 * cols);
            let want = run(Isa::Scalar, stored.weights(), &x, cols, 5);
            let first: Vec<f32> = want.chunks(2).map(|pair| pair[0]).collect();
            for isa in Isa::available() {
                let got = run(isa, stored.weights(), &x, cols, 5);
                let what = format!("{} kind {kind} cols {cols}", isa.name());
                assert_same_bits(&got, &want, &what);
                let one = run(isa, stored.weights(), &x[..cols], cols, 5);
                assert_same_bits(&one, &first, &format!("one vector, {what}"));
            }
        }
    }
}

#[test]
fn tiles_of_every_size_give_the_scalar_bits() {
    let mut rng = Rng(11);
    // Whole blocks, a ragged last one, and fewer blocks than are worked on at a time.
    for cols in [96, 512, 640, 1184] {
        for kind in 0..3 {
            for rows in [1, 4, 23, 24, 27] {
                let stored = Stored::random(kind, rows, cols, &mut rng);
                let x = rng.normals(79 * cols);
                let all = run(Isa::Scalar, stored.weights(), &x, cols, rows);
                for t in (1..=14).chain([16, 24, 30, 31, 61, 64, 65, 66, 67, 72, 79]) {
                    let want: Vec<f32> = all.chunks(79).flat_map(|r| r[..t].to_vec()).collect();
                    for isa in Isa::available().into_iter().skip(1) {
                        let got = run(isa, stored.weights(), &x[..t * cols], cols, rows);
                        let what = format!("{} kind {kind} [{rows}, {cols}] T {t}", isa.name());
                        assert_same_bits(&got, &want, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn any_bytes_and_any_inputs_give_the_scalar_bits() {
    let mut rng = Rng(12);
    let (rows, cols, tokens) = (9, 608, 70);
    // Rows of extreme inputs: infinities, NaN, subnormals, zeros of both signs; and rows of finite ones of any size.
    let special = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE / 8.0,
        -f32::from_bits(1),
        0.0,
        -0.0,
        f32::MAX,
    ];
    let mut x = rng.normals(tokens * cols);
    for (token, x) in x.chunks_mut(cols).enumerate() {
        for value in x {
            match token % 4 {
                0 if rng.next().is_multiple_of(300) => {
                    *value = special[usize::from(rng.byte() % 8)];
                }
                1 => *value = f32::from_bits((*value).to_bits() & 0x80ff_ffff),
                2 => *value *= f32::from_bits(u32::from(rng.byte() | 1) << 23),
                _ => {}
            }
        }
    }
    let any: Vec<u8> = (0..rows * cols * 4).map(|_| rng.byte()).collect();
    let bf16 = &any[..rows * cols * 2];
    let packed = &any[..rows * cols / 2];
    let small: Vec<u8> = any.iter().map(|b| b & 0x81).collect();
    let mxfp4 = |nan_scales| Weights::Mxfp4 {
        packed,
        scale: &any[..rows * cols / 32],
        nan_scales,
    };
    for (name, w) in [
        ("bf16", Weights::Bf16(bf16)),
        ("f32", Weights::F32(&any)),
        ("tiny f32", Weights::F32(&small)),
        ("mxfp4", mxfp4(NanScales::Propagate)),
        ("mxfp4 without NaN", mxfp4(NanScales::Zero)),
    ] {
        let all = run(Isa::Scalar, w, &x, cols, rows);
        for t in [1, 2, 3, 5, 6, 7, 17, 70] {
            let want: Vec<f32> = all.chunks(tokens).flat_map(|r| r[..t].to_vec()).collect();
            for isa in Isa::available() {
                let got = run(isa, w, &x[..t * cols], cols, rows);
                assert_same_bits(&got, &want, &format!("{} {name} T {t}", isa.name()));
            }
        }
    }
}

/// Inputs of magnitude about `2^k`, some of them zeros of either sign.
fn inputs(k: i32, len: usize, rng: &mut Rng) -> Vec<f32> {
    (0..len)
        .map(|i| match i % 7 {
            0 => 0.0,
            1 => -0.0,
            _ => (1.0 + rng.unit().abs() * 0.99).copysign(rng.unit()) * 2f32.powi(k),
        })
        .collect()
}

#[test]
fn mxfp4_is_the_reference_on_every_isa_inside_at_and_beyond_the_range_of_scaled_weights() {
    let mut rng = Rng(21);
    let (rows, cols, most) = (9, 320, 66);
    let packed: Vec<u8> = (0..rows * cols / 2).map(|_| rng.byte()).collect();
    let (first, last) = (*SCALES.start(), *SCALES.end());
    for byte in [0, first - 1, first, 127, last, last + 1, 254] {
        let mut scale = vec![byte; rows * cols / 32];
        // Beside it one ordinary group in each row, so that sums of different size meet.
        scale.iter_mut().step_by(10).for_each(|byte| *byte = 120);
        let w = Weights::Mxfp4 {
            packed: &packed,
            scale: &scale,
            nan_scales: NanScales::Propagate,
        };
        for k in [-149, -126, -63, -62, 0, 63, 64, 126] {
            let values = inputs(k, most * cols, &mut rng);
            for t in [2, 3, 6, 17, most] {
                let mut x = Activations::new();
                x.fill(&values[..t * cols], cols);
                let mut want = vec![0.0; rows * t];
                matmul(Isa::Scalar, w, &x, &mut want);
                for isa in Isa::available().into_iter().skip(1) {
                    let mut got = vec![f32::NAN; rows * t];
                    matmul(isa, w, &x, &mut got);
                    let what = format!("{} scale {byte} inputs 2^{k} T {t}", isa.name());
                    assert_same_bits(&got, &want, &what);
                }
            }
        }
    }
}

#[test]
fn many_vectors_leave_every_thread_as_much_to_do() {
    // Rows of an 8 MiB tile of bf16 at the widths of the model, and whole matrices.
    for num_rows in [124, 341, 585, 1168, 3072, 7168, 12288] {
        for threads in [2, 3, 8] {
            let rows = super::equal_rows(num_rows, threads);
            let tasks = num_rows.div_ceil(rows);
            let most = tasks.div_ceil(threads) * rows;
            assert!(
                most * threads <= num_rows + num_rows / 10 + threads * super::PAIR_ROWS,
                "{num_rows} rows on {threads} threads: {tasks} tasks of {rows}"
            );
        }
    }
}

#[test]
fn threads_and_row_splits_change_no_bit() {
    let mut rng = Rng(3);
    for (kind, cols) in [(0, 700), (1, 300), (2, 672)] {
        let rows = 211;
        let stored = Stored::random(kind, rows, cols, &mut rng);
        for t in [1, 3, 70] {
            let mut x = Activations::new();
            x.fill(&rng.normals(t * cols), cols);
            for isa in Isa::available() {
                let mut want = vec![0.0; rows * t];
                matmul(isa, stored.weights(), &x, &mut want);
                for threads in [1, 2, 3] {
                    let pool = rayon::ThreadPoolBuilder::new()
                        .num_threads(threads)
                        .build()
                        .unwrap();
                    let mut got = vec![f32::NAN; rows * t];
                    pool.install(|| par_matmul(isa, stored.weights(), &x, &mut got));
                    assert_same_bits(&got, &want, &format!("{threads} threads"));
                    let mut second = got.clone();
                    let (w, out) = (stored.weights(), [&mut got[..], &mut second[..]]);
                    pool.install(|| {
                        par_matmul_pair(isa, [w, w], &x, out, |first, second| {
                            first.swap_with_slice(second);
                            second.fill(1.0);
                        });
                    });
                    assert_same_bits(&got, &want, &format!("a pair, {threads} threads"));
                    assert!(second.iter().all(|value| *value == 1.0));
                }
                for split in [1, 5, 6, 7, 64] {
                    let mut got = vec![f32::NAN; rows * t];
                    for (i, out) in got.chunks_mut(split * t).enumerate() {
                        let first = i * split;
                        matmul(
                            isa,
                            stored.weights().rows(first..first + out.len() / t, cols),
                            &x,
                            out,
                        );
                    }
                    assert_same_bits(&got, &want, &format!("tiles of {split} rows"));
                }
            }
        }
    }
}

#[test]
fn a_vector_is_computed_as_it_would_be_alone_in_any_batch() {
    let mut rng = Rng(4);
    let (rows, cols, t) = (13, 416, 131);
    for kind in 0..3 {
        let stored = Stored::random(kind, rows, cols, &mut rng);
        let x = rng.normals(t * cols);
        for isa in Isa::available() {
            let all = run(isa, stored.weights(), &x, cols, rows);
            let mut transposed = vec![0.0; all.len()];
            transpose(&all, t, &mut transposed);
            for (token, x) in x.chunks(cols).enumerate() {
                let alone = run(isa, stored.weights(), x, cols, rows);
                assert_same_bits(
                    &transposed[token * rows..][..rows],
                    &alone,
                    &format!("{} kind {kind} vector {token}", isa.name()),
                );
            }
        }
    }
}

#[test]
fn unaligned_weights_give_the_same_bits() {
    let mut rng = Rng(5);
    let (rows, cols) = (7, 320);
    let all = rng.normals(7 * cols);
    let moved = |bytes: &[u8], shift: usize| [vec![0; shift], bytes.to_vec()].concat();
    for kind in 0..3 {
        let stored = Stored::random(kind, rows, cols, &mut rng);
        for t in [1, 2, 7] {
            let x = &all[..t * cols];
            let want = run(Isa::Scalar, stored.weights(), x, cols, rows);
            for shift in 1..8 {
                let shifted = match &stored {
                    Stored::Bf16(bytes) => Stored::Bf16(moved(bytes, shift)),
                    Stored::F32(bytes) => Stored::F32(moved(bytes, shift)),
                    Stored::Mxfp4(packed, scale) => {
                        Stored::Mxfp4(moved(packed, shift), moved(scale, shift))
                    }
                };
                let w = match shifted.weights() {
                    Weights::Bf16(bytes) => Weights::Bf16(&bytes[shift..]),
                    Weights::F32(bytes) => Weights::F32(&bytes[shift..]),
                    Weights::Mxfp4 {
                        packed,
                        scale,
                        nan_scales,
                    } => Weights::Mxfp4 {
                        packed: &packed[shift..],
                        scale: &scale[shift..],
                        nan_scales,
                    },
                };
                for isa in Isa::available() {
                    assert_same_bits(&run(isa, w, x, cols, rows), &want, "shifted");
                }
            }
        }
    }
}

#[test]
fn error_against_f64_is_below_3e_7_at_the_widths_of_the_model() {
    let mut rng = Rng(6);
    for (kind, cols) in [
        (0, 128),
        (0, 7168),
        (0, 12288),
        (0, 33792),
        (1, 7168),
        (2, 3584),
        (2, 3072),
    ] {
        let rows = 24;
        let stored = Stored::random(kind, rows, cols, &mut rng);
        let x = rng.normals(cols);
        let mut wide = vec![0.0; rows * cols];
        widen(stored.weights(), &mut wide);
        let want: Vec<f64> = wide
            .chunks(cols)
            .map(|w| {
                w.iter()
                    .zip(&x)
                    .map(|(w, x)| f64::from(*w) * f64::from(*x))
                    .sum()
            })
            .collect();
        let error = relative_l2(&run(Isa::detect(), stored.weights(), &x, cols, rows), &want);
        println!("kind {kind} cols {cols}: relative L2 error {error:.2e}");
        assert!(error < 3e-7, "kind {kind} cols {cols}: {error:.2e}");
    }
}

#[test]
fn row_32_scale_bytes_at_the_ends_agree_on_every_isa() {
    let mut rng = Rng(7);
    let (rows, cols) = (6, 192);
    let packed: Vec<u8> = (0..rows * cols / 2).map(|_| rng.byte()).collect();
    let x = rng.normals(5 * cols);
    for byte in [0, 1, 2, 126, 127, 128, 253, 254, 255] {
        let scale = vec![byte; rows * cols / 32];
        for nan_scales in [NanScales::Propagate, NanScales::Zero] {
            let w = Weights::Mxfp4 {
                packed: &packed,
                scale: &scale,
                nan_scales,
            };
            let want = run(Isa::Scalar, w, &x, cols, rows);
            for t in [1, 2, 5] {
                let x = &x[..t * cols];
                let want: Vec<f32> = want.chunks(5).flat_map(|r| r[..t].to_vec()).collect();
                for isa in Isa::available() {
                    assert_same_bits(
                        &run(isa, w, x, cols, rows),
                        &want,
                        &format!("{} scale {byte} T {t}", isa.name()),
                    );
                }
            }
            let finite = want.iter().all(|v| v.is_finite());
            match (byte, nan_scales) {
                (255, NanScales::Propagate) => assert!(want.iter().all(|v| v.is_nan())),
                (255, NanScales::Zero) => assert!(want.iter().all(|v| *v == 0.0)),
                (0, _) => assert!(finite && want.iter().any(|v| *v != 0.0 && v.abs() < 1e-35)),
                _ => {}
            }
        }
    }
}

#[test]
fn one_nan_scale_spoils_only_its_row() {
    let (rows, cols) = (3, 64);
    let mut scale = vec![127; rows * 2];
    scale[3] = 255;
    let packed = vec![0x22; rows * cols / 2];
    let w = Weights::Mxfp4 {
        packed: &packed,
        scale: &scale,
        nan_scales: NanScales::Propagate,
    };
    for isa in Isa::available() {
        for t in [1, 2] {
            let out = run(isa, w, &vec![1.0; t * cols], cols, rows);
            for (row, results) in out.chunks(t).enumerate() {
                assert!(
                    results.iter().all(|v| v.is_nan() == (row == 1)),
                    "row {row}"
                );
            }
        }
    }
}

#[test]
fn row_29_the_low_nibble_meets_the_even_input() {
    let mut x = vec![0.0; 32];
    let w = Weights::Mxfp4 {
        packed: &[0x1F; 16],
        scale: &[128],
        nan_scales: NanScales::Propagate,
    };
    for (i, want) in [(0, -12.0), (1, 1.0), (16, -12.0), (31, 1.0)] {
        x.fill(0.0);
        x[i] = 1.0;
        for isa in Isa::available() {
            assert_eq!(run(isa, w, &x, 32, 1), [want]);
        }
    }
}

#[test]
fn no_vectors_or_no_rows_is_no_work() {
    let mut x = Activations::new();
    x.fill(&[], 8);
    matmul(Isa::detect(), Weights::Bf16(&[0; 32]), &x, &mut []);
    par_matmul(Isa::detect(), Weights::Bf16(&[0; 32]), &x, &mut []);
    x.fill(&[1.0; 8], 8);
    par_matmul(Isa::detect(), Weights::Bf16(&[]), &x, &mut []);
}

#[test]
#[should_panic(expected = "results of 2 rows times 1 vectors")]
fn a_result_of_the_wrong_length_is_refused() {
    run(Isa::Scalar, Weights::F32(&[0; 32]), &[0.0; 4], 4, 3);
}

#[test]
fn transpose_moves_every_result() {
    let (rows, t) = (37, 5);
    let out: Vec<f32> = (0..rows * t).map(|i| i as f32).collect();
    let mut into = vec![0.0; out.len()];
    transpose(&out, t, &mut into);
    for row in 0..rows {
        for token in 0..t {
            assert_eq!(into[token * rows + row], out[row * t + token]);
        }
    }
}

#[test]
fn row_48_negative_zero_weights_are_zeros() {
    let (rows, cols) = (2, 160);
    let x = Rng(9).normals(3 * cols);
    let negative: Vec<u8> = [0x00, 0x80].repeat(rows * cols);
    let wide = f32_bytes(&vec![-0.0; rows * cols]);
    let packed = Weights::Mxfp4 {
        packed: &vec![0x88; rows * cols / 2],
        scale: &vec![127; rows * cols / 32],
        nan_scales: NanScales::Propagate,
    };
    for isa in Isa::available() {
        for w in [Weights::Bf16(&negative), Weights::F32(&wide), packed] {
            // Equal as numbers; other implementations may keep the sign.
            assert_eq!(run(isa, w, &x, cols, rows), [0.0; 6]);
        }
    }
}
