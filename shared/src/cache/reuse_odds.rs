//! Evict what is least likely to be asked for again, for the time it would hold its slot.
//!
//! A decoded token walks the layers in order, so an expert has one chance a token: when its layer comes round. Until then it
//! holds a slot. [`ReuseOdds`] estimates that chance for every resident and gives up the one with the lowest
//! `odds / (1 + distance)`, where `distance` is the part of a token until its layer's next turn: 0 for a layer about to come,
//! 1 for the one just passed. Experts just computed with compete like all others, so a few slots turn over quickly while the rest
//! stay, and nothing has to be told about working sets: below one token's the policy keeps a choice of experts, where LRU
//! hits nothing, and above it the same rule goes on to hit more than LRU does.
//!
//! The odds are learned from the requests themselves, not set. An expert's past falls into one of 128 classes: in which of the
//! last 1, 2, 3-4 and 5-8 turns of its layer it was asked for, and the order of magnitude of how often before. Of
//! each class it is counted how many experts stood in it at each turn, resident or not, and how many of them were asked for;
//! the quotient is the estimate, leaning on that of all classes with the same last two turns and count while a class is new. Rows of a prompt are learned from too.
//!
//! # What was tried
//!
//! Hit rates in percent, each request a group of its own (`k3-simcache --pass last --warmup-tokens 5` on a recorded prompt of 12
//! positions, 92 layers, 16 of 896 experts a layer: one token's working set is 1,472 slots; Belady is the optimum):
//!
//! | slots | 227 | 455 | 911 | 1367 | 1481 | 1823 | 3647 | 7294 |
//! |---|---|---|---|---|---|---|---|---|
//! | LRU | 0.0 | 0.0 | 0.0 | 0.0 | 39.7 | 40.0 | 50.9 | 56.7 |
//! | LFU with remembered counts | 5.4 | 11.8 | 19.4 | 26.6 | 27.4 | 32.2 | 50.4 | 56.5 |
//! | layer just passed, then lowest count | 2.5 | 6.3 | 16.4 | 27.5 | 29.9 | 32.9 | 49.8 | 56.8 |
//! | counts halving every turn, lowest goes | 2.2 | 5.2 | 15.7 | 17.1 | | 39.4 | | |
//! | counts halving every 2 turns | 4.5 | 9.7 | 22.9 | 27.8 | | 29.7 | | |
//! | the same less 0.6 x mean of victims x distance | 9.1 | 15.8 | 26.2 | 32.7 | | 40.3 | | |
//! | the same over 1 + distance | 8.9 | 15.7 | 26.1 | 32.7 | | 40.0 | | |
//! | learned odds of the last 4 turns alone | 1.5 | 4.5 | 13.4 | 16.4 | | 37.5 | | |
//! | learned odds less mean of victims x distance | 8.6 | 15.4 | 27.1 | 35.7 | 38.0 | 42.4 | 50.7 | 56.6 |
//! | learned odds over 1 + distance, last 2 turns one by one | 8.7 | 16.0 | 27.6 | 37.3 | 39.1 | 43.0 | 51.4 | 56.7 |
//! | the same, last 4 one by one | 8.6 | 15.4 | 27.1 | 36.0 | 38.1 | 42.5 | 50.6 | 56.5 |
//! | the same, last 1, 2, 3-4, 5-8 | 8.8 | 15.9 | 26.8 | 36.1 | 38.1 | 42.5 | 50.4 | 56.7 |
//! | **the same, leaning on the last 2 (this policy)** | 9.0 | 16.5 | 27.6 | 37.3 | 39.0 | 43.0 | 50.5 | 56.7 |
//! | Belady | 15.4 | 29.4 | 45.1 | 51.9 | 53.0 | 56.3 | 58.0 | 58.0 |
//!
//! With a token's experts of a layer as one group, as k3-run asks (`--grouped`), this policy hits 8.7, 16.5, 27.8, 37.2, 39.5, 43.1,
//! 50.6 and 56.7 %, and an LRU in each layer ([`super::LayerQuota`]), the best of the others, 5.7, 11.8, 24.3, 37.1, 40.0, 43.0,
//! 51.6 and 56.5 %.
//!
//! Seven tokens of one prompt prove little. The classes were chosen on generated traces, not on that one (which prefers the last
//! two turns alone, where traces that repeat choices of the last eight tokens lose up to 9 points). On others, of a seed that nothing
//! was chosen by, decode steps hit with 911 slots (`cargo run --release -p k3-simcache --example policies 7919`; the text changes
//! 0 to 2 pairs of ranks a layer and token):
//!
//! | popularity falls as rank to the power | 0 | 0.3 | 0.6 | 0.7 | 0.8 | 0.8 | 1.0 | 1.2 |
//! |---|---|---|---|---|---|---|---|---|
//! | choices that repeat one of the last tokens' | 0 | 0.4 of 2 | 0.4 of 4 | 0.5 of 8 | 0 | 0.3 of 3 | 0.4 of 1 | 0.2 of 2 |
//! | lfu | 0.9 | 5.2 | 9.6 | 12.3 | 16.9 | 15.7 | 24.8 | 31.6 |
//! | layer-distance | 1.1 | 4.0 | 5.7 | 7.8 | 6.4 | 7.7 | 12.9 | 16.4 |
//! | layer-quota | 1.1 | 14.6 | 10.4 | 9.8 | 6.6 | 12.5 | 29.5 | 22.9 |
//! | s3-fifo | 0.3 | 1.4 | 2.6 | 4.2 | 8.4 | 5.6 | 25.0 | 21.9 |
//! | w-tinylfu | 0.9 | 4.4 | 7.2 | 10.6 | 14.6 | 13.2 | 22.2 | 29.9 |
//! | **reuse-odds** | 1.1 | 16.0 | 14.3 | 15.2 | 16.7 | 18.1 | 32.2 | 33.3 |
//! | belady | 13.6 | 40.9 | 35.9 | 34.8 | 27.4 | 38.6 | 54.1 | 49.6 |
//!
//! LRU hits nothing in any. Halving counts every 32, 64 or 256 turns, assumed odds worth 2 to 100 experts seen, forgetting over 10^3 to
//! 10^4 turns, and 7 to 12 magnitudes stay within half a point of each other everywhere; forgetting over 10^2 turns is worse, by one
//! to two points.

