//! SIEVE: a queue that is never reordered, and a hand that sweeps it.

use super::{Geometry, Key, Members, Policy, Victim, lists::Lists};

/// SIEVE (Zhang et al., NSDI 2024). A hit marks; the hand moves from the oldest to the newest, clears marks, and takes the first
/// expert without one. Members of the group in progress are stepped over and keep their marks.
#[derive(Debug)]
pub struct Sieve {
    /// Newest at the front.
    queue: Lists,
    /// `[keys]`: requested again since the hand last came by.
    marked: Vec<bool>,
    /// Where the hand stands; `None` is at the oldest.
    hand: Option<Key>,
}

impl Sieve {
    /// For keys of this shape.
    pub fn new(geometry: Geometry) -> Self {
        Self {
            queue: Lists::new(1, geometry.keys()),
            marked: vec![false; geometry.keys()],
            hand: None,
        }
    }
}

impl Policy for Sieve {
    fn hit(&mut self, key: Key) {
        self.marked[key.get()] = true;
    }

    fn victim(&mut self, _incoming: Key, members: &Members) -> Victim {
        // The first round may clear every mark; the second then finds a victim, unless all are members.
        for _ in 0..=2 * self.queue.len(0) {
            let Some(key) = self.hand.or_else(|| self.queue.back(0)) else {
                break;
            };
            let is_member = members.contains(key);
            if !is_member && !self.marked[key.get()] {
                self.hand = Some(key);
                return Victim::Resident(key);
            }
            if !is_member {
                self.marked[key.get()] = false;
            }
            self.hand = self.queue.before(key);
        }
        Victim::EarliestMember
    }

    fn evict(&mut self, key: Key) {
        if self.hand == Some(key) {
            self.hand = self.queue.before(key);
        }
        self.queue.remove(key);
        self.marked[key.get()] = false;
    }

    fn insert(&mut self, key: Key) {
        self.queue.push_front(0, key);
    }
}
