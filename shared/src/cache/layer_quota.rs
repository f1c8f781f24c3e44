//! An equal share of the slots for each layer.

use super::{Geometry, Key, Members, Policy, Victim, lists::Lists};

/// Gives up the least recent expert of the layer that holds most slots, the current layer first among equals and then the most
/// recently passed. Shares even out to `slots / layers that have experts`, whatever that number is; only the layer in progress
/// exceeds its share, by the experts it is computing with.
#[derive(Debug)]
pub struct LayerQuota {
    geometry: Geometry,
    /// One list a layer, by recency.
    residents: Lists,
}

impl LayerQuota {
    /// For keys of this shape.
    pub fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            residents: Lists::new(geometry.layers(), geometry.keys()),
        }
    }

    fn touch(&mut self, key: Key) {
        self.residents
            .push_front(self.geometry.layer_of(key).0, key);
    }
}

impl Policy for LayerQuota {
    fn hit(&mut self, key: Key) {
        self.touch(key);
    }

    fn victim(&mut self, incoming: Key, members: &Members) -> Victim {
        let current = self.geometry.layer_of(incoming).0;
        let mut most = 0;
        let mut victim = Victim::EarliestMember;
        let backwards = (0..=current)
            .rev()
            .chain((current + 1..self.geometry.layers).rev());
        for layer in backwards {
            // The least recent of the current layer is a member only if all of them are.
            if self.residents.len(layer) > most
                && let Some(key) = self.residents.back(layer)
                && !members.contains(key)
            {
                most = self.residents.len(layer);
                victim = Victim::Resident(key);
            }
        }
        victim
    }

    fn evict(&mut self, key: Key) {
        self.residents.remove(key);
    }

    fn insert(&mut self, key: Key) {
        self.touch(key);
    }

    fn settle(&mut self, key: Key) {
        self.touch(key);
    }
}
