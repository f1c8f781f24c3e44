//! Arithmetic, with every bit of every result fixed. The only home of intrinsics and of unsafe arithmetic code.
pub mod activations;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
pub mod conv;
pub mod delta;
pub mod isa;
pub mod math;
pub mod matmul;
pub mod norm;
mod scalar;
#[cfg(test)]
mod testing;
pub mod weights;

pub use activations::Activations;
pub use isa::Isa;
pub use matmul::{matmul, par_matmul, transpose};
pub use weights::{NanScales, Weights, widen};
