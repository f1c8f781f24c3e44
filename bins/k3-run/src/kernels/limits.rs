//! Loops that do nothing but what the machine is limited by, so that a kernel's speed can be told as a share of it.
//!
//! The loops run the caller's threads; the caller holds the clock.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    _mm256_extract_epi64, _mm256_loadu_si256, _mm256_setzero_si256, _mm256_xor_si256,
};

use super::isa::Isa;
use super::math::for_each_isa;
#[cfg(target_arch = "x86_64")]
use super::prefetch;

/// How far ahead of the bytes in hand others are asked for.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 4096;

/// Independent sums of [`multiply_add`] with 256-bit registers: twelve of them, more than latency times units needs.
const NARROW: usize = 96;

/// The same for 512-bit registers.
const WIDE: usize = 192;

/// Fused multiply-adds from registers on this thread, and how many floating-point operations they were (two each).
///
/// The result keeps the work alive and means nothing.
pub fn multiply_add(isa: Isa, rounds: usize) -> (f32, usize) {
    let mut narrow = [1f32; NARROW];
    let mut wide = [1f32; WIDE];
    let factor = std::hint::black_box(0.999_f32);
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => {
            multiply_add_wide(isa, &mut wide, factor, rounds);
            (wide.iter().sum(), 2 * WIDE * rounds)
        }
        _ => {
            multiply_add_narrow(isa, &mut narrow, factor, rounds);
            (narrow.iter().sum(), 2 * NARROW * rounds)
        }
    }
}

for_each_isa! {
    fn multiply_add_narrow(sums: &mut [f32; NARROW], factor: f32, rounds: usize) {
        let mut own = *sums;
        for _ in 0..rounds {
            for sum in &mut own {
                *sum = sum.mul_add(factor, factor);
            }
        }
        *sums = own;
    }
}

for_each_isa! {
    fn multiply_add_wide(sums: &mut [f32; WIDE], factor: f32, rounds: usize) {
        let mut own = *sums;
        for _ in 0..rounds {
            for sum in &mut own {
                *sum = sum.mul_add(factor, factor);
            }
        }
        *sums = own;
    }
}

/// Reads every whole 256 bytes once, in order, on this thread; the result keeps the work alive and means nothing.
///
/// Both vector instruction sets use 256-bit loads, which are as fast as the memory behind them, and ask for bytes
/// some way ahead of those in hand, as the kernels do.
pub fn read(isa: Isa, bytes: &[u8]) -> u64 {
    let chunks = bytes.as_chunks().0;
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Avx2` or `Avx512` exists only if `detect` saw AVX2.
        Isa::Avx2(_) | Isa::Avx512(_) => unsafe { read_avx2(chunks) },
        Isa::Scalar => chunks.iter().fold(0, |all, chunk| {
            let words = chunk.as_chunks().0.iter().map(|w| u64::from_le_bytes(*w));
            words.fold(all, |all, word| all ^ word)
        }),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2(chunks: &[[u8; 256]]) -> u64 {
    let mut sums = [_mm256_setzero_si256(); 8];
    for chunk in chunks {
        prefetch::keep::<AHEAD>(chunk);
        for (sum, part) in sums.iter_mut().zip(chunk.as_chunks::<32>().0) {
            // SAFETY: 32 readable bytes, and the load allows any alignment.
            let part = unsafe { _mm256_loadu_si256(part.as_ptr().cast()) };
            *sum = _mm256_xor_si256(*sum, part);
        }
    }
    let all = sums
        .into_iter()
        .fold(_mm256_setzero_si256(), |a, b| _mm256_xor_si256(a, b));
    let words = [
        _mm256_extract_epi64::<0>(all),
        _mm256_extract_epi64::<1>(all),
        _mm256_extract_epi64::<2>(all),
        _mm256_extract_epi64::<3>(all),
    ];
    words.into_iter().fold(0, |a, b| a ^ b.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_isa_does_the_work_it_says() {
        for isa in Isa::available() {
            let (sum, operations) = multiply_add(isa, 3);
            assert!(
                sum.is_finite() && operations.is_multiple_of(6),
                "{}",
                isa.name()
            );
            // An even number of equal words cancels; the byte that differs is left.
            let mut bytes: Vec<u8> = (0..3 * 512).map(|i| u8::from(i % 8 == 0)).collect();
            assert_eq!(read(isa, &bytes), 0);
            bytes[700] ^= 4;
            assert_eq!(read(isa, &bytes), 4 << 32, "{}", isa.name());
        }
    }
}
