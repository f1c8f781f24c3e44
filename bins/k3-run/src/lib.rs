//! Generates tokens from a plan, a trunk and the experts in the shards.

pub mod kernels;
pub mod model;
pub mod sampler;
pub mod tokenizer;
