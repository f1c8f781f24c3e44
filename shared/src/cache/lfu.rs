//! Least frequently used, with counts that survive eviction.

use super::{Geometry, Key, Members, Policy, Victim, heap::Heap};

/// How often and how lately each key was requested, resident or not.
#[derive(Debug)]
pub(super) struct History {
    /// `[keys]`: requests so far, and the number of the last one.
    requests: Vec<(u64, u64)>,
    clock: u64,
}

/// Orders keys by fewest requests, then longest ago.
pub(super) type Worth = (u64, u64, Key);

impl History {
    pub(super) fn new(geometry: Geometry) -> Self {
        Self {
            requests: vec![(0, 0); geometry.keys()],
            clock: 0,
        }
    }

    pub(super) fn record(&mut self, key: Key) {
        self.clock += 1;
        let (count, last) = &mut self.requests[key.get()];
        *count += 1;
        *last = self.clock;
    }

    pub(super) fn worth(&self, key: Key) -> Worth {
        let (count, last) = self.requests[key.get()];
        (count, last, key)
    }
}

/// Gives up the expert requested least often since the start, evicted or not in between; ties go to the least recent.
#[derive(Debug)]
pub struct Lfu {
    history: History,
    /// Residents outside the group in progress.
    evictable: Heap<(u64, u64)>,
}

impl Lfu {
    /// For `slots` slots and keys of this shape.
    pub fn new(slots: usize, geometry: Geometry) -> Self {
        Self {
            history: History::new(geometry),
            evictable: Heap::new(slots, geometry.keys()),
        }
    }
}

impl Policy for Lfu {
    fn hit(&mut self, key: Key) {
        self.evictable.remove(key);
        self.history.record(key);
    }

    fn miss(&mut self, key: Key) {
        self.history.record(key);
    }

    fn victim(&mut self, _incoming: Key, _members: &Members) -> Victim {
        match self.evictable.first() {
            Some((_, key)) => Victim::Resident(key),
            None => Victim::EarliestMember,
        }
    }

    fn evict(&mut self, key: Key) {
        self.evictable.remove(key);
    }

    fn insert(&mut self, _key: Key) {}

    fn settle(&mut self, key: Key) {
        let (count, last, key) = self.history.worth(key);
        self.evictable.insert((count, last), key);
    }
}
