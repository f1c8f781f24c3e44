//! Synthetic checkpoints by rule, for tests, benchmarks and the demo; and the rows that measurements leave.
//!
//! Why: the model is 1.56 TB, and everything but its values can be had from a rule: a tiny checkpoint with every structure, layers of
//! the released widths, the whole release as holes. The tests of whole pipelines are in `tests/tests`, each file a subject:
//! `exactness` and `golden` for the values, `accounting` and `streaming` for bytes and memory, `resume`, `faults` and `bit_flips`
//! for what goes wrong, `readme` and `live` for what people see. `tests/reference` is the same model in numpy float64.
//!
//! [`synth`] is the library that tests call, with [`tokenizer`] for the tiny vocabulary; [`Cli`] and [`run`] are the program
//! `k3-synth` over it. [`rows`] keeps, compares and draws what the measuring pipelines find, and is the program `k3-rows`.
#![forbid(unsafe_code)]

mod cli;
pub mod rows;
pub mod synth;
pub mod tokenizer;

pub use cli::{Cli, run};
