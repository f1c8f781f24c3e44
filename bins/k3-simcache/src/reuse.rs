//! Working sets: how many experts some tokens in a row need, and how many tokens pass before an expert is needed again.

use k3_shared::cache::{Geometry, Key};
use serde::Serialize;

use crate::replay::Phase;

/// Tokens in a row that are looked at, at most.
pub const MOST_TOKENS: usize = 16;

/// Experts that a number of consecutive tokens need together: what a step over so many rows reads at least.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Union {
    /// What the tokens were for.
    pub phase: Phase,
    /// How many tokens.
    pub tokens: usize,
    /// How many stretches of so many tokens there are; overlapping ones count.
    pub stretches: usize,
    /// Distinct experts of a stretch, of all layers, on average.
    pub mean_experts: f64,
    /// `mean_experts` by that of one token, by `tokens`: 1 if the tokens share nothing.
    pub per_token: f64,
}

/// How many tokens ago an expert was needed last.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gap {
    /// What the asking tokens were for.
    pub phase: Phase,
    /// So many tokens ago and no fewer than the entry before says; `None` is longer ago than any, or never.
    pub tokens: Option<usize>,
    /// Part of the requests of single tokens.
    pub share: f64,
}

/// Every token's requests, by how many tokens ago each expert was requested before.
#[derive(Debug)]
pub(crate) struct Reuse {
    /// `[keys]`: 1 + the last token that asked for each.
    last: Vec<u32>,
    /// `[tokens]`: requests by tokens since the one before, from 1; at [`MOST_TOKENS`] stand all that are longer ago, or new.
    by_gap: Vec<[u32; MOST_TOKENS + 1]>,
    /// `[tokens]`: what each counts as.
    phases: Vec<Option<Phase>>,
}

impl Reuse {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            last: vec![0; geometry.keys()],
            by_gap: Vec::new(),
            phases: Vec::new(),
        }
    }

    /// Token number `token` asks for `key`. Numbers ascend within a layer.
    pub(crate) fn ask(&mut self, token: u32, key: Key, phase: Option<Phase>) {
        let index = token as usize;
        if index >= self.by_gap.len() {
            self.by_gap.resize(index + 1, [0; MOST_TOKENS + 1]);
            self.phases.resize(index + 1, None);
        }
        self.phases[index] = phase;
        let before = std::mem::replace(&mut self.last[key.get()], token + 1);
        let gap = match before {
            0 => MOST_TOKENS,
            before => ((token + 1).saturating_sub(before) as usize).min(MOST_TOKENS),
        };
        self.by_gap[index][gap] += 1;
    }

    /// Unions of 1 to [`MOST_TOKENS`] tokens, for each phase that has so many in a row.
    pub(crate) fn unions(&self) -> Vec<Union> {
        Phase::ALL
            .into_iter()
            .flat_map(|phase| self.unions_of(phase))
            .collect()
    }

    fn unions_of(&self, phase: Phase) -> Vec<Union> {
        let mut unions: Vec<Union> = Vec::new();
        for tokens in 1..=MOST_TOKENS {
            let (mut stretches, mut experts) = (0usize, 0u64);
            let starts = self.phases.windows(tokens).zip(self.by_gap.windows(tokens));
            for (phases, by_gap) in starts {
                if phases.iter().all(|&p| p == Some(phase)) {
                    stretches += 1;
                    // A token adds what none of the stretch before it asked for.
                    let new = |(nth, gaps): (usize, &[u32; MOST_TOKENS + 1])| -> u64 {
                        gaps[nth + 1..].iter().map(|&n| u64::from(n)).sum()
                    };
                    experts += by_gap.iter().enumerate().map(new).sum::<u64>();
                }
            }
            if stretches == 0 {
                break;
            }
            let mean_experts = experts as f64 / stretches as f64;
            let one = unions.first().map_or(mean_experts, |one| one.mean_experts);
            unions.push(Union {
                phase,
                tokens,
                stretches,
                mean_experts,
                per_token: mean_experts / one / tokens as f64,
            });
        }
        unions
    }

    /// How long ago the experts of each phase's tokens were needed before.
    pub(crate) fn gaps(&self) -> Vec<Gap> {
        let mut gaps = Vec::new();
        for phase in Phase::ALL {
            let mut by_gap = [0u64; MOST_TOKENS + 1];
            for (_, token) in self
                .phases
                .iter()
                .zip(&self.by_gap)
                .filter(|(p, _)| **p == Some(phase))
            {
                by_gap
                    .iter_mut()
                    .zip(token)
                    .for_each(|(all, &n)| *all += u64::from(n));
            }
            let requests: u64 = by_gap.iter().sum();
            let mut from = 1;
            for upto in [1, 2, 4, 8, MOST_TOKENS - 1, MOST_TOKENS] {
                if requests > 0 {
                    let part: u64 = by_gap[from..=upto].iter().sum();
                    gaps.push(Gap {
                        phase,
                        tokens: (upto < MOST_TOKENS).then_some(upto),
                        share: part as f64 / requests as f64,
                    });
                }
                from = upto + 1;
            }
        }
        gaps
    }
}
