//! How likely an expert is to be asked for when its layer's turn comes, learned by classes of what is known of it.

use super::super::{Geometry, Key};

/// Patterns of recent turns: four groups of turns, each with a request or without.
const PATTERNS: usize = 16;
/// Orders of magnitude of the count: 0, 1, 2-3, 4-7, ... 64 and more.
const MAGNITUDES: usize = 8;
/// What can be told apart of an expert's past.
pub(super) const CLASSES: usize = PATTERNS * MAGNITUDES;

/// Turns of a layer after which its counts are halved, so that they follow the text.
const HALVING: u32 = 64;
/// The bits of a pattern for the third turn ago and those before it: classes that differ in no other bit are one family.
const OLDER: usize = 0b1100;
/// Weight of the assumed odds, in experts seen: nothing beside the 1,472 requests of one token.
const ASSUMED: f32 = 20.0;
/// Weight of the family's odds in those of a class, in experts seen: a class is believed as far as it has been seen.
const FAMILY: f32 = 300.0;
/// What was learned fades by this factor a turn of any layer: half is left after 6,931, 75 tokens of 92 layers.
const FADING: f32 = 0.9999;

/// Bit 0 is the turn in progress, bit n the nth before it.
const TURNS: u16 = 0b1_1111_1111;

/// The odds of each class, and what every expert's class is made from.
#[derive(Debug)]
pub(super) struct Odds {
    experts: usize,
    /// `[keys]`: the turns of its layer in which the expert was asked for, as [`TURNS`] says.
    turns: Vec<u16>,
    /// `[keys]`: turns it was asked for in, halved now and then; not that in progress.
    counts: Vec<u8>,
    /// `[layers]`: turns that are over.
    passed: Vec<u32>,
    /// `[layers, CLASSES]`: how many experts of the layer are in the class.
    standing: Vec<u32>,
    /// `[CLASSES]`: experts that stood in the class when their layer's turn came, and those of them that were asked for.
    stood: [f32; CLASSES],
    asked: [f32; CLASSES],
    /// `[CLASSES]`: the odds as of the last turn.
    estimated: [f32; CLASSES],
    /// `[CLASSES]`: the odds before anything is learned.
    assumed: [f32; CLASSES],
}

fn class_of(turns: u16, count: u8) -> usize {
    let group = |turns_ago: u16, bit: usize| usize::from(turns & turns_ago != 0) << bit;
    let pattern = group(0b10, 0) | group(0b100, 1) | group(0b1_1000, 2) | group(0b1_1110_0000, 3);
    let magnitude = (u8::BITS - count.leading_zeros()) as usize;
    magnitude.min(MAGNITUDES - 1) * PATTERNS + pattern
}

/// Of two turns the later counts more, and each magnitude of the count a little.
fn assumed(class: usize) -> f32 {
    let (magnitude, pattern) = (class / PATTERNS, class % PATTERNS);
    let recent = [0.2, 0.1, 0.05, 0.025].into_iter().enumerate();
    let recent = recent.filter(|(bit, _)| pattern >> bit & 1 == 1);
    0.02 + 0.05 * magnitude as f32 + recent.map(|(_, odds)| odds).sum::<f32>()
}

impl Odds {
    pub(super) fn new(geometry: Geometry) -> Self {
        let (layers, experts, keys) = (geometry.layers(), geometry.experts(), geometry.keys());
        let mut standing = vec![0; layers * CLASSES];
        for layer in standing.chunks_exact_mut(CLASSES) {
            layer[0] = geometry.experts;
        }
        Self {
            experts,
            turns: vec![0; keys],
            counts: vec![0; keys],
            passed: vec![0; layers],
            standing,
            stood: [0.0; CLASSES],
            asked: [0.0; CLASSES],
            estimated: std::array::from_fn(assumed),
            assumed: std::array::from_fn(assumed),
        }
    }

    /// The odds of a class.
    pub(super) fn of(&self, class: usize) -> f32 {
        self.estimated[class]
    }

    /// The class that `key` stands in at its layer's next turn, or at the one in progress.
    pub(super) fn class(&self, key: Key) -> usize {
        class_of(self.turns[key.get()], self.counts[key.get()])
    }

    /// The class of `key` once the turn in progress is over.
    pub(super) fn next_class(&self, key: Key) -> usize {
        let turns = self.turns[key.get()];
        let count = self.counts[key.get()].saturating_add(u8::from(turns & 1 == 1));
        class_of(turns << 1 & TURNS, count)
    }

    /// A turn of `layer` begins.
    pub(super) fn start(&mut self, layer: usize) {
        let standing = &self.standing[layer * CLASSES..][..CLASSES];
        for ((stood, asked), &now) in self.stood.iter_mut().zip(&mut self.asked).zip(standing) {
            *stood = *stood * FADING + now as f32;
            *asked *= FADING;
        }
    }

    /// The turn in progress asks for `key`, which counts as `weight` requests.
    pub(super) fn ask(&mut self, key: Key, weight: f32) {
        self.asked[self.class(key)] += weight;
        self.turns[key.get()] |= 1;
    }

