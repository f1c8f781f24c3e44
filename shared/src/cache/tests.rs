//! Facts about the cache-group rule and about each policy.

use std::{collections::BTreeSet, sync::Arc};

use proptest::prelude::*;

use super::*;
use crate::ids::{ExpertId, ExpertIdx};

const LAYERS: usize = 3;
const EXPERTS: usize = 6;

type Group = (LayerIdx, Vec<Key>);

fn geometry() -> Geometry {
    Geometry::new(LAYERS, EXPERTS, 2).unwrap()
}

fn key(layer: u32, expert: u32) -> Key {
    let id = ExpertId {
        layer: LayerIdx(layer),
        expert: ExpertIdx(expert),
    };
    geometry().key(id).unwrap()
}

fn keys(layer: u32, experts: &[u32]) -> Vec<Key> {
    experts.iter().map(|&expert| key(layer, expert)).collect()
}

/// Groups of 1 to 6 distinct experts of one layer each, in any order of layers.
fn groups(largest: usize) -> impl Strategy<Value = Vec<Group>> {
    let experts = prop::collection::btree_set(0..u32::try_from(EXPERTS).unwrap(), 1..=largest);
    let group = (0..u32::try_from(LAYERS).unwrap(), experts).prop_map(|(layer, experts)| {
        let group: Vec<Key> = experts.into_iter().map(|e| key(layer, e)).collect();
        (LayerIdx(layer), group)
    });
    prop::collection::vec(group, 1..60)
}

fn future(groups: &[Group]) -> Arc<Future> {
    Arc::new(Future::new(
        geometry(),
        groups.iter().map(|(_, group)| &group[..]),
    ))
}

fn cache(kind: PolicyKind, slots: usize, groups: &[Group]) -> ExpertCache {
    ExpertCache::for_replay(kind, slots, geometry(), &future(groups)).unwrap()
}

fn replay(kind: PolicyKind, slots: usize, groups: &[Group]) -> (Counters, Vec<Vec<Decision>>) {
    let mut cache = cache(kind, slots, groups);
    let decisions = groups
        .iter()
        .map(|(layer, group)| cache.request_group(*layer, group))
        .collect();
    (cache.counters(), decisions)
}

/// Check one group's decisions against the rule, and bring `slots` (`[slots]`, who lies where) up to date.
fn check_rule(kind: PolicyKind, group: &[Key], decisions: &[Decision], slots: &mut [Option<Key>]) {
    let resident: BTreeSet<Key> = slots.iter().flatten().copied().collect();
    let hits = group.iter().filter(|k| resident.contains(k));
    let misses = group.iter().filter(|k| !resident.contains(k));
    let order: Vec<Key> = decisions.iter().map(|d| d.key).collect();
    assert!(
        order.iter().eq(hits.clone().chain(misses)),
        "{kind}: processing order"
    );
    for (i, decision) in decisions.iter().enumerate() {
        assert_eq!(decision.is_hit(), i < hits.clone().count(), "{kind}");
        let Some(slot) = decision.slot.map(|slot| slot as usize) else {
            assert_eq!(kind, PolicyKind::Belady);
            assert_eq!(decision.outcome, Outcome::Miss { evicted: None });
            continue;
        };
        match decision.outcome {
            Outcome::Hit => assert_eq!(slots[slot], Some(decision.key), "{kind}"),
            Outcome::Miss { evicted } => {
                assert_eq!(slots[slot], evicted, "{kind}: the slot is the victim's");
                let lowest_free = slots.iter().position(Option::is_none);
                if evicted.is_none() {
                    assert_eq!(Some(slot), lowest_free, "{kind}");
                }
                if let Some(victim) = evicted.filter(|victim| group.contains(victim)) {
                    check_member_goes(kind, victim, group, &order[..i], slots);
                }
                slots[slot] = Some(decision.key);
            }
        }
    }
    let held: Vec<Key> = slots.iter().flatten().copied().collect();
    assert_eq!(
        held.iter().collect::<BTreeSet<_>>().len(),
        held.len(),
        "{kind}: one slot a key"
    );
}

