//! Weights from memory, tile by tile, all as f32.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
};

use k3_shared::{
    config::Config,
    ids::{ExpertIdx, LayerIdx, TokenId},
    names::{Dtype, LayerTensor, TensorRole},
    tiles::{TileSpec, trunk_tiles},
};

use super::super::{ExpertWeights, SourceError, WeightSource};
use crate::kernels::testing::f32_bytes;

/// The tiles of a model, and its experts.
pub(super) struct MemorySource {
    tiles: Vec<(TileSpec, Vec<u8>)>,
    next: usize,
    embedding: Vec<f32>,
    /// Blocks by layer and expert.
    experts: BTreeMap<(u32, u32), Vec<u8>>,
    layout: [Range<usize>; 6],
    requested: VecDeque<(LayerIdx, ExpertIdx)>,
    /// How often somebody looked whether an expert is there.
    asked: usize,
}

impl MemorySource {
    /// The first `num_layers` layers; `values` gives a tensor's values, any that are missing at its end being zero.
    pub(super) fn new(
        config: &Config,
        num_layers: usize,
        tile_bytes: u64,
        values: &mut dyn FnMut(TensorRole) -> Vec<f32>,
    ) -> Self {
        let stored_as = |role: TensorRole| (Dtype::F32, role.spec(config).shape);
        let mut whole: BTreeMap<TensorRole, Vec<f32>> = BTreeMap::new();
        let mut tile = |spec: TileSpec| {
            let mut bytes = Vec::new();
            for part in &spec.parts {
                let tensor = whole.entry(part.role).or_insert_with(|| {
                    let mut tensor = values(part.role);
                    tensor.resize(part.role.spec(config).shape.iter().product(), 0.0);
                    tensor
                });
                let rows = part.rows.start * part.cols..part.rows.end * part.cols;
                assert_eq!(bytes.len() as u64, part.offset);
                bytes.extend(f32_bytes(&tensor[rows]));
            }
            (spec, bytes)
        };
        let tiles = trunk_tiles(config, num_layers, tile_bytes, &stored_as);
        let tiles = tiles.into_iter().map(&mut tile).collect();
        Self {
            tiles,
            next: 0,
            embedding: values(TensorRole::Embedding),
            experts: BTreeMap::new(),
            layout: Default::default(),
            requested: VecDeque::new(),
            asked: 0,
        }
    }

    /// Add an expert of six tensors in file order.
    pub(super) fn add_expert(&mut self, layer: u32, expert: u32, tensors: &[Vec<u8>; 6]) {
        let mut end = 0;
        self.layout = tensors.each_ref().map(|tensor| {
            let start = end;
            end += tensor.len();
            start..end
        });
        self.experts.insert((layer, expert), tensors.concat());
    }

    /// The tiles, in order.
    pub(super) fn specs(&self) -> Vec<TileSpec> {
        self.tiles.iter().map(|(spec, _)| spec.clone()).collect()
    }

    /// Make the small tensors of `layer` the next tile.
    pub(super) fn seek_layer(&mut self, layer: LayerIdx) {
        let found = self
            .tiles
            .iter()
            .position(|(spec, _)| spec.layer() == Some(layer));
        self.next = found.unwrap();
    }

    /// Make the first rows of a matrix the next tile.
    pub(super) fn seek(&mut self, layer: LayerIdx, tensor: LayerTensor) {
        let role = TensorRole::Layer(layer, tensor);
        let found = self
            .tiles
            .iter()
            .position(|(spec, _)| spec.parts[0].role == role);
        self.next = found.unwrap();
    }
}

impl WeightSource for MemorySource {
    fn announce(&mut self, _: &[bool]) {}

    fn with_tile(&mut self, use_it: &mut dyn FnMut(&TileSpec, &[u8])) -> Result<(), SourceError> {
        let (spec, bytes) = &self.tiles[self.next];
        use_it(spec, bytes);
        self.next += 1;
        Ok(())
    }

    /// A step begins with its embedding rows, so its tiles begin again.
    fn embedding_row(&mut self, token: TokenId, out: &mut [f32]) -> Result<(), SourceError> {
        self.next = 0;
        let start = token.get() * out.len();
        out.copy_from_slice(&self.embedding[start..start + out.len()]);
        Ok(())
    }

    fn request_experts(
        &mut self,
        layer: LayerIdx,
        experts: &[ExpertIdx],
    ) -> Result<(), SourceError> {
        // They arrive in the opposite order, which must not matter.
        self.requested
            .extend(experts.iter().rev().map(|&expert| (layer, expert)));
        Ok(())
    }

    /// Every second time one is there.
    fn with_ready_expert(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError> {
        self.asked += 1;
        Ok(self.asked % 2 == 1 && self.with_next_expert(use_it)?)
    }

    fn with_next_expert(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError> {
        let Some((layer, expert)) = self.requested.pop_front() else {
            return Ok(false);
        };
        let block = &self.experts[&(layer.0, expert.0)];
        use_it(
            expert,
            ExpertWeights {
                block,
                layout: &self.layout,
            },
        );
        Ok(true)
    }
}
