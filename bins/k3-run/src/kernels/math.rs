//! `exp`, `sigmoid`, `tanh`, `silu` and SiTU in f32 with the same bits on every machine.
//!
//! Our own polynomials, written with plain multiplications and additions (which Rust never contracts) and without
//! branches, so that the compiler vectorises the slice versions for any instruction set and each lane still gets the bits
//! of the one-value function. Errors, measured over every exponent: `exp` 1 ulp, `sigmoid` 3, `tanh` 2, `silu` 3.

#![expect(
    clippy::inline_always,
    reason = "only an inlined body is compiled, and vectorised, for the caller's features"
)]

/// Adding and subtracting this rounds a small f32 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// `2^n` for `n` in -126..=127.
#[inline(always)]
fn exp2i(n: i32) -> f32 {
    f32::from_bits(((n + 127) << 23).cast_unsigned())
}

/// `e^x`. Infinite from about 88.72 on, 0 from about -103.97 down; subnormal results are rounded once; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Comparisons with a NaN are false, so it passes through.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -105.0 { -105.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // The high part of ln 2 has 9 bits and n at most 8, so the first product and difference are exact.
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for c in [
        1.398_2e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        p = p * r + c;
    }
    let p = (p * (r * r) + r) + 1.0;
    // Two factors, so that neither leaves the range of normal numbers. A NaN gives any integer, and stays NaN.
    let n = shifted
        .to_bits()
        .cast_signed()
        .wrapping_sub(ROUND.to_bits().cast_signed())
        .clamp(-160, 160);
    let half = n >> 1;
    p * exp2i(half) * exp2i(n - half)
}

/// `1 / (1 + e^-x)`, accurate relative to its value on both sides.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    let numerator = if x < 0.0 { e } else { 1.0 };
    numerator / (1.0 + e)
}

/// `tanh x`, accurate relative to its value near 0 and exactly 1 far out.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let z = x * x;
    let mut p = -5.704_988_7e-3;
    for c in [0.020_639_09, -5.373_971_6e-2, 1.333_144_2e-1, -0.333_332_8] {
        p = p * z + c;
    }
    let a = x.abs();
    let small = p * z * a + a;
    let large = 1.0 - 2.0 / (exp(2.0 * a) + 1.0);
    (if a < 0.625 { small } else { large }).copysign(x)
}

/// `x * sigmoid(x)`. Below -87, where the sigmoid is subnormal, the result is right to 1e-42 absolute.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// SiTU-GLU: `beta tanh(gate / beta) * sigmoid(gate) * linear_beta tanh(up / linear_beta)`; the sigmoid sees the uncapped
/// gate (specification 3.6).
#[inline(always)]
pub fn situ(gate: f32, up: f32, beta: f32, linear_beta: f32) -> f32 {
    (beta * tanh(gate / beta)) * sigmoid(gate) * (linear_beta * tanh(up / linear_beta))
}

/// Defines a function whose one body is compiled for each instruction set, vectorised by the compiler. The bits are
/// those of the plain body: Rust neither contracts nor reorders floating-point operations, and `mul_add` is fused
/// everywhere (a library call where there is no instruction).
macro_rules! for_each_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::kernels::Isa, $($arg: $ty),*) {
            #[inline(always)]
            fn body($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) {
                body($($arg),*);
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) {
                body($($arg),*);
            }

            match isa {
                $crate::kernels::Isa::Scalar => body($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Avx2` exists only if `Avx2::detect` saw AVX2 and FMA.
                $crate::kernels::Isa::Avx2(_) => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Avx512` exists only if `Avx512::detect` saw these features.
                $crate::kernels::Isa::Avx512(_) => unsafe { avx512($($arg),*) },
            }
        }
    };
}
pub(super) use for_each_isa;

for_each_isa! {
    /// [`exp`] of every value.
    pub fn exp_slice(x: &mut [f32]) {
        for x in x {
            *x = exp(*x);
        }
    }
}

for_each_isa! {
    /// [`sigmoid`] of every value.
    pub fn sigmoid_slice(x: &mut [f32]) {
        for x in x {
            *x = sigmoid(*x);
        }
    }
}

for_each_isa! {
    /// [`silu`] of every value.
    pub fn silu_slice(x: &mut [f32]) {
        for x in x {
            *x = silu(*x);
        }
    }
}

for_each_isa! {
    /// [`situ`] of every pair; `betas` is `(beta, linear_beta)`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn situ_slice(gate: &[f32], up: &[f32], betas: (f32, f32), out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len(), "gate, up and out lengths");
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = situ(*gate, *up, betas.0, betas.1);
        }
    }
}

