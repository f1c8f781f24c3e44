//! A sequence on disk: everything a later run needs to go on as if it had never stopped.
//!
//! A [framed](k3_shared::formats::codec) [`Header`] under the tag [`TAG`], then for each layer its mixer's state as little-endian
//! f32: of KDA the matrix `[heads, key rows, value columns]` and the histories of queries, keys and values, oldest first; of MLA
//! the latents of every position, `[positions, latent and shared slice]`. The SHA-256 of those values ends the file. No layout of
//! a kernel or budget is in it, so that any plan of the same checkpoint can go on.
//!
//! State is written from the sequence itself, never copied in memory, and [in turn](keeper::Keeper) into two files, so that
//! whatever happens while one is written the other is whole.

mod keeper;
mod read;
mod session;
#[cfg(test)]
mod tests;
mod write;

use std::{io, path::PathBuf};

use k3_shared::{
    config::{Config, Mixer},
    formats::codec::CodecError,
};
use serde::{Deserialize, Serialize};

pub use keeper::{Interval, Keeper, previous};
pub use read::Reader;
pub(crate) use session::{Resumed, Saver, sampler};
pub use write::write;

/// First bytes of a saved state: name and version.
pub const TAG: [u8; 8] = *b"K3STATE\x01";

/// What follows the values.
const DIGEST_BYTES: u64 = 32;

/// What kind of file, in errors.
const WHAT: &str = "a saved state";

/// Everything but the layers' values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// What the state can be continued with.
    pub origin: Origin,
    /// All tokens, computed or not.
    pub ids: Vec<u32>,
    /// How many of them were generated after the last prompt: they end the list.
    pub generated: u64,
    /// How many of the tokens are computed; at least one is not.
    pub position: u64,
    /// How tokens were chosen.
    pub sampling: Sampling,
}

/// What a state was computed with: all that changes a bit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// Identity of the checkpoint.
    pub identity: String,
    /// Layers run.
    pub num_layers: u64,
    /// Epsilon of MLA's low-rank norms.
    pub mla_norm_eps: f64,
    /// Whether a scale byte of 255 counted as factor 0.
    pub allow_nan_scales: bool,
}

/// How tokens are chosen, and where the generator stands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 takes the likeliest.
    pub temperature: f64,
    /// The probability kept.
    pub top_p: f64,
    /// The generator's state.
    pub generator: u64,
}

/// Why a state cannot be saved or continued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SavedError {
    /// It cannot be read.
    #[error("{}: byte {offset}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// It is no state, or a damaged one.
    #[error("{}: {source}{}", path.display(), older(path))]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: CodecError,
    },
    /// Its parts do not agree with each other.
    #[error("{}: byte {offset}: {problem}{}", path.display(), older(path))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong there.
        problem: String,
    },
    /// It was made for something else.
    #[error("{}: {field}: the state was made with {found}, this run has {wanted} ({remedy})", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// The state's value.
        found: String,
        /// This run's.
        wanted: String,
        /// What to do.
        remedy: String,
    },
    /// It cannot be written.
    #[error("{}: cannot be saved: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// It is there already.
    #[error("{}: is there already; go on from it with --resume, or replace it with --force", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The disk cannot hold it.
    #[error("{}: needs {needed} for this state and the one before it, and {free} are free; free some, or give a --state on another disk", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// What two states take.
        needed: k3_shared::size::Bytes,
        /// What there is.
        free: k3_shared::size::Bytes,
    },
    /// Another run saves there.
    #[error("{}: another run saves its state there; give another --state", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
}

impl SavedError {
    /// Whether a state is there, but is not what can be gone on from.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Header { .. } | Self::Damaged { .. } | Self::Foreign { .. }
        )
    }
}

/// Bytes a state of `positions` positions takes at most.
pub fn size_of_state(config: &Config, num_layers: usize, positions: usize) -> u64 {
    // Frame, origin and sampling take far less than this.
    const FIXED: u64 = 4096;
    let kda = &config.kda;
    let matrix = kda.num_heads * kda.head_dim * kda.head_dim;
    let history = 3 * (kda.short_conv_kernel_size - 1) * kda.projection_size();
    let of = |mixer: &Mixer| match mixer {
        Mixer::Kda => matrix + history,
        Mixer::Mla => positions * config.mla.cache_width(),
    };
    let values: usize = config.mixers.iter().take(num_layers).map(of).sum();
    FIXED + 4 * (values + positions + 1) as u64 + DIGEST_BYTES
}

/// Which file to try instead.
fn older(path: &std::path::Path) -> String {
    let previous = previous(path);
    if previous.exists() {
        format!(
            " (the state saved before it: --resume {})",
            k3_shared::term::shell(&previous)
        )
    } else {
        String::new()
    }
}
