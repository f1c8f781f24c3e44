//! Doubly linked lists over dense keys: a key is on one list at most.

use super::Key;

const NIL: u32 = u32::MAX;

/// `lists` lists that share one node a key, so that moving a key between them is O(1) and allocates nothing.
#[derive(Debug)]
pub(super) struct Lists {
    /// `[keys]`: the neighbour towards the front.
    before: Vec<u32>,
    /// `[keys]`: the neighbour towards the back.
    after: Vec<u32>,
    /// `[keys]`: which list holds the key.
    list_of: Vec<u32>,
    ends: Vec<Ends>,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    front: u32,
    back: u32,
    len: usize,
}

impl Lists {
    pub(super) fn new(lists: usize, keys: usize) -> Self {
        let empty = Ends {
            front: NIL,
            back: NIL,
            len: 0,
        };
        Self {
            before: vec![NIL; keys],
            after: vec![NIL; keys],
            list_of: vec![NIL; keys],
            ends: vec![empty; lists],
        }
    }

    pub(super) fn len(&self, list: u32) -> usize {
        self.ends[list as usize].len
    }

    /// The list that holds `key`.
    pub(super) fn list_of(&self, key: Key) -> Option<u32> {
        some(self.list_of[key.get()])
    }

    pub(super) fn back(&self, list: u32) -> Option<Key> {
        some(self.ends[list as usize].back).map(Key)
    }

    /// The neighbour of `key` towards the front.
    pub(super) fn before(&self, key: Key) -> Option<Key> {
        some(self.before[key.get()]).map(Key)
    }

    /// The key nearest the back of which `wanted` is true; each key stepped over costs O(1).
    pub(super) fn rfind(&self, list: u32, mut wanted: impl FnMut(Key) -> bool) -> Option<Key> {
        let mut at = self.back(list);
        while let Some(key) = at {
            if wanted(key) {
                return Some(key);
            }
            at = self.before(key);
        }
        None
    }

    /// Put `key` at the front of `list`, taking it off the list it is on.
    pub(super) fn push_front(&mut self, list: u32, key: Key) {
        self.remove(key);
        let ends = &mut self.ends[list as usize];
        let second = std::mem::replace(&mut ends.front, key.0);
        ends.len += 1;
        match some(second) {
            Some(second) => self.before[second as usize] = key.0,
            None => ends.back = key.0,
        }
        self.after[key.get()] = second;
        self.before[key.get()] = NIL;
        self.list_of[key.get()] = list;
    }

    /// Take `key` off its list, if it is on one.
    pub(super) fn remove(&mut self, key: Key) {
        let Some(list) = self.list_of(key) else {
            return;
        };
        let (before, after) = (self.before[key.get()], self.after[key.get()]);
        let ends = &mut self.ends[list as usize];
        ends.len -= 1;
        match some(before) {
            Some(before) => self.after[before as usize] = after,
            None => ends.front = after,
        }
        match some(after) {
            Some(after) => self.before[after as usize] = before,
            None => ends.back = before,
        }
        self.list_of[key.get()] = NIL;
    }
}

fn some(index: u32) -> Option<u32> {
    (index != NIL).then_some(index)
}
