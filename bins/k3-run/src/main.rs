//! Command-line entry of `k3-run`.
fn main() {}
