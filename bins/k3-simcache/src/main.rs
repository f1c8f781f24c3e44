//! Command-line entry of `k3-simcache`.
fn main() {}
