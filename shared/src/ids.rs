//! Indices that cannot be swapped.

use serde::{Deserialize, Serialize};

/// A zero-based layer. `config.json` counts layers from one in its lists; they are converted where they are parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerIdx(pub u32);

/// An expert within one layer, by its number in the tensor name (not by its place in the file).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExpertIdx(pub u32);

/// One expert of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExpertId {
    /// The layer.
    pub layer: LayerIdx,
    /// The expert within it.
    pub expert: ExpertIdx,
}

/// A vocabulary id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenId(pub u32);

impl LayerIdx {
    /// The layer as an array index.
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

impl ExpertIdx {
    /// The expert as an array index.
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

impl TokenId {
    /// The id as an array index.
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

impl std::fmt::Display for LayerIdx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Display for ExpertIdx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Display for TokenId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Ranks of the experts `0..num_experts` in a layer file, where they lie in the order of their decimal *strings*.
///
/// `ranks[e]` is the place of expert `e` in the file: `0, 1, 10, 100, 101, ...`. Specification 2.2.
pub fn expert_file_ranks(num_experts: usize) -> Vec<u32> {
    let mut order: Vec<(String, usize)> = (0..num_experts).map(|e| (e.to_string(), e)).collect();
    order.sort();
    let mut ranks = vec![0; num_experts];
    for (rank, (_, expert)) in (0..).zip(order) {
        ranks[expert] = rank;
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_31_experts_lie_in_string_order() {
        let ranks = expert_file_ranks(12);
        let mut order: Vec<usize> = (0..12).collect();
        order.sort_by_key(|&e| ranks[e]);
        assert_eq!(order, [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(expert_file_ranks(896)[100], 3);
    }
}
