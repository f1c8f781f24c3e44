//! Facts about spending, over the release, slices of it, and a tiny model.

use super::{order::spread, *};
use k3_shared::{
    cache::PolicyKind,
    config::Config,
    formats::plan::Probe,
    ledger::MIN_RING_SLOTS,
    release,
    tiles::{DEFAULT_TILE_BYTES, TileClass, TileSpec, as_released, trunk_tiles},
};
use proptest::prelude::*;

mod splits;

const TINY: &str = include_str!("../../tests/tiny.config.json");

/// A model that owns its parts.
struct Owned {
    config: Config,
    num_layers: usize,
    tiles: Vec<TileSpec>,
}

impl Owned {
    fn new(config: Config, num_layers: usize, tile_bytes: u64) -> Self {
        let tiles = trunk_tiles(&config, num_layers, tile_bytes, &as_released(&config));
        Self {
            config,
            num_layers,
            tiles,
        }
    }

    fn release() -> Self {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        Self::new(config, 93, DEFAULT_TILE_BYTES)
    }

    fn tiny(num_layers: usize, tile_bytes: u64) -> Self {
        let config = Config::parse(TINY.as_bytes(), "c".as_ref()).unwrap();
        Self::new(config, num_layers, tile_bytes)
    }

    fn model(&self) -> Model<'_> {
        Model {
            config: &self.config,
            num_layers: self.num_layers,
            tiles: &self.tiles,
        }
    }

    fn spender(&self, asks: Asks) -> Spender<'_> {
        self.try_spender(asks).unwrap()
    }

    /// By bytes alone, all experts being equally likely.
    fn try_spender(&self, asks: Asks) -> Result<Spender<'_>, TooFewSlots> {
        let policies = vec![PolicyKind::LayerDistance];
        let curve = Curve::new(self.model(), None, policies, usize::MAX);
        self.spender_by(asks, curve, None)
    }

    fn spender_by<'a>(
        &'a self,
        asks: Asks,
        curve: Curve<'a>,
        probe: Option<Probe>,
    ) -> Result<Spender<'a>, TooFewSlots> {
        let model = self.model();
        let cost = CostModel::new(&model, probe, 4 << 20);
        // Kept for the rest of the test.
        Spender::new(
            model,
            asks,
            Box::leak(Box::new(curve)),
            Box::leak(Box::new(cost)),
        )
    }
}

fn asks() -> Asks {
    Asks {
        context: 4096,
        prefill_chunk: 64,
        threads: 8,
        queue_depth: 8,
        depth_by_hand: false,
        ring_bytes: 256 << 20,
        verify_experts: false,
        pin_bytes: None,
        expert_slots: None,
        pin_order: PinOrder::Sequence,
    }
}

fn spend(spender: &Spender<'_>, budget: u64) -> Option<Choice> {
    spender.spend(budget).map(|spent| spent.choice)
}

fn total(spender: &Spender<'_>, choice: &Choice) -> u64 {
    spender.total_of(choice).unwrap()
}

fn streamed(spender: &Spender<'_>, choice: &Choice) -> u64 {
    let (trunk, head) = spender.model.streamed_payload(&choice.pinned);
    trunk + head
}

/// The smallest budget is exact, and as good as it says.
fn assert_exact(spender: &Spender<'_>) {
    let least = spender.smallest().unwrap();
    let choice = spend(spender, least).unwrap();
    assert!(total(spender, &choice) <= least);
    assert_eq!(spend(spender, least - 1), None);
    let floor = spender.floor().unwrap();
    let choice = spend(spender, floor).unwrap();
    assert_eq!(choice.context, spender.asks.context);
    assert_eq!(total(spender, &choice), floor);
}

#[test]
fn the_release_at_2048_positions_fits_in_1300_megabytes() {
    let release = Owned::release();
    let spender = release.spender(Asks {
        context: 2048,
        ..asks()
    });
    let floor = spender.floor().unwrap();
    assert!((1_000_000_000..1_300_000_000).contains(&floor), "{floor}");
    assert_exact(&spender);
}