/// A member lost its slot to another: it was consumed, and no one else could go.
fn check_member_goes(
    kind: PolicyKind,
    victim: Key,
    group: &[Key],
    processed: &[Key],
    slots: &[Option<Key>],
) {
    assert!(
        processed.contains(&victim),
        "{kind}: a member must be consumed first"
    );
    // These three keep some residents, or choose among members, by design.
    if !matches!(
        kind,
        PolicyKind::Belady | PolicyKind::StaticPin | PolicyKind::PinLru
    ) {
        let others = slots.iter().flatten().filter(|key| !group.contains(key));
        assert_eq!(
            others.count(),
            0,
            "{kind}: a resident outside the group could go"
        );
        let earliest = processed.iter().find(|key| slots.contains(&Some(**key)));
        assert_eq!(earliest, Some(&victim), "{kind}");
    }
}

proptest! {
    #[test]
    fn every_policy_follows_the_group_rule(groups in groups(EXPERTS), slots in 1usize..20) {
        for kind in PolicyKind::ALL {
            let mut cache = cache(kind, slots, &groups);
            let mut held = vec![None; slots];
            for (layer, group) in &groups {
                let decisions = cache.request_group(*layer, group);
                check_rule(kind, group, &decisions, &mut held);
                let residents = held.iter().flatten().count();
                prop_assert_eq!(cache.residents(), residents);
                for k in 0..u32::try_from(geometry().keys()).unwrap() {
                    let slot = held.iter().position(|h| *h == Some(Key(k)));
                    prop_assert_eq!(cache.slot_of(Key(k)).map(|s| s as usize), slot);
                }
            }
        }
    }

    #[test]
    fn hits_and_misses_are_all_requests(groups in groups(EXPERTS), slots in 1usize..20) {
        let requests: usize = groups.iter().map(|(_, group)| group.len()).sum();
        let distinct: BTreeSet<Key> = groups.iter().flat_map(|(_, g)| g.iter().copied()).collect();
        for kind in PolicyKind::ALL {
            let (counters, decisions) = replay(kind, slots, &groups);
            let hits = decisions.iter().flatten().filter(|d| d.is_hit()).count();
            prop_assert_eq!(counters.requests, requests as u64);
            prop_assert_eq!(counters.hits, hits as u64);
            prop_assert_eq!(counters.hits + counters.misses(), counters.requests);
            prop_assert!(counters.misses() >= distinct.len() as u64, "each expert is read once");
            if slots >= geometry().keys() && kind != PolicyKind::PinLru {
                prop_assert_eq!(counters.misses(), distinct.len() as u64, "{} has room for all", kind);
            }
        }
    }

    #[test]
    fn decisions_are_reproducible(groups in groups(EXPERTS), slots in 1usize..20) {
        for kind in PolicyKind::ALL {
            prop_assert_eq!(replay(kind, slots, &groups), replay(kind, slots, &groups));
        }
    }

    #[test]
    fn no_policy_beats_belady(groups in groups(EXPERTS), slots in 1usize..20) {
        let (best, _) = replay(PolicyKind::Belady, slots, &groups);
        for kind in PolicyKind::ALL {
            let (counters, _) = replay(kind, slots, &groups);
            prop_assert!(counters.hits <= best.hits, "{}: {:?} > {:?}", kind, counters, best);
        }
    }

    #[test]
    fn belady_is_the_optimum_of_all_choices(groups in small_groups(), slots in 1usize..5) {
        let (counters, _) = replay(PolicyKind::Belady, slots, &groups);
        prop_assert_eq!(counters.hits, most_hits(&groups, slots));
    }

    #[test]
    fn lru_hits_never_fall_as_it_grows(groups in groups(3)) {
        let mut hits = 0;
        for slots in 3..20 {
            let (counters, _) = replay(PolicyKind::Lru, slots, &groups);
            prop_assert!(counters.hits >= hits, "{} slots: {} after {}", slots, counters.hits, hits);
            hits = counters.hits;
        }
    }

    #[test]
    fn lru_lfu_and_layer_distance_choose_as_their_definitions_say(
        groups in groups(EXPERTS),
        slots in 1usize..20,
    ) {
        for kind in [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::LayerDistance] {
            let (_, decisions) = replay(kind, slots, &groups);
            prop_assert_eq!(decisions, by_definition(kind, slots, &groups), "{}", kind);
        }
    }

    #[test]
    fn a_layer_quota_lets_no_idle_layer_hold_more_than_its_share(groups in groups(2)) {
        let slots = 6;
        let mut cache = cache(PolicyKind::LayerQuota, slots, &groups);
        let mut held: Vec<Option<Key>> = vec![None; slots];
        for (layer, group) in &groups {
            for d in cache.request_group(*layer, group) {
                if let Outcome::Miss { evicted: Some(victim) } = d.outcome {
                    let count = |l| held.iter().flatten().filter(|&&k| geometry().layer_of(k) == l).count();
                    let all = (0..3).map(|l| count(LayerIdx(l))).max().unwrap();
                    let from = geometry().layer_of(victim);
                    // Only members keep a layer from giving up its own.
                    prop_assert!(count(from) == all || all <= group.len());
                }
                held[d.slot.unwrap() as usize] = Some(d.key);
            }
        }
    }
}

