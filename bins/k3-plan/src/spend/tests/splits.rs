//! The division between trunk and slots, against every division there is.

use k3_shared::{
    cache::{Geometry, GroupBuilder},
    formats::{
        plan::{ReadKind, SweepCell},
        trace::{Mode, TraceGroup},
    },
    ids::{ExpertIdx, LayerIdx},
};

use super::*;
use crate::{cost::Reads, predict::Replay};

/// Text with favourites: so many of a token's experts are those of the token before, the others are drawn by rank.
#[derive(Clone, Copy, Debug)]
struct Text {
    seed: u64,
    tokens: usize,
    repeated: f64,
    /// Popularity falls with this power of the rank.
    power: f64,
}

/// Numbers in `0..1`: splitmix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl Text {
    fn replay(self, owned: &Owned) -> Replay {
        let config = &owned.config;
        let (experts, top_k) = (config.moe.num_experts, config.moe.num_experts_per_token);
        let geometry = Geometry::new(config.num_hidden_layers, experts, top_k).unwrap();
        let mut random = Random(self.seed);
        let mut builder = GroupBuilder::new(geometry);
        let mut last: Vec<Vec<u32>> = vec![Vec::new(); owned.num_layers];
        let mut groups = Vec::new();
        for step in 0..self.tokens as u64 {
            for (layer, last) in last
                .iter_mut()
                .enumerate()
                .skip(config.first_k_dense_replace)
            {
                let mut chosen: Vec<u32> = Vec::new();
                for &expert in &*last {
                    if random.next() < self.repeated {
                        chosen.push(expert);
                    }
                }
                while chosen.len() < top_k {
                    // Each layer has favourites of its own.
                    let rank = whole(random.next().powf(self.power) * experts as f64);
                    let expert = number((rank * 7 + layer * 5) % experts);
                    if !chosen.contains(&expert) {
                        chosen.push(expert);
                    }
                }
                let layer = LayerIdx(number(layer));
                let keys = builder.group(layer, chosen.iter().map(|&e| ExpertIdx(e)));
                groups.push(TraceGroup {
                    step,
                    mode: Mode::Decode,
                    layer,
                    rows: 1,
                    keys: keys.unwrap().to_vec(),
                });
                *last = chosen;
            }
        }
        Replay::of_groups(geometry, groups)
    }
}

fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small and positive"
)]
fn whole(value: f64) -> usize {
    value as usize
}

fn online() -> Vec<PolicyKind> {
    let all = PolicyKind::ALL.into_iter();
    all.filter(|policy| !policy.is_replay_only()).collect()
}

/// The least cost of a budget over `sizes` x all prefixes of the pin order, each size under its best policy.
fn brute_force(spender: &Spender<'_>, hits: &[(usize, f64)], budget: u64) -> Option<Cost> {
    let settings = spender.asked();
    let at = spender.cost.at(spender.depth_in_flight(&settings));
    let expert = spender.model.config.moe.expert_bytes() as f64;
    let fewest = spender.slots(&settings);
    let mut best: Option<Cost> = None;
    // Ledgers are linear in slots and in what is pinned; each is added up for one prefix and slot more.
    let total = |pinned: usize, slots: usize| {
        spender
            .total_of(&spender.choice(&settings, pinned, slots))
            .unwrap()
    };
    let by_prefix: Vec<(u64, f64)> = (0..=spender.order.len())
        .map(|pinned| {
            let choice = spender.choice(&settings, pinned, fewest);
            let (trunk, head) = spender.model.streamed_payload(&choice.pinned);
            (total(pinned, fewest), (trunk + head) as f64)
        })
        .collect();
    let slot = total(0, fewest + 1) - total(0, fewest);
    for &(slots, missed) in hits.iter().filter(|&&(slots, _)| slots >= fewest) {
        for &(with_fewest, trunk_bytes) in &by_prefix {
            if with_fewest + slot * (slots - fewest) as u64 > budget {
                continue;
            }
            let cost = at.cost(Reads {
                trunk_bytes,
                expert_bytes: missed * expert,
            });
            if best.is_none_or(|best| cost.compare(&best).is_lt()) {
                best = Some(cost);
            }
        }
    }
    best
}

/// Misses a token at every size, under the best policy there.
fn misses(
    replay: &Replay,
    sizes: impl Iterator<Item = usize>,
    policies: &[PolicyKind],
) -> Vec<(usize, f64)> {
    let least = |slots| {
        let each = policies
            .iter()
            .map(|&policy| replay.hits(slots, policy).missed_per_token());
        each.fold(f64::INFINITY, f64::min)
    };
    sizes.map(|slots| (slots, least(slots))).collect()
}

fn probe(sequential: f64, random: f64, memory: Option<f64>) -> Probe {
    Probe {
        disk_bytes_per_second: Some(sequential),
        random_bytes_per_second: Some(random),
        memory_bytes_per_second: memory,
        ..Probe::default()
    }
}

