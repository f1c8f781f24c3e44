//! W-TinyLFU: a small recency window, and a main part that only the more frequent may enter.

use super::{Geometry, Key, Members, Policy, Victim, lists::Lists};

const WINDOW: u32 = 0;
const PROBATION: u32 = 1;
const PROTECTED: u32 = 2;

/// Counts saturate here, as the paper's four-bit counters do.
const MAX_COUNT: u8 = 15;

/// W-TinyLFU (Einziger, Friedman and Manes, TOS 2017): window 1 % of the slots, the rest a segmented LRU with 80 % protected.
///
/// Two adaptations. Keys are few and dense, so frequencies are an exact table rather than a sketch: one byte a key, halved every
/// `10 * slots` requests, without collisions or a hash. And an expert needs a slot to be computed with, so every newcomer
/// enters the window; the contest for the main part is between the window's least recent and the main part's. Members of the
/// group in progress take no part in it.
#[derive(Debug)]
pub struct WTinyLfu {
    segments: Lists,
    /// `[keys]`: requests in the sample, at most [`MAX_COUNT`].
    counts: Vec<u8>,
    sampled: usize,
    sample: usize,
    window_slots: usize,
    protected_slots: usize,
    /// Whether room ever had to be made: until then the window overflows into the main part without a contest.
    full: bool,
}

impl WTinyLfu {
    /// For `slots` slots and keys of this shape.
    pub fn new(slots: usize, geometry: Geometry) -> Self {
        let window_slots = (slots / 100).max(1);
        Self {
            segments: Lists::new(3, geometry.keys()),
            counts: vec![0; geometry.keys()],
            sampled: 0,
            sample: slots.saturating_mul(10),
            window_slots,
            protected_slots: slots.saturating_sub(window_slots) * 4 / 5,
            full: false,
        }
    }

    fn count(&mut self, key: Key) {
        let count = &mut self.counts[key.get()];
        *count = (*count + 1).min(MAX_COUNT);
        self.sampled += 1;
        if self.sampled >= self.sample {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.sampled /= 2;
        }
    }

    fn least_recent(&self, segment: u32, members: &Members) -> Option<Key> {
        self.segments.rfind(segment, |key| !members.contains(key))
    }
}

impl Policy for WTinyLfu {
    fn hit(&mut self, key: Key) {
        self.count(key);
        if self.segments.list_of(key) == Some(WINDOW) {
            self.segments.push_front(WINDOW, key);
            return;
        }
        self.segments.push_front(PROTECTED, key);
        if self.segments.len(PROTECTED) > self.protected_slots
            && let Some(demoted) = self.segments.back(PROTECTED)
        {
            self.segments.push_front(PROBATION, demoted);
        }
    }

    fn miss(&mut self, key: Key) {
        self.count(key);
    }

    fn victim(&mut self, _incoming: Key, members: &Members) -> Victim {
        self.full = true;
        let in_main = self
            .least_recent(PROBATION, members)
            .or_else(|| self.least_recent(PROTECTED, members));
        let mut candidate = self.least_recent(WINDOW, members);
        if in_main.is_some() && self.segments.len(WINDOW) < self.window_slots {
            candidate = None;
        }
        match (candidate, in_main) {
            (Some(candidate), Some(resident)) => {
                if self.counts[candidate.get()] <= self.counts[resident.get()] {
                    return Victim::Resident(candidate);
                }
                self.segments.push_front(PROBATION, candidate);
                Victim::Resident(resident)
            }
            (Some(key), None) | (None, Some(key)) => Victim::Resident(key),
            (None, None) => Victim::EarliestMember,
        }
    }

    fn evict(&mut self, key: Key) {
        self.segments.remove(key);
    }

    fn insert(&mut self, key: Key) {
        self.segments.push_front(WINDOW, key);
    }

    fn end_group(&mut self) {
        while !self.full && self.segments.len(WINDOW) > self.window_slots {
            let Some(key) = self.segments.back(WINDOW) else {
                break;
            };
            self.segments.push_front(PROBATION, key);
        }
    }
}
