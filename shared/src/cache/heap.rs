//! A priority queue over dense keys from which any key can be taken.

use super::Key;

const NOWHERE: u32 = u32::MAX;

/// A binary heap, least first, that knows where each key stands. Nothing is allocated after [`Heap::new`].
#[derive(Debug)]
pub(super) struct Heap<W> {
    entries: Vec<(W, Key)>,
    /// `[keys]`: the place of each key in `entries`.
    place: Vec<u32>,
}

impl<W: Ord + Copy> Heap<W> {
    /// For at most `capacity` of `keys` keys at a time.
    pub(super) fn new(capacity: usize, keys: usize) -> Self {
        Self {
            entries: Vec::with_capacity(capacity.min(keys)),
            place: vec![NOWHERE; keys],
        }
    }

    /// The key of least worth, and of those the least key.
    pub(super) fn first(&self) -> Option<(W, Key)> {
        self.entries.first().copied()
    }

    /// Add a key that is not there.
    pub(super) fn insert(&mut self, worth: W, key: Key) {
        let at = self.entries.len();
        self.entries.push((worth, key));
        self.rise(at);
    }

    /// Take out a key, if it is there.
    pub(super) fn remove(&mut self, key: Key) {
        let at = std::mem::replace(&mut self.place[key.get()], NOWHERE);
        if at == NOWHERE {
            return;
        }
        let at = at as usize;
        self.entries.swap_remove(at);
        if at < self.entries.len() {
            // What took its place came from the end: it may be too small or too large for it.
            let at = self.rise(at);
            self.sink(at);
        }
    }

    /// Move the entry at `at` up to where it belongs; returns where that is.
    fn rise(&mut self, mut at: usize) -> usize {
        let entry = self.entries[at];
        while at > 0 {
            let above = (at - 1) / 2;
            if self.entries[above] <= entry {
                break;
            }
            self.put(at, self.entries[above]);
            at = above;
        }
        self.put(at, entry);
        at
    }

    fn sink(&mut self, mut at: usize) {
        let entry = self.entries[at];
        loop {
            let mut below = 2 * at + 1;
            if below + 1 < self.entries.len() && self.entries[below + 1] < self.entries[below] {
                below += 1;
            }
            if below >= self.entries.len() || entry <= self.entries[below] {
                break;
            }
            self.put(at, self.entries[below]);
            at = below;
        }
        self.put(at, entry);
    }

    fn put(&mut self, at: usize, entry: (W, Key)) {
        self.entries[at] = entry;
        self.place[entry.1.get()] = u32::try_from(at).expect("no more entries than keys");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_heap_is_an_ordered_set(steps in prop::collection::vec((0u32..40, 0u32..9), 1..300)) {
            let (mut heap, mut set) = (Heap::new(40, 40), BTreeSet::new());
            let mut worth_of = [None; 40];
            for (key, worth) in steps {
                heap.remove(Key(key));
                if let Some(worth) = worth_of[key as usize].take() {
                    set.remove(&(worth, Key(key)));
                } else {
                    heap.insert(worth, Key(key));
                    set.insert((worth, Key(key)));
                    worth_of[key as usize] = Some(worth);
                }
                prop_assert_eq!(heap.first(), set.first().copied());
            }
        }
    }
}
