//! Numbers below the normal range: every kernel takes them for what they are.
//!
//! Whatever is loaded into a process may tell the processor to flush them to zero instead (code built with `-ffast-math` does), which
//! changes results. Threads inherit the setting, so it is looked at once, where an engine is opened.

use std::hint::black_box;

/// Whether this thread computes with numbers below 2^-126, as results and as operands.
pub fn keeps_subnormals() -> bool {
    let result = black_box(f32::MIN_POSITIVE) * black_box(0.5);
    let from_operand = black_box(f32::from_bits(1)) * black_box(f32::MAX);
    result.to_bits() != 0 && from_operand.to_bits() != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnormal_numbers_are_kept_unless_the_processor_is_told_otherwise() {
        assert!(keeps_subnormals());
        assert!(std::thread::spawn(keeps_subnormals).join().unwrap());
    }

    /// Each way of losing them is noticed, on the thread that is told and on those it starts.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn lost_subnormal_numbers_are_noticed() {
        const DEFAULT: u32 = 0x1F80;
        const FLUSH_RESULTS: u32 = 1 << 15;
        const ZERO_OPERANDS: u32 = 1 << 6;
        let set = |control: u32| {
            // SAFETY: all exceptions stay masked; only how this thread rounds tiny numbers changes, and it ends with the test.
            unsafe {
                std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack));
            };
        };
        let noticed = move || {
            for flags in [FLUSH_RESULTS, ZERO_OPERANDS, FLUSH_RESULTS | ZERO_OPERANDS] {
                set(DEFAULT | flags);
                let here = keeps_subnormals();
                let there = std::thread::spawn(keeps_subnormals).join().unwrap();
                set(DEFAULT);
                assert!(!here && !there, "{flags:#x}");
            }
            assert!(keeps_subnormals());
        };
        std::thread::spawn(noticed).join().unwrap();
    }
}
