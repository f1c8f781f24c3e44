//! What is read and counted: rows 40 to 42.

use k3_run::{engine::EngineOptions, report::Spent};
use k3_shared::{
    formats::{plan::Plan, trunk::Trunk},
    names::TensorRole,
    tiles::TileClass,
};

use crate::{
    common::{Ask, Fixture, TINY_PROMPT, try_run},
    patch::Place,
};

/// Bytes of one expert of the tiny checkpoint; three or four blocks of 4,096 cover it.
const EXPERT: u64 = 9_792;

/// The decode steps of a run.
fn decode(plan: &Plan) -> Vec<Spent> {
    let ask = Ask::new(&TINY_PROMPT, 6);
    let (_, generated) = try_run(plan, &EngineOptions::default(), &ask);
    assert!(generated.error.is_none(), "{:?}", generated.error);
    let steps: Vec<Spent> = generated
        .steps
        .iter()
        .skip(1)
        .map(|step| step.spent)
        .collect();
    assert_eq!(steps.len(), 5);
    steps
}

#[test]
fn row_40_the_embedding_is_not_resident() {
    let fixture = Fixture::tiny("16Ki");
    // All else is: trunk and head pinned, a slot for every expert.
    let plan = fixture.plan(&["--budget", "1G", "--expert-slots", "144"]);
    assert!(plan.streamed_trunk_bytes == 0 && plan.head_pinned);
    assert!(plan.ledger.iter().all(|line| !line.name.contains("embed")));
    let table = Place::tensor(&fixture, TensorRole::Embedding);
    assert_eq!(table.bytes, 576 * 320);
    for step in decode(&plan) {
        assert_eq!((step.trunk_bytes_read, step.head_bytes_read), (0, 0));
        // One row of 320 bytes lies in one block, or crosses into a second; experts come in three or four.
        let misses = step.expert_bytes_read / EXPERT;
        let range = misses * 12_288 + 4096..=misses * 16_384 + 8192;
        assert!(
            range.contains(&step.bytes_requested),
            "{} for {misses} misses",
            step.bytes_requested
        );
    }
}

#[test]
fn row_41_pinned_tiles_save_exactly_their_bytes() {
    let fixture = Fixture::tiny("8Ki");
    let trunk = Trunk::open(&fixture.trunk).unwrap();
    let all: u64 = trunk
        .specs
        .iter()
        .filter(|s| s.class() == TileClass::Trunk)
        .map(k3_shared::tiles::TileSpec::raw_bytes)
        .sum();
    let mut seen = Vec::new();
    for pin in ["0", "400K", "1200K", "2500K", "8M"] {
        let plan = fixture.plan(&["--budget", "200M", "--pin", pin, "--stream-buffers", "40Ki"]);
        let pinned: u64 = plan
            .pinned_tiles
            .iter()
            .flat_map(|&[first, last]| first..=last)
            .map(|tile| &trunk.specs[tile])
            .filter(|spec| spec.class() == TileClass::Trunk)
            .map(k3_shared::tiles::TileSpec::raw_bytes)
            .sum();
        for step in decode(&plan) {
            assert_eq!(step.trunk_bytes_read, all - pinned, "pin {pin}");
        }
        seen.push(pinned);
    }
    assert!(
        seen.is_sorted_by(|a, b| a < b) && seen[0] == 0 && seen[4] == all,
        "{seen:?}"
    );
}

#[test]
fn row_42_hits_are_requests_that_read_nothing() {
    let fixture = Fixture::tiny("16Ki");
    let mut hits = Vec::new();
    for (policy, slots) in [
        ("lru", "8"),
        ("lru", "60"),
        ("layer-distance", "30"),
        ("lfu", "30"),
        ("lru", "144"),
    ] {
        let flags = [
            "--budget",
            "200M",
            "--pin",
            "20M",
            "--cache-policy",
            policy,
            "--expert-slots",
            slots,
        ];
        let steps = decode(&fixture.plan(&flags));
        for step in &steps {
            assert_eq!(step.expert_requests, 12 * 4);
            let misses = step.expert_requests - step.expert_hits;
            assert_eq!(
                step.expert_bytes_read,
                misses * EXPERT,
                "{policy}, {slots} slots"
            );
            // Each miss asked the disk for the blocks around its bytes, and one row of the embedding for one or two more:
            // reads ahead of the arithmetic never turn into hits.
            assert_eq!((step.trunk_bytes_read, step.head_bytes_read), (0, 0));
            let range = misses * 12_288 + 4096..=misses * 16_384 + 8192;
            assert!(
                range.contains(&step.bytes_requested),
                "{} for {misses} misses",
                step.bytes_requested
            );
        }
        hits.push(steps.iter().map(|step| step.expert_hits).sum::<u64>());
    }
    assert_eq!(hits[0], 0, "below one token's working set LRU hits nothing");
    assert!(hits[1] < hits[4] && hits[4] > 0, "{hits:?}");
}
