//! Least recently used.

use super::{Geometry, Key, Members, Policy, Victim, lists::Lists};

/// Gives up the expert whose last request is longest ago.
///
/// Among the members of one group the last in group order is the most recent, hit or not; so a larger cache holds all that a
/// smaller one does, as long as both hold a whole group. On a cyclic scan LRU hits exactly nothing until one token's working set fits,
/// less a group.
#[derive(Debug)]
pub struct Lru {
    recency: Lists,
}

impl Lru {
    /// For keys of this shape.
    pub fn new(geometry: Geometry) -> Self {
        Self {
            recency: Lists::new(1, geometry.keys()),
        }
    }
}

impl Policy for Lru {
    fn hit(&mut self, key: Key) {
        self.recency.push_front(0, key);
    }

    fn victim(&mut self, _incoming: Key, members: &Members) -> Victim {
        // Members were all touched after every other resident: if the last one is a member, they all are.
        match self.recency.back(0) {
            Some(key) if !members.contains(key) => Victim::Resident(key),
            _ => Victim::EarliestMember,
        }
    }

    fn evict(&mut self, key: Key) {
        self.recency.remove(key);
    }

    fn insert(&mut self, key: Key) {
        self.recency.push_front(0, key);
    }

    fn settle(&mut self, key: Key) {
        self.recency.push_front(0, key);
    }
}