/// At most five distinct experts of one layer.
fn small_groups() -> impl Strategy<Value = Vec<Group>> {
    let experts = prop::collection::btree_set(0u32..5, 1..=4);
    let group = experts.prop_map(|experts| {
        let experts: Vec<u32> = experts.into_iter().collect();
        (LayerIdx(0), keys(0, &experts))
    });
    prop::collection::vec(group, 1..12)
}

/// The most hits any choice of residents gives, by trying all: after a group, any `slots` of residents and members may stay.
fn most_hits(groups: &[Group], slots: usize) -> u64 {
    let mut best = [None; 32];
    best[0] = Some(0u64);
    for (_, group) in groups {
        let members = group.iter().fold(0usize, |set, key| set | 1 << key.0);
        let mut next = [None; 32];
        for (residents, hits) in best.iter().enumerate() {
            let Some(hits) = hits else { continue };
            let hits = hits + u64::from((residents & members).count_ones());
            for (kept, best) in next.iter_mut().enumerate() {
                if kept & !(residents | members) == 0 && kept.count_ones() as usize <= slots {
                    *best = (*best).max(Some(hits));
                }
            }
        }
        best = next;
    }
    best.into_iter().flatten().max().unwrap()
}

/// LRU, LFU and layer distance by scanning all residents for every victim.
fn by_definition(kind: PolicyKind, slots: usize, groups: &[Group]) -> Vec<Vec<Decision>> {
    let mut held: Vec<Option<Key>> = vec![None; slots];
    let mut count = vec![0u64; geometry().keys()];
    let mut processed = vec![0u64; geometry().keys()];
    let mut recency = vec![(0, 0); geometry().keys()];
    let mut clock = 0;
    let mut all = Vec::new();
    for (number, (layer, group)) in groups.iter().enumerate() {
        let (hits, misses): (Vec<Key>, Vec<Key>) =
            group.iter().partition(|k| held.contains(&Some(**k)));
        let mut decisions: Vec<Decision> = Vec::new();
        for (key, hit) in hits
            .iter()
            .map(|k| (*k, true))
            .chain(misses.iter().map(|k| (*k, false)))
        {
            clock += 1;
            count[key.get()] += 1;
            processed[key.get()] = clock;
            recency[key.get()] = (number, group.iter().position(|k| *k == key).unwrap());
            let slot = held.iter().position(|h| *h == Some(key));
            let free = slot.or_else(|| held.iter().position(Option::is_none));
            let slot = free.unwrap_or_else(|| {
                let candidates = held.iter().flatten().filter(|k| !group.contains(k));
                let victim = candidates.min_by_key(|k| {
                    let back = (layer.get() + LAYERS - geometry().layer_of(**k).get()) % LAYERS;
                    let distance = if back == 0 { LAYERS } else { back };
                    let worth = (count[k.get()], processed[k.get()]);
                    match kind {
                        PolicyKind::Lru => (recency[k.get()].0, recency[k.get()].1 as u64, 0),
                        PolicyKind::Lfu => (0, worth.0, worth.1),
                        _ => (distance, worth.0, worth.1),
                    }
                });
                let earliest = decisions
                    .iter()
                    .map(|d| d.key)
                    .find(|k| held.contains(&Some(*k)));
                let victim = victim.copied().or(earliest).unwrap();
                held.iter().position(|h| *h == Some(victim)).unwrap()
            });
            let evicted = held[slot].replace(key);
            decisions.push(Decision {
                key,
                slot: Some(u32::try_from(slot).unwrap()),
                outcome: if hit {
                    Outcome::Hit
                } else {
                    Outcome::Miss { evicted }
                },
            });
        }
        all.push(decisions);
    }
    all
}

