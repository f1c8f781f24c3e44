//! See [`k3_fuzz::properties::config`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| k3_fuzz::properties::config::check(input));
