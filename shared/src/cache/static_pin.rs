//! A fixed set of experts that stays, and scratch slots for the others.

use super::{Geometry, Key, Members, Policy, Victim, lists::Lists};

/// Keeps a fixed set for good; the other slots are scratch, first in first out. At least `2 * top_k` slots (one, if there are not
/// so many) are scratch, so that any one token's experts can be read ahead.
///
/// The set holds no matter how the requests go: no recency cliff below one token's working set.
#[derive(Debug)]
pub struct StaticPin {
    /// `[keys]`
    pinned: Vec<bool>,
    /// How many more experts are pinned as they come; 0 with a given list.
    to_pin: usize,
    scratch: Lists,
}

impl StaticPin {
    /// Keep the experts of `list`, best first, as far as slots go.
    ///
    /// # Panics
    /// If a key lies outside the geometry.
    pub fn with_list(list: &[Key], slots: usize, geometry: Geometry) -> Self {
        let mut policy = Self::first_come(slots, geometry);
        for key in list.iter().take(policy.to_pin) {
            policy.pinned[key.get()] = true;
        }
        policy.to_pin = 0;
        policy
    }

    /// Keep the first experts that are requested, where nothing better is known.
    pub fn first_come(slots: usize, geometry: Geometry) -> Self {
        let scratch_slots = (2 * geometry.top_k()).min(slots.div_ceil(2));
        Self {
            pinned: vec![false; geometry.keys()],
            to_pin: slots.saturating_sub(scratch_slots),
            scratch: Lists::new(1, geometry.keys()),
        }
    }
}

impl Policy for StaticPin {
    fn hit(&mut self, _key: Key) {}

    fn victim(&mut self, _incoming: Key, members: &Members) -> Victim {
        self.scratch
            .rfind(0, |key| !members.contains(key))
            .map_or(Victim::EarliestMember, Victim::Resident)
    }

    fn evict(&mut self, key: Key) {
        self.scratch.remove(key);
    }

    fn insert(&mut self, key: Key) {
        if self.to_pin > 0 {
            self.to_pin -= 1;
            self.pinned[key.get()] = true;
        }
        if !self.pinned[key.get()] {
            self.scratch.push_front(0, key);
        }
    }

    fn keeps(&self, key: Key) -> bool {
        self.pinned[key.get()]
    }
}