fn hits_of(cache: &mut ExpertCache, layer: u32, experts: &[u32]) -> Vec<bool> {
    let decisions = cache.request_group(LayerIdx(layer), &keys(layer, experts));
    decisions.iter().map(Decision::is_hit).collect()
}

fn engine(kind: PolicyKind, slots: usize) -> ExpertCache {
    ExpertCache::new(kind, slots, geometry()).unwrap()
}

#[test]
fn row_43_hits_come_first_and_are_not_evicted_by_the_misses_of_their_group() {
    let mut cache = engine(PolicyKind::Lru, 3);
    cache.request_group(LayerIdx(0), &keys(0, &[4]));
    cache.request_group(LayerIdx(1), &keys(1, &[0, 1]));
    let decisions = cache.request_group(LayerIdx(0), &keys(0, &[0, 1, 4]));
    let miss = |evicted| Outcome::Miss {
        evicted: Some(evicted),
    };
    let want = [
        Decision {
            key: key(0, 4),
            slot: Some(0),
            outcome: Outcome::Hit,
        },
        Decision {
            key: key(0, 0),
            slot: Some(1),
            outcome: miss(key(1, 0)),
        },
        Decision {
            key: key(0, 1),
            slot: Some(2),
            outcome: miss(key(1, 1)),
        },
    ];
    assert_eq!(decisions, want);
}

#[test]
fn a_group_larger_than_the_cache_reuses_its_earliest_slots() {
    let mut cache = engine(PolicyKind::Lru, 2);
    let decisions = cache.request_group(LayerIdx(0), &keys(0, &[0, 1, 2, 3]));
    let slots: Vec<_> = decisions.iter().map(|d| d.slot.unwrap()).collect();
    assert_eq!(slots, [0, 1, 0, 1]);
    assert_eq!(
        decisions[2].outcome,
        Outcome::Miss {
            evicted: Some(key(0, 0))
        }
    );
}

#[test]
fn row_41_lru_hits_nothing_on_a_cycle_one_group_larger_than_itself_and_everything_on_one_that_fits()
{
    for (slots, want) in [(4, 0), (6, 12)] {
        let mut cache = engine(PolicyKind::Lru, slots);
        for _ in 0..3 {
            for layer in 0..3 {
                cache.request_group(LayerIdx(layer), &keys(layer, &[0, 1]));
            }
        }
        assert_eq!(cache.counters().hits, want);
    }
}

#[test]
fn lfu_counts_survive_eviction() {
    let mut cache = engine(PolicyKind::Lfu, 2);
    // 0 three times, then pushed out by the first two of a group of three, then back: it outlives 5, asked for twice.
    for experts in [&[0][..], &[0], &[0], &[1, 2, 3], &[0, 5], &[5], &[4]] {
        cache.request_group(LayerIdx(0), &keys(0, experts));
    }
    assert_eq!(cache.slot_of(key(0, 5)), None);
    assert!(cache.slot_of(key(0, 0)).is_some());
}

