//! The command line.

use std::{fmt, num::NonZeroUsize, path::PathBuf, str::FromStr};

use clap::Parser;
use k3_shared::{direct::Mode, ids::LayerIdx, size::Bytes};

/// Copy the always-used weights of a checkpoint into a trunk, in the order they are read.
///
/// Writes `trunk.bin` and `trunk.json` into the trunk folder: the tensors of every layer except the routed experts, the final vectors
/// and the output head, cut into 4 KiB-aligned tiles with a SHA-256 each. Zero pages stay holes.
#[derive(Clone, Debug, Parser)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
#[command(name = "k3-pack", version)]
pub struct Cli {
    /// The checkpoint: config.json, the index and the shards.
    pub model_dir: PathBuf,
    /// Where the trunk goes; made if it does not exist.
    pub trunk_dir: PathBuf,
    /// Replace the trunk that is there.
    #[arg(long, conflicts_with_all = ["verify", "repair"])]
    pub force: bool,
    /// Check every tile of an existing trunk against its digest; exit 1 if one is bad.
    #[arg(long, conflicts_with = "repair")]
    pub verify: bool,
    /// Rewrite one layer's tiles of an existing trunk from the checkpoint, or those of the final vectors and the head.
    #[arg(long, value_name = "LAYER|output")]
    pub repair: Option<RepairTarget>,
    /// Pack only the first N layers, the final vectors and the head.
    #[arg(long, value_name = "N", conflicts_with_all = ["verify", "repair"])]
    pub layers: Option<NonZeroUsize>,
    /// More folders, on other disks, to spread the tiles over; each gets as many as its disk is fast.
    #[arg(long, value_name = "DIR2,DIR3", value_delimiter = ',', conflicts_with_all = ["verify", "repair"])]
    pub stripe: Vec<PathBuf>,
    /// Relative speeds of the disks, the trunk folder's first [default: measured with a file of up to 268 MB on each].
    #[arg(long, value_name = "W1,W2,W3", value_delimiter = ',', requires = "stripe", value_parser = clap::value_parser!(u32).range(1..))]
    pub stripe_weights: Vec<u32>,
    /// Cut tiles to at most this size; a row, or a head's rows, is never cut.
    #[arg(long, value_name = "SIZE", default_value = "8Mi", conflicts_with_all = ["verify", "repair"], value_parser = tile_bytes)]
    pub tile_bytes: Bytes,
    /// Workers that read, hash and write [default: twice the cores, at most 8].
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Read and write through the page cache instead of past it.
    #[arg(long)]
    pub buffered: bool,
    /// Errors only.
    #[arg(short, long)]
    pub quiet: bool,
    /// More on stderr; twice for all.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

impl Cli {
    pub(crate) fn mode(&self) -> Mode {
        if self.buffered {
            Mode::Buffered
        } else {
            Mode::Auto
        }
    }
}

fn tile_bytes(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse().map_err(|e| format!("{e}"))?;
    if (4096..=1 << 30).contains(&size.0) {
        Ok(size)
    } else {
        Err(format!("{text} is not between 4Ki and 1Gi"))
    }
}

/// Whose tiles `--repair` rewrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RepairTarget {
    /// A layer, counted from zero.
    Layer(LayerIdx),
    /// The final vectors and the output head.
    Output,
}

impl RepairTarget {
    pub(crate) fn of(layer: Option<LayerIdx>) -> Self {
        layer.map_or(Self::Output, Self::Layer)
    }
}

impl FromStr for RepairTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(layer) => Ok(Self::Layer(LayerIdx(layer))),
            Err(_) if text == "output" => Ok(Self::Output),
            Err(_) => Err("give a layer, counted from 0, or `output`".into()),
        }
    }
}

impl fmt::Display for RepairTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layer(layer) => layer.fmt(f),
            Self::Output => f.write_str("output"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_shared::tiles::DEFAULT_TILE_BYTES;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_that_would_be_ignored_are_refused() {
        for flags in [
            &["--verify", "--force"][..],
            &["--verify", "--repair", "1"],
            &["--verify", "--layers", "1"],
            &["--repair", "1", "--stripe", "x"],
            &["--repair", "1", "--tile-bytes", "4Mi"],
            &["--stripe-weights", "1,2"],
            &["--repair", "head"],
            &["--tile-bytes", "4095"],
            &["--layers", "0"],
            &["--stripe", "x", "--stripe-weights", "1,0"],
        ] {
            let line = ["k3-pack", "model", "trunk"].iter().chain(flags);
            assert!(Cli::try_parse_from(line).is_err(), "{flags:?}");
        }
        let cli = Cli::try_parse_from(["k3-pack", "m", "t", "--stripe", "a,b"]).unwrap();
        assert_eq!(cli.stripe, [PathBuf::from("a"), PathBuf::from("b")]);
        assert_eq!(cli.tile_bytes, Bytes(DEFAULT_TILE_BYTES));
    }
}
