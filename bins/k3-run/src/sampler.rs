//! From logits to a token, and to the score of a known token.
//!
//! Both are plain sequential f64 arithmetic over logits in ascending id order with the exponential of `libm`, so that a seed
//! gives the same token on every machine, and the way a head is cut into tiles gives the same score. Source: specification 8.

use std::cmp::Ordering;

/// Why logits gave no token or score.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// The temperature is not a number of zero or more.
    #[error("temperature {0} is not a finite number of zero or more; use --temperature 1")]
    Temperature(f64),
    /// The probability mass to keep is not one.
    #[error("top-p {0} is not between 0 and 1; use --top-p 1")]
    TopP(f64),
    /// The generator would stand still.
    #[error("a generator state of zero never comes from a seed; start again with --seed")]
    ZeroState,
    /// A logit is infinite or not a number.
    #[error(
        "the logit of token {id} is {logit}; the weights or the arithmetic are damaged (check: k3-run --verify always)"
    )]
    NotFinite {
        /// The token.
        id: usize,
        /// Its logit.
        logit: f32,
    },
    /// There are no logits.
    #[error("no logits to choose from")]
    Empty,
    /// A tile did not begin where the one before it ended.
    #[error("logits from token {found} came where token {expected} was due")]
    OutOfOrder {
        /// First id due.
        expected: usize,
        /// First id that came.
        found: usize,
    },
    /// The token to be scored has no logit.
    #[error("token {id} is to be scored, but there are only {seen} logits")]
    NoTarget {
        /// The token.
        id: u32,
        /// Logits seen.
        seen: usize,
    },
}

/// Chooses tokens by temperature and top-p with a seeded generator.
#[derive(Clone, Debug)]
pub struct Sampler {
    temperature: f64,
    top_p: f64,
    state: u64,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    probability: f64,
    id: u32,
}

impl Candidate {
    /// Order of choice: more probable first, of equals the lower id.
    fn before(&self, other: &Self) -> Ordering {
        other
            .probability
            .total_cmp(&self.probability)
            .then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler whose generator is seeded by `seed`; temperature 0 always takes the highest logit.
    ///
    /// # Errors
    /// If the temperature is negative or not finite, or `top_p` is not in 0..=1.
    pub fn new(temperature: f64, top_p: f64, seed: u64) -> Result<Self, SamplerError> {
        if !temperature.is_finite() || temperature < 0.0 {
            return Err(SamplerError::Temperature(temperature));
        }
        if !(0.0..=1.0).contains(&top_p) {
            return Err(SamplerError::TopP(top_p));
        }
        Ok(Self {
            temperature,
            top_p,
            // One seed of the 2^64 mixes to the state at which xorshift stands still.
            state: splitmix64(seed).max(1),
            candidates: Vec::new(),
        })
    }

    /// The generator's state, to be saved with a sequence; never zero.
    pub fn state(&self) -> u64 {
        self.state
    }

    /// Go on from a state that [`Sampler::state`] gave.
    ///
    /// # Errors
    /// If it is zero.
    pub fn set_state(&mut self, state: u64) -> Result<(), SamplerError> {
        if state == 0 {
            return Err(SamplerError::ZeroState);
        }
        self.state = state;
        Ok(())
    }

    /// Choose a token; `logits[id]` is the logit of token `id`.
    ///
    /// Temperature 0: the highest logit, of equals the lowest id; the generator is not advanced. Otherwise one draw: f64 softmax
    /// of (logit - highest) / temperature, tokens by falling probability (of equals the lower id first), the shortest prefix
    /// whose sum reaches `top_p` and at least one token, renormalised; the first token whose cumulative probability exceeds the
    /// draw. Source: specification 8.
    ///
    /// # Errors
    /// If there are no logits, or one is infinite or not a number.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        check_finite(0, logits)?;
        let (best, highest) = argmax(logits).ok_or(SamplerError::Empty)?;
        if self.temperature == 0.0 {
            return Ok(best);
        }
        self.fill(logits, highest);
        let kept = self.sort_prefix();
        let kept = self.candidates.get(..kept).unwrap_or_default();
        let total: f64 = kept.iter().map(|c| c.probability).sum();
        let draw = uniform(&mut self.state);
        let mut cumulative = 0.0;
        for candidate in kept {
            cumulative += candidate.probability / total;
            if cumulative > draw {
                return Ok(candidate.id);
            }
        }
        // Rounding can leave the sum a little below a draw near one.
        Ok(kept.last().map_or(best, |c| c.id))
    }

    fn fill(&mut self, logits: &[f32], highest: f32) {
        let highest = f64::from(highest);
        self.candidates.clear();
        self.candidates
            .extend((0u32..).zip(logits).map(|(id, &logit)| Candidate {
                // The difference first: a quotient by a tiny temperature could overflow, this one is at most zero.
                probability: libm::exp((f64::from(logit) - highest) / self.temperature),
                id,
            }));
        let sum: f64 = self.candidates.iter().map(|c| c.probability).sum();
        for candidate in &mut self.candidates {
            candidate.probability /= sum;
        }
    }

    /// Bring the candidates that are kept to the front in order; how many. Sorts no more of them than needed, which for usual
    /// logits is a few hundred of 163,840.
    fn sort_prefix(&mut self) -> usize {
        let len = self.candidates.len();
        let mut sorted = FIRST_SORTED.min(len);
        loop {
            if sorted < len {
                self.candidates
                    .select_nth_unstable_by(sorted, Candidate::before);
            }
            let front = self.candidates.get_mut(..sorted).unwrap_or_default();
            front.sort_unstable_by(Candidate::before);
            let mut cumulative = 0.0;
            let enough = front.iter().position(|candidate| {
                cumulative += candidate.probability;
                cumulative >= self.top_p
            });
            match enough {
                Some(last) => return last + 1,
                None if sorted == len => return len,
                None => sorted = sorted.saturating_mul(8).min(len),
            }
        }
    }
}

