//! Byte-pair merges of one piece, in O(n log n).
//!
//! The plain rule merges, again and again, the adjacent pair whose concatenation has the lowest rank, the leftmost of equals,
//! until no pair is a token (specification 5.3). A heap holds every pair that is; entries that a merge outdated are dropped when
//! they come up. Each merge adds at most two, so a piece of n bytes costs at most 3n lookups.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::vocabulary::Vocabulary;

/// Parts of a piece as a linked list over byte positions: a part is known by where it starts.
struct Parts<'a> {
    piece: &'a [u8],
    /// End of the part that starts here, which is the start of the next; [`GONE`] if none starts here.
    end: Vec<usize>,
    /// Start of the part before the one that starts here; only for starts above zero.
    previous: Vec<usize>,
    /// Rank, start and end of adjacent pairs, some outdated.
    pairs: BinaryHeap<Reverse<(u32, usize, usize)>>,
    lookups: usize,
}

const GONE: usize = 0;

impl<'a> Parts<'a> {
    fn single_bytes(piece: &'a [u8]) -> Self {
        Self {
            piece,
            end: (1..=piece.len()).collect(),
            previous: (0..piece.len())
                .map(|start| start.saturating_sub(1))
                .collect(),
            pairs: BinaryHeap::new(),
            lookups: 0,
        }
    }

    /// End of the pair that starts with the part at `start`, if that is a part and not the last.
    fn pair_end(&self, start: usize) -> Option<usize> {
        match *self.end.get(start)? {
            GONE => None,
            middle => self.end.get(middle).copied(),
        }
    }

    /// Note the pair that starts at `start` if it is a token.
    fn note(&mut self, vocabulary: &Vocabulary, start: usize) {
        let Some(end) = self.pair_end(start) else {
            return;
        };
        self.lookups += 1;
        if let Some(rank) = vocabulary.rank(&self.piece[start..end]) {
            self.pairs.push(Reverse((rank, start, end)));
        }
    }

    fn merge_all(&mut self, vocabulary: &Vocabulary) {
        while let Some(Reverse((_, start, end))) = self.pairs.pop() {
            // Parts only grow: a pair of the same start and end is the same bytes.
            if self.pair_end(start) != Some(end) {
                continue;
            }
            let middle = self.end[start];
            self.end[start] = end;
            self.end[middle] = GONE;
            if let Some(previous) = self.previous.get_mut(end) {
                *previous = start;
            }
            self.note(vocabulary, start);
            if start > 0 {
                self.note(vocabulary, self.previous[start]);
            }
        }
    }
}

/// Append the ids of `piece` to `ids`; returns the number of vocabulary lookups it took, at most three a byte.
pub(super) fn encode_piece(vocabulary: &Vocabulary, piece: &[u8], ids: &mut Vec<u32>) -> usize {
    if let Some(rank) = vocabulary.rank(piece) {
        ids.push(rank);
        return 1;
    }
    let mut parts = Parts::single_bytes(piece);
    for start in 0..piece.len() {
        parts.note(vocabulary, start);
    }
    parts.merge_all(vocabulary);
    let mut start = 0;
    while let Some(&end) = parts.end.get(start) {
        // Every part is a single byte or was found in the vocabulary when it was merged.
        ids.extend(vocabulary.rank(&piece[start..end]));
        parts.lookups += 1;
        start = end;
    }
    parts.lookups
}
