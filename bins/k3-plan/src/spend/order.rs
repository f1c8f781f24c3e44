//! The order in which tiles are pinned, cut anywhere: what is held on one side, what streams on the other.

use k3_shared::{
    ledger::{MIN_RING_SLOTS, Model},
    tiles::TileClass,
};

use super::{Asks, MIN_RING_BYTES};
use crate::cli::PinOrder;

/// The order cut in two: what is pinned and what streams.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cut {
    /// Stored bytes before the cut.
    pub(super) pinned_bytes: u64,
    /// Stored bytes after it.
    pub(super) streamed_bytes: u64,
    /// Payload bytes after it, which every token reads.
    pub(super) payload: u64,
    /// The largest tile after it.
    pub(super) largest: u64,
    /// Tiles after it.
    pub(super) num_streamed: usize,
}

impl Cut {
    /// Bytes of a ring of at most `asked` bytes: whole slots, at least two, never more than there is to hold.
    pub(super) fn ring_bytes(&self, asked: u64) -> u64 {
        let fit = |bytes: u64| bytes.checked_div(self.largest).unwrap_or(0);
        let slots = fit(asked)
            .min(fit(self.streamed_bytes))
            .max(MIN_RING_SLOTS as u64)
            .min(self.num_streamed as u64);
        slots.saturating_mul(self.largest)
    }
}

impl Cut {
    /// Bytes of what is pinned, and of the ring for what streams.
    pub(super) fn held(&self, ring_bytes: u64) -> u64 {
        self.pinned_bytes
            .saturating_add(self.ring_bytes(ring_bytes))
    }
}

/// Tiles that every plan pins: by hand, the longest prefix within the size given; else the prefix that takes least memory with
/// the smallest ring, which is none unless a ring would take more than all there is to stream.
pub(super) fn num_fixed(sums: &[Cut], asks: &Asks) -> usize {
    let ring = asks.ring_bytes.min(MIN_RING_BYTES);
    let found = match asks.pin_bytes {
        Some(bytes) => sums.iter().rposition(|cut| cut.pinned_bytes <= bytes),
        None => (0..sums.len()).min_by_key(|&at| {
            let cut = &sums[at];
            cut.pinned_bytes.saturating_add(cut.ring_bytes(ring))
        }),
    };
    found.unwrap_or(0)
}

/// The tiles that may stream, in the order they are pinned: the layers' first, the head's last.
pub(super) fn pin_order(model: &Model<'_>, order: PinOrder) -> Vec<usize> {
    let of_class = |class: TileClass| {
        let tiles = model.tiles.iter().enumerate();
        tiles
            .filter(move |(_, tile)| tile.class() == class)
            .map(|(at, _)| at)
    };
    let mut tiles: Vec<usize> = of_class(TileClass::Trunk).collect();
    if order == PinOrder::Spread {
        tiles = spread(&tiles);
    }
    tiles.extend(of_class(TileClass::Head));
    tiles
}

/// Tiles in an order each prefix of which is spread evenly over the sequence: by bit-reversed place.
pub(super) fn spread(tiles: &[usize]) -> Vec<usize> {
    let bits = tiles.len().next_power_of_two().trailing_zeros();
    if bits == 0 {
        return tiles.to_vec();
    }
    (0..1usize << bits)
        .filter_map(|place| {
            tiles
                .get(place.reverse_bits() >> (usize::BITS - bits))
                .copied()
        })
        .collect()
}

/// All cuts of the order: element `k` has the first `k` tiles pinned.
pub(super) fn cuts(model: &Model<'_>, order: &[usize]) -> Vec<Cut> {
    let sizes: Vec<u64> = order
        .iter()
        .map(|&tile| model.tiles[tile].stored_bytes())
        .collect();
    let mut cuts = vec![Cut::default(); sizes.len() + 1];
    for (at, size) in sizes.iter().enumerate() {
        cuts[at + 1].pinned_bytes = cuts[at].pinned_bytes.saturating_add(*size);
    }
    for (at, size) in sizes.iter().enumerate().rev() {
        let after = cuts[at + 1];
        let cut = &mut cuts[at];
        cut.streamed_bytes = after.streamed_bytes.saturating_add(*size);
        let raw = model.tiles[order[at]].raw_bytes();
        cut.payload = after.payload.saturating_add(raw);
        cut.largest = after.largest.max(*size);
        cut.num_streamed = after.num_streamed + 1;
    }
    cuts
}
