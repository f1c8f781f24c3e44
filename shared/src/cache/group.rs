//! Dense expert keys, and the groups they are requested in.

use crate::{
    cache::CacheError,
    ids::{ExpertId, ExpertIdx, LayerIdx, expert_file_ranks},
};

/// One expert as a dense number: `layer * experts + expert`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub u32);

impl Key {
    /// The key as an array index.
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

/// The shape that keys are made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub(super) layers: u32,
    pub(super) experts: u32,
    top_k: u32,
}

impl Geometry {
    /// `layers` counts all layers, dense ones too, so that a layer's number is its index; `experts` are those of one layer,
    /// `top_k` those one token selects in it.
    ///
    /// # Errors
    /// If a number is 0, `top_k` exceeds `experts`, or the keys do not fit in a `u32`.
    pub fn new(layers: usize, experts: usize, top_k: usize) -> Result<Self, CacheError> {
        let bad = CacheError::Geometry {
            layers,
            experts,
            top_k,
        };
        let (Ok(l), Ok(e), Ok(k)) = (layers.try_into(), experts.try_into(), top_k.try_into())
        else {
            return Err(bad);
        };
        let geometry = Self {
            layers: l,
            experts: e,
            top_k: k,
        };
        let keys = geometry.layers.checked_mul(geometry.experts);
        // The largest u32 stands for "no key" in the policies' tables.
        if k == 0 || k > e || keys.is_none_or(|keys| keys == 0 || keys == u32::MAX) {
            return Err(bad);
        }
        Ok(geometry)
    }

    /// All layers.
    pub fn layers(self) -> usize {
        self.layers as usize
    }

    /// Experts in one layer.
    pub fn experts(self) -> usize {
        self.experts as usize
    }

    /// Experts one token selects in one layer.
    pub fn top_k(self) -> usize {
        self.top_k as usize
    }

    /// How many keys there are.
    pub fn keys(self) -> usize {
        self.layers as usize * self.experts as usize
    }

    /// The key of an expert, or `None` if there is no such expert.
    pub fn key(self, id: ExpertId) -> Option<Key> {
        let ExpertId {
            layer: LayerIdx(layer),
            expert: ExpertIdx(expert),
        } = id;
        (layer < self.layers && expert < self.experts).then(|| Key(layer * self.experts + expert))
    }

    /// The layer of a key.
    pub fn layer_of(self, key: Key) -> LayerIdx {
        LayerIdx(key.0 / self.experts)
    }

    /// The expert a key stands for.
    pub fn id(self, key: Key) -> ExpertId {
        ExpertId {
            layer: self.layer_of(key),
            expert: ExpertIdx(key.0 % self.experts),
        }
    }
}

/// Makes the group of one step and layer: its distinct experts in ascending file rank.
///
/// File rank is where the expert lies in its shard (specification 2.2), so misses are read front to back.
#[derive(Clone, Debug)]
pub struct GroupBuilder {
    geometry: Geometry,
    /// `[experts]`: file rank of each expert.
    ranks: Vec<u32>,
    group: Vec<Key>,
}

impl GroupBuilder {
    /// For keys of this shape.
    pub fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            ranks: expert_file_ranks(geometry.experts()),
            group: Vec::new(),
        }
    }

    /// The group of `layer` from the selections of all rows of one step, in any order, with repeats.
    ///
    /// # Errors
    /// If the geometry has no such layer or expert.
    pub fn group(
        &mut self,
        layer: LayerIdx,
        experts: impl IntoIterator<Item = ExpertIdx>,
    ) -> Result<&[Key], CacheError> {
        self.group.clear();
        for expert in experts {
            let id = ExpertId { layer, expert };
            let key = self
                .geometry
                .key(id)
                .ok_or(CacheError::NoSuchExpert { id })?;
            self.group.push(key);
        }
        let ranks = &self.ranks;
        let experts = self.geometry.experts;
        self.group
            .sort_unstable_by_key(|key| ranks[(key.0 % experts) as usize]);
        self.group.dedup();
        Ok(&self.group)
    }
}