#[test]
fn twelve_budgets_of_the_release_fit_and_never_stream_more() {
    let release = Owned::release();
    for pin_order in [PinOrder::Sequence, PinOrder::Spread] {
        let spender = release.spender(Asks {
            pin_order,
            ..asks()
        });
        let mut last = u64::MAX;
        for giga in [
            1.2, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 96.0, 112.5, 128.0, 224.0,
        ] {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "small positive numbers"
            )]
            let budget = (giga * 1e9) as u64;
            let choice = spend(&spender, budget).unwrap();
            assert!(total(&spender, &choice) <= budget);
            // Nothing worth having is left over: no tile and no slot would still fit.
            let slack = budget - total(&spender, &choice);
            assert!(giga < 2.0 || slack < 18_000_000, "{giga}: {slack} left");
            let now = streamed(&spender, &choice);
            assert!(now <= last, "{giga} G streams {now} after {last}");
            last = now;
        }
        assert_eq!(last, 0);
    }
}

#[test]
fn expert_slots_come_only_when_the_trunk_is_resident() {
    let release = Owned::release();
    let spender = release.spender(asks());
    let resident = spender.all_resident().unwrap();
    let before = spend(&spender, resident - 1).unwrap();
    assert!(streamed(&spender, &before) > 0);
    assert_eq!(before.expert_slots, 24);
    let at = spend(&spender, resident).unwrap();
    assert_eq!((streamed(&spender, &at), at.expert_slots), (0, 24));
    assert_eq!(at.stream_buffer_bytes, 0);
    let more = spend(&spender, resident + 17_551_360).unwrap();
    assert_eq!(more.expert_slots, 25);
    let all = spend(&spender, u64::MAX).unwrap();
    assert_eq!(all.expert_slots, 82_432);
}

#[test]
fn tiles_are_pinned_from_the_first_layer_on_and_the_head_last() {
    let release = Owned::release();
    let spender = release.spender(asks());
    let last_tile = release.tiles.len() - 1;
    let ranges = spend(&spender, 32_000_000_000).unwrap().pinned.to_ranges();
    assert_eq!(ranges.len(), 2);
    assert_eq!(ranges[0][0], 0);
    assert_eq!(release.tiles[ranges[1][0]].class(), TileClass::Final);
    let nearly = spend(&spender, spender.all_resident().unwrap() - 1).unwrap();
    assert!(!nearly.pinned.contains(last_tile));
    assert!(nearly.pinned.contains(0));
}

#[test]
fn the_spread_order_pins_each_tile_once_and_evenly() {
    for count in [0, 1, 2, 3, 100, 7411] {
        let tiles: Vec<usize> = (10..10 + count).collect();
        let mut order = spread(&tiles);
        let half = order.len() / 2;
        let in_first_half = order[..half]
            .iter()
            .filter(|&&t| t < 10 + count / 2)
            .count();
        assert!(in_first_half.abs_diff(half / 2) <= 2, "{count}");
        order.sort_unstable();
        assert_eq!(order, tiles);
    }
}

#[test]
fn settings_are_lowered_before_the_context_and_the_context_before_refusing() {
    let release = Owned::release();
    let spender = release.spender(asks());
    let floor = spender.floor().unwrap();
    let tight = spend(&spender, floor).unwrap();
    assert_eq!(
        (tight.context, tight.prefill_chunk, tight.queue_depth),
        (4096, 1, 4)
    );
    let tighter = spend(&spender, floor - 1).unwrap();
    assert_eq!(tighter.context, 4095);
    let wide = spend(&spender, floor + 30_000_000).unwrap();
    assert!(wide.prefill_chunk > 1 && wide.prefill_chunk < 64);
    assert_eq!(wide.queue_depth, 4);
}

#[test]
fn a_split_by_hand_is_kept() {
    let release = Owned::release();
    let spender = release.spender(Asks {
        pin_bytes: Some(10_000_000_000),
        expert_slots: Some(100),
        ..asks()
    });
    let choice = spend(&spender, 64_000_000_000).unwrap();
    assert_eq!(choice.expert_slots, 100);
    let trunk = 108_811_877_376 + 2_348_810_240 - streamed(&spender, &choice);
    assert!((9_980_000_000..=10_000_000_000).contains(&trunk), "{trunk}");
    assert_exact(&spender);

    let pin_only = release.spender(Asks {
        pin_bytes: Some(0),
        ..asks()
    });
    let choice = spend(&pin_only, 32_000_000_000).unwrap();
    assert_eq!(choice.pinned.count(), 1);
    assert!(choice.expert_slots > 1700);

    let slots_only = release.spender(Asks {
        expert_slots: Some(1500),
        ..asks()
    });
    let choice = spend(&slots_only, 32_000_000_000).unwrap();
    assert_eq!(choice.expert_slots, 1500);
    assert!(choice.pinned.count() > 1);
}