    /// The turn of `layer` is over; `now_in` is told of every expert that changed class or was asked for.
    pub(super) fn finish(&mut self, layer: usize, mut now_in: impl FnMut(Key, usize)) {
        self.passed[layer] += 1;
        let halved = u32::from(self.passed[layer].is_multiple_of(HALVING));
        let keys = layer * self.experts..(layer + 1) * self.experts;
        let first = u32::try_from(keys.start).expect("a u32 counts the keys");
        let standing = &mut self.standing[layer * CLASSES..][..CLASSES];
        let turns = self.turns[keys.clone()].iter_mut();
        for ((turns, count), key) in turns.zip(&mut self.counts[keys]).zip(first..) {
            if *turns == 0 && (halved == 0 || *count == 0) {
                continue;
            }
            let (before, asked) = (class_of(*turns, *count), *turns & 1 == 1);
            *count = count.saturating_add(u8::from(asked)) >> halved;
            *turns = *turns << 1 & TURNS;
            let class = class_of(*turns, *count);
            standing[before] -= 1;
            standing[class] += 1;
            if asked || class != before {
                now_in(Key(key), class);
            }
        }
        self.estimate();
    }

    fn estimate(&mut self) {
        let (mut stood, mut asked) = ([0.0; CLASSES], [0.0; CLASSES]);
        for class in 0..CLASSES {
            stood[class & !OLDER] += self.stood[class];
            asked[class & !OLDER] += self.asked[class];
        }
        for class in 0..CLASSES {
            let family = class & !OLDER;
            let odds = (asked[family] + ASSUMED * self.assumed[family]) / (stood[family] + ASSUMED);
            self.estimated[class] =
                (self.asked[class] + FAMILY * odds) / (self.stood[class] + FAMILY);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn geometry() -> Geometry {
        Geometry::new(2, 20, 4).unwrap()
    }

    #[test]
    fn a_past_has_four_groups_of_turns_and_a_magnitude() {
        // Bit 0 is the turn in progress, which tells nothing yet.
        for (turns, pattern) in [(0b1, 0), (0b10, 1), (0b100, 2), (0b1000, 4), (0b1_0000, 4)] {
            assert_eq!(class_of(turns, 0), pattern);
        }
        for turns in [0b10_0000, 0b1_0000_0000] {
            assert_eq!(class_of(turns, 0), 8);
        }
        for (count, magnitude) in [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 2),
            (4, 3),
            (63, 6),
            (64, 7),
            (255, 7),
        ] {
            assert_eq!(class_of(0, count), magnitude * PATTERNS);
        }
    }

    #[test]
    fn odds_become_the_part_that_is_asked_for() {
        let mut odds = Odds::new(geometry());
        // Experts 0 and 1 always, 2 to 5 every other turn.
        for turn in 0..4000u32 {
            odds.start(0);
            let sometimes = if turn % 2 == 0 { [2, 3] } else { [4, 5] };
            for key in [0, 1].into_iter().chain(sometimes) {
                odds.ask(Key(key), 1.0);
            }
            odds.finish(0, |_, _| {});
        }
        let of = |key| odds.of(odds.class(Key(key)));
        assert!(of(0) > 0.95, "{}", of(0));
        assert!(
            of(2) > 0.95 && of(4) < 0.05,
            "asked for in turn: {}, {}",
            of(2),
            of(4)
        );
        assert!(of(9) < 0.01, "{}", of(9));
    }

    proptest! {
        #[test]
        fn every_expert_of_a_layer_stands_in_its_class(
            turns in prop::collection::vec((0u32..2, prop::collection::btree_set(0u32..20, 1..8)), 1..200)
        ) {
            let mut odds = Odds::new(geometry());
            for (layer, experts) in turns {
                let index = layer as usize;
                odds.start(index);
                for expert in experts {
                    odds.ask(Key(20 * layer + expert), 1.0);
                }
                odds.finish(index, |_, _| {});
                let mut standing = vec![0; CLASSES];
                for key in 20 * layer..20 * (layer + 1) {
                    standing[odds.class(Key(key))] += 1;
                }
                prop_assert_eq!(&odds.standing[index * CLASSES..][..CLASSES], &standing[..]);
                prop_assert!(odds.estimated.iter().all(|odds| (0.0..=1.0).contains(odds)));
            }
        }

        #[test]
        fn the_next_class_is_the_class_after_the_turn(turns in prop::collection::vec(0u32..8, 1..30)) {
            let mut odds = Odds::new(geometry());
            for expert in turns {
                odds.start(0);
                odds.ask(Key(expert), 1.0);
                let next: Vec<usize> = (0..20).map(|key| odds.next_class(Key(key))).collect();
                odds.finish(0, |_, _| {});
                prop_assert_eq!(next, (0..20).map(|key| odds.class(Key(key))).collect::<Vec<_>>());
            }
        }
    }
}
