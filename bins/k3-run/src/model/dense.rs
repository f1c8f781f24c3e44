//! The gated MLP on the full width: dense layers, and the fused shared experts (specification 3.6).

use k3_shared::{
    config::Config,
    ids::LayerIdx,
    names::{LayerTensor, TensorRole},
};

use super::{ModelError, matrix::StepContext};
use crate::kernels::{Activations, Isa, math::situ_slice};

/// Buffers of one gated MLP.
pub(super) struct GatedBuffers<'a> {
    pub(super) gate: &'a mut Vec<f32>,
    pub(super) up: &'a mut Vec<f32>,
    pub(super) inner: &'a mut Activations,
}

/// Which three matrices, and how wide.
#[derive(Clone, Copy)]
pub(super) struct GatedMlp {
    pub(super) layer: LayerIdx,
    /// Gate, up, down.
    pub(super) tensors: [LayerTensor; 3],
    pub(super) inner_size: usize,
}

impl GatedMlp {
    /// The dense MLP of `layer`.
    pub(super) fn dense(config: &Config, layer: LayerIdx) -> Self {
        let tensors = [
            LayerTensor::DenseGate,
            LayerTensor::DenseUp,
            LayerTensor::DenseDown,
        ];
        Self {
            layer,
            tensors,
            inner_size: config.intermediate_size,
        }
    }

    /// The shared experts of `layer`: one MLP as wide as all of them.
    pub(super) fn shared(config: &Config, layer: LayerIdx) -> Self {
        let tensors = [
            LayerTensor::SharedGate,
            LayerTensor::SharedUp,
            LayerTensor::SharedDown,
        ];
        Self {
            layer,
            tensors,
            inner_size: config.moe.shared_intermediate_size(),
        }
    }

    /// `out = down(situ(gate x, up x))`, `[rows, hidden]`.
    pub(super) fn run(
        self,
        step: &mut StepContext<'_>,
        buffers: GatedBuffers<'_>,
        x: &Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let [gate, up, down] = self
            .tensors
            .map(|tensor| TensorRole::Layer(self.layer, tensor));
        let GatedBuffers {
            gate: gate_out,
            up: up_out,
            inner,
        } = buffers;
        step.multiply(gate, self.inner_size, x, gate_out)?;
        step.multiply(up, self.inner_size, x, up_out)?;
        let len = self.inner_size * x.num_rows();
        situ_in_place(step.config, step.isa, &gate_out[..len], &mut up_out[..len]);
        inner.fill(&up_out[..len], self.inner_size);
        step.multiply(down, step.config.hidden_size, inner, out)
    }
}

/// Values taken at a time: their results wait on the stack.
const PIECE: usize = 1024;

/// `up = situ(gate, up)`, split over the pool.
pub(super) fn situ_in_place(config: &Config, isa: Isa, gate: &[f32], up: &mut [f32]) {
    use rayon::prelude::*;
    up.par_chunks_mut(PIECE)
        .zip(gate.par_chunks(PIECE))
        .for_each(|(up, gate)| situ_here(config, isa, gate, up));
}

/// `up = situ(gate, up)` on this thread.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the caps are f32 in the arithmetic"
)]
pub(super) fn situ_here(config: &Config, isa: Isa, gate: &[f32], up: &mut [f32]) {
    let betas = (
        config.activation_situ_beta as f32,
        config.activation_situ_linear_beta as f32,
    );
    let mut piece = [0.0; PIECE];
    for (up, gate) in up.chunks_mut(PIECE).zip(gate.chunks(PIECE)) {
        let piece = &mut piece[..up.len()];
        situ_slice(isa, gate, up, betas, piece);
        up.copy_from_slice(piece);
    }
}
