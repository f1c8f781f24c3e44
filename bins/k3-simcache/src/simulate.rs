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
/// # Errors
/// If a size has no slots, or more than can be numbered.
pub fn simulate(
    replay: &Replay,
    policies: &[PolicyKind],
    sizes: &[CacheSize],
) -> Result<Vec<Row>, CacheError> {
    let future = Arc::new(Future::new(
        replay.geometry,
        replay.groups().map(|(_, keys, _)| keys),
    ));
    let caches: Vec<(PolicyKind, CacheSize)> = policies
        .iter()
        .flat_map(|&policy| sizes.iter().map(move |&size| (policy, size)))
        .collect();
    caches
        .into_par_iter()
        .map(|(policy, size)| {
            let counted = replay_one(replay, policy, size.slots, &future)?;
            Ok(Row::new(policy, size, counted))
        })
        .collect()
}

fn replay_one(
    replay: &Replay,
    policy: PolicyKind,
    slots: usize,
    future: &Arc<Future>,
) -> Result<Counters, CacheError> {
    let mut cache = ExpertCache::for_replay(policy, slots, replay.geometry, future)?;
    let mut decisions = Vec::new();
    let mut counted = Counters::default();
    for (layer, keys, counts) in replay.groups() {
        let before = cache.counters();
        cache.request_group_into(layer, keys, &mut decisions);
        if counts {
            let group = cache.counters().since(before);
            counted.requests += group.requests;
            counted.hits += group.hits;
        }
    }
    Ok(counted)
}
