//! Where the experts lie, compactly: one record a layer when they lie in string order, else eight bytes a tensor.

use super::{ExpertLocation, ShardIdx};
use crate::{
    config::Config,
    ids::{ExpertId, ExpertIdx, LayerIdx, expert_file_ranks},
    names::{ExpertTensor, TensorRole},
};

const NUM_TENSORS: usize = ExpertTensor::ALL.len();
const ABSENT: u64 = u64::MAX;
/// File offsets take the low bits of a [`Place`], which is 281 TB; the shard number takes the rest.
const OFFSET_BITS: u32 = 48;

/// A tensor's place inside an expert's block, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InnerRange {
    /// From the start of the block.
    pub offset: u64,
    /// Its length.
    pub len: u64,
}

/// In what order the experts of a layer lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertOrder {
    /// As in the release: one block each, one after the other, in the order of their decimal strings.
    Strings,
    /// One block each, in another order or in several shards.
    Blocks,
    /// The tensors of at least one expert are not together, or not in the order the others have.
    Scattered,
}

/// Absolute offsets of the expert tensors of one layer that one shard holds.
#[derive(Clone, Debug)]
pub struct LayerExperts {
    /// The layer.
    pub layer: LayerIdx,
    found: Found,
}

#[derive(Clone, Debug)]
enum Found {
    /// Every expert, in string order, from this offset.
    Strings(u64),
    /// By expert and tensor; [`ABSENT`] where another shard has it, or none.
    Listed(Vec<u64>),
}

impl LayerExperts {
    pub(super) fn new(config: &Config, layer: LayerIdx) -> Self {
        let found = Found::Listed(vec![ABSENT; config.moe.num_experts * NUM_TENSORS]);
        Self { layer, found }
    }

    pub(super) fn insert(&mut self, expert: ExpertIdx, tensor: ExpertTensor, offset: u64) {
        if let Found::Listed(offsets) = &mut self.found
            && let Some(place) = offsets.get_mut(expert.get() * NUM_TENSORS + tensor as usize)
        {
            *place = offset;
        }
    }

    /// Replace the list by its first offset if that and the order of the release give all of it.
    pub(super) fn compress(&mut self, geometry: &Geometry) {
        let Found::Listed(offsets) = &self.found else {
            return;
        };
        let Some(first) = offsets.first().copied().filter(|&o| o != ABSENT) else {
            return;
        };
        let in_order =
            offsets
                .chunks_exact(NUM_TENSORS)
                .zip(&geometry.ranks)
                .all(|(six, &rank)| {
                    let block = u64::from(rank)
                        .checked_mul(geometry.expert_bytes)
                        .and_then(|bytes| bytes.checked_add(first));
                    block.is_some_and(|block| {
                        six.iter()
                            .zip(&geometry.layout)
                            .all(|(&offset, inner)| block.checked_add(inner.offset) == Some(offset))
                    })
                });
        if in_order {
            self.found = Found::Strings(first);
        }
    }

    /// Absolute offset of a tensor, if this shard has it.
    pub fn offset(
        &self,
        geometry: &Geometry,
        expert: ExpertIdx,
        tensor: ExpertTensor,
    ) -> Option<u64> {
        match &self.found {
            Found::Strings(first) => geometry.offset(*first, expert, tensor),
            Found::Listed(offsets) => offsets
                .get(expert.get() * NUM_TENSORS + tensor as usize)
                .copied()
                .filter(|&o| o != ABSENT),
        }
    }
}

/// The shape of every expert's block in the release's layout, and the order of the blocks.
#[derive(Clone, Debug)]
pub struct Geometry {
    ranks: Vec<u32>,
    layout: [InnerRange; NUM_TENSORS],
    expert_bytes: u64,
}

impl Geometry {
    pub(super) fn new(config: &Config) -> Self {
        let id = ExpertId {
            layer: LayerIdx(0),
            expert: ExpertIdx(0),
        };
        let mut offset = 0;
        let layout = ExpertTensor::ALL.map(|tensor| {
            let len = TensorRole::Expert(id, tensor).spec(config).bytes();
            let range = InnerRange { offset, len };
            offset += len;
            range
        });
        Self {
            ranks: expert_file_ranks(config.moe.num_experts),
            layout,
            expert_bytes: offset,
        }
    }

