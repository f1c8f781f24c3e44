//! Synthetic checkpoints by rule, for tests, benchmarks and the demo.
//!
//! [`synth`] is the library that tests call, [`tokenizer`] the vocabulary of the tiny checkpoint; [`Cli`] and [`run`] are the
//! program `k3-synth` over them.
#![forbid(unsafe_code)]

mod cli;
pub mod synth;
pub mod tokenizer;

pub use cli::{Cli, run};
