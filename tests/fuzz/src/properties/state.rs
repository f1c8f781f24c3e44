//! Saved states: what is read into a sequence is written again byte for byte.

use std::sync::OnceLock;

use k3_run::{
    model::SequenceState,
    sampler::Sampler,
    saved::{Reader, write},
};
use k3_shared::config::Config;

use super::{NAME, seal::sealed, tiny_config};

/// Positions there is room for.
pub const CONTEXT: usize = 6;

/// The config of the states: one layer of each mixer, as narrow as can be.
pub fn config() -> Config {
    let mut config = tiny_config().first_layers(4);
    config.mixers.drain(..2);
    config.num_hidden_layers = 2;
    config.kda.num_heads = 2;
    config.kda.head_dim = 4;
    config.mla.kv_lora_rank = 5;
    config.mla.qk_rope_head_dim = 2;
    config
}

/// A state after one byte, which if odd asks for its digests to be made right.
pub fn check(input: &[u8]) {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    let config = CONFIG.get_or_init(config);
    let Some(bytes) = sealed(input, Some(0)) else {
        return;
    };
    let Ok(reader) = Reader::new(&bytes[..], bytes.len() as u64, NAME.as_ref()) else {
        return;
    };
    let header = &reader.header;
    assert!(header.position < header.ids.len() as u64);
    assert!(header.generated <= header.ids.len() as u64);
    if let Ok(mut sampler) = Sampler::new(header.sampling.temperature, header.sampling.top_p, 0)
        && sampler.set_state(header.sampling.generator).is_ok()
    {
        assert_eq!(sampler.state(), header.sampling.generator);
    }
    let mut state = SequenceState::new(config, config.num_hidden_layers, CONTEXT);
    let Ok(header) = reader.read_into(&mut state) else {
        return;
    };
    assert!(state.position <= CONTEXT);
    let mut again = Vec::new();
    let written = write(&mut again, &header, &state).expect("a vector takes all");
    assert_eq!(written, bytes.len() as u64);
    assert!(again == bytes, "written again, it differs");
}
