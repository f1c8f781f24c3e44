//! Traces of stated statistics, to try policies on requests that none of them was fitted to.

use std::io::Write;

use k3_shared::{
    formats::trace::{Mode, TraceError, TraceHeader, TraceRecord, TraceRow, TraceWriter},
    ids::{ExpertIdx, LayerIdx},
};

/// How a trace's requests are distributed.
///
/// Each expert of a selection repeats one of the same layer, `window` tokens back at most, with probability `repeat`; else it is
/// drawn by popularity: the expert of rank r (from 1) with a probability that falls as r to the power `-zipf`. Who has which rank
/// is drawn for each layer, and changes as the text goes on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    /// Layers with routed experts; they follow one dense layer.
    pub layers: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts a row selects in a layer.
    pub top_k: u32,
    /// Rows of the prompt, which is one step.
    pub prompt: u32,
    /// Decoded rows after it, a step each.
    pub decoded: u32,
    /// How uneven popularity is: 0 is uniform.
    pub zipf: f64,
    /// Probability that a choice repeats a recent one.
    pub repeat: f64,
    /// Tokens back that choices repeat, at least 1.
    pub window: u32,
    /// Pairs of experts that change ranks in each layer after each token.
    pub drift: f64,
    /// Chooses everything that is drawn.
    pub seed: u64,
}

impl Statistics {
    /// The released model's shape (specification 1), 8 rows of prompt, 64 decoded; uniform, without repeats or drift.
    pub const RELEASED: Self = Self {
        layers: 92,
        experts: 896,
        top_k: 16,
        prompt: 8,
        decoded: 64,
        zipf: 0.0,
        repeat: 0.0,
        window: 1,
        drift: 0.0,
        seed: 1,
    };

    /// Popularity from flat to steep, repeats from none to half, of one to eight tokens, with and without drift.
    pub const SAMPLES: [Self; 8] = [
        Self::sample(0.0, 0.0, 1, 0.0),
        Self::sample(0.3, 0.4, 2, 0.0),
        Self::sample(0.6, 0.4, 4, 0.0),
        Self::sample(0.7, 0.5, 8, 0.5),
        Self::sample(0.8, 0.0, 1, 0.0),
        Self::sample(0.8, 0.3, 3, 2.0),
        Self::sample(1.0, 0.4, 1, 0.0),
        Self::sample(1.2, 0.2, 2, 0.5),
    ];

    const fn sample(zipf: f64, repeat: f64, window: u32, drift: f64) -> Self {
        Self {
            zipf,
            repeat,
            window,
            drift,
            ..Self::RELEASED
        }
    }

    /// Write such a trace; the same numbers give the same bytes on every machine.
    ///
    /// # Errors
    /// If the shape is no mixture of experts, or `to` fails.
    pub fn write<W: Write>(&self, to: W) -> Result<W, TraceError> {
        let header = TraceHeader {
            identity: format!("generated: {self:?}"),
            layers: self.layers + 1,
            experts: self.experts,
            top_k: self.top_k,
            expert_bytes: crate::RELEASED_EXPERT_BYTES,
        };
        let mut writer = TraceWriter::new(to, header)?;
        let mut generator = Generator::new(self);
        let mut position = 0;
        for step in 0..=u64::from(self.decoded) {
            let rows = if step == 0 { self.prompt } else { 1 };
            let tokens: Vec<Vec<u32>> = (0..rows).map(|_| generator.token()).collect();
            for layer in (0..self.layers).filter(|_| rows > 0) {
                let start = (layer * self.top_k) as usize;
                let selections = tokens.iter();
                let selections =
                    selections.flat_map(|token| &token[start..][..self.top_k as usize]);
                let rows = position..position + rows;
                writer.write(&TraceRecord {
                    step,
                    mode: if step == 0 {
                        Mode::Prefill
                    } else {
                        Mode::Decode
                    },
                    layer: LayerIdx(layer + 1),
                    rows: rows
                        .map(|position| TraceRow {
                            sequence: 0,
                            position,
                        })
                        .collect(),
                    experts: selections.map(|&expert| ExpertIdx(expert)).collect(),
                })?;
            }
            position += rows;
        }
        writer.finish()
    }
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In 0..1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// In `0..limit`, with a bias that no one sees below 2^32.
    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).unwrap_or(0)
    }
}

struct Generator<'a> {
    statistics: &'a Statistics,
    random: Random,
    /// `[experts]`: sums of weights by rank.
    weights: Vec<f64>,
    /// `[layers, experts]`: who has which rank.
    ranks: Vec<u32>,
    /// The last tokens, the newest last: `[layers, top_k]` each.
    recent: std::collections::VecDeque<Vec<u32>>,
}

impl<'a> Generator<'a> {
    fn new(statistics: &'a Statistics) -> Self {
        let mut random = Random(statistics.seed);
        let mut sum = 0.0;
        let weigh = |rank: u32| {
            // Not the platform's `pow`, so that a seed gives the same trace everywhere.
            sum += libm::pow(f64::from(rank), -statistics.zipf);
            sum
        };
        let weights = (1..=statistics.experts).map(weigh).collect();
        let mut ranks = Vec::new();
        for _ in 0..statistics.layers {
            let mut layer: Vec<u32> = (0..statistics.experts).collect();
            for last in (1..layer.len()).rev() {
                layer.swap(last, random.below(last + 1));
            }
            ranks.extend(layer);
        }
        Self {
            statistics,
            random,
            weights,
            ranks,
            recent: std::collections::VecDeque::new(),
        }
    }

    /// `[layers, top_k]`: the next token's experts.
    fn token(&mut self) -> Vec<u32> {
        let top_k = self.statistics.top_k as usize;
        let mut token = Vec::with_capacity(self.statistics.layers as usize * top_k);
        for layer in 0..self.statistics.layers as usize {
            self.drift(layer);
            let start = token.len();
            while token.len() < start + top_k {
                let expert = self.choice(layer, start);
                if !token[start..].contains(&expert) {
                    token.push(expert);
                }
            }
        }
        self.recent.push_back(token.clone());
        if self.recent.len() > self.statistics.window as usize {
            self.recent.pop_front();
        }
        token
    }

    fn choice(&mut self, layer: usize, start: usize) -> u32 {
        if !self.recent.is_empty() && self.random.unit() < self.statistics.repeat {
            let token = self.random.below(self.recent.len());
            let place = start + self.random.below(self.statistics.top_k as usize);
            return self.recent[token][place];
        }
        let all = self.weights.last().copied().unwrap_or(0.0);
        let drawn = self.random.unit() * all;
        let rank = self.weights.partition_point(|&sum| sum <= drawn);
        let experts = self.statistics.experts as usize;
        self.ranks[layer * experts + rank.min(experts - 1)]
    }

    fn drift(&mut self, layer: usize) {
        let experts = self.statistics.experts as usize;
        let mut swaps = self.statistics.drift;
        while swaps > 0.0 && self.random.unit() < swaps {
            let (one, other) = (self.random.below(experts), self.random.below(experts));
            self.ranks
                .swap(layer * experts + one, layer * experts + other);
            swaps -= 1.0;
        }
    }
}