/// Budgets from the smallest to more than everything.
fn budgets(spender: &Spender<'_>, count: u64) -> Vec<u64> {
    let least = spender.smallest().unwrap();
    let all = spender.all_resident().unwrap()
        + spender.model.expert_slot_bytes() * spender.model.num_experts() as u64;
    let step = (all - least) / (count - 2);
    (0..count).map(|n| least + n * step).collect()
}

/// Every tile is pinned or streams, and the ledger holds the pinned ones.
fn assert_placed_once(spender: &Spender<'_>, choice: &Choice) {
    let model = &spender.model;
    let ranges = choice.pinned.to_ranges();
    let pinned: usize = ranges.iter().map(|[first, last]| last - first + 1).sum();
    let (_, streaming) = ledger::stream_slot_bytes(model, &choice.pinned);
    assert_eq!(pinned + streaming, model.tiles.len());
    let stored = |tiles: &mut dyn Iterator<Item = usize>| -> u64 {
        tiles.map(|tile| model.tiles[tile].stored_bytes()).sum()
    };
    let lines = ledger::lines(model, choice).unwrap();
    let held: u64 = lines
        .iter()
        .filter(|line| line.name == "pinned_trunk" || line.name == "output_head")
        .map(|line| line.bytes)
        .sum();
    let in_ranges = stored(&mut ranges.iter().flat_map(|[first, last]| *first..=*last));
    assert_eq!(held, in_ranges);
}

