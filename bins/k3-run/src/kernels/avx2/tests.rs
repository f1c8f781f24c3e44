use super::super::testing::{Rng, assert_same_bits};
use super::super::weights::NanScales;
use super::super::{Isa, matmul};
use super::tile::{SCALES, in_range};
use super::*;
use crate::kernels::isa::Avx2;

fn magnitudes_are_in_range(values: &[f32]) -> bool {
    assert!(Avx2::detect().is_some(), "this test needs AVX2");
    let mut x = Activations::new();
    x.fill(values, values.len());
    // SAFETY: the processor was asked above.
    unsafe { in_range(x.row(0)) }
}

#[test]
fn the_range_is_zero_or_two_to_the_minus_62_to_below_two_to_the_64() {
    let (least, past) = (2f32.powi(-62), 2f32.powi(64));
    for good in [
        0.0,
        -0.0,
        least,
        -least,
        1.0,
        past.next_down(),
        -past.next_down(),
    ] {
        assert!(magnitudes_are_in_range(&[1.0, good, 0.0]), "{good:e}");
    }
    let bad = [
        least.next_down(),
        past,
        f32::from_bits(1),
        f32::INFINITY,
        f32::NAN,
    ];
    for bad in bad.into_iter().flat_map(|bad| [bad, -bad]) {
        for at in 0..40 {
            let mut values = [1.0; 40];
            values[at] = bad;
            assert!(!magnitudes_are_in_range(&values), "{bad:e} at {at}");
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
fn mxfp4_is_the_reference_inside_at_and_beyond_the_range_of_scaled_weights() {
    let Some(avx2) = Avx2::detect().map(Isa::Avx2) else {
        panic!("this test needs AVX2");
    };
    let mut rng = Rng(21);
    let (rows, cols, most) = (9, 320, 26);
    let packed: Vec<u8> = (0..rows * cols / 2).map(|_| rng.byte()).collect();
    let (first, last) = (*SCALES.start(), *SCALES.end());
    for scale in [0, first - 1, first, 127, last, last + 1, 254] {
        let mut scale = vec![scale; rows * cols / 32];
        // Beside it one ordinary group in each row, so that sums of different size meet.
        scale.iter_mut().step_by(10).for_each(|byte| *byte = 120);
        let w = Weights::Mxfp4 {
            packed: &packed,
            scale: &scale,
            nan_scales: NanScales::Propagate,
        };
        for k in [-149, -126, -63, -62, 0, 63, 64, 126] {
            let values = inputs(k, most * cols, &mut rng);
            for t in [2, 3, 5, 16, most] {
                let mut x = Activations::new();
                x.fill(&values[..t * cols], cols);
                let (mut got, mut want) = (vec![0.0; rows * t], vec![0.0; rows * t]);
                matmul(avx2, w, &x, &mut got);
                matmul(Isa::Scalar, w, &x, &mut want);
                assert_same_bits(&got, &want, &format!("scale {scale:?} inputs 2^{k} T {t}"));
            }
        }
    }
}

#[test]
fn every_batch_size_up_to_70_is_the_reference() {
    let Some(avx2) = Avx2::detect().map(Isa::Avx2) else {
        panic!("this test needs AVX2");
    };
    let mut rng = Rng(22);
    // More than one run of blocks, an odd number of them, the last ragged; rows that leave one over.
    let (rows, cols, most) = (29, 1184, 70);
    let values = rng.normals(most * cols);
    let bytes: Vec<u8> = super::super::testing::f32_bytes(&rng.normals(rows * cols));
    let scale: Vec<u8> = (0..rows * cols / 32)
        .map(|_| 118 + rng.byte() % 8)
        .collect();
    let kinds = [
        Weights::F32(&bytes),
        Weights::Bf16(&bytes[..rows * cols * 2]),
        Weights::Mxfp4 {
            packed: &bytes[..rows * cols / 2],
            scale: &scale,
            nan_scales: NanScales::Propagate,
        },
    ];
    for (kind, w) in kinds.into_iter().enumerate() {
        let mut x = Activations::new();
        x.fill(&values, cols);
        let mut all = vec![0.0; rows * most];
        matmul(Isa::Scalar, w, &x, &mut all);
        for t in 1..=most {
            x.fill(&values[..t * cols], cols);
            let want: Vec<f32> = all
                .chunks(most)
                .flat_map(|row| &row[..t])
                .copied()
                .collect();
            let mut got = vec![f32::NAN; rows * t];
            matmul(avx2, w, &x, &mut got);
            assert_same_bits(&got, &want, &format!("kind {kind} T {t}"));
        }
    }
}