    fn offset(&self, first: u64, expert: ExpertIdx, tensor: ExpertTensor) -> Option<u64> {
        let rank = *self.ranks.get(expert.get())?;
        let inner = self.layout[tensor as usize];
        Some(first + u64::from(rank) * self.expert_bytes + inner.offset)
    }
}

/// A shard and an offset in eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place(u64);

impl Place {
    const NONE: Self = Self(u64::MAX);

    fn new(shard: ShardIdx, offset: u64) -> Option<Self> {
        let fits = offset < 1 << OFFSET_BITS && shard.0 < (1 << (64 - OFFSET_BITS)) - 1;
        fits.then_some(Self(u64::from(shard.0) << OFFSET_BITS | offset))
    }

    fn get(self) -> Option<(ShardIdx, u64)> {
        let shard = u32::try_from(self.0 >> OFFSET_BITS).ok()?;
        let offset = self.0 & ((1 << OFFSET_BITS) - 1);
        (self != Self::NONE).then_some((ShardIdx(shard), offset))
    }
}

#[derive(Clone, Debug)]
enum Table {
    /// No expert tensor of this layer, or a dense layer.
    Empty,
    Strings(ShardIdx, u64),
    Listed(Vec<Place>),
}

/// The experts of every opened layer.
#[derive(Debug)]
pub(super) struct Experts {
    geometry: Geometry,
    /// The common layout: the release's, unless every expert has another.
    layout: [InnerRange; NUM_TENSORS],
    tables: Vec<Table>,
}

/// Why a tensor could not be entered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Another shard has it too.
    Twice(ShardIdx),
    /// Its offset or shard number is beyond what a table holds.
    TooFar,
}

impl Experts {
    pub(super) fn new(config: &Config, layers: usize) -> Self {
        let geometry = Geometry::new(config);
        Self {
            layout: geometry.layout,
            geometry,
            tables: vec![Table::Empty; layers],
        }
    }

    /// Enter what one shard holds of a layer; `refused` is told of each tensor that cannot be.
    pub(super) fn insert(
        &mut self,
        shard: ShardIdx,
        experts: &LayerExperts,
        mut refused: impl FnMut(TensorRole, u64, Refused),
    ) {
        let layer = experts.layer;
        let Some(table) = self.tables.get_mut(layer.get()) else {
            return;
        };
        if let (Table::Empty, Found::Strings(first)) = (&*table, &experts.found) {
            *table = Table::Strings(shard, *first);
            return;
        }
        let mut places = match std::mem::replace(table, Table::Empty) {
            Table::Listed(places) => places,
            old => expand(&self.geometry, &old),
        };
        for (id, tensor) in every_tensor(layer, self.geometry.ranks.len()) {
            let Some(offset) = experts.offset(&self.geometry, id.expert, tensor) else {
                continue;
            };
            let place = &mut places[id.expert.get() * NUM_TENSORS + tensor as usize];
            let role = TensorRole::Expert(id, tensor);
            match (place.get(), Place::new(shard, offset)) {
                (Some((other, _)), _) => refused(role, offset, Refused::Twice(other)),
                (None, None) => refused(role, offset, Refused::TooFar),
                (None, Some(new)) => *place = new,
            }
        }
        self.tables[layer.get()] = Table::Listed(places);
    }

    /// Settle the common layout once everything is entered: if the experts are not stored as the release stores them, then
    /// as the first of them is.
    pub(super) fn settle(&mut self) {
        let release = self.tables.iter().any(|t| matches!(t, Table::Strings(..)));
        if release {
            return;
        }
        let first = self.tables.iter().find_map(|table| match table {
            Table::Listed(places) => places.chunks_exact(NUM_TENSORS).find_map(|six| {
                let start = six.iter().filter_map(|p| p.get()).map(|(_, o)| o).min()?;
                self.inner_layout(six, start)
            }),
            _ => None,
        });
        self.layout = first.unwrap_or(self.geometry.layout);
    }

