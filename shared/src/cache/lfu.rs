//! Least frequently used, with counts that survive eviction.

use std::collections::BTreeSet;

use super::{Geometry, Key, Members, Policy, Victim};

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
    evictable: BTreeSet<Worth>,
}

impl Lfu {
    /// For keys of this shape.
    pub fn new(geometry: Geometry) -> Self {
        Self {
            history: History::new(geometry),
            evictable: BTreeSet::new(),
        }
    }
}

impl Policy for Lfu {
    fn hit(&mut self, key: Key) {
        self.evictable.remove(&self.history.worth(key));
        self.history.record(key);
    }

    fn miss(&mut self, key: Key) {
        self.history.record(key);
    }

    fn victim(&mut self, _incoming: Key, _members: &Members) -> Victim {
        match self.evictable.first() {
            Some(&(_, _, key)) => Victim::Resident(key),
            None => Victim::EarliestMember,
        }
    }

    fn evict(&mut self, key: Key) {
        self.evictable.remove(&self.history.worth(key));
    }

    fn insert(&mut self, _key: Key) {}

    fn settle(&mut self, key: Key) {
        self.evictable.insert(self.history.worth(key));
    }
}