/// Candidates sorted before looking whether they are enough.
const FIRST_SORTED: usize = 256;

fn check_finite(first_id: usize, logits: &[f32]) -> Result<(), SamplerError> {
    match logits.iter().position(|logit| !logit.is_finite()) {
        Some(at) => Err(SamplerError::NotFinite {
            id: first_id + at,
            logit: logits[at],
        }),
        None => Ok(()),
    }
}

/// The highest logit and its lowest id; none of no logits.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &logit) in (0u32..).zip(logits) {
        if best.is_none_or(|(_, highest)| logit > highest) {
            best = Some((id, logit));
        }
    }
    best
}

/// One step of splitmix64 from `seed`, so that near seeds give unrelated states.
fn splitmix64(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Advance an xorshift64* generator.
fn xorshift64star(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

/// A draw from [0, 1): the upper 53 bits, so that every value is exact.
fn uniform(state: &mut u64) -> f64 {
    (xorshift64star(state) >> 11) as f64 / (1u64 << 53) as f64
}

/// How a known token stands among the logits of its position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// The token that was scored.
    pub id: u32,
    /// The token with the highest logit, of equals the lowest id.
    pub argmax: u32,
    /// Logit of `id`.
    pub logit: f32,
    /// Natural logarithm of the probability of `id`.
    pub logprob: f64,
    /// Tokens that come before `id`: with a higher logit, or an equal one and a lower id. Zero if `id` is the argmax.
    pub rank: usize,
}

/// Reduces the logits of one position, tile by tile, to the [`Score`] of one token.
///
/// Log-sum-exp and argmax need three numbers. The exact rank among tokens whose logits came before the target's own cannot be
/// had from less than those logits, so they are kept until the target's tile is here and then let go: 4 bytes for every id
/// below the target's (at most 4 x `id` bytes, nothing after the target). Vocabularies give frequent tokens low ids, so over a
/// text this is far below a row of logits a token; a caller that must bound it scores fewer rows at a time.
#[derive(Clone, Debug)]
pub struct ScoreReducer {
    target: u32,
    next_id: usize,
    best: Option<(u32, f32)>,
    /// Sum of exp(logit - highest).
    sum: f64,
    /// The target's logit, and how many tokens seen come before it.
    found: Option<(f32, usize)>,
    /// Logits below the target's id, while the target's is not known.
    earlier: Vec<f32>,
    error: Option<SamplerError>,
}

impl ScoreReducer {
    /// Score token `target`.
    pub fn new(target: u32) -> Self {
        Self {
            target,
            next_id: 0,
            best: None,
            sum: 0.0,
            found: None,
            earlier: Vec::new(),
            error: None,
        }
    }

    /// Take the logits of tokens `first_id..first_id + logits.len()`; tiles come in ascending order without gaps.
    ///
    /// What is wrong with them is told by [`ScoreReducer::finish`].
    pub fn push(&mut self, first_id: usize, logits: &[f32]) {
        if self.error.is_some() {
            return;
        }
        if first_id != self.next_id {
            let expected = self.next_id;
            self.error = Some(SamplerError::OutOfOrder {
                expected,
                found: first_id,
            });
            return;
        }
        if let Err(error) = check_finite(first_id, logits) {
            self.error = Some(error);
            return;
        }
        self.next_id += logits.len();
        self.count_rank(first_id, logits);
        for (id, &logit) in (first_id..).zip(logits) {
            self.add(id, logit);
        }
    }

    fn count_rank(&mut self, first_id: usize, logits: &[f32]) {
        if let Some((target, rank)) = &mut self.found {
            *rank += logits.iter().filter(|&&logit| logit > *target).count();
            return;
        }
        let at = (self.target as usize).checked_sub(first_id);
        let Some((at, &target)) = at.and_then(|at| Some((at, logits.get(at)?))) else {
            self.earlier.extend_from_slice(logits);
            return;
        };
        let (before, after) = logits.split_at(at);
        let earlier = std::mem::take(&mut self.earlier);
        let lower_ids = earlier
            .iter()
            .chain(before)
            .filter(|&&logit| logit >= target);
        let higher_ids = after.iter().filter(|&&logit| logit > target);
        self.found = Some((target, lower_ids.count() + higher_ids.count()));
    }

    fn add(&mut self, id: usize, logit: f32) {
        match self.best {
            Some((_, highest)) if logit <= highest => {
                self.sum += libm::exp(f64::from(logit) - f64::from(highest));
            }
            Some((_, highest)) => {
                self.sum = self.sum * libm::exp(f64::from(highest) - f64::from(logit)) + 1.0;
                self.best = u32::try_from(id).ok().map(|id| (id, logit));
            }
            None => {
                self.sum = 1.0;
                self.best = u32::try_from(id).ok().map(|id| (id, logit));
            }
        }
    }

    /// The score, after the last tile.
    ///
    /// # Errors
    /// If a logit was infinite or not a number, a tile was missing or out of order, or the target has no logit.
    pub fn finish(self) -> Result<Score, SamplerError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let (argmax, highest) = self.best.ok_or(SamplerError::Empty)?;
        let (logit, rank) = self.found.ok_or(SamplerError::NoTarget {
            id: self.target,
            seen: self.next_id,
        })?;
        let logprob = f64::from(logit) - f64::from(highest) - libm::log(self.sum);
        Ok(Score {
            id: self.target,
            argmax,
            logit,
            logprob,
            rank,
        })
    }
}

#[cfg(test)]
mod tests;
