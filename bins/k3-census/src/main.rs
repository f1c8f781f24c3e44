//! Command-line entry of `k3-census`.
fn main() {}
