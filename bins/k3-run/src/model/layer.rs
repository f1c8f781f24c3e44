//! One layer over the rows of a step, and the buffers that every layer uses again (specification 3.1, 3.2).

use std::ops::Range;

use k3_shared::{
    config::{Mixer, Mlp},
    ids::LayerIdx,
    names::LayerTensor,
};
use rayon::prelude::*;

use super::{
    ForwardOptions, MixerState, ModelError, Observer, Part, Segment,
    attn_res::ResidualStream,
    dense::{GatedBuffers, GatedMlp},
    kda::{self, KdaRows},
    matrix::{StepContext, sized},
    mla::{self, MlaRows, MlaScratch},
    moe,
    vectors::LayerVectors,
    workspace::{Workspace, vec_bytes},
};
use crate::kernels::{Activations, norm::rms_norm_in_place};

/// The stream, and what a layer needs besides it.
#[derive(Default)]
pub(super) struct LayerBuffers {
    pub(super) stream: ResidualStream,
    vectors: LayerVectors,
    mixed: Vec<f32>,
    input: Activations,
    output: Vec<f32>,
    mla: MlaScratch,
    work: Workspace,
}

impl LayerBuffers {
    /// Run `layer`: the stream becomes what it is after it.
    pub(super) fn run(
        &mut self,
        step: &mut StepContext<'_>,
        options: &ForwardOptions,
        layer: LayerIdx,
        segments: &mut [Segment<'_>],
        observer: &mut dyn Observer,
    ) -> Result<(), ModelError> {
        let config = step.config;
        let boundary = layer.get().is_multiple_of(config.attn_res_block_size);
        self.vectors.load(layer, step)?;
        step.lap(Part::LayerVectors);
        if self.stream.has_snapshots() {
            let weights = &self.vectors.attn_res;
            self.stream
                .mix(weights, config.rms_norm_eps, &mut self.mixed);
        } else {
            sized(&mut self.mixed, self.stream.sum.len()).copy_from_slice(&self.stream.sum);
        }
        step.lap(Part::AttentionResiduals);
        if boundary {
            // The stream before the mix is kept, and the running sum restarts with the mixer's output.
            self.stream.snapshot();
            step.lap(Part::Stream);
        }
        self.norm_input(step, LayerTensor::InputNorm);
        self.mixer(step, options, layer, segments)?;
        let len = self.stream.sum.len();
        self.stream.add(&self.output[..len], boundary);
        step.lap(Part::Stream);

        let weights = &self.vectors.mlp_res;
        self.stream
            .mix(weights, config.rms_norm_eps, &mut self.mixed);
        step.lap(Part::AttentionResiduals);
        self.norm_input(step, LayerTensor::PostNorm);
        match config.mlp(layer) {
            Mlp::Dense => {
                let mlp = GatedMlp::dense(config, layer);
                let [gate, up, ..] = &mut self.work.wide;
                let [inner, ..] = &mut self.work.inputs;
                let buffers = GatedBuffers { gate, up, inner };
                mlp.run(step, buffers, &self.input, &mut self.output)?;
                step.lap(Part::DenseMlp);
            }
            Mlp::Moe => {
                let (work, vectors) = (&mut self.work, &self.vectors);
                let (x, out) = (&self.input, &mut self.output);
                moe::run(step, layer, options.nan_scales, vectors, work, x, out)?;
                observer.routed(layer, self.work.groups.routings());
                step.lap(Part::Observer);
            }
        }
        self.stream.add(&self.output[..len], false);
        if let Some(row) = self.stream.not_finite() {
            return Err(ModelError::NotFinite { layer, row });
        }
        step.lap(Part::Stream);
        Ok(())
    }

    /// Norm the mixed rows and lay them out for the kernels.
    fn norm_input(&mut self, step: &mut StepContext<'_>, tensor: LayerTensor) {
        let hidden = step.config.hidden_size;
        let weight = self.vectors.get(tensor);
        let eps = step.config.rms_norm_eps;
        let mixed = &mut self.mixed[..self.stream.sum.len()];
        mixed
            .par_chunks_exact_mut(hidden)
            .for_each(|row| rms_norm_in_place(row, weight, eps));
        self.input.fill(mixed, hidden);
        step.lap(Part::Norms);
    }

    fn mixer(
        &mut self,
        step: &mut StepContext<'_>,
        options: &ForwardOptions,
        layer: LayerIdx,
        segments: &mut [Segment<'_>],
    ) -> Result<(), ModelError> {
        let (vectors, x, out) = (&self.vectors, &self.input, &mut self.output);
        // One sequence, as in decoding, needs no list on the heap.
        match step.config.mixers[layer.get()] {
            Mixer::Kda => {
                let (mut one, mut many);
                let rows = if let [segment] = segments {
                    one = kda_rows(segment, 0, layer);
                    one.as_mut_slice()
                } else {
                    let each = with_first_rows(segments);
                    many = each
                        .filter_map(|(first, segment)| kda_rows(segment, first, layer))
                        .collect::<Vec<_>>();
                    &mut many
                };
                for sequence in &*rows {
                    step.profile.touch(2 * sequence.state.bytes());
                }
                kda::run(step, layer, vectors, &mut self.work, rows, x, out)
            }
            Mixer::Mla => {
                let (mut one, mut many);
                let rows = if let [segment] = segments {
                    one = mla_rows(segment, 0, layer);
                    one.as_mut_slice()
                } else {
                    let each = with_first_rows(segments);
                    many = each
                        .filter_map(|(first, segment)| mla_rows(segment, first, layer))
                        .collect::<Vec<_>>();
                    &mut many
                };
                for sequence in &*rows {
                    let positions = sequence.position + 2 * sequence.rows.len();
                    let width = step.config.mla.cache_width();
                    step.profile.touch(positions * width * size_of::<f32>());
                }
                let eps = options.mla_norm_eps;
                mla::run(step, layer, eps, vectors, &mut self.mla, rows, x, out)
            }
        }
    }

    /// Bytes of memory the buffers hold, without those of MLA.
    pub(super) fn allocated_bytes(&self) -> usize {
        self.stream.allocated_bytes()
            + self.vectors.allocated_bytes()
            + vec_bytes(&self.mixed)
            + vec_bytes(&self.output)
            + self.input.allocated_bytes()
            + self.work.allocated_bytes()
    }
}

fn kda_rows<'a>(
    segment: &'a mut Segment<'_>,
    first: usize,
    layer: LayerIdx,
) -> Option<KdaRows<'a>> {
    let rows = first..first + segment.tokens.len();
    match &mut segment.state.mixers[layer.get()] {
        MixerState::Kda(state) => Some(KdaRows { rows, state }),
        MixerState::Mla(_) => None,
    }
}

fn mla_rows<'a>(
    segment: &'a mut Segment<'_>,
    first: usize,
    layer: LayerIdx,
) -> Option<MlaRows<'a>> {
    let rows = first..first + segment.tokens.len();
    let position = segment.state.position;
    match &mut segment.state.mixers[layer.get()] {
        MixerState::Mla(cache) => Some(MlaRows {
            rows,
            position,
            cache,
        }),
        MixerState::Kda(_) => None,
    }
}

/// Each segment with the first row of the step that is its.
fn with_first_rows<'a, 'b>(
    segments: &'a mut [Segment<'b>],
) -> impl Iterator<Item = (usize, &'a mut Segment<'b>)> {
    let mut next = 0;
    segments.iter_mut().map(move |segment| {
        let first = next;
        next += segment.tokens.len();
        (first, segment)
    })
}

/// Which rows of the step are each segment's.
pub(super) fn row_ranges(segments: &[Segment<'_>]) -> impl Iterator<Item = Range<usize>> {
    let mut first = 0;
    segments.iter().map(move |segment| {
        let range = first..first + segment.tokens.len();
        first = range.end;
        range
    })
}
