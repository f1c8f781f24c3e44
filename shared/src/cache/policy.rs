//! What a policy is asked, and the policies by name.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    Belady, Future, Geometry, Key, LayerDistance, LayerQuota, Lfu, Lru, PinLru, ReuseOdds, S3Fifo,
    Sieve, StaticPin, WTinyLfu,
};
use crate::ids::{ExpertId, LayerIdx};

/// Why a cache cannot be made or asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// A cache without slots can hold no expert to compute with.
    #[error(
        "an expert cache needs at least 1 slot: raise the capacity above the size of one expert"
    )]
    NoSlots,
    /// More slots than can be numbered.
    #[error("{slots} expert slots are more than there can be experts: lower the number of slots")]
    TooManySlots {
        /// What was asked for.
        slots: usize,
    },
    /// A shape that names no experts.
    #[error(
        "{layers} layers of {experts} experts, {top_k} selected, is not a mixture of experts: check config.json or the trace header"
    )]
    Geometry {
        /// All layers.
        layers: usize,
        /// Experts of one layer.
        experts: usize,
        /// Experts one token selects.
        top_k: usize,
    },
    /// An expert outside the shape.
    #[error("layer {} has no expert {}: the request is not of this model", id.layer, id.expert)]
    NoSuchExpert {
        /// What was asked for.
        id: ExpertId,
    },
    /// A policy that has to know the requests to come.
    #[error(
        "policy {kind} knows the future, so it is for replay only: run `k3-simcache TRACE --policy {kind}`, and choose {} for k3-run",
        names(false)
    )]
    ReplayOnly {
        /// The policy.
        kind: PolicyKind,
    },
    /// A name that is no policy.
    #[error("no cache policy is called {name:?}: choose {}", names(true))]
    UnknownPolicy {
        /// What was typed.
        name: String,
    },
}

fn names(with_replay_only: bool) -> String {
    let names: Vec<&str> = PolicyKind::ALL
        .into_iter()
        .filter(|kind| with_replay_only || !kind.is_replay_only())
        .map(PolicyKind::name)
        .collect();
    names.join(", ")
}

/// The members of the group in progress.
#[derive(Debug)]
pub struct Members {
    /// `[keys]`: the group a key was last a member of.
    group_of: Vec<u64>,
    now: u64,
}

impl Members {
    pub(super) fn new(keys: usize) -> Self {
        Self {
            group_of: vec![0; keys],
            now: 0,
        }
    }

    pub(super) fn start(&mut self) {
        self.now += 1;
    }

    /// Returns whether `key` is new to the group.
    pub(super) fn add(&mut self, key: Key) -> bool {
        std::mem::replace(&mut self.group_of[key.get()], self.now) != self.now
    }

    /// Whether `key` belongs to the group in progress.
    pub fn contains(&self, key: Key) -> bool {
        self.group_of[key.get()] == self.now
    }
}

/// How a policy makes room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// Give up this resident. Not a member of the group, except that [`Belady`] may name one already processed.
    Resident(Key),
    /// No resident outside the group can go: give up the member that is consumed first.
    EarliestMember,
    /// Read the expert without keeping it. Only in simulation: an engine needs the slot to compute with.
    NotKept,
}

/// A replacement policy: told of every request, asked for victims.
///
/// [`ExpertCache`](super::ExpertCache) calls, for one group: [`begin_group`](Self::begin_group);
/// [`hit`](Self::hit) for each hit; then for each miss [`miss`](Self::miss), perhaps [`victim`](Self::victim) and [`evict`](Self::evict), and [`insert`](Self::insert); then
/// [`settle`](Self::settle) for each member that is still resident, and [`end_group`](Self::end_group).
pub trait Policy: Send {
    /// `group` is requested: the distinct experts of one step and `layer`, in ascending file rank, resident or not.
    fn begin_group(&mut self, _layer: LayerIdx, _group: &[Key]) {}

    /// A resident was requested.
    fn hit(&mut self, key: Key);

    /// An expert that is not resident was requested; room for it is sought next.
    fn miss(&mut self, _key: Key) {}

    /// Name a victim for `incoming`.
    fn victim(&mut self, incoming: Key, members: &Members) -> Victim;

    /// `key` lost its slot, by this policy's choice or as earliest member.
    fn evict(&mut self, key: Key);

    /// `key` became resident.
    fn insert(&mut self, key: Key);

