//! Synthetic checkpoints by rule, for tests, benchmarks and the demo.
