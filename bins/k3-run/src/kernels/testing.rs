//! Seeded random inputs for the tests of the kernels.

/// The splitmix64 generator.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    /// Uniform in -1..1, every value exact in f32.
    pub(crate) fn unit(&mut self) -> f32 {
        let bits = u32::try_from(self.next() >> 40).unwrap();
        bits as f32 / 8_388_608.0 - 1.0
    }

    /// About normal, standard deviation 1.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() / 2.0
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// bf16 bytes nearest to zero of each value.
pub(crate) fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|v| v.to_le_bytes().into_iter().skip(2))
        .collect()
}

pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Root of the summed squared differences over that of the wanted values.
pub(crate) fn relative_l2(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got
        .iter()
        .zip(want)
        .map(|(g, w)| (f64::from(*g) - w).powi(2))
        .sum();
    let norm: f64 = want.iter().map(|w| w * w).sum();
    (error / norm).sqrt()
}

/// The same bits, any NaN counting as equal to any other.
pub(crate) fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(
            g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()),
            "{what}: element {i} is {g:e}, not {w:e}"
        );
    }
}
