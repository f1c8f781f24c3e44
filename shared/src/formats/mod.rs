//! Files the tools exchange, one module a format.

pub mod census;
pub mod codec;
pub mod expert_digests;
pub mod plan;
pub mod safetensors;
pub mod trace;
pub mod trunk;
