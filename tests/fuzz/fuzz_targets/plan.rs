//! See [`k3_fuzz::properties::plan`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| k3_fuzz::properties::plan::check(input));
