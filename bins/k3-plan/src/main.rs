//! Command-line entry of `k3-plan`.
fn main() {}
