//! Command-line entry of `k3-synth`.
fn main() {}
