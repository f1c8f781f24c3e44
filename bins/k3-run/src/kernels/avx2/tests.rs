use super::super::testing::{Rng, assert_same_bits};
use super::super::weights::NanScales;
use super::super::{Isa, matmul};
use super::*;
use crate::kernels::isa::Avx2;

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
