//! The small tensors of a layer, widened to f32.

use k3_shared::{
    ids::LayerIdx,
    names::{Dtype, LayerTensor, TensorRole},
    tiles::{TilePart, TileSpec},
};

use super::{
    ModelError,
    matrix::StepContext,
    workspace::{sized, vec_bytes},
};
use crate::kernels::{Weights, widen};

/// A layer's norms, taps and biases as f32, by role; reused from layer to layer.
#[derive(Debug, Default)]
pub(super) struct LayerVectors {
    values: Vec<Vec<f32>>,
    /// Norm weight times projection of the attention residual before the mixer.
    pub(super) attn_res: Vec<f32>,
    /// The same before the channel mixer.
    pub(super) mlp_res: Vec<f32>,
}

impl LayerVectors {
    /// Take the next tile, which must hold the small tensors of `layer`.
    pub(super) fn load(
        &mut self,
        layer: LayerIdx,
        step: &mut StepContext<'_>,
    ) -> Result<(), ModelError> {
        self.values.resize_with(LayerTensor::ALL.len(), Vec::new);
        let mut wrong = None;
        step.with_tile(&mut |spec, bytes| {
            for part in &spec.parts {
                match part.role {
                    TensorRole::Layer(l, tensor) if l == layer => {
                        widen_part(part, bytes, &mut self.values[tensor as usize]);
                    }
                    _ => wrong = Some(describe(spec)),
                }
            }
        })?;
        if let Some(found) = wrong {
            let wanted = TensorRole::Layer(layer, LayerTensor::InputNorm);
            return Err(ModelError::WrongTile {
                wanted,
                row: 0,
                found,
            });
        }
        let product = |into: &mut Vec<f32>, norm: &[f32], projection: &[f32]| {
            let into = sized(into, norm.len());
            for ((into, n), p) in into.iter_mut().zip(norm).zip(projection) {
                *into = n * p;
            }
        };
        let at = |tensor: LayerTensor| self.values[tensor as usize].as_slice();
        product(
            &mut self.attn_res,
            at(LayerTensor::AttnResNorm),
            at(LayerTensor::AttnResProj),
        );
        product(
            &mut self.mlp_res,
            at(LayerTensor::MlpResNorm),
            at(LayerTensor::MlpResProj),
        );
        Ok(())
    }

    /// Bytes of memory the vectors hold.
    pub(super) fn allocated_bytes(&self) -> usize {
        let all = self.values.iter().chain([&self.attn_res, &self.mlp_res]);
        all.map(vec_bytes).sum()
    }

    /// One tensor's values.
    pub(super) fn get(&self, tensor: LayerTensor) -> &[f32] {
        &self.values[tensor as usize]
    }
}

/// Stored trunk bytes as kernel weights.
pub(crate) fn stored(dtype: Dtype, bytes: &[u8]) -> Weights<'_> {
    match dtype {
        Dtype::F32 => Weights::F32(bytes),
        // The trunk's reader admits no other type.
        Dtype::Bf16 | Dtype::U8 => Weights::Bf16(bytes),
    }
}

/// The bytes of one part of a tile.
#[expect(clippy::cast_possible_truncation, reason = "a tile lies in memory")]
pub(super) fn part_bytes<'a>(part: &TilePart, tile: &'a [u8]) -> &'a [u8] {
    &tile[part.offset as usize..(part.offset + part.bytes()) as usize]
}

/// Widen one part of a tile into `into`.
pub(super) fn widen_part(part: &TilePart, tile: &[u8], into: &mut Vec<f32>) {
    let len = part.rows.len() * part.cols;
    into.truncate(len);
    sized(into, len);
    widen(stored(part.dtype, part_bytes(part, tile)), into);
}

/// What a tile holds, for messages.
pub(super) fn describe(spec: &TileSpec) -> String {
    spec.parts.first().map_or_else(
        || "nothing".to_owned(),
        |part| {
            format!(
                "{} rows {}..{}",
                part.role.name(),
                part.rows.start,
                part.rows.end
            )
        },
    )
}
