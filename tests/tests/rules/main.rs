//! The rules of the specification, section 4, row by row: a test of each fails if the rule is broken.
//!
//! | where | how |
//! |---|---|
//! | [`mixers`], [`residuals`], [`experts`] | the engine agrees with a float64 reading of the rules and not with the same reading making one mistake |
//! | [`files`], [`failures`], [`counters`] | checkpoints changed, cut or moved, and what the engine then does |
//! | [`index`] | every row has a test named `row_NN_...` somewhere in the workspace |
#![allow(unreachable_pub, missing_docs, reason = "a test binary has no users")]
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
#[path = "../common/mod.rs"]
mod common;
mod counters;
mod experts;
mod failures;
mod files;
mod index;
mod mixers;
mod patch;
mod reference;
mod residuals;
mod verdict;
