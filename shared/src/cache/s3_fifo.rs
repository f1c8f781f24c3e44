//! S3-FIFO: a small queue for newcomers, a main queue for what came back, and a memory of what left.

use super::{Geometry, Key, Members, Policy, Victim, lists::Lists};

const SMALL: u32 = 0;
const MAIN: u32 = 1;
const GHOST: u32 = 2;

/// Requests remembered of one resident, at most (two bits in the paper).
const MAX_FREQUENCY: u8 = 3;

/// S3-FIFO (Yang et al., SOSP 2023): the small queue aims at a tenth of the slots, the ghost queue holds as many keys as the main
/// queue. Members of the group in progress are stepped over and keep their place.
#[derive(Debug)]
pub struct S3Fifo {
    queues: Lists,
    /// `[keys]`: hits since the expert became resident, at most [`MAX_FREQUENCY`].
    frequency: Vec<u8>,
    small_slots: usize,
    ghosts: usize,
}

impl S3Fifo {
    /// For `slots` slots and keys of this shape.
    pub fn new(slots: usize, geometry: Geometry) -> Self {
        let small_slots = (slots / 10).max(1);
        Self {
            queues: Lists::new(3, geometry.keys()),
            frequency: vec![0; geometry.keys()],
            small_slots,
            ghosts: slots.saturating_sub(small_slots),
        }
    }

    /// The oldest newcomer requested at most once again; others on the way move on to the main queue.
    fn victim_in_small(&mut self, members: &Members) -> Option<Key> {
        let mut at = self.queues.back(SMALL);
        while let Some(key) = at {
            at = self.queues.before(key);
            if members.contains(key) {
                continue;
            }
            if self.frequency[key.get()] <= 1 {
                return Some(key);
            }
            self.frequency[key.get()] = 0;
            self.queues.push_front(MAIN, key);
            if self.queues.len(SMALL) < self.small_slots {
                break;
            }
        }
        None
    }

    /// The oldest of the main queue not requested since its last round; others on the way go round again.
    fn victim_in_main(&mut self, members: &Members) -> Option<Key> {
        loop {
            let mut went_round = false;
            let mut at = self.queues.back(MAIN);
            for _ in 0..self.queues.len(MAIN) {
                let Some(key) = at else { break };
                at = self.queues.before(key);
                if members.contains(key) {
                    continue;
                }
                if self.frequency[key.get()] == 0 {
                    return Some(key);
                }
                self.frequency[key.get()] -= 1;
                self.queues.push_front(MAIN, key);
                went_round = true;
            }
            if !went_round {
                return None;
            }
        }
    }

    fn remember(&mut self, key: Key) {
        self.queues.push_front(GHOST, key);
        if self.queues.len(GHOST) > self.ghosts
            && let Some(oldest) = self.queues.back(GHOST)
        {
            self.queues.remove(oldest);
        }
    }
}

impl Policy for S3Fifo {
    fn hit(&mut self, key: Key) {
        let frequency = &mut self.frequency[key.get()];
        *frequency = (*frequency + 1).min(MAX_FREQUENCY);
    }

    fn victim(&mut self, _incoming: Key, members: &Members) -> Victim {
        let mut victim = None;
        if self.queues.len(SMALL) >= self.small_slots {
            victim = self.victim_in_small(members);
        }
        let victim = victim
            .or_else(|| self.victim_in_main(members))
            .or_else(|| self.victim_in_small(members))
            // The call above may have moved the last newcomers to the main queue.
            .or_else(|| self.victim_in_main(members));
        victim.map_or(Victim::EarliestMember, Victim::Resident)
    }

    fn evict(&mut self, key: Key) {
        if self.queues.list_of(key) == Some(SMALL) {
            self.remember(key);
        } else {
            self.queues.remove(key);
        }
    }

    fn insert(&mut self, key: Key) {
        let came_back = self.queues.list_of(key) == Some(GHOST);
        self.frequency[key.get()] = 0;
        self.queues
            .push_front(if came_back { MAIN } else { SMALL }, key);
    }
}
