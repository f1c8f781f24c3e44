//! Files the tools exchange, one module a format.

pub mod census;
pub mod codec;
pub mod plan;
pub mod safetensors;
pub mod trace;
pub mod trunk;
