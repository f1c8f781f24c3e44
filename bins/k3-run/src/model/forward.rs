//! The layer driver: one step of rows through all layers (specification 3.1, 3.2).

use std::ops::Range;

use k3_shared::{
    config::{Config, Mixer, Mlp},
    ids::{LayerIdx, TokenId},
    names::LayerTensor,
};
use rayon::prelude::*;

use super::{
    MixerState, ModelError, Routing, SequenceState, WeightSource,
    attn_res::ResidualStream,
    dense::{GatedMlp, GatedScratch},
    head::{self, HeadScratch},
    kda::{self, KdaRows, KdaScratch},
    matrix::{MatrixScratch, StepContext, sized},
    mla::{self, MlaRows, MlaScratch},
    moe::{self, MoeScratch},
    vectors::LayerVectors,
};
use crate::kernels::{Activations, Isa, NanScales, norm::rms_norm};

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
    /// A layer begins.
    fn layer(&mut self, _layer: LayerIdx) {}

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
    stream: ResidualStream,
    vectors: LayerVectors,
    matrix: MatrixScratch,
    mixed: Vec<f32>,
    normed: Vec<f32>,
    input: Activations,
    output: Vec<f32>,
    kda: KdaScratch,
    mla: MlaScratch,
    dense: GatedScratch,
    moe: MoeScratch,
    head: HeadScratch,
}

impl Forward {
    /// A model of the first `num_layers` layers of `config`.
    pub fn new(config: Config, num_layers: usize, options: ForwardOptions) -> Self {
        Self {
            num_layers: num_layers.min(config.num_hidden_layers),
            config,
            options,
            stream: ResidualStream::default(),
            vectors: LayerVectors::default(),
            matrix: MatrixScratch::default(),
            mixed: Vec::new(),
            normed: Vec::new(),
            input: Activations::new(),
            output: Vec::new(),
            kda: KdaScratch::default(),
            mla: MlaScratch::default(),
            dense: GatedScratch::default(),
            moe: MoeScratch::default(),
            head: HeadScratch::default(),
        }
    }