    /// The layout of one expert whose block starts at `start`; `None` if its tensors are not one block.
    fn inner_layout(&self, six: &[Place], start: u64) -> Option<[InnerRange; NUM_TENSORS]> {
        let mut layout = self.geometry.layout;
        let shard = six.first()?.get()?.0;
        for (inner, place) in layout.iter_mut().zip(six) {
            let (other, offset) = place.get()?;
            inner.offset = offset.checked_sub(start)?;
            if other != shard || inner.offset + inner.len > self.geometry.expert_bytes {
                return None;
            }
        }
        // Six ranges that tile the shard and fit into their common length are one block.
        Some(layout)
    }

    pub(super) fn tensor(&self, id: ExpertId, tensor: ExpertTensor) -> Option<(ShardIdx, u64)> {
        match self.tables.get(id.layer.get())? {
            Table::Empty => None,
            Table::Strings(shard, first) => {
                Some((*shard, self.geometry.offset(*first, id.expert, tensor)?))
            }
            Table::Listed(places) => places
                .get(id.expert.get() * NUM_TENSORS + tensor as usize)?
                .get(),
        }
    }

    pub(super) fn block(&self, id: ExpertId) -> Option<ExpertLocation> {
        let (shard, offset) = self.tensor(id, ExpertTensor::W1Packed)?;
        let start = offset.checked_sub(self.layout[0].offset)?;
        if let Table::Listed(_) = self.tables.get(id.layer.get())? {
            let as_the_others = ExpertTensor::ALL
                .iter()
                .zip(&self.layout)
                .all(|(t, inner)| self.tensor(id, *t) == Some((shard, start + inner.offset)));
            if !as_the_others {
                return None;
            }
        }
        Some(ExpertLocation {
            shard,
            offset: start,
            bytes: self.geometry.expert_bytes,
        })
    }

    pub(super) fn layout(&self) -> [InnerRange; NUM_TENSORS] {
        self.layout
    }

    pub(super) fn order(&self, layer: LayerIdx) -> Option<ExpertOrder> {
        match self.tables.get(layer.get())? {
            Table::Empty => None,
            Table::Strings(..) => Some(ExpertOrder::Strings),
            Table::Listed(_) => {
                let blocks =
                    experts_of(layer, self.geometry.ranks.len()).all(|id| self.block(id).is_some());
                Some(if blocks {
                    ExpertOrder::Blocks
                } else {
                    ExpertOrder::Scattered
                })
            }
        }
    }

    /// The experts' tensors of a layer that no shard has.
    pub(super) fn missing(&self, layer: LayerIdx) -> Vec<TensorRole> {
        if let Some(Table::Strings(..)) | None = self.tables.get(layer.get()) {
            return Vec::new();
        }
        every_tensor(layer, self.geometry.ranks.len())
            .filter(|(id, tensor)| self.tensor(*id, *tensor).is_none())
            .map(|(id, tensor)| TensorRole::Expert(id, tensor))
            .collect()
    }
}

fn expand(geometry: &Geometry, table: &Table) -> Vec<Place> {
    let num_experts = geometry.ranks.len();
    let Table::Strings(shard, first) = table else {
        return vec![Place::NONE; num_experts * NUM_TENSORS];
    };
    every_tensor(LayerIdx(0), num_experts)
        .map(|(id, tensor)| {
            let offset = geometry.offset(*first, id.expert, tensor);
            offset
                .and_then(|offset| Place::new(*shard, offset))
                .unwrap_or(Place::NONE)
        })
        .collect()
}

fn experts_of(layer: LayerIdx, num_experts: usize) -> impl Iterator<Item = ExpertId> {
    (0..)
        .map(ExpertIdx)
        .take(num_experts)
        .map(move |expert| ExpertId { layer, expert })
}

fn every_tensor(
    layer: LayerIdx,
    num_experts: usize,
) -> impl Iterator<Item = (ExpertId, ExpertTensor)> {
    experts_of(layer, num_experts).flat_map(|id| ExpertTensor::ALL.map(|tensor| (id, tensor)))
}
