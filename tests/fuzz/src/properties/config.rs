//! `config.json`: what is accepted is its own canonical form, and no size that follows from it overflows.

use k3_shared::{
    config::{Config, Mixer},
    ids::LayerIdx,
    tiles::{as_released, count_trunk_tiles},
};

use super::NAME;

/// The bytes of a `config.json`.
pub fn check(input: &[u8]) {
    let Ok(config) = Config::parse(input, NAME.as_ref()) else {
        return;
    };
    let canonical = config.to_canonical();
    let again = Config::parse(canonical.to_string().as_bytes(), NAME.as_ref())
        .expect("the canonical form is a config");
    assert_eq!(again, config);
    assert_eq!(again.to_canonical(), canonical);

    let layers = config.num_hidden_layers;
    assert_eq!(config.mixers.len(), layers);
    let of = |mixer| config.num_layers_with(mixer);
    assert_eq!(of(Mixer::Kda) + of(Mixer::Mla), layers);
    assert!(config.num_moe_layers() <= layers);
    assert!(config.moe.num_experts_per_token <= config.moe.num_experts);
    assert!(config.moe.expert_bytes() > 0);
    for kept in [1, layers / 2, layers] {
        let first = config.first_layers(kept);
        assert_eq!(first.mixers[..], config.mixers[..kept]);
        for layer in [0, kept.saturating_sub(1)] {
            let layer = LayerIdx(u32::try_from(layer).expect("the parser limits layers"));
            assert_eq!(first.mlp(layer), config.mlp(layer));
        }
    }
    let few = layers.min(3);
    assert!(count_trunk_tiles(&config, few, 1 << 20, &as_released(&config)) > few);
}
