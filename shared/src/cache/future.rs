//! All requests of a replay, known beforehand.

use super::{Geometry, Key};

/// When each expert is requested, for the policies that know the future.
#[derive(Debug)]
pub struct Future {
    /// `[keys + 1]`: where each key's part of `groups` begins.
    starts: Vec<usize>,
    /// The numbers of the groups that ask for each key, ascending within a key.
    groups: Vec<u32>,
    by_popularity: Vec<Key>,
}

impl Future {
    /// From the groups in the order in which they will be requested.
    ///
    /// # Panics
    /// If a key lies outside the geometry, or there are 2^32 groups.
    pub fn new<'a>(geometry: Geometry, groups: impl Iterator<Item = &'a [Key]> + Clone) -> Self {
        let mut starts = vec![0; geometry.keys() + 1];
        let mut by_popularity = Vec::new();
        for key in groups.clone().flatten() {
            let count = &mut starts[key.get() + 1];
            if *count == 0 {
                by_popularity.push(*key);
            }
            *count += 1;
        }
        // The sort is stable, so ties stay in the order of their first requests.
        by_popularity.sort_by_key(|key| std::cmp::Reverse(starts[key.get() + 1]));
        let mut total = 0;
        for start in &mut starts {
            total += *start;
            *start = total;
        }
        let mut next = starts.clone();
        let mut requested_in = vec![0; total];
        for (number, group) in (0u32..).zip(groups) {
            for key in group {
                requested_in[next[key.get()]] = number;
                next[key.get()] += 1;
            }
        }
        Self {
            starts,
            groups: requested_in,
            by_popularity,
        }
    }

    /// Every expert that is requested, most often first; ties go to the earliest first request.
    pub fn by_popularity(&self) -> &[Key] {
        &self.by_popularity
    }

    /// How many keys there are.
    pub(super) fn keys(&self) -> usize {
        self.starts.len() - 1
    }

    /// The number of the group that asks for `key` the `nth` time, from 0.
    pub(super) fn request(&self, key: Key, nth: u32) -> Option<u32> {
        let all = &self.groups[self.starts[key.get()]..self.starts[key.get() + 1]];
        all.get(nth as usize).copied()
    }
}
