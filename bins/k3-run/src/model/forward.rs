//! The layer driver: one step of rows through all layers (specification 3.1, 3.2).

use k3_shared::{
    config::Config,
    ids::{LayerIdx, TokenId},
};

use super::{
    ModelError, Part, Progress, Routing, SequenceState, StepProfile, WeightSource,
    head::{self, HeadScratch},
    layer::{LayerBuffers, row_ranges},
    matrix::{MatrixScratch, StepContext},
    workspace::vec_bytes,
};
use crate::kernels::{Isa, NanScales};

/// What a run chooses about the arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct ForwardOptions {
    /// Instruction set; changes no bit.
    pub isa: Isa,
    /// Epsilon of the two low-rank norms of MLA: 1e-6 as the official code has it.
    pub mla_norm_eps: f64,
    /// What a scale byte of 255 means.
    pub nan_scales: NanScales,
}

/// The rows of one sequence in a step.
pub struct Segment<'a> {
    /// The sequence, advanced by the step.
    pub state: &'a mut SequenceState,
    /// Its next tokens.
    pub tokens: &'a [TokenId],
}

/// For which rows of a step the head runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// None: a prompt chunk that is not the last. The head is not read.
    None,
    /// The last row of each segment.
    Last,
    /// Every row.
    All,
}

/// Watches a step.
pub trait Observer: Send {
    /// A layer begins; `_progress` has been read for this step and those before it.
    fn layer(&mut self, _layer: LayerIdx, _progress: Progress) {}

    /// The router of `layer` has chosen; one routing a row.
    fn routed(&mut self, _layer: LayerIdx, _routings: &[Routing]) {}

    /// The stream after `layer`, `[rows, hidden]`.
    fn hidden(&mut self, _layer: LayerIdx, _stream: &[f32]) {}

    /// Logits of ids from `first_id` on for the output rows, `[rows, ids]`, in ascending order of ids.
    fn logits(&mut self, _first_id: usize, _logits: &[f32]) {}
}

/// The model's arithmetic and the buffers it reuses from step to step.
pub struct Forward {
    config: Config,
    num_layers: usize,
    options: ForwardOptions,
    buffers: LayerBuffers,
    matrix: MatrixScratch,
    head: HeadScratch,
    /// Rows of the step that the head runs over.
    rows: Vec<usize>,
    profile: StepProfile,
}

impl Forward {
    /// A model of the first `num_layers` layers of `config`.
    pub fn new(config: Config, num_layers: usize, options: ForwardOptions) -> Self {
        Self {
            num_layers: num_layers.min(config.num_hidden_layers),
            config,
            options,
            buffers: LayerBuffers::default(),
            matrix: MatrixScratch::default(),
            head: HeadScratch::default(),
            rows: Vec::new(),
            profile: StepProfile::default(),
        }
    }

    /// The model's config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where the time of the last step went.
    pub fn profile(&self) -> &StepProfile {
        &self.profile
    }

    /// Bytes of memory that the buffers hold between steps, without those of MLA: what the ledger calls activations.
    pub fn scratch_bytes(&self) -> usize {
        let rows = vec_bytes(&self.rows);
        self.buffers.allocated_bytes()
            + self.matrix.allocated_bytes()
            + self.head.allocated_bytes()
            + rows
    }

