//! See [`k3_fuzz::properties::safetensors`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| k3_fuzz::properties::safetensors::check(input));
