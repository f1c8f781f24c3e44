//! See [`k3_fuzz::properties::tokenizer_text`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| k3_fuzz::properties::tokenizer_text::check(input));
