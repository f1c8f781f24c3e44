//! One cache after another over the same requests.

use std::sync::Arc;

use k3_shared::cache::{CacheError, Counters, ExpertCache, Future, PolicyKind};
use rayon::prelude::*;

use crate::{Replay, Row};

/// The size of one simulated cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSize {
    /// Experts it holds.
    pub slots: usize,
    /// Bytes it was asked to fit in.
    pub capacity_bytes: u64,
}

/// Replay under each policy at each size: rows by policy, then by size, in the given orders.
///
/// LRU is counted from the depths that reading the trace found, wherever they are exact.
///
/// # Errors
/// If a size has no slots, or more than can be numbered.
pub fn simulate(
    replay: &Replay,
    policies: &[PolicyKind],
    sizes: &[CacheSize],
) -> Result<Vec<Row>, CacheError> {
    let mut caches: Vec<(PolicyKind, CacheSize)> = policies
        .iter()
        .flat_map(|&policy| sizes.iter().map(move |&size| (policy, size)))
        .collect();
    // Only they look ahead, and what they look at is as large as the requests.
    let future = policies
        .iter()
        .any(|policy| policy.is_replay_only())
        .then(|| {
            let groups = replay.groups().map(|(_, keys, _)| keys);
            Arc::new(Future::new(replay.geometry, groups))
        });
    caches
        .par_drain(..)
        .with_max_len(1)
        .map(|(policy, size)| {
            let counted = if policy == PolicyKind::Lru && size.slots >= replay.largest_group() {
                replay
                    .depths()
                    .each_ref()
                    .map(|curve| curve.counters(size.slots))
            } else {
                replay_one(replay, policy, size.slots, future.as_ref())?
            };
            Ok(Row::new(policy, size, counted))
        })
        .collect()
}

/// What one cache counts in each phase.
fn replay_one(
    replay: &Replay,
    policy: PolicyKind,
    slots: usize,
    future: Option<&Arc<Future>>,
) -> Result<[Counters; 3], CacheError> {
    let mut cache = match future {
        Some(future) => ExpertCache::for_replay(policy, slots, replay.geometry, future)?,
        None => ExpertCache::new(policy, slots, replay.geometry)?,
    };
    let mut decisions = Vec::new();
    let mut counted = [Counters::default(); 3];
    for (layer, keys, phase) in replay.groups() {
        let before = cache.counters();
        cache.request_group_into(layer, keys, &mut decisions);
        if let Some(phase) = phase {
            let group = cache.counters().since(before);
            let counted = &mut counted[phase as usize];
            counted.requests += group.requests;
            counted.hits += group.hits;
        }
    }
    Ok(counted)
}
