//! The most requested experts pinned, LRU for the rest.

use super::{Future, Geometry, Key, Members, Policy, Victim, lists::Lists};

/// Pins the experts requested most often in the whole replay in half the slots, and runs an LRU in the other half.
///
/// A slot kept for a pinned expert stays empty until that expert is first requested.
#[derive(Debug)]
pub struct PinLru {
    /// `[keys]`
    pinned: Vec<bool>,
    recency: Lists,
    lru_slots: usize,
}

impl PinLru {
    /// For `slots` slots and for replaying the requests that `future` was made of.
    pub fn new(slots: usize, geometry: Geometry, future: &Future) -> Self {
        let mut pinned = vec![false; geometry.keys()];
        let list = future.by_popularity();
        let pins = list.len().min(slots / 2);
        for key in &list[..pins] {
            pinned[key.get()] = true;
        }
        Self {
            pinned,
            recency: Lists::new(1, geometry.keys()),
            lru_slots: slots - pins,
        }
    }

    fn touch(&mut self, key: Key) {
        if !self.pinned[key.get()] {
            self.recency.push_front(0, key);
        }
    }
}

impl Policy for PinLru {
    fn hit(&mut self, key: Key) {
        self.touch(key);
    }

    fn victim(&mut self, _incoming: Key, members: &Members) -> Victim {
        match self.recency.back(0) {
            Some(key) if !members.contains(key) => Victim::Resident(key),
            _ => Victim::EarliestMember,
        }
    }

    fn evict(&mut self, key: Key) {
        self.recency.remove(key);
    }

    fn insert(&mut self, key: Key) {
        self.touch(key);
    }

    fn settle(&mut self, key: Key) {
        self.touch(key);
    }

    fn replaces_before_full(&self, incoming: Key) -> bool {
        !self.pinned[incoming.get()] && self.recency.len(0) >= self.lru_slots
    }

    fn keeps(&self, key: Key) -> bool {
        self.pinned[key.get()]
    }
}
