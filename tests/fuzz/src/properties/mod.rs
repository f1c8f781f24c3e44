//! What holds of any bytes whatever that a parser of k3 is given: an error or a value, and of the value what each module says.
//!
//! Every check takes the bytes and panics where its property fails. [`TARGETS`] lists them by name.

pub mod config;
pub mod plan;
pub mod safetensors;
mod seal;
pub mod state;
pub mod tokenizer_files;
pub mod tokenizer_text;
pub mod trace;
pub mod trunk;

use k3_shared::config::Config;

/// A check by the name of its target, and its corpus.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 8] = [
    ("safetensors", safetensors::check),
    ("config", config::check),
    ("trunk", trunk::check),
    ("plan", plan::check),
    ("trace", trace::check),
    ("state", state::check),
    ("tokenizer_files", tokenizer_files::check),
    ("tokenizer_text", tokenizer_text::check),
];

/// The name of the input in errors.
const NAME: &str = "input";

/// The config of the tiny checkpoint.
#[expect(clippy::expect_used, reason = "a committed file that the parser takes")]
fn tiny_config() -> Config {
    let text = include_bytes!("../../../../bins/k3-plan/tests/tiny.config.json");
    Config::parse(text, NAME.as_ref()).expect("the tiny config is one")
}
