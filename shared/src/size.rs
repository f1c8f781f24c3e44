//! Byte sizes as people write and read them.
//!
//! `K M G T` are powers of 1000, `Ki Mi Gi Ti` of 1024, an optional `B` may follow, a bare number is bytes.

use std::{fmt, str::FromStr};

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

/// A number of bytes that reads `32G`, `24GiB` or `1.5 GB` and prints `32.00 GB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A size that could not be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "{text:?} is not a size; write bytes, or a number with K M G T (powers of 1000) or Ki Mi Gi Ti (of 1024)"
)]
pub struct SizeError {
    text: String,
}

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError {
            text: text.to_owned(),
        };
        let trimmed = text.trim();
        if !trimmed.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(error());
        }
        // A bare integer must not pass through a float: file sizes are exact.
        if let Ok(bytes) = trimmed.parse::<u64>() {
            return Ok(Self(bytes));
        }
        ByteSize::from_str(trimmed)
            .map(|size| Self(size.as_u64()))
            .map_err(|_| error())
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, f64); 4] = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
        let bytes = self.0 as f64;
        for (unit, scale) in UNITS {
            if bytes >= scale {
                return f.pad(&format!("{:.2} {unit}", bytes / scale));
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_in_powers_of_1000_and_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("17547264", 17_547_264),
            ("32G", 32_000_000_000),
            ("32GB", 32_000_000_000),
            ("1.5G", 1_500_000_000),
            ("24GiB", 24 << 30),
            ("24Gi", 24 << 30),
            ("64Mi", 64 << 20),
            ("4K", 4000),
            ("2T", 2_000_000_000_000),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in ["", "G", "-1", "12Q", "1..5G", "auto", "0x10", "inf", "nan"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_print_in_decimal_units() {
        assert_eq!(Bytes(108_811_877_376).to_string(), "108.81 GB");
        assert_eq!(Bytes(999).to_string(), "999 B");
    }
}
