//! The optimum, knowing the future.

use std::{cmp::Reverse, sync::Arc};

use super::{Future, Key, Members, Policy, Victim, heap::Heap};

/// Belady's optimum: gives up whatever is next requested furthest in the future, the newcomer itself included (it is then read
/// but not kept). Members already processed may go. No other policy has more hits on the same groups.
#[derive(Debug)]
pub struct Belady {
    future: Arc<Future>,
    /// `[keys]`: requests so far.
    requests: Vec<u32>,
    /// Residents, first the one whose next request is furthest, by the group that makes it; of those the greatest key.
    residents: Heap<Reverse<(u32, Key)>>,
}

/// Next requested after every group there is.
const NEVER: u32 = u32::MAX;

impl Belady {
    /// For `slots` slots and for replaying the requests that `future` was made of.
    pub fn new(slots: usize, future: Arc<Future>) -> Self {
        Self {
            requests: vec![0; future.keys()],
            residents: Heap::new(slots, future.keys()),
            future,
        }
    }

    fn next_request(&self, key: Key) -> u32 {
        let nth = self.requests[key.get()];
        self.future.request(key, nth).unwrap_or(NEVER)
    }
}

impl Policy for Belady {
    fn hit(&mut self, key: Key) {
        self.residents.remove(key);
        self.requests[key.get()] += 1;
        self.residents
            .insert(Reverse((self.next_request(key), key)), key);
    }

    fn miss(&mut self, key: Key) {
        self.requests[key.get()] += 1;
    }

    fn victim(&mut self, incoming: Key, _members: &Members) -> Victim {
        match self.residents.first() {
            Some((Reverse((next, _)), key)) if next > self.next_request(incoming) => {
                Victim::Resident(key)
            }
            _ => Victim::NotKept,
        }
    }

    fn evict(&mut self, key: Key) {
        self.residents.remove(key);
    }

    fn insert(&mut self, key: Key) {
        self.residents
            .insert(Reverse((self.next_request(key), key)), key);
    }
}
