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

/// The instruction set a kernel call uses. The choice changes speed, never a bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// Portable Rust: the reference that the others must equal. Slow, because a fused multiply-add is a library call.
    Scalar,
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
}

impl Isa {
    /// The fastest instruction set of this processor.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = Avx2::detect() {
            return Self::Avx2(avx2);
        }
        Self::Scalar
    }

    /// Every instruction set this processor has, the reference first.
    pub fn available() -> Vec<Self> {
        let best = Self::detect();
        if best == Self::Scalar {
            vec![Self::Scalar]
        } else {
            vec![Self::Scalar, best]
        }
    }

    /// The name used by `--isa` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
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
        assert!(all.contains(&Isa::detect()));
        let mut names: Vec<_> = all.iter().map(|isa| isa.name()).collect();
        names.dedup();
        assert_eq!(names.len(), all.len());
    }
}
