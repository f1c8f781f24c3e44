//! See [`k3_fuzz::properties::tokenizer_files`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| k3_fuzz::properties::tokenizer_files::check(input));
