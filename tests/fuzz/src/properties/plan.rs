//! Plans: what is read writes back as itself, and what fits a model keeps to its budget.

use std::sync::OnceLock;

use k3_shared::{
    config::Config,
    formats::plan::Plan,
    ledger::{self, Model},
    tiles::{TileSpec, as_released, trunk_tiles},
};

use super::{NAME, tiny_config};

/// The size the tiny trunk is cut to here.
pub const TILE_BYTES: u64 = 64 << 10;

/// The bytes of a plan, checked against the tiny model.
pub fn check(input: &[u8]) {
    static TINY: OnceLock<(Config, Vec<TileSpec>)> = OnceLock::new();
    let (config, tiles) = TINY.get_or_init(|| {
        let config = tiny_config();
        let layers = config.num_hidden_layers;
        let tiles = trunk_tiles(&config, layers, TILE_BYTES, &as_released(&config));
        (config, tiles)
    });
    let Ok(plan) = Plan::parse(input) else {
        return;
    };
    let text = serde_json::to_vec(&plan).expect("a plan is JSON");
    assert_eq!(
        Plan::parse(&text).expect("what was parsed reads back"),
        plan
    );
    let model = Model {
        config,
        num_layers: config.num_hidden_layers,
        tiles,
    };
    match ledger::check(&plan, &model, &plan.identity) {
        Err(problems) => assert!(!problems.is_empty(), "{NAME}: refused without a reason"),
        Ok(checked) => {
            assert!(checked.total_bytes <= plan.budget_bytes);
            let lines: u128 = checked.ledger.iter().map(|l| u128::from(l.bytes)).sum();
            assert_eq!(lines, u128::from(checked.total_bytes));
            assert!(plan.expert_slots <= model.num_experts());
            let ring = checked.stream_slots as u64 * checked.stream_slot_bytes;
            assert!(ring <= plan.stream_buffer_bytes);
        }
    }
}
