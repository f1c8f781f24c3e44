//! Absorbed latent attention (specification 3.5): one form for prefill and decode.
//!
//! `out = sum_s softmax_s(scale * q . cache[s]) * cache[s, ..r]` over the positions that a query sees. Every result is a
//! function of the query, these positions and nothing else: positions are visited in order, in blocks of [`POSITIONS`] anchored
//! at position 0, however they came into the cache and whichever queries share a call.
//!
//! Scores use the dot order of the [kernels](super). Per block of positions: the running maximum is raised, the sums so far
//! are scaled by `exp(old - new)` in f64, weights `exp(score - max)` are applied by f32 fused multiply-adds from +0 in
//! ascending position, and the block sums are added in f64; weights themselves are summed in f64, ascending. A position that a
//! query does not see takes no part in its result, not even times zero.
//!
//! # Speed
//!
//! All heads read the same cache, 36 runs of sixteen values a position, so the arithmetic outweighs the bytes as soon as many
//! queries share one pass: a [`Group`] of up to [`QUERIES`] (heads of one row, rows of one head) meets each block while it is
//! in the second-level cache. Cache and queries are kept even lanes first, as [`Activations`](super::Activations) are, so the
//! final tree over the lanes begins with whole registers; results are put back in order once, when they are divided.

mod absorb;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod cache;
mod group;
mod heads;
mod plain;
#[cfg(test)]
mod tests;

pub use absorb::{Strided, absorb};
pub use cache::LatentCache;
pub use group::{Group, LatentWidths};
pub use heads::{CachedRows, LatentAttention, LatentDims, LatentScratch, TASK_LATENTS};

/// Positions of one block of the running softmax.
pub const POSITIONS: usize = 64;

/// Most queries of one group.
pub const QUERIES: usize = 32;
