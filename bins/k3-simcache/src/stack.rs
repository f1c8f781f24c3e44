//! LRU at every size in one pass (Mattson's stack).

use k3_shared::cache::{Counters, Geometry, Key};

/// How deep each request lies in the stack of experts by last request: an LRU cache of at least that many slots hits it.
///
/// Exact for caches that hold the largest group there is. A group's depths are taken before any of its members is touched, as the
/// cache-group rule finds hits, and the members then go on top in group order, as [`k3_shared::cache::Lru`] has them. A smaller cache
/// gives up members of the group in progress, which is no stack.
#[derive(Debug)]
pub(crate) struct LruStack {
    /// `[keys]`: 1 + when each key was last requested; 0 is never.
    last: Vec<u32>,
    /// `[times]`: who was last requested then.
    at: Vec<Option<Key>>,
    /// A Fenwick tree over times: how many keys were last requested then.
    tree: Vec<u32>,
    now: usize,
    distinct: u32,
    largest_group: usize,
    depths: Vec<u32>,
}

impl LruStack {
    pub(crate) fn new(geometry: Geometry) -> Self {
        // Times are renumbered when they run out, so every `times - keys` requests at least.
        let times = 2 * geometry.keys() + geometry.experts();
        Self {
            last: vec![0; geometry.keys()],
            at: vec![None; times],
            tree: vec![0; times + 1],
            now: 0,
            distinct: 0,
            largest_group: 0,
            depths: Vec::new(),
        }
    }

    /// Request a group; the depth of each member, from 1, or 0 if it was never requested.
    pub(crate) fn request(&mut self, group: &[Key]) -> &[u32] {
        self.largest_group = self.largest_group.max(group.len());
        let mut depths = std::mem::take(&mut self.depths);
        depths.clear();
        depths.extend(group.iter().map(|&key| self.depth(key)));
        self.depths = depths;
        for &key in group {
            self.touch(key);
        }
        &self.depths
    }

    /// The most experts requested at once: smaller caches are no part of this stack.
    pub(crate) fn largest_group(&self) -> usize {
        self.largest_group
    }

    fn depth(&self, key: Key) -> u32 {
        match self.last[key.get()] {
            0 => 0,
            last => self.distinct - self.requested_before(last as usize - 1),
        }
    }

    /// How many keys were last requested before `time`.
    fn requested_before(&self, time: usize) -> u32 {
        let mut sum = 0;
        let mut node = time;
        while node > 0 {
            sum += self.tree[node];
            node &= node - 1;
        }
        sum
    }

    fn add(&mut self, time: usize, change: impl Fn(&mut u32)) {
        let mut node = time + 1;
        while node < self.tree.len() {
            change(&mut self.tree[node]);
            node += node & node.wrapping_neg();
        }
    }

    fn touch(&mut self, key: Key) {
        if self.now == self.at.len() {
            self.renumber();
        }
        match self.last[key.get()] {
            0 => self.distinct += 1,
            last => {
                let last = last as usize - 1;
                self.at[last] = None;
                self.add(last, |count| *count -= 1);
            }
        }
        self.place(key);
    }

    fn place(&mut self, key: Key) {
        self.at[self.now] = Some(key);
        self.add(self.now, |count| *count += 1);
        self.now += 1;
        self.last[key.get()] = u32::try_from(self.now).expect("times are a few per key");
    }

    fn renumber(&mut self) {
        let mut at = std::mem::take(&mut self.at);
        self.now = 0;
        self.tree.fill(0);
        self.at = vec![None; at.len()];
        for key in at.drain(..).flatten() {
            self.place(key);
        }
    }
}

/// Requests by depth: hits of an LRU of any size.
#[derive(Debug, Default)]
pub(crate) struct DepthCurve {
    /// `[depth]`: requests found there; 0 holds those that were never requested before.
    found: Vec<u64>,
}

impl DepthCurve {
    pub(crate) fn add(&mut self, depth: u32) {
        let depth = depth as usize;
        if depth >= self.found.len() {
            self.found.resize(depth + 1, 0);
        }
        self.found[depth] += 1;
    }

    /// What a cache of `slots` slots counts.
    pub(crate) fn counters(&self, slots: usize) -> Counters {
        let hits = self.found.iter().skip(1).take(slots).sum();
        Counters {
            requests: self.found.iter().sum(),
            hits,
        }
    }

    /// The least depth that `share` of the repeated requests do not exceed; `None` if nothing was repeated.
    pub(crate) fn quantile(&self, share: f64) -> Option<u64> {
        let repeated: u64 = self.found.iter().skip(1).sum();
        let mut seen = 0;
        (1..)
            .zip(self.found.iter().skip(1))
            .find_map(|(depth, &count)| {
                seen += count;
                (count > 0 && seen as f64 >= share * repeated as f64).then_some(depth)
            })
    }
}
