//! How many of a token's experts are found in so many slots, and under which policy most are.
//!
//! With a trace every answer is an exact replay, by the code k3-run caches with. Replays are dear, so they are made for a fixed
//! series of sizes first, all policies on all threads; between two sizes of the series only the policies that won somewhere are
//! asked. Without a trace, all experts are taken to be equally likely: the least that any text gives a cache that keeps what it
//! read.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use k3_shared::{cache::PolicyKind, ledger::Model};

use crate::predict::{Hits, Replay, uniform_hits};

/// Sizes of the series at the most, and at the least.
const MOST_SIZES: usize = 40;
const FEWEST_SIZES: usize = 10;
/// Requests replayed for each policy over the whole series, about: longer traces get fewer sizes.
const SERIES_REQUESTS: usize = 4_000_000;
/// Sizes looked at for one budget beside the series, at most, and at the most for the longest traces.
const MOST_TRIES: usize = 400;
const FEWEST_TRIES: usize = 24;
/// Requests replayed for each contender for one budget, about.
const TRIES_REQUESTS: usize = 40_000_000;
/// A policy this close to the best somewhere is asked between the sizes of the series too.
const CLOSE: f64 = 0.002;

/// The policy that hits most, and how often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// The policy.
    pub policy: PolicyKind,
    /// Its requests and hits.
    pub hits: Hits,
}

/// Hits by number of slots.
#[derive(Debug)]
pub struct Curve<'a> {
    model: Model<'a>,
    replay: Option<&'a Replay>,
    /// Those allowed, the first preferred where two are equal.
    policies: Vec<PolicyKind>,
    /// Sizes that are looked at first, ascending.
    series: Vec<usize>,
    /// Of `policies`, those worth asking between them.
    contenders: Vec<PolicyKind>,
    known: Mutex<BTreeMap<(PolicyKind, usize), Hits>>,
}

impl<'a> Curve<'a> {
    /// The curve of `model` under the best of `policies`, by `replay` if there is one, up to `most` slots.
    ///
    /// # Panics
    /// If `policies` is empty.
    pub fn new(
        model: Model<'a>,
        replay: Option<&'a Replay>,
        policies: Vec<PolicyKind>,
        most: usize,
    ) -> Self {
        assert!(!policies.is_empty(), "a cache has a policy");
        let series = series(&model, replay.map(Replay::num_requests));
        let mut curve = Self {
            model,
            replay,
            contenders: policies.clone(),
            policies,
            series,
            known: Mutex::default(),
        };
        curve.prepare(most);
        curve
    }

    /// Replay the series and find the contenders.
    fn prepare(&mut self, most: usize) {
        if self.replay.is_none() {
            return;
        }
        let sizes: Vec<usize> = self.series.iter().copied().filter(|&s| s <= most).collect();
        let jobs: Vec<(PolicyKind, usize)> = sizes
            .iter()
            .flat_map(|&slots| self.policies.iter().map(move |&policy| (policy, slots)))
            .collect();
        self.replay_all(&jobs);
        let is_close = |policy: PolicyKind| {
            sizes.iter().any(|&slots| {
                let best = self.at(slots).hits.rate;
                self.hits(policy, slots).rate >= best - CLOSE && best > 0.0
            })
        };
        let close: Vec<PolicyKind> = self
            .policies
            .iter()
            .copied()
            .filter(|&policy| is_close(policy))
            .collect();
        if !close.is_empty() {
            self.contenders = close;
        }
    }

    /// Whether a trace says so.
    pub fn is_from_trace(&self) -> bool {
        self.replay.is_some()
    }

    /// How many sizes may be looked at for one budget beside the series: longer traces take longer to replay.
    pub fn tries(&self) -> usize {
        self.replay.map_or(MOST_TRIES, |replay| {
            (TRIES_REQUESTS / replay.num_requests().max(1)).clamp(FEWEST_TRIES, MOST_TRIES)
        })
    }

    /// The sizes to look at first.
    pub fn series(&self) -> &[usize] {
        &self.series
    }

    /// What `slots` slots are expected to hit under the best policy.
    pub fn at(&self, slots: usize) -> Expected {
        let policies = if self.series.contains(&slots) {
            &self.policies
        } else {
            let jobs: Vec<_> = self
                .contenders
                .iter()
                .map(|&policy| (policy, slots))
                .collect();
            self.replay_all(&jobs);
            &self.contenders
        };
        let mut best: Option<Expected> = None;
        for &policy in policies {
            let hits = self.hits(policy, slots);
            if best.is_none_or(|best| hits.rate > best.hits.rate) {
                best = Some(Expected { policy, hits });
            }
        }
        best.unwrap_or_else(|| Expected {
            policy: self.policies[0],
            hits: self.hits(self.policies[0], slots),
        })
    }

    /// What every policy hits, the best first.
    pub fn ranking(&self, slots: usize) -> Vec<Expected> {
        let expected = |&policy: &PolicyKind| Expected {
            policy,
            hits: self.hits(policy, slots),
        };
        let mut all: Vec<Expected> = self.policies.iter().map(expected).collect();
        all.sort_by(|a, b| b.hits.rate.total_cmp(&a.hits.rate));
        all
    }

    fn hits(&self, policy: PolicyKind, slots: usize) -> Hits {
        let known = |key| {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(&key).copied()
        };
        if let Some(hits) = known((policy, slots)) {
            return hits;
        }
        let hits = match self.replay {
            Some(replay) if slots > 0 => replay.hits(slots, policy),
            _ => uniform_hits(&self.model, slots, policy),
        };
        self.known
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((policy, slots), hits);
        hits
    }

    /// Replay these on all threads, as far as they are not known.
    fn replay_all(&self, jobs: &[(PolicyKind, usize)]) {
        let jobs: Vec<_> = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            jobs.iter()
                .filter(|job| !known.contains_key(job))
                .copied()
                .collect()
        };
        if self.replay.is_none() {
            return;
        }
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(&(policy, slots)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.hits(policy, slots);
            }
        };
        thread::scope(|scope| {
            for _ in 0..threads.min(jobs.len()) {
                scope.spawn(work);
            }
        });
    }
}

/// Sizes in a geometric series from the fewest slots that work to all experts, with one token's working set and its neighbours,
/// where policies change places. They depend on model and trace alone, never on a budget.
fn series(model: &Model<'_>, requests: Option<usize>) -> Vec<usize> {
    let least = model.min_expert_slots(1).max(1);
    let all = model.num_experts().max(least);
    let set = model.experts_per_token();
    let mut sizes = vec![least, all];
    sizes.extend([set.saturating_sub(1), set, set + 1]);
    if let Some(requests) = requests {
        let count = (SERIES_REQUESTS / requests.max(1)).clamp(FEWEST_SIZES, MOST_SIZES);
        let ratio = (all as f64 / least as f64).powf(1.0 / count as f64);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between two numbers of slots"
        )]
        sizes.extend((1..count).map(|n| (least as f64 * ratio.powf(n as f64)).round() as usize));
    }
    sizes.retain(|&size| (least..=all).contains(&size));
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}
