//! Byte-pair merging in O(n log n) (specification 5.3).
//!
//! A library would do, but `tiktoken-rs` carries five vocabularies of its own, takes only valid UTF-8 and keeps 256 copies of its
//! regular expressions.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::vocabulary::Vocabulary;

/// Marks a symbol that became part of the one before it.
const GONE: usize = usize::MAX;

/// A pair of neighbours whose concatenation is a token. Ordered by rank, then from the left: the order of merging.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    rank: u32,
    start: usize,
    end: usize,
}

/// Merges pieces, keeping its buffers between them.
#[derive(Default)]
pub(super) struct Merger {
    /// By the offset at which a symbol begins: the offset at which it ends.
    ends: Vec<usize>,
    /// By the offset at which a symbol begins: the offset at which the one before it does.
    previous: Vec<usize>,
    pairs: BinaryHeap<Reverse<Pair>>,
    /// Pairs looked up so far: the work done.
    pub(super) lookups: u64,
}

impl Merger {
    /// Append the ids of `piece` to `ids`: its own if it is a token, else those that are left when no two neighbours merge.
    ///
    /// Starts from single bytes; of all neighbours that form a token, those that form the one of lowest rank merge first, the
    /// leftmost on ties.
    pub(super) fn encode(&mut self, vocabulary: &Vocabulary, piece: &[u8], ids: &mut Vec<u32>) {
        if let Some(id) = vocabulary.id(piece) {
            ids.push(id);
            return;
        }
        self.merge(vocabulary, piece);
        let mut start = 0;
        while start < piece.len() {
            let end = self.ends[start];
            ids.push(
                vocabulary
                    .id(&piece[start..end])
                    .expect("every byte and every merged pair is a token"),
            );
            start = end;
        }
    }

    fn merge(&mut self, vocabulary: &Vocabulary, piece: &[u8]) {
        self.ends.clear();
        self.ends.extend(1..=piece.len());
        self.previous.clear();
        self.previous
            .extend((0..piece.len()).map(|start| start.wrapping_sub(1)));
        self.pairs.clear();
        for start in 0..piece.len() {
            self.consider(vocabulary, piece, start);
        }
        while let Some(Reverse(pair)) = self.pairs.pop() {
            let middle = self.ends[pair.start];
            // Merges since the pair was found may have taken either half; what is still there has the same bytes.
            if middle >= pair.end || self.ends[middle] != pair.end {
                continue;
            }
            self.ends[pair.start] = pair.end;
            self.ends[middle] = GONE;
            if let Some(previous) = self.previous.get_mut(pair.end) {
                *previous = pair.start;
                self.consider(vocabulary, piece, pair.start);
            }
            if pair.start > 0 {
                self.consider(vocabulary, piece, self.previous[pair.start]);
            }
        }
    }

    /// Note the pair whose left half begins at `start`, if there is one and it forms a token.
    fn consider(&mut self, vocabulary: &Vocabulary, piece: &[u8], start: usize) {
        let Some(&end) = self.ends.get(self.ends[start]) else {
            return;
        };
        self.lookups += 1;
        if let Some(rank) = vocabulary.id(&piece[start..end]) {
            self.pairs.push(Reverse(Pair { rank, start, end }));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tokenizer::tests::vocabulary;

    /// The rule as it is written, in quadratic time.
    fn encode_plainly(vocabulary: &Vocabulary, piece: &[u8]) -> Vec<u32> {
        if let Some(id) = vocabulary.id(piece) {
            return vec![id];
        }
        let mut parts: Vec<&[u8]> = piece.chunks(1).collect();
        loop {
            let offset = |index: usize| parts[..index].iter().map(|part| part.len()).sum::<usize>();
            let best = (1..parts.len())
                .filter_map(|right| {
                    let start = offset(right - 1);
                    let merged = &piece[start..start + parts[right - 1].len() + parts[right].len()];
                    Some((vocabulary.id(merged)?, right, merged))
                })
                .min();
            let Some((_, right, merged)) = best else {
                return parts
                    .iter()
                    .map(|part| vocabulary.id(part).unwrap())
                    .collect();
            };
            parts[right - 1] = merged;
            parts.remove(right);
        }
    }

    fn encode(merger: &mut Merger, vocabulary: &Vocabulary, piece: &[u8]) -> Vec<u32> {
        let mut ids = Vec::new();
        merger.encode(vocabulary, piece, &mut ids);
        ids
    }

    #[test]
    fn equal_ranks_merge_from_the_left() {
        let vocabulary = vocabulary(&[b"aa"]);
        let a = vocabulary.id(b"a").unwrap();
        assert_eq!(
            encode(&mut Merger::default(), &vocabulary, b"aaa"),
            [256, a]
        );
    }

    #[test]
    fn work_grows_with_length_and_not_with_its_square() {
        let powers: Vec<Vec<u8>> = (1..8).map(|power| vec![b'a'; 1 << power]).collect();
        let vocabulary = vocabulary(&powers.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let mut merger = Merger::default();
        let ids = encode(&mut merger, &vocabulary, &vec![b'a'; 1 << 20]);
        assert_eq!(ids, vec![262; 1 << 13]);
        // One for each byte, then two for each of the fewer merges.
        assert!(merger.lookups <= 3 << 20, "{}", merger.lookups);
    }

    proptest! {
        #[test]
        fn the_heap_merges_what_the_plain_rule_merges(
            merges in proptest::collection::btree_set(proptest::collection::vec(b'a'..=b'c', 2..6), 0..40),
            shuffle in any::<u64>(),
            piece in proptest::collection::vec(b'a'..=b'c', 1..60),
        ) {
            let mut merges: Vec<&[u8]> = merges.iter().map(Vec::as_slice).collect();
            // Any order of ranks is allowed, also one in which a long token comes before its parts.
            merges.sort_by_key(|token| {
                token.iter().fold(shuffle, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
            });
            let vocabulary = vocabulary(&merges);
            prop_assert_eq!(
                encode(&mut Merger::default(), &vocabulary, &piece),
                encode_plainly(&vocabulary, &piece)
            );
        }
    }
}