for_each_isa! {
    /// `y[i] *= sigmoid(gate[i])`: the output gates of both mixers (specification 3.4 step 7, 3.5 step 5).
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn sigmoid_gate(y: &mut [f32], gate: &[f32]) {
        assert_eq!(y.len(), gate.len(), "values and gates");
        for (y, gate) in y.iter_mut().zip(gate) {
            *y *= sigmoid(*gate);
        }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::super::Isa;
    use super::super::testing::{Rng, assert_same_bits};
    use super::*;

    /// Distance in units in the last place of the correctly rounded result.
    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
    fn ulps(got: f32, want: f64) -> f64 {
        let rounded = want as f32;
        if rounded.is_infinite() || got.is_infinite() {
            return if got == rounded { 0.0 } else { f64::INFINITY };
        }
        let exponent = rounded.abs().max(f32::MIN_POSITIVE).log2().floor();
        (f64::from(got) - want).abs() / f64::from(exponent - 23.0).exp2()
    }

    /// Every exponent of both signs, about 2 million values, and a dense grid where the functions bend.
    fn sweep() -> impl Iterator<Item = f32> {
        let by_bits = (0..0xff80_0000_u32)
            .step_by(2039)
            .map(f32::from_bits)
            .filter(|x| x.is_finite());
        let grid = (-110_000..=110_000).map(|i| i as f32 * 1e-3);
        by_bits.chain(grid)
    }

    fn worst(f: impl Fn(f32) -> f32, want: impl Fn(f64) -> f64) -> (f64, f32) {
        sweep()
            .map(|x| (ulps(f(x), want(f64::from(x))), x))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap()
    }

    fn sigmoid_f64(x: f64) -> f64 {
        if x < 0.0 {
            libm::exp(x) / (1.0 + libm::exp(x))
        } else {
            1.0 / (1.0 + libm::exp(-x))
        }
    }

    #[test]
    fn functions_are_within_their_stated_ulps_at_every_exponent() {
        for (name, limit, (error, at)) in [
            ("exp", 1.1, worst(exp, libm::exp)),
            ("sigmoid", 3.0, worst(sigmoid, sigmoid_f64)),
            ("tanh", 2.0, worst(tanh, libm::tanh)),
            (
                "silu",
                3.5,
                worst(
                    |x| silu(x.max(-87.0)),
                    |x| x.max(-87.0) * sigmoid_f64(x.max(-87.0)),
                ),
            ),
        ] {
            println!("{name}: {error:.2} ulp at {at:e}");
            assert!(error <= limit, "{name}: {error} ulp at {at:e}");
        }
    }

    #[test]
    fn silu_fades_to_zero_far_below() {
        for i in 0..20_000 {
            let x = -87.0 - i as f32 * 1e-3;
            assert!(
                (f64::from(silu(x)) - f64::from(x) * sigmoid_f64(f64::from(x))).abs() < 1e-42,
                "{x}"
            );
        }
    }

    #[test]
    fn saturation_is_exact() {
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(-104.0).to_bits(), 0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(88.73), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(88.72) < f32::INFINITY);
        assert_eq!(
            (
                sigmoid(f32::INFINITY),
                sigmoid(f32::NEG_INFINITY),
                sigmoid(0.0)
            ),
            (1.0, 0.0, 0.5)
        );
        for x in [20.0, 1e3, f32::INFINITY] {
            assert_eq!((tanh(x), tanh(-x)), (1.0, -1.0));
        }
        assert_eq!(tanh(-0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(tanh(1e-30), 1e-30);
        assert_eq!(situ(100.0, 1000.0, 4.0, 25.0), 100.0);
    }

    #[test]
    fn nan_stays_nan() {
        for nan in [
            f32::NAN,
            -f32::NAN,
            f32::from_bits(0x7f80_0001),
            f32::from_bits(0xffff_ffff),
        ] {
            for value in [
                exp(nan),
                sigmoid(nan),
                tanh(nan),
                silu(nan),
                situ(nan, 1.0, 4.0, 25.0),
                situ(1.0, nan, 4.0, 25.0),
            ] {
                assert!(value.is_nan());
            }
        }
    }

    #[test]
    fn row_27_situ_caps_both_inputs_and_gates_with_the_uncapped_one() {
        for (gate, up, want) in [
            (1.0, 1.0, 0.715_817_828),
            (-1.0, 2.0, -0.525_828_896),
            (0.0, 7.0, 0.0),
            (4.0, 25.0, 56.959_319_511),
            (100.0, 1000.0, 100.0),
            (8.0, -50.0, -92.903_751_778),
            (0.5, -0.25, -0.077_402_106),
        ] {
            let got = f64::from(situ(gate, up, 4.0, 25.0));
            assert!(
                (got - want).abs() <= 3e-7 * want.abs().max(1e-3),
                "situ({gate}, {up}) = {got}, not {want}"
            );
        }
    }

    #[test]
    fn row_48_a_closed_gate_gives_zero_whatever_its_sign() {
        for up in [3.0, -3.0, 0.0, -0.0, 1e4] {
            assert!(situ(-100.0, up, 4.0, 25.0).abs() < 1e-41);
            assert_eq!(situ(-200.0, up, 4.0, 25.0), 0.0);
        }
        assert!(situ(-200.0, 3.0, 4.0, 25.0).is_sign_negative());
    }

    #[test]
    fn slices_give_the_bits_of_single_values_on_every_isa() {
        let mut rng = Rng(11);
        let mut x: Vec<f32> = sweep().step_by(97).chain(rng.normals(1000)).collect();
        x.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]);
        let up: Vec<f32> = x.iter().rev().copied().collect();
        let each = |f: fn(f32) -> f32| x.iter().map(|x| f(*x)).collect::<Vec<_>>();
        let pairs = |f: fn(f32, f32) -> f32| {
            x.iter()
                .zip(&up)
                .map(|(x, u)| f(*x, *u))
                .collect::<Vec<_>>()
        };
        for isa in Isa::available() {
            let in_place = |f: fn(Isa, &mut [f32])| {
                let mut y = x.clone();
                f(isa, &mut y);
                y
            };
            assert_same_bits(&in_place(exp_slice), &each(exp), "exp");
            assert_same_bits(&in_place(sigmoid_slice), &each(sigmoid), "sigmoid");
            assert_same_bits(&in_place(silu_slice), &each(silu), "silu");
            let mut out = vec![0.0; x.len()];
            situ_slice(isa, &x, &up, (4.0, 25.0), &mut out);
            assert_same_bits(&out, &pairs(|g, u| situ(g, u, 4.0, 25.0)), "situ");
            out.copy_from_slice(&up);
            sigmoid_gate(isa, &mut out, &x);
            assert_same_bits(&out, &pairs(|g, y| y * sigmoid(g)), "gate");
        }
    }
}