#[test]
fn sieve_takes_the_oldest_that_was_not_requested_again() {
    let mut cache = engine(PolicyKind::Sieve, 3);
    for expert in [0, 1, 2, 0, 3] {
        cache.request_group(LayerIdx(0), &keys(0, &[expert]));
    }
    assert_eq!(cache.slot_of(key(0, 1)), None, "0 was marked, so 1 goes");
    // The hand stands at 2 and does not go back to 0, whose mark is gone.
    cache.request_group(LayerIdx(0), &keys(0, &[4]));
    assert_eq!(cache.slot_of(key(0, 2)), None);
    assert!(cache.slot_of(key(0, 0)).is_some());
}

#[test]
fn s3_fifo_keeps_what_came_back_through_a_scan() {
    let mut cache = engine(PolicyKind::S3Fifo, 4);
    for _ in 0..3 {
        hits_of(&mut cache, 0, &[0, 1]);
    }
    for layer in [1, 2] {
        for expert in 0..6 {
            hits_of(&mut cache, layer, &[expert]);
        }
    }
    assert_eq!(hits_of(&mut cache, 0, &[0, 1]), [true, true]);
}

#[test]
fn s3_fifo_takes_a_key_it_remembers_into_the_main_queue() {
    let mut cache = engine(PolicyKind::S3Fifo, 3);
    for expert in [0, 1, 2, 3] {
        hits_of(&mut cache, 0, &[expert]);
    }
    assert_eq!(
        hits_of(&mut cache, 0, &[0]),
        [false],
        "0 left by the small queue"
    );
    for expert in 0..4 {
        hits_of(&mut cache, 1, &[expert]);
    }
    assert_eq!(hits_of(&mut cache, 0, &[0]), [true]);
}

#[test]
fn w_tinylfu_lets_a_scan_through_its_window_only() {
    let mut cache = engine(PolicyKind::WTinyLfu, 4);
    for _ in 0..4 {
        hits_of(&mut cache, 0, &[0, 1, 2]);
    }
    for expert in 0..6 {
        hits_of(&mut cache, 1, &[expert]);
    }
    assert_eq!(hits_of(&mut cache, 0, &[0, 1, 2]), [true; 3]);
}

#[test]
fn a_static_pin_stays_and_the_rest_is_first_in_first_out() {
    let pins = keys(2, &[0, 1]);
    let policy = StaticPin::with_list(&pins, 4, geometry());
    let mut cache = ExpertCache::with_policy(Box::new(policy), 4, geometry()).unwrap();
    hits_of(&mut cache, 2, &[0, 1]);
    for expert in 0..6 {
        hits_of(&mut cache, 0, &[expert]);
    }
    assert_eq!(hits_of(&mut cache, 0, &[4, 5]), [true, true]);
    assert_eq!(hits_of(&mut cache, 2, &[0, 1]), [true, true]);
    // Without a list the first comers stay.
    let mut cache = engine(PolicyKind::StaticPin, 6);
    for layer in 0..3 {
        hits_of(&mut cache, layer, &[0, 1, 2, 3, 4, 5]);
    }
    assert_eq!(
        hits_of(&mut cache, 0, &[0, 1, 2, 3]),
        [true, true, true, false]
    );
}

#[test]
fn reuse_odds_keeps_what_comes_back_where_lru_keeps_nothing() {
    // Each token asks each layer for expert 0 and one of the others; a token's six experts do not fit in five slots.
    for (kind, want) in [(PolicyKind::Lru, 0), (PolicyKind::ReuseOdds, 3 * 190)] {
        let mut cache = engine(kind, 5);
        for token in 0..200 {
            for layer in 0..3 {
                cache.request_group(LayerIdx(layer), &keys(layer, &[0, 1 + (token + layer) % 5]));
            }
        }
        assert!(
            cache.counters().hits >= want,
            "{kind}: {:?}",
            cache.counters()
        );
        assert!(kind != PolicyKind::Lru || cache.counters().hits == 0);
    }
}