    /// The model's config.
    pub fn config(&self) -> &Config {
        &self.config
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
        self.embed(source, segments)?;
        for layer in 0..self.num_layers {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the config bounds the layers"
            )]
            let layer = LayerIdx(layer as u32);
            observer.layer(layer);
            self.layer(layer, source, segments, observer)?;
            self.check_finite(layer)?;
            observer.hidden(layer, &self.stream.sum);
        }
        if output != Output::None {
            let rows = output_rows(segments, output);
            let mut step = StepContext {
                config: &self.config,
                isa: self.options.isa,
                source,
                matrix: &mut self.matrix,
            };
            let take = &mut |first: usize, logits: &[f32]| observer.logits(first, logits);
            head::run(&mut step, &self.stream, &mut self.head, &rows, take)?;
        }
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
        self.stream.begin(rows, hidden);
        let tokens = segments.iter().flat_map(|s| s.tokens);
        for (row, token) in self.stream.sum.chunks_exact_mut(hidden).zip(tokens) {
            source.embedding_row(*token, row)?;
        }
        Ok(())
    }

    fn layer(
        &mut self,
        layer: LayerIdx,
        source: &mut dyn WeightSource,
        segments: &mut [Segment<'_>],
        observer: &mut dyn Observer,
    ) -> Result<(), ModelError> {
        let boundary = layer.get().is_multiple_of(self.config.attn_res_block_size);
        self.vectors.load(layer, source)?;
        if self.stream.has_snapshots() {
            self.stream.mix(
                &self.vectors.attn_res,
                self.config.rms_norm_eps,
                &mut self.mixed,
            );
        } else {
            self.mixed.clone_from(&self.stream.sum);
        }
        if boundary {
            // The stream before the mix is kept, and the running sum restarts with the mixer's output.
            self.stream.snapshot();
        }
        self.norm_input(LayerTensor::InputNorm);
        self.mixer(layer, source, segments)?;
        let len = self.stream.sum.len();
        self.stream.add(&self.output[..len], boundary);

        self.stream.mix(
            &self.vectors.mlp_res,
            self.config.rms_norm_eps,
            &mut self.mixed,
        );
        self.norm_input(LayerTensor::PostNorm);
        let mut step = StepContext {
            config: &self.config,
            isa: self.options.isa,
            source,
            matrix: &mut self.matrix,
        };
        match self.config.mlp(layer) {
            Mlp::Dense => {
                let mlp = GatedMlp::dense(&self.config, layer);
                mlp.run(&mut step, &mut self.dense, &self.input, &mut self.output)?;
            }
            Mlp::Moe => {
                let (nan_scales, moe) = (self.options.nan_scales, &mut self.moe);
                let out = &mut self.output;
                moe::run(
                    &mut step,
                    layer,
                    nan_scales,
                    &self.vectors,
                    moe,
                    &self.input,
                    out,
                )?;
                observer.routed(layer, self.moe.routings());
            }
        }
        self.stream.add(&self.output[..len], false);
        Ok(())
    }

    /// Norm the mixed rows and lay them out for the kernels.
    fn norm_input(&mut self, tensor: LayerTensor) {
        let hidden = self.config.hidden_size;
        let weight = self.vectors.get(tensor);
        let eps = self.config.rms_norm_eps;
        let normed = sized(&mut self.normed, self.mixed.len());
        let rows = normed
            .par_chunks_mut(hidden)
            .zip(self.mixed.par_chunks(hidden));
        rows.for_each(|(out, x)| rms_norm(x, weight, eps, out));
        self.input.fill(normed, hidden);
    }

    fn mixer(
        &mut self,
        layer: LayerIdx,
        source: &mut dyn WeightSource,
        segments: &mut [Segment<'_>],
    ) -> Result<(), ModelError> {
        let mut step = StepContext {
            config: &self.config,
            isa: self.options.isa,
            source,
            matrix: &mut self.matrix,
        };
        let (vectors, x, out) = (&self.vectors, &self.input, &mut self.output);
        let ranges = row_ranges(segments);
        match self.config.mixers[layer.get()] {
            Mixer::Kda => {
                let mut rows: Vec<KdaRows<'_>> = segments
                    .iter_mut()
                    .zip(ranges)
                    .filter_map(
                        |(segment, rows)| match &mut segment.state.mixers[layer.get()] {
                            MixerState::Kda(state) => Some(KdaRows { rows, state }),
                            MixerState::Mla(_) => None,
                        },
                    )
                    .collect();
                kda::run(&mut step, layer, vectors, &mut self.kda, &mut rows, x, out)
            }
            Mixer::Mla => {
                let mut rows: Vec<MlaRows<'_>> = segments
                    .iter_mut()
                    .zip(ranges)
                    .filter_map(|(segment, rows)| {
                        let position = segment.state.position;
                        match &mut segment.state.mixers[layer.get()] {
                            MixerState::Mla(cache) => Some(MlaRows {
                                rows,
                                position,
                                cache,
                            }),
                            MixerState::Kda(_) => None,
                        }
                    })
                    .collect();
                let eps = self.options.mla_norm_eps;
                mla::run(
                    &mut step,
                    layer,
                    eps,
                    vectors,
                    &mut self.mla,
                    &mut rows,
                    x,
                    out,
                )
            }
        }
    }

    fn check_finite(&self, layer: LayerIdx) -> Result<(), ModelError> {
        let rows = self.stream.sum.chunks_exact(self.config.hidden_size);
        for (row, values) in rows.enumerate() {
            if !values.iter().all(|x| x.is_finite()) {
                return Err(ModelError::NotFinite { layer, row });
            }
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
        self.stream.begin(stream.len() / hidden, hidden);
        for snapshot in snapshots {
            self.stream.sum.copy_from_slice(snapshot);
            self.stream.snapshot();
        }
        self.stream.sum.copy_from_slice(stream);
        self.layer(layer, source, segments, &mut Blind)?;
        Ok((self.stream.sum.clone(), self.stream.snapshots().to_vec()))
    }
}

/// Which rows of the step are each segment's.
fn row_ranges(segments: &[Segment<'_>]) -> Vec<Range<usize>> {
    let mut first = 0;
    let range = |segment: &Segment<'_>| {
        let range = first..first + segment.tokens.len();
        first = range.end;
        range
    };
    segments.iter().map(range).collect()
}

fn output_rows(segments: &[Segment<'_>], output: Output) -> Vec<usize> {
    let ranges = row_ranges(segments).into_iter();
    match output {
        Output::None => Vec::new(),
        Output::Last => ranges.filter_map(Iterator::last).collect(),
        Output::All => ranges.flatten().collect(),
    }
}
