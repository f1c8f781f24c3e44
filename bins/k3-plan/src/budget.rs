//! Budgets: sizes, presets, and what a host can give.

use std::{fmt, str::FromStr};

use k3_shared::{host::Host, size::Bytes};

/// What `auto` leaves to the system at the least.
const LEAST_HEADROOM: u64 = 512_000_000;
/// What `auto` leaves to the system of a large machine: one part in this many.
const HEADROOM_PART: u64 = 20;

/// A named budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// What to type.
    pub name: &'static str,
    /// Its peak resident size; `None` where it depends on the model or the host.
    pub bytes: Option<u64>,
    /// What it is for.
    pub about: &'static str,
}

/// Every preset, smallest first, then `auto`.
pub const PRESETS: [Preset; 7] = [
    Preset {
        name: "floor",
        bytes: None,
        about: "the smallest that works with the context asked for",
    },
    Preset {
        name: "laptop",
        bytes: Some(8_000_000_000),
        about: "a laptop of 16 GB",
    },
    Preset {
        name: "desktop",
        bytes: Some(32_000_000_000),
        about: "a desktop of 48 to 64 GB",
    },
    Preset {
        name: "workstation",
        bytes: Some(96_000_000_000),
        about: "a workstation of 128 GB",
    },
    Preset {
        name: "server",
        bytes: Some(128_000_000_000),
        about: "a server of 160 GB: the whole trunk of Kimi K3 stays in memory",
    },
    Preset {
        name: "max",
        bytes: Some(224_000_000_000),
        about: "a server of 256 GB: the rest goes to expert slots",
    },
    Preset {
        name: "auto",
        bytes: None,
        about: "what this host can give, less 5 % or 512 MB, whichever is more",
    },
];

/// What `--budget` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// A size, typed or of a preset.
    Size(u64),
    /// The smallest that works.
    Floor,
    /// What this host can give, with headroom.
    Auto,
}

impl Budget {
    /// The most bytes it can come to on `host`.
    pub(crate) fn most_bytes(self, host: &Host) -> u64 {
        match self {
            Self::Size(bytes) => bytes,
            Self::Floor => 0,
            Self::Auto => auto_bytes(host),
        }
    }
}

/// A budget that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is neither a size such as 32G or 24GiB nor one of floor, laptop, desktop, workstation, server, max, auto"
)]
pub struct BudgetError {
    text: String,
}

impl FromStr for Budget {
    type Err = BudgetError;

    fn from_str(text: &str) -> Result<Self, BudgetError> {
        let text = text.trim();
        match text {
            "floor" => return Ok(Self::Floor),
            "auto" => return Ok(Self::Auto),
            _ => {}
        }
        if let Some(bytes) = PRESETS
            .iter()
            .find(|preset| preset.name == text)
            .and_then(|preset| preset.bytes)
        {
            return Ok(Self::Size(bytes));
        }
        text.parse::<Bytes>()
            .map(|size| Self::Size(size.0))
            .map_err(|_| BudgetError {
                text: text.to_owned(),
            })
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(bytes) => write!(f, "{}", Bytes(*bytes)),
            Self::Floor => f.write_str("floor"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// What this host can give a run: its limit, less headroom for the system and for what other programs come to need.
pub fn auto_bytes(host: &Host) -> u64 {
    let headroom = (host.limit_bytes / HEADROOM_PART).max(LEAST_HEADROOM);
    host.limit_bytes.saturating_sub(headroom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_sizes_or_names() {
        assert_eq!("32G".parse(), Ok(Budget::Size(32_000_000_000)));
        assert_eq!("laptop".parse(), Ok(Budget::Size(8_000_000_000)));
        assert_eq!("floor".parse(), Ok(Budget::Floor));
        assert_eq!("auto".parse(), Ok(Budget::Auto));
        assert!("huge".parse::<Budget>().is_err());
        assert!("".parse::<Budget>().is_err());
    }

    #[test]
    fn auto_leaves_headroom_and_never_wraps() {
        let host = |limit_bytes| Host {
            available_bytes: limit_bytes,
            limit_bytes,
            limited_by: "MemAvailable".into(),
            cores: 1,
        };
        assert_eq!(auto_bytes(&host(100_000_000_000)), 95_000_000_000);
        assert_eq!(auto_bytes(&host(4_000_000_000)), 3_488_000_000);
        assert_eq!(auto_bytes(&host(1000)), 0);
    }
}