mod odds;

use super::{Geometry, Key, Members, Policy, Victim, lists::Lists};
use crate::ids::LayerIdx;
use odds::{CLASSES, Odds};

/// No list of a set holds anything.
const EMPTY: f32 = f32::INFINITY;

/// Gives up the resident with the lowest estimated chance of a hit for the time it would hold its slot.
///
/// One request group of at least `top_k` experts is a whole turn of its layer. Smaller ones (a trace without steps) are added up to
/// `top_k`; until then, residents of the layer that were not asked for yet are judged by this turn, those that were by the next.
///
/// A victim costs O(layers), a group O(experts of one layer), whatever the number of slots, and nothing is allocated after
/// [`ReuseOdds::new`].
#[derive(Debug)]
pub struct ReuseOdds {
    geometry: Geometry,
    odds: Odds,
    /// Residents outside the group in progress: for each set a list a class, the longest there at the back.
    ///
    /// A set is a layer, or, for number `layers`, what the unfinished turn has asked for so far.
    residents: Lists,
    /// `[sets]`: bit n is set if the list of class n holds anything.
    occupied: Vec<u128>,
    /// `[sets]`: the lowest odds of a list that holds anything as of the layer's last turn, else [`EMPTY`]; and the list.
    lowest: Vec<(f32, u32)>,
    /// `[layers + 1]`: `1 / (1 + n / layers)`, the worth of the odds of a layer n layers ahead.
    worth: Vec<f32>,
    layer: usize,
    /// Whether the turn of `layer` is unfinished, and how many it has asked for.
    unfinished: Option<usize>,
}

impl ReuseOdds {
    /// For keys of this shape.
    pub fn new(geometry: Geometry) -> Self {
        let layers = geometry.layers();
        let worth = |ahead: usize| 1.0 / (1.0 + ahead as f32 / layers as f32);
        Self {
            geometry,
            odds: Odds::new(geometry),
            residents: Lists::new((layers + 1) * CLASSES, geometry.keys()),
            occupied: vec![0; layers + 1],
            lowest: vec![(EMPTY, 0); layers + 1],
            worth: (0..=layers).map(worth).collect(),
            layer: 0,
            unfinished: None,
        }
    }

