//! Header-less traces of other engines.

use std::path::Path;

use super::{MAX_EXPERTS, TraceError};
use crate::ids::{ExpertIdx, LayerIdx};

/// Layers beyond any model: a larger number in a header-less file means that it is no trace.
const MAX_RAW_LAYERS: u32 = 1 << 12;

/// One request of a header-less trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The layer.
    pub layer: LayerIdx,
    /// The expert within it.
    pub expert: ExpertIdx,
}

/// Read header-less little-endian `i32` pairs (layer, expert); `path` names them in errors.
///
/// # Errors
/// If there are none, a pair is cut short, or a number is negative or beyond any model.
pub fn parse_pairs(bytes: &[u8], path: &Path) -> Result<Vec<Pair>, TraceError> {
    let refuse = |offset: usize, problem: String| TraceError::NotPairs {
        path: path.to_owned(),
        offset: offset as u64,
        problem,
    };
    let (pairs, rest) = bytes.as_chunks::<8>();
    if pairs.is_empty() {
        return Err(refuse(0, format!("{} bytes hold no pair", bytes.len())));
    }
    if !rest.is_empty() {
        return Err(refuse(
            bytes.len() - rest.len(),
            "the last pair is cut short".to_owned(),
        ));
    }
    let number = |raw: [u8; 4], limit: u32, what: &str, offset: usize| {
        let value = i32::from_le_bytes(raw);
        match u32::try_from(value) {
            Ok(value) if value < limit => Ok(value),
            _ => Err(refuse(
                offset,
                format!("{what} {value} is not in 0..{limit}"),
            )),
        }
    };
    let pair = |(i, &[l0, l1, l2, l3, e0, e1, e2, e3]): (usize, &[u8; 8])| {
        Ok(Pair {
            layer: LayerIdx(number([l0, l1, l2, l3], MAX_RAW_LAYERS, "layer", 8 * i)?),
            expert: ExpertIdx(number([e0, e1, e2, e3], MAX_EXPERTS, "expert", 8 * i + 4)?),
        })
    };
    pairs.iter().enumerate().map(pair).collect()
}