fn any_text() -> impl Strategy<Value = Text> {
    (any::<u64>(), 4usize..40, 0.0..0.9, 1.0..6.0).prop_map(|(seed, tokens, repeated, power)| {
        Text {
            seed,
            tokens,
            repeated,
            power,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn every_choice_is_within_one_percent_of_the_best_of_all_splits(
        text in any_text(),
        sequential in 1e6..1e9,
        ratio in prop::sample::select(vec![0.05, 0.3, 0.8, 1.0, 1.5]),
        memory in prop::option::of(1e7..1e11),
        layers in prop::sample::select(vec![5usize, 13]),
    ) {
        let tiny = Owned::tiny(layers, 16_384);
        let replay = text.replay(&tiny);
        let curve = Curve::new(tiny.model(), Some(&replay), online(), usize::MAX);
        let machine = probe(sequential, sequential * ratio, memory);
        let small = Asks { ring_bytes: 1 << 18, prefill_chunk: 1, queue_depth: 2, ..asks() };
        let spender = tiny.spender_by(small, curve, Some(machine)).unwrap();
        let model = tiny.model();
        let all = misses(&replay, 1..=model.num_experts(), &online());
        let floor = spender.floor().unwrap();
        let mut last: Option<Cost> = None;
        for budget in budgets(&spender, 40) {
            let spent = spender.spend(budget).unwrap();
            prop_assert!(total(&spender, &spent.choice) <= budget);
            assert_placed_once(&spender, &spent.choice);
            let chosen = spent.cost.seconds.unwrap();
            if spent.choice.stream_buffer_bytes == 0 || budget > floor + (1 << 19) {
                let best = brute_force(&spender, &all, budget).unwrap().seconds.unwrap();
                prop_assert!(chosen <= best * 1.01, "{budget}: {chosen} s, of all splits {best} s");
                prop_assert!(chosen >= best * (1.0 - 1e-9), "{budget}: {chosen} s, below {best} s");
            }
            if let Some(last) = last {
                let last = last.seconds.unwrap();
                prop_assert!(chosen <= last * (1.0 + 1e-12), "{budget}: {chosen} s after {last} s");
            }
            last = Some(spent.cost);
        }
    }

    #[test]
    fn with_one_speed_or_none_bytes_never_rise_either(
        text in any_text(),
        speed in prop::option::of(1e6..1e9),
        with_trace in any::<bool>(),
        policy in prop::sample::select(vec![PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::LayerDistance]),
    ) {
        let tiny = Owned::tiny(13, 16_384);
        let replay = text.replay(&tiny);
        let replay = with_trace.then_some(&replay);
        let curve = Curve::new(tiny.model(), replay, vec![policy], usize::MAX);
        let machine = speed.map(|speed| probe(speed, speed, None));
        let spender = tiny.spender_by(asks(), curve, machine).unwrap();
        let mut last = Cost { seconds: None, bytes: f64::INFINITY };
        for budget in budgets(&spender, 60) {
            let cost = spender.spend(budget).unwrap().cost;
            prop_assert!(cost.bytes <= last.bytes, "{budget}: {} after {}", cost.bytes, last.bytes);
            if let (Some(now), Some(before)) = (cost.seconds, last.seconds) {
                prop_assert!(now <= before, "{budget}: {now} s after {before} s");
            }
            last = cost;
        }
    }
}

#[test]
fn forty_budgets_of_the_release_are_within_one_percent_of_the_best() {
    let release = Owned::release();
    let text = Text {
        seed: 3,
        tokens: 24,
        repeated: 0.35,
        power: 3.0,
    };
    let replay = text.replay(&release);
    let policies = vec![PolicyKind::Lru, PolicyKind::LayerDistance];
    let model = release.model();
    let sizes = (0..120).map(|n| whole(20.0 * 1.0718_f64.powi(n)));
    let all = misses(&replay, sizes.chain([24, 1472]), &policies);
    for (sequential, random) in [(3e9, 3e9), (3e9, 0.9e9)] {
        let curve = Curve::new(model, Some(&replay), policies.clone(), usize::MAX);
        let machine = probe(sequential, random, Some(40e9));
        let spender = release.spender_by(asks(), curve, Some(machine)).unwrap();
        let from = spender.floor().unwrap() + 500_000_000;
        for n in 0..40 {
            let budget = from + n * 6_000_000_000;
            let chosen = spender.spend(budget).unwrap().cost.seconds.unwrap();
            let best = brute_force_fast(&spender, &all, budget);
            assert!(
                chosen <= best * 1.01,
                "{budget}: {chosen} s, of all splits {best} s"
            );
        }
    }
}

/// As [`brute_force`], for the release: its 14,000 prefixes are not added up anew by the ledger but taken from the sums, which
/// other tests compare with it.
fn brute_force_fast(spender: &Spender<'_>, hits: &[(usize, f64)], budget: u64) -> f64 {
    let settings = spender.asked();
    let at = spender.cost.at(spender.depth_in_flight(&settings));
    let expert = spender.model.config.moe.expert_bytes() as f64;
    let fewest = spender.slots(&settings);
    let base = spender.base(&settings).unwrap();
    let mut best = f64::INFINITY;
    for &(slots, missed) in hits.iter().filter(|&&(slots, _)| slots >= fewest) {
        let with_slots = base + spender.model.expert_slot_bytes() * (slots - fewest) as u64;
        for cut in &spender.sums {
            if with_slots + cut.pinned_bytes + cut.ring_bytes(settings.ring_bytes) <= budget {
                let reads = Reads {
                    trunk_bytes: cut.payload as f64,
                    expert_bytes: missed * expert,
                };
                best = best.min(at.cost(reads).seconds.unwrap());
            }
        }
    }
    best
}

#[test]
fn slots_come_before_the_trunk_where_experts_are_read_slowly_and_hit() {
    let tiny = Owned::tiny(13, 16_384);
    // The same experts for every token: a slot saves a read of its expert each time.
    let text = Text {
        seed: 1,
        tokens: 50,
        repeated: 1.0,
        power: 1.0,
    };
    let replay = text.replay(&tiny);
    let small = Asks {
        ring_bytes: 1 << 18,
        prefill_chunk: 1,
        queue_depth: 2,
        ..asks()
    };
    let of_ratio = |ratio: f64| {
        let curve = Curve::new(
            tiny.model(),
            Some(&replay),
            vec![PolicyKind::Lru],
            usize::MAX,
        );
        let machine = probe(1e9, 1e9 * ratio, None);
        let spender = tiny
            .spender_by(small.clone(), curve, Some(machine))
            .unwrap();
        let budget = spender.floor().unwrap() + 2_000_000;
        spender.spend(budget).unwrap().choice.expert_slots
    };
    assert_eq!(of_ratio(1.0), 6, "the fewest that work: trunk first");
    assert!(of_ratio(0.1) >= 48, "one token's experts and more");
}

#[test]
fn a_depth_is_used_only_as_far_as_it_costs_nothing() {
    let tiny = Owned::tiny(13, 16_384);
    let cell = |kind, depth, bytes_per_second| SweepCell {
        kind,
        read_bytes: 4 << 20,
        depth,
        bytes_per_second,
    };
    let speeds = [(2, 50.0), (4, 80.0), (8, 100.0), (16, 70.0)];
    let machine = |chosen| Probe {
        sweep: speeds
            .iter()
            .flat_map(|&(depth, speed)| {
                [ReadKind::Sequential, ReadKind::Random].map(|kind| cell(kind, depth, speed))
            })
            .collect(),
        queue_depth: Some(chosen),
        ..Probe::default()
    };
    let depth = |asked, depth_by_hand| {
        let curve = Curve::new(tiny.model(), None, vec![PolicyKind::Lru], usize::MAX);
        let asks = Asks {
            queue_depth: asked,
            depth_by_hand,
            ..asks()
        };
        let spender = tiny.spender_by(asks, curve, Some(machine(8))).unwrap();
        let choice = spender.spend(1 << 30).unwrap().choice;
        choice.queue_depth
    };
    assert_eq!(depth(8, false), 8);
    assert_eq!(depth(16, false), 8, "sixteen are slower");
    assert_eq!(depth(16, true), 16, "but were asked for");
}
