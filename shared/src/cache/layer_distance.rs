//! Evict the layer just passed.

use super::{
    Geometry, Key, Members, Policy, Victim,
    lfu::{History, Worth},
};

/// Gives up an expert of the layer that is needed furthest in the future: layers come round in order, so that is the one passed
/// most recently. Never the current layer while another holds anything. Within a layer the lowest remembered count goes, then the
/// least recent.
#[derive(Debug)]
pub struct LayerDistance {
    geometry: Geometry,
    history: History,
    /// `[layers]`: residents outside the group in progress, ascending. A sorted list, because a layer has few enough experts to
    /// shift, and in a steady run it neither grows nor allocates.
    evictable: Vec<Vec<Worth>>,
}

impl LayerDistance {
    /// For keys of this shape.
    pub fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            history: History::new(geometry),
            evictable: vec![Vec::new(); geometry.layers()],
        }
    }

    fn layer(&mut self, key: Key) -> &mut Vec<Worth> {
        &mut self.evictable[self.geometry.layer_of(key).get()]
    }

    fn remove(&mut self, worth: Worth) {
        let layer = self.layer(worth.2);
        if let Ok(at) = layer.binary_search(&worth) {
            layer.remove(at);
        }
    }
}

impl Policy for LayerDistance {
    fn hit(&mut self, key: Key) {
        self.remove(self.history.worth(key));
        self.history.record(key);
    }

    fn miss(&mut self, key: Key) {
        self.history.record(key);
    }

    fn victim(&mut self, incoming: Key, _members: &Members) -> Victim {
        let layers = self.geometry.layers();
        let current = self.geometry.layer_of(incoming).get();
        // Backwards from the layer before this one, all the way round to this one.
        let mut passed = (1..=layers).map(|back| (current + layers - back) % layers);
        match passed.find_map(|layer| self.evictable[layer].first()) {
            Some(&(_, _, key)) => Victim::Resident(key),
            None => Victim::EarliestMember,
        }
    }

    fn evict(&mut self, key: Key) {
        self.remove(self.history.worth(key));
    }

    fn insert(&mut self, _key: Key) {}

    fn settle(&mut self, key: Key) {
        let worth = self.history.worth(key);
        let layer = self.layer(key);
        if let Err(at) = layer.binary_search(&worth) {
            layer.insert(at, worth);
        }
    }
}