#[test]
fn reuse_odds_follows_a_change_of_what_is_asked_for() {
    let mut cache = engine(PolicyKind::ReuseOdds, 5);
    let mut hits = Vec::new();
    for favourite in [0, 3] {
        for token in 0..150u32 {
            let before = cache.counters().hits;
            for layer in 0..3 {
                let other = [1, 2, 4, 5][(token + layer) as usize % 4];
                let mut group = [favourite, other];
                group.sort_unstable();
                cache.request_group(LayerIdx(layer), &keys(layer, &group));
            }
            hits.push(cache.counters().hits - before);
        }
    }
    assert!(hits[130..150].iter().sum::<u64>() >= 60, "{hits:?}");
    assert!(hits[280..].iter().sum::<u64>() >= 60, "{hits:?}");
}

#[test]
fn reuse_odds_takes_requests_one_by_one_as_it_takes_a_group() {
    let mut hits = Vec::new();
    for one_by_one in [false, true] {
        let mut cache = engine(PolicyKind::ReuseOdds, 5);
        for token in 0..200 {
            for layer in 0..3 {
                let group = keys(layer, &[0, 1 + (token + layer) % 5]);
                let size = if one_by_one { 1 } else { 2 };
                for part in group.chunks(size) {
                    cache.request_group(LayerIdx(layer), part);
                }
            }
        }
        hits.push(cache.counters().hits);
    }
    assert!(hits[0].abs_diff(hits[1]) < 30, "{hits:?}");
}

#[test]
fn belady_need_not_keep_what_it_reads() {
    let groups: Vec<Group> = [0, 1, 2, 0, 1]
        .into_iter()
        .map(|expert| (LayerIdx(0), keys(0, &[expert])))
        .collect();
    let (counters, decisions) = replay(PolicyKind::Belady, 2, &groups);
    assert_eq!(counters.hits, 2);
    assert_eq!(decisions[2][0].slot, None);
}

#[test]
fn popularity_ties_go_to_the_earliest_first_request() {
    let groups = [
        (LayerIdx(1), keys(1, &[3])),
        (LayerIdx(0), keys(0, &[0, 1])),
        (LayerIdx(0), keys(0, &[1])),
    ];
    assert_eq!(
        future(&groups).by_popularity(),
        [key(0, 1), key(1, 3), key(0, 0)]
    );
}

#[test]
fn names_read_back_and_policies_that_know_the_future_are_no_engine_policies() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
        let made = ExpertCache::new(kind, 4, geometry());
        assert_eq!(made.is_err(), kind.is_replay_only(), "{kind}");
    }
    let error = "mru".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(
        error.contains("\"mru\"") && error.contains("w-tinylfu"),
        "{error}"
    );
    let error = ExpertCache::new(PolicyKind::Belady, 4, geometry())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("k3-simcache") && !error.contains("pin-lru"),
        "{error}"
    );
}

#[test]
fn row_43_impossible_shapes_and_empty_caches_are_refused() {
    for (layers, experts, top_k) in [
        (0, 8, 2),
        (2, 0, 0),
        (2, 8, 0),
        (2, 8, 9),
        (1 << 20, 1 << 20, 2),
    ] {
        assert!(Geometry::new(layers, experts, top_k).is_err());
    }
    assert_eq!(
        ExpertCache::new(PolicyKind::Lru, 0, geometry()).unwrap_err(),
        CacheError::NoSlots
    );
    assert!(ExpertCache::new(PolicyKind::Lru, 1 << 40, geometry()).is_err());
}

#[test]
fn a_group_is_the_distinct_experts_in_file_order() {
    let geometry = Geometry::new(2, 12, 2).unwrap();
    let mut builder = GroupBuilder::new(geometry);
    let selected = [2, 10, 1, 10, 11].map(ExpertIdx);
    let group = builder.group(LayerIdx(1), selected).unwrap();
    assert_eq!(group, [13, 22, 23, 14].map(Key));
    assert!(builder.group(LayerIdx(1), [ExpertIdx(12)]).is_err());
    assert!(builder.group(LayerIdx(2), [ExpertIdx(0)]).is_err());
    assert_eq!(
        geometry.id(Key(22)),
        ExpertId {
            layer: LayerIdx(1),
            expert: ExpertIdx(10)
        }
    );
}