    fn finish_turn(&mut self) {
        if self.unfinished.take().is_none() {
            return;
        }
        let layer = self.layer;
        let (residents, occupied) = (&mut self.residents, &mut self.occupied);
        self.odds.finish(layer, |key, class| {
            let Some(from) = residents.list_of(key) else {
                return;
            };
            let to = list(layer, class);
            if from != to {
                residents.push_front(to, key);
                occupied[layer] |= 1 << class;
                let (set, class) = (from as usize / CLASSES, from as usize % CLASSES);
                if residents.len(from) == 0 {
                    occupied[set] &= !(1 << class);
                }
            }
        });
        self.find_lowest(layer);
        self.find_lowest(self.geometry.layers());
    }

    fn find_lowest(&mut self, set: usize) {
        let mut lowest = (EMPTY, 0);
        let mut left = self.occupied[set];
        while left != 0 {
            let class = left.trailing_zeros() as usize;
            left &= left - 1;
            let odds = self.odds.of(class);
            if odds < lowest.0 {
                lowest = (odds, list(set, class));
            }
        }
        self.lowest[set] = lowest;
    }

    fn add(&mut self, key: Key) {
        let (set, class) = if self.unfinished.is_some() {
            (self.geometry.layers(), self.odds.next_class(key))
        } else {
            (self.geometry.layer_of(key).get(), self.odds.class(key))
        };
        self.residents.push_front(list(set, class), key);
        self.occupied[set] |= 1 << class;
        let odds = self.odds.of(class);
        if odds < self.lowest[set].0 {
            self.lowest[set] = (odds, list(set, class));
        }
    }

    fn remove(&mut self, key: Key) {
        let Some(from) = self.residents.list_of(key) else {
            return;
        };
        self.residents.remove(key);
        if self.residents.len(from) == 0 {
            let set = from as usize / CLASSES;
            self.occupied[set] &= !(1 << (from as usize % CLASSES));
            if self.lowest[set].1 == from {
                self.find_lowest(set);
            }
        }
    }
}

fn list(set: usize, class: usize) -> u32 {
    u32::try_from(set * CLASSES + class).expect("fewer lists than keys a u32 counts")
}

impl Policy for ReuseOdds {
    fn begin_group(&mut self, layer: LayerIdx, group: &[Key]) {
        let (layer, top_k) = (layer.get(), self.geometry.top_k());
        let goes_on = |asked: usize| layer == self.layer && asked + group.len() <= top_k;
        let asked = match self.unfinished {
            Some(asked) if goes_on(asked) => asked,
            _ => {
                self.finish_turn();
                self.layer = layer;
                self.odds.start(layer);
                0
            }
        };
        let asked = asked + group.len();
        self.unfinished = Some(asked);
        // Many rows ask for more than one would: what is learned is the chance of being asked for by one.
        let weight = (top_k as f32 / group.len() as f32).min(1.0);
        for &key in group {
            self.odds.ask(key, weight);
        }
        if asked >= top_k {
            self.finish_turn();
        }
    }

    fn hit(&mut self, key: Key) {
        self.remove(key);
    }

    fn victim(&mut self, _incoming: Key, _members: &Members) -> Victim {
        let layers = self.geometry.layers();
        let open = self.unfinished.is_some();
        // Furthest first, so that ties go to the one needed last: what this turn asked for, this layer unless it is still to
        // be asked for more, the layer before it, and on backwards to the next one.
        let after = (self.layer + 1..layers)
            .rev()
            .map(|set| (set, set - self.layer));
        let before = (0..self.layer)
            .rev()
            .map(|set| (set, layers + set - self.layer));
        let here = (self.layer, if open { 0 } else { layers });
        let sets = [(layers, layers), here]
            .into_iter()
            .chain(before)
            .chain(after);
        let mut least = (EMPTY, 0);
        for (set, ahead) in sets {
            let (odds, list) = self.lowest[set];
            let worth = odds * self.worth[ahead];
            if worth < least.0 {
                least = (worth, list);
            }
        }
        match self.residents.back(least.1) {
            Some(key) if least.0 < EMPTY => Victim::Resident(key),
            _ => Victim::EarliestMember,
        }
    }

    fn evict(&mut self, key: Key) {
        self.remove(key);
    }

    fn insert(&mut self, _key: Key) {}

    fn settle(&mut self, key: Key) {
        self.add(key);
    }
}
