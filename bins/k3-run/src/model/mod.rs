//! The forward pass: what a step of rows computes, layer by layer (specification 3).
//!
//! A step takes rows of one or more sequences and walks the layers once: a prompt chunk is many rows of one sequence, decoding
//! one row. Each row is computed exactly as it would be alone, so results never depend on which rows share a step.
//! Nothing here reads a file: weights come, tile by tile and expert by expert, through [`WeightSource`].

mod attn_res;
mod dense;
mod forward;
mod groups;
mod head;
mod kda;
mod layer;
mod matrix;
mod mla;
mod moe;
mod profile;
mod router;
mod source;
mod state;
#[cfg(test)]
mod tests;
mod vectors;
mod workspace;

pub use forward::{Forward, ForwardOptions, Observer, Output, Segment};
pub use profile::{Part, PartTimes, StepProfile};
pub use router::{Routing, route, route_into};
pub use source::{ExpertWeights, Progress, SourceError, WeightSource};
pub use state::{KdaState, LatentCache, MixerState, SequenceState};
pub(crate) use vectors::stored;

use k3_shared::{ids::LayerIdx, names::TensorRole};

/// Why a step stopped. Nothing it computed may be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Weights could not be had.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The trunk holds something else where a tensor was due.
    #[error(
        "trunk tile holds {found:?} where {} row {row} is due (re-run k3-pack --force)",
        wanted.name()
    )]
    WrongTile {
        /// The tensor due.
        wanted: TensorRole,
        /// Its row.
        row: usize,
        /// What the tile holds.
        found: String,
    },
    /// A value stopped being a number.
    #[error(
        "layer {layer}, row {row} of the step: a value is not finite; the step stops rather than print a wrong token \
         (check the shards with: k3-census --hash MODEL_DIR; a scale byte of 255 is NaN, see --allow-nan-scales)"
    )]
    NotFinite {
        /// The layer whose output it is.
        layer: LayerIdx,
        /// The row of the step.
        row: usize,
    },
    /// More positions than were planned.
    #[error(
        "{wanted} positions do not fit the planned context of {context} (plan again with k3-plan --context {wanted})"
    )]
    ContextFull {
        /// Positions needed.
        wanted: usize,
        /// Positions planned.
        context: usize,
    },
    /// A token id past the vocabulary.
    #[error("token id {id} is not below the vocabulary size {vocab_size}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The sequence took part in a step that failed.
    #[error(
        "this sequence was left half advanced by a failed step; start it again from its prompt"
    )]
    StateLost,
}
