//! Where the model gets its weights: one small trait, so that tests feed it from memory and the engine from disk.

use std::{ops::Range, path::PathBuf};

use k3_shared::{
    cache::CacheError,
    direct::DirectError,
    ids::{ExpertIdx, LayerIdx, TokenId},
    tiles::TileSpec,
};

use crate::kernels::{NanScales, Weights};

/// Why weights could not be had. The step that asked for them stops.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A read failed or came up short.
    #[error(transparent)]
    Read(#[from] DirectError),
    /// Bytes are not the ones that were packed.
    #[error(
        "{}: byte {offset}: {what} does not match its digest (repair with: {repair})",
        path.display()
    )]
    Digest {
        /// The file.
        path: PathBuf,
        /// Where the bytes begin.
        offset: u64,
        /// What they are.
        what: String,
        /// The command that repairs it.
        repair: String,
    },
    /// A file is not what it was when the run began.
    #[error("{}: changed during the run: it {what}; what was computed since the last step cannot be trusted (check it: k3-census, k3-pack --verify)", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// How.
        what: String,
    },
    /// The cache cannot be made.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Anything else, told whole.
    #[error("{0}")]
    Other(String),
    /// The user asked the run to end.
    #[error("interrupted")]
    Interrupted,
}

/// The six tensors of one expert, as stored.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeights<'a> {
    /// The expert's bytes.
    pub block: &'a [u8],
    /// Where each tensor lies in them, in file order.
    pub layout: &'a [Range<usize>; 6],
}

impl<'a> ExpertWeights<'a> {
    /// Bytes of tensor `index` in file order.
    pub fn tensor(&self, index: usize) -> &'a [u8] {
        &self.block[self.layout[index].clone()]
    }

    /// The matrix whose packed weights are tensor `index`, its scales being the next.
    pub(super) fn matrix(&self, index: usize, nan_scales: NanScales) -> Weights<'a> {
        let (packed, scale) = (self.tensor(index), self.tensor(index + 1));
        // Vectors made by others have dense experts; no packed matrix is without scales.
        #[cfg(test)]
        if scale.is_empty() {
            return Weights::F32(packed);
        }
        Weights::Mxfp4 {
            packed,
            scale,
            nan_scales,
        }
    }
}

/// What was read for all steps so far: counted when a step uses it, and read whenever somebody looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Everything asked of the disk.
    pub bytes: u64,
    /// Distinct experts asked for.
    pub expert_requests: u64,
    /// Of these, resident ones.
    pub expert_hits: u64,
}

/// Hands out weights in order of use.
pub trait WeightSource: Send {
    /// Steps to come, in order, each saying whether it reads the output head: lets reads run ahead of the arithmetic.
    fn announce(&mut self, steps_with_head: &[bool]);

    /// What was read since it was opened.
    fn progress(&self) -> Progress {
        Progress::default()
    }

    /// A step ends: what was read for it came from files that are still what they were.
    ///
    /// # Errors
    /// If one is not.
    fn end_step(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    /// Give the next tile of the step to `use_it`.
    ///
    /// # Errors
    /// If it cannot be read whole, or is not what was packed.
    fn with_tile(&mut self, use_it: &mut dyn FnMut(&TileSpec, &[u8])) -> Result<(), SourceError>;

    /// Read the embedding row of `token`, widened to f32, into `out`.
    ///
    /// # Errors
    /// If it cannot be read whole.
    fn embedding_row(&mut self, token: TokenId, out: &mut [f32]) -> Result<(), SourceError>;

    /// Start reading the distinct experts of one step and layer, given in ascending file rank.
    ///
    /// # Errors
    /// If they cannot be located.
    fn request_experts(
        &mut self,
        layer: LayerIdx,
        experts: &[ExpertIdx],
    ) -> Result<(), SourceError>;

    /// Give one of the requested experts that has already arrived to `use_it`; `false` when there is none right now.
    ///
    /// # Errors
    /// If one cannot be read whole.
    fn with_ready_expert(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError>;

    /// Give the next of the requested experts, in whatever order they arrive, to `use_it`; `false` when all were given.
    ///
    /// # Errors
    /// If one cannot be read whole.
    fn with_next_expert(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError>;
}
