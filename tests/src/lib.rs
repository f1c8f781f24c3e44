//! Synthetic checkpoints by rule, for tests, benchmarks and the demo.
//!
//! [`synth`] is the library that tests call, with [`tokenizer`] for the tiny vocabulary; [`Cli`] and [`run`] are the program
//! `k3-synth` over it. [`rows`] keeps, compares and draws what the measuring pipelines find, and is the program `k3-rows`.
#![forbid(unsafe_code)]

mod cli;
pub mod rows;
pub mod synth;
pub mod tokenizer;

pub use cli::{Cli, run};