    /// The group is over and `key`, a member, is resident: it may be a victim from now on. Called in group order, whatever hit.
    fn settle(&mut self, _key: Key) {}

    /// The group is over.
    fn end_group(&mut self) {}

    /// Whether a victim is wanted for `incoming` although a slot is free.
    fn replaces_before_full(&self, _incoming: Key) -> bool {
        false
    }

    /// Whether `key` stays whatever happens; other members go before it.
    fn keeps(&self, _key: Key) -> bool {
        false
    }
}

/// A replacement policy by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PolicyKind {
    /// [`Lru`]
    Lru,
    /// [`Lfu`]
    Lfu,
    /// [`LayerDistance`]
    LayerDistance,
    /// [`LayerQuota`]
    LayerQuota,
    /// [`S3Fifo`]
    S3Fifo,
    /// [`Sieve`]
    Sieve,
    /// [`WTinyLfu`]
    WTinyLfu,
    /// [`StaticPin`]
    StaticPin,
    /// [`ReuseOdds`]
    ReuseOdds,
    /// [`Belady`]
    Belady,
    /// [`PinLru`]
    PinLru,
}

impl PolicyKind {
    /// What a plan uses unless told otherwise. It needs no switch at one token's working set: [`ReuseOdds`] has the figures.
    pub const DEFAULT: Self = Self::ReuseOdds;

    /// Every policy, in the order they are listed in.
    pub const ALL: [Self; 11] = [
        Self::Lru,
        Self::Lfu,
        Self::LayerDistance,
        Self::LayerQuota,
        Self::S3Fifo,
        Self::Sieve,
        Self::WTinyLfu,
        Self::StaticPin,
        Self::ReuseOdds,
        Self::Belady,
        Self::PinLru,
    ];

    /// Its name in plans, flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::LayerDistance => "layer-distance",
            Self::LayerQuota => "layer-quota",
            Self::S3Fifo => "s3-fifo",
            Self::Sieve => "sieve",
            Self::WTinyLfu => "w-tinylfu",
            Self::StaticPin => "static-pin",
            Self::ReuseOdds => "reuse-odds",
            Self::Belady => "belady",
            Self::PinLru => "pin-lru",
        }
    }

    /// Whether it needs to know the requests to come, so that no engine can run it.
    pub const fn is_replay_only(self) -> bool {
        matches!(self, Self::Belady | Self::PinLru)
    }

    pub(super) fn build(
        self,
        slots: u32,
        geometry: Geometry,
    ) -> Result<Box<dyn Policy>, CacheError> {
        Ok(match self {
            Self::Lru => Box::new(Lru::new(geometry)),
            Self::Lfu => Box::new(Lfu::new(slots as usize, geometry)),
            Self::LayerDistance => Box::new(LayerDistance::new(geometry)),
            Self::LayerQuota => Box::new(LayerQuota::new(geometry)),
            Self::S3Fifo => Box::new(S3Fifo::new(slots as usize, geometry)),
            Self::Sieve => Box::new(Sieve::new(geometry)),
            Self::WTinyLfu => Box::new(WTinyLfu::new(slots as usize, geometry)),
            Self::StaticPin => Box::new(StaticPin::first_come(slots as usize, geometry)),
            Self::ReuseOdds => Box::new(ReuseOdds::new(geometry)),
            Self::Belady | Self::PinLru => return Err(CacheError::ReplayOnly { kind: self }),
        })
    }

    pub(super) fn build_for_replay(
        self,
        slots: u32,
        geometry: Geometry,
        future: &Arc<Future>,
    ) -> Result<Box<dyn Policy>, CacheError> {
        match self {
            Self::Belady => Ok(Box::new(Belady::new(slots as usize, Arc::clone(future)))),
            Self::PinLru => Ok(Box::new(PinLru::new(slots as usize, geometry, future))),
            _ => self.build(slots, geometry),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = CacheError;

    fn from_str(name: &str) -> Result<Self, CacheError> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| CacheError::UnknownPolicy {
                name: name.to_owned(),
            })
    }
}

impl TryFrom<String> for PolicyKind {
    type Error = CacheError;

    fn try_from(name: String) -> Result<Self, CacheError> {
        name.parse()
    }
}

impl From<PolicyKind> for String {
    fn from(kind: PolicyKind) -> Self {
        kind.name().to_owned()
    }
}
