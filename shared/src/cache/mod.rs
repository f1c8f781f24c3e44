//! Replacement policies over expert keys: no I/O, no clock. k3-run and k3-simcache run this same code.
//!
//! [`ExpertCache`] owns slots, residency and counters and applies the *cache-group rule*; a [`Policy`] only says which
//! resident to give up. So the rule cannot differ from one policy to the next, nor between the engine and a replay.
//!
//! The cache-group rule (design, section 5). One request is one [`ExpertCache::request_group`]: the distinct experts of one
//! step and layer, in ascending file rank ([`GroupBuilder`] makes it).
//!
//! 1. Hits are found first, for the whole group. Processing order is all hits in group order, then all misses in group order.
//! 2. A miss takes the lowest free slot; if there is none, the policy picks a victim among residents outside the group.
//! 3. If every resident is in the group, the victim is the member earliest in processing order: it is consumed first.
//!
//! Nothing here depends on a hash order or on time: the same requests give the same decisions everywhere.

mod belady;
mod future;
mod group;
mod heap;
mod layer_distance;
mod layer_quota;
mod lfu;
mod lists;
mod lru;
mod pin_lru;
mod policy;
mod reuse_odds;
mod s3_fifo;
mod sieve;
mod static_pin;
#[cfg(test)]
mod tests;
mod w_tinylfu;

pub use belady::Belady;
pub use future::Future;
pub use group::{Geometry, GroupBuilder, Key};
pub use layer_distance::LayerDistance;
pub use layer_quota::LayerQuota;
pub use lfu::Lfu;
pub use lru::Lru;
pub use pin_lru::PinLru;
pub use policy::{CacheError, Members, Policy, PolicyKind, Victim};
pub use reuse_odds::ReuseOdds;
pub use s3_fifo::S3Fifo;
pub use sieve::Sieve;
pub use static_pin::StaticPin;
pub use w_tinylfu::WTinyLfu;

use crate::ids::LayerIdx;

/// What happened to one request of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The expert was resident when the group was requested.
    Hit,
    /// The expert has to be read.
    Miss {
        /// Who gave up the slot; `None` if it was free, or if the expert is not kept.
        evicted: Option<Key>,
    },
}

/// The cache's answer to one member of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The expert asked for.
    pub key: Key,
    /// Where it lies or is to be read to. `None` only under [`Belady`], which may read an expert without keeping it.
    pub slot: Option<u32>,
    /// Hit or miss.
    pub outcome: Outcome,
}

impl Decision {
    /// Whether the expert was resident.
    pub fn is_hit(&self) -> bool {
        self.outcome == Outcome::Hit
    }
}

/// Requests and hits since the cache was made. A request is one distinct (step, layer, expert).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Experts asked for.
    pub requests: u64,
    /// Of these, how many were resident.
    pub hits: u64,
}

impl Counters {
    /// Experts that had to be read.
    pub fn misses(self) -> u64 {
        self.requests - self.hits
    }

    /// What was counted after `earlier`, a reading of the same cache.
    ///
    /// # Panics
    /// If `earlier` is the later reading.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            requests: self.requests - earlier.requests,
            hits: self.hits - earlier.hits,
        }
    }
}

/// Marks a key without a slot, and a slot without a key.
const NONE: u32 = u32::MAX;

/// A fixed number of expert slots under one replacement policy.
pub struct ExpertCache {
    geometry: Geometry,
    policy: Box<dyn Policy>,
    /// `[geometry.keys()]`: the slot of each resident, else [`NONE`].
    slot_of: Vec<u32>,
    slots: u32,
    /// Slots `used..slots` have never held an expert. An eviction always hands its slot on, so there are no other free ones.
    used: u32,
    members: Members,
    counters: Counters,
}

