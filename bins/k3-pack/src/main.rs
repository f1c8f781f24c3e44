//! Command-line entry of `k3-pack`.
fn main() {}