#[test]
fn row_43_too_few_slots_by_hand_are_refused_and_few_lower_the_depth() {
    let release = Owned::release();
    let with = |slots| {
        release.try_spender(Asks {
            expert_slots: Some(slots),
            ..asks()
        })
    };
    assert!(with(19).is_err());
    assert_eq!(with(20).unwrap().asks().queue_depth, 4);
    assert_eq!(with(22).unwrap().asks().queue_depth, 6);
    assert_eq!(with(usize::MAX).unwrap().asks().expert_slots, Some(82_432));
}

#[test]
fn wishes_past_64_bits_do_not_fit_rather_than_wrap() {
    let release = Owned::release();
    let spender = release.spender(Asks {
        prefill_chunk: usize::MAX,
        ring_bytes: u64::MAX,
        ..asks()
    });
    assert!(spend(&spender, 32_000_000_000).is_some());
    assert_exact(&spender);
    let spender = release.spender(Asks {
        threads: usize::MAX,
        ..asks()
    });
    assert_eq!(spender.smallest(), None);
    assert_eq!(spend(&spender, u64::MAX), None);
}

#[test]
fn a_model_without_routed_experts_needs_no_slots() {
    let tiny = Owned::tiny(1, DEFAULT_TILE_BYTES);
    let spender = tiny.spender(asks());
    assert_exact(&spender);
    assert_eq!(spend(&spender, 1 << 40).unwrap().expert_slots, 0);
}

fn any_asks() -> impl Strategy<Value = Asks> {
    (
        (1usize..5000, 1usize..200, 1usize..20, 1usize..12),
        0u64..(1 << 24),
        any::<bool>(),
        prop::option::of(0u64..6_000_000),
        prop::option::of(16usize..200),
        any::<bool>(),
    )
        .prop_map(
            |(
                (context, prefill_chunk, threads, queue_depth),
                ring_bytes,
                verify_experts,
                pin_bytes,
                expert_slots,
                sequence,
            )| Asks {
                context,
                prefill_chunk,
                threads,
                queue_depth,
                depth_by_hand: false,
                ring_bytes,
                verify_experts,
                pin_bytes,
                expert_slots,
                pin_order: if sequence {
                    PinOrder::Sequence
                } else {
                    PinOrder::Spread
                },
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn every_plan_fits_works_and_more_memory_never_streams_more(
        asks in any_asks(),
        layers in 1usize..=13,
        tile_bytes in prop::sample::select(vec![1u64, 4096, 16_384, 65_536, DEFAULT_TILE_BYTES]),
        mut budgets in prop::collection::vec(0u64..80_000_000, 12),
    ) {
        let tiny = Owned::tiny(layers, tile_bytes);
        let Ok(spender) = tiny.try_spender(asks.clone()) else {
            return Ok(());
        };
        assert_exact(&spender);
        let least = spender.smallest().unwrap();
        budgets.sort_unstable();
        let mut last = u64::MAX;
        for budget in budgets {
            let Some(choice) = spend(&spender, budget) else {
                prop_assert!(budget < least);
                continue;
            };
            prop_assert!(budget >= least);
            prop_assert!(total(&spender, &choice) <= budget);
            prop_assert!(choice.context <= asks.context && choice.prefill_chunk <= asks.prefill_chunk);
            let (slot, streaming) = ledger::stream_slot_bytes(&spender.model, &choice.pinned);
            prop_assert!(choice.stream_buffer_bytes >= slot * MIN_RING_SLOTS.min(streaming) as u64);
            prop_assert!(slot == 0 || choice.stream_buffer_bytes % slot == 0);
            prop_assert!(choice.expert_slots >= spender.model.min_expert_slots(choice.queue_depth));
            prop_assert!(choice.expert_slots <= spender.model.num_experts());
            let now = streamed(&spender, &choice);
            prop_assert!(now <= last);
            last = now;
        }
    }
}