impl std::fmt::Debug for ExpertCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertCache")
            .field("geometry", &self.geometry)
            .field("slots", &self.slots)
            .field("used", &self.used)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl ExpertCache {
    /// An empty cache under a policy that needs no foreknowledge, as k3-run uses it.
    ///
    /// # Errors
    /// If `slots` is 0 or more than a `u32` counts, or if `kind` is for replay only.
    pub fn new(kind: PolicyKind, slots: usize, geometry: Geometry) -> Result<Self, CacheError> {
        let policy = kind.build(checked(slots)?, geometry)?;
        Self::with_policy(policy, slots, geometry)
    }

    /// An empty cache for replaying the requests that `future` was made of; takes every kind.
    ///
    /// # Errors
    /// If `slots` is 0 or more than a `u32` counts.
    pub fn for_replay(
        kind: PolicyKind,
        slots: usize,
        geometry: Geometry,
        future: &std::sync::Arc<Future>,
    ) -> Result<Self, CacheError> {
        let policy = kind.build_for_replay(checked(slots)?, geometry, future)?;
        Self::with_policy(policy, slots, geometry)
    }

    /// An empty cache under a given policy, made for the same `slots` and `geometry`.
    ///
    /// # Errors
    /// If `slots` is 0 or more than a `u32` counts.
    pub fn with_policy(
        policy: Box<dyn Policy>,
        slots: usize,
        geometry: Geometry,
    ) -> Result<Self, CacheError> {
        Ok(Self {
            geometry,
            policy,
            slot_of: vec![NONE; geometry.keys()],
            slots: checked(slots)?,
            used: 0,
            members: Members::new(geometry.keys()),
            counters: Counters::default(),
        })
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.slots as usize
    }

    /// How many experts are resident.
    pub fn residents(&self) -> usize {
        self.used as usize
    }

    /// The shape the keys are made by.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Requests and hits so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The slot of a resident expert.
    pub fn slot_of(&self, key: Key) -> Option<u32> {
        self.slot_of
            .get(key.get())
            .copied()
            .filter(|&slot| slot != NONE)
    }

    /// Request one group: the distinct experts of one step and `layer`, in ascending file rank.
    ///
    /// Decisions come in processing order: all hits, then all misses. A miss may take the slot of an earlier decision of this
    /// same answer (only if every slot holds a member, or one the policy never gives up); that earlier expert must then be
    /// consumed before the slot is read into.
    ///
    /// # Panics
    /// If a key is not of `layer`, lies outside the geometry, or occurs twice.
    pub fn request_group(&mut self, layer: LayerIdx, group: &[Key]) -> Vec<Decision> {
        let mut decisions = Vec::with_capacity(group.len());
        self.request_group_into(layer, group, &mut decisions);
        decisions
    }

    /// [`Self::request_group`] into a vector that is kept from group to group.
    ///
    /// # Panics
    /// As [`Self::request_group`].
    pub fn request_group_into(
        &mut self,
        layer: LayerIdx,
        group: &[Key],
        decisions: &mut Vec<Decision>,
    ) {
        decisions.clear();
        self.members.start();
        for &key in group {
            assert_eq!(
                self.geometry.layer_of(key),
                layer,
                "{key:?} is of another layer"
            );
            assert!(self.members.add(key), "{key:?} is in the group twice");
        }
        self.policy.begin_group(layer, group);
        for &key in group {
            if let Some(slot) = self.slot_of(key) {
                self.policy.hit(key);
                let outcome = Outcome::Hit;
                decisions.push(Decision {
                    key,
                    slot: Some(slot),
                    outcome,
                });
            }
        }
        let hits = decisions.len();
        self.counters.requests += group.len() as u64;
        self.counters.hits += hits as u64;

        let mut next_hit = 0;
        let mut earliest = 0;
        for &key in group {
            if next_hit < hits && decisions[next_hit].key == key {
                next_hit += 1;
                continue;
            }
            let decision = self.admit(key, decisions, &mut earliest);
            decisions.push(decision);
        }
        for &key in group {
            if self.slot_of[key.get()] != NONE {
                self.policy.settle(key);
            }
        }
        self.policy.end_group();
    }

    /// Find a slot for a missing `key`. `decided` is the group so far; members before `earliest` have lost their slots or are
    /// never given up.
    fn admit(&mut self, key: Key, decided: &[Decision], earliest: &mut usize) -> Decision {
        self.policy.miss(key);
        if self.used < self.slots && !self.policy.replaces_before_full(key) {
            let slot = self.used;
            self.used += 1;
            return self.install(key, slot, None);
        }
        let victim = match self.policy.victim(key, &self.members) {
            Victim::Resident(victim) => victim,
            Victim::EarliestMember => self.earliest_member(decided, earliest),
            Victim::NotKept => {
                let outcome = Outcome::Miss { evicted: None };
                return Decision {
                    key,
                    slot: None,
                    outcome,
                };
            }
        };
        let slot = self.slot_of[victim.get()];
        assert_ne!(
            slot, NONE,
            "the policy gave up {victim:?}, which is not resident"
        );
        self.slot_of[victim.get()] = NONE;
        self.policy.evict(victim);
        self.install(key, slot, Some(victim))
    }

    fn install(&mut self, key: Key, slot: u32, evicted: Option<Key>) -> Decision {
        self.slot_of[key.get()] = slot;
        self.policy.insert(key);
        Decision {
            key,
            slot: Some(slot),
            outcome: Outcome::Miss { evicted },
        }
    }

    fn earliest_member(&self, decided: &[Decision], earliest: &mut usize) -> Key {
        while let Some(decision) = decided.get(*earliest) {
            let key = decision.key;
            if self.slot_of[key.get()] != NONE && !self.policy.keeps(key) {
                return key;
            }
            *earliest += 1;
        }
        // Only members that the policy would keep hold slots: the group still has to be served.
        decided
            .iter()
            .map(|decision| decision.key)
            .find(|key| self.slot_of[key.get()] != NONE)
            .expect("a full cache from which the policy gives up no resident holds a member of the group")
    }
}

fn checked(slots: usize) -> Result<u32, CacheError> {
    match u32::try_from(slots) {
        Ok(0) => Err(CacheError::NoSlots),
        Ok(slots) if slots < NONE => Ok(slots),
        _ => Err(CacheError::TooManySlots { slots }),
    }
}
