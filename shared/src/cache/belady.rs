//! The optimum, knowing the future.

use std::{collections::BTreeSet, sync::Arc};

use super::{Future, Key, Members, Policy, Victim};

/// Belady's optimum: gives up whatever is next requested furthest in the future, the newcomer itself included (it is then read
/// but not kept). Members already processed may go. No other policy has more hits on the same groups.
#[derive(Debug)]
pub struct Belady {
    future: Arc<Future>,
    /// `[keys]`: requests so far.
    requests: Vec<u32>,
    /// Residents by the group that next asks for them.
    residents: BTreeSet<(u32, Key)>,
}

/// Next requested after every group there is.
const NEVER: u32 = u32::MAX;

impl Belady {
    /// For replaying the requests that `future` was made of.
    pub fn new(future: Arc<Future>) -> Self {
        Self {
            requests: vec![0; future.keys()],
            future,
            residents: BTreeSet::new(),
        }
    }

    fn next_request(&self, key: Key) -> u32 {
        let nth = self.requests[key.get()];
        self.future.request(key, nth).unwrap_or(NEVER)
    }
}

impl Policy for Belady {
    fn hit(&mut self, key: Key) {
        self.residents.remove(&(self.next_request(key), key));
        self.requests[key.get()] += 1;
        self.residents.insert((self.next_request(key), key));
    }

    fn miss(&mut self, key: Key) {
        self.requests[key.get()] += 1;
    }

    fn victim(&mut self, incoming: Key, _members: &Members) -> Victim {
        match self.residents.last() {
            Some(&(next, key)) if next > self.next_request(incoming) => Victim::Resident(key),
            _ => Victim::NotKept,
        }
    }

    fn evict(&mut self, key: Key) {
        self.residents.remove(&(self.next_request(key), key));
    }

    fn insert(&mut self, key: Key) {
        self.residents.insert((self.next_request(key), key));
    }
}
