//! Which instruction set the kernels may use, decided once at start-up.
//!
//! A token type such as [`Avx2`] can only be made by asking the processor, so holding one is the proof that makes the
//! call into a `#[target_feature]` function sound. Every instruction set gives the same bits.

/// Proof that this processor has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// Asks the processor.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

/// Proof that this processor has AVX-512 (F, BW, DQ, VL) besides AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx512(());

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// Asks the processor.
    pub fn detect() -> Option<Self> {
        (Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl"))
        .then_some(Self(()))
    }
}

/// The instruction set a kernel call uses. The choice changes speed, never a bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// Portable Rust: the reference that the others must equal. Slow, because a fused multiply-add is a library call.
    Scalar,
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 with the features of [`Avx512`].
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Isa {
    /// The fastest instruction set of this processor.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = Avx512::detect().map(Self::Avx512);
            if let Some(best) = avx512.or_else(|| Avx2::detect().map(Self::Avx2)) {
                return best;
            }
        }
        Self::Scalar
    }

    /// Every instruction set this processor has, the reference first, the fastest last.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::detect().map(Self::Avx2));
            all.extend(Avx512::detect().map(Self::Avx512));
        }
        all
    }

    /// The name used by `--isa` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_always_available_and_names_differ() {
        let all = Isa::available();
        assert_eq!(all[0], Isa::Scalar);
        assert_eq!(all.last(), Some(&Isa::detect()));
        let mut names: Vec<_> = all.iter().map(|isa| isa.name()).collect();
        names.dedup();
        assert_eq!(names.len(), all.len());
    }
}
