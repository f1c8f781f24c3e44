//! The forward pass on weights in memory.

mod batch;
mod memory;
mod shared_data;