    /// Run one step. States advance only if it succeeds; after a failure they refuse further steps.
    ///
    /// # Errors
    /// If weights cannot be had, a value is not finite, a token is unknown or a context is full. Unknown tokens and full
    /// contexts are found before anything is touched.
    pub fn step(
        &mut self,
        source: &mut dyn WeightSource,
        segments: &mut [Segment<'_>],
        output: Output,
        observer: &mut dyn Observer,
    ) -> Result<(), ModelError> {
        self.admit(segments)?;
        for segment in &mut *segments {
            segment.state.torn = true;
        }
        self.profile.begin();
        self.embed(source, segments)?;
        self.profile.lap(Part::Embedding);
        let mut step = StepContext {
            config: &self.config,
            isa: self.options.isa,
            source,
            matrix: &mut self.matrix,
            profile: &mut self.profile,
            meanwhile: None,
        };
        for layer in 0..self.num_layers {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the config bounds the layers"
            )]
            let layer = LayerIdx(layer as u32);
            observer.layer(layer, step.source.progress());
            step.lap(Part::Observer);
            let buffers = &mut self.buffers;
            buffers.run(&mut step, &self.options, layer, segments, observer)?;
            observer.hidden(layer, &buffers.stream.sum);
            step.lap(Part::Observer);
        }
        if output != Output::None {
            let rows = segments.iter().map(|s| s.tokens.len()).sum();
            self.rows.clear();
            self.rows.reserve_exact(rows);
            output_rows(segments, output, &mut self.rows);
            let take = &mut |first: usize, logits: &[f32]| observer.logits(first, logits);
            let stream = &mut self.buffers.stream;
            head::run(&mut step, stream, &mut self.head, &self.rows, take)?;
            step.lap(Part::Head);
        }
        source.end_step()?;
        for segment in segments {
            segment.state.position += segment.tokens.len();
            segment.state.torn = false;
        }
        Ok(())
    }

    fn admit(&self, segments: &[Segment<'_>]) -> Result<(), ModelError> {
        for segment in segments {
            if segment.state.torn {
                return Err(ModelError::StateLost);
            }
            let wanted = segment.state.position + segment.tokens.len();
            if wanted > segment.state.context {
                return Err(ModelError::ContextFull {
                    wanted,
                    context: segment.state.context,
                });
            }
            let vocab_size = self.config.vocab_size;
            if let Some(token) = segment.tokens.iter().find(|t| t.get() >= vocab_size) {
                return Err(ModelError::UnknownToken {
                    id: token.0,
                    vocab_size,
                });
            }
        }
        Ok(())
    }

    fn embed(
        &mut self,
        source: &mut dyn WeightSource,
        segments: &[Segment<'_>],
    ) -> Result<(), ModelError> {
        let hidden = self.config.hidden_size;
        let rows: usize = segments.iter().map(|s| s.tokens.len()).sum();
        self.buffers.stream.begin(rows, hidden);
        let tokens = segments.iter().flat_map(|s| s.tokens);
        for (row, token) in self.buffers.stream.sum.chunks_exact_mut(hidden).zip(tokens) {
            source.embedding_row(*token, row)?;
        }
        Ok(())
    }
}

#[cfg(test)]
impl Forward {
    /// Run one layer over a stream and snapshots given from outside, all `[rows, hidden]`; what the stream becomes, and the
    /// snapshots after it.
    pub(super) fn lone_layer(
        &mut self,
        layer: LayerIdx,
        source: &mut dyn WeightSource,
        segments: &mut [Segment<'_>],
        snapshots: &[Vec<f32>],
        stream: &[f32],
    ) -> Result<(Vec<f32>, Vec<Vec<f32>>), ModelError> {
        struct Blind;
        impl Observer for Blind {}
        let hidden = self.config.hidden_size;
        let buffers = &mut self.buffers;
        buffers.stream.begin(stream.len() / hidden, hidden);
        for snapshot in snapshots {
            buffers.stream.sum.copy_from_slice(snapshot);
            buffers.stream.snapshot();
        }
        buffers.stream.sum.copy_from_slice(stream);
        let mut step = StepContext {
            config: &self.config,
            isa: self.options.isa,
            source,
            matrix: &mut self.matrix,
            profile: &mut self.profile,
            meanwhile: None,
        };
        buffers.run(&mut step, &self.options, layer, segments, &mut Blind)?;
        Ok((
            buffers.stream.sum.clone(),
            buffers.stream.snapshots().to_vec(),
        ))
    }
}

fn output_rows(segments: &[Segment<'_>], output: Output, rows: &mut Vec<usize>) {
    let ranges = row_ranges(segments);
    match output {
        Output::None => {}
        Output::Last => rows.extend(ranges.filter_map(Iterator::last)),
        Output::All => rows.extend(ranges.flatten()),
    }
}
