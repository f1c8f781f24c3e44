//! How a budget is spent: what a run cannot do without, then speed, by the model of cost.
//!
//! 1. The floor: one prompt row a step, four reads in flight, a 64 MiB ring, one token's experts of a layer. The context asked
//!    for is lowered only if even this does not fit.
//! 2. Prefill chunk, then reads in flight with a ring two tiles longer, then the ring, up to what was asked for.
//! 3. The rest is divided between trunk tiles, the head behind them, and expert slots, so that a decoded token is expected to take
//!    least time. A pinned byte saves a byte of reads a token; the bytes of a slot save at most as many, and only as far as the
//!    curve of hits says. So trunk and head come first, unless experts are read so much more slowly that a hit is worth more.
//!
//! A step begins only when the one before it is complete, and a division is compared with all that a smaller budget allows. So
//! more memory is never expected to take longer (but for policies that may hit less with more slots, as the curve says of them).

mod division;
mod order;

use k3_shared::ledger::{self, Choice, Model, TileSet};

use crate::{
    cli::PinOrder,
    cost::{Cost, CostModel, Depth},
    curve::{Curve, Expected},
};
use division::Split;
use order::{Cut, cuts, num_fixed, pin_order};

/// Fewest positions the context is lowered to: a short prompt and its answer.
const MIN_CONTEXT: usize = 256;
/// Fewest reads in flight the planner goes down to by itself.
const MIN_QUEUE_DEPTH: usize = 4;
/// Smallest ring the planner goes down to by itself.
const MIN_RING_BYTES: u64 = 64 << 20;

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Asks {
    /// Positions to hold.
    pub context: usize,
    /// Prompt rows of one step.
    pub prefill_chunk: usize,
    /// Compute threads.
    pub threads: usize,
    /// Read requests in flight.
    pub queue_depth: usize,
    /// Whether that depth was given by hand, and so is kept although a smaller one is as fast.
    pub depth_by_hand: bool,
    /// Bytes of the ring, at most.
    pub ring_bytes: u64,
    /// Whether experts are checked against digests.
    pub verify_experts: bool,
    /// Bytes of the trunk to pin, where the split is made by hand.
    pub pin_bytes: Option<u64>,
    /// Expert slots, where the split is made by hand.
    pub expert_slots: Option<usize>,
    /// Which tiles to pin first.
    pub pin_order: PinOrder,
}

/// How a budget was spent.
#[derive(Clone, Debug, PartialEq)]
pub struct Spent {
    /// The choices.
    pub choice: Choice,
    /// Policy and hits to expect.
    pub expected: Expected,
    /// What a decoded token costs.
    pub cost: Cost,
    /// Reads in flight it is counted with.
    pub depth: Depth,
}

/// What the planner may lower.
#[derive(Clone, Copy, Debug)]
struct Settings {
    context: usize,
    prefill_chunk: usize,
    queue_depth: usize,
    ring_bytes: u64,
}

/// Fewer expert slots were asked for than a run can do with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{asked} expert slots are too few: one token's experts of a layer and {depth} reads in flight need {least} (try --expert-slots {least}, or a lower --queue-depth)"
)]
pub struct TooFewSlots {
    asked: usize,
    least: usize,
    depth: usize,
}

/// Spends budgets on one model.
#[derive(Debug)]
pub struct Spender<'a> {
    model: Model<'a>,
    asks: Asks,
    curve: &'a Curve<'a>,
    cost: &'a CostModel,
    /// Reads in flight the planner goes through, ascending; the last is [`Asks::queue_depth`].
    depths: Vec<usize>,
    /// Tiles that may be pinned or not, in the order they are.
    order: Vec<usize>,
    /// Sums over the order's prefixes and suffixes.
    sums: Vec<Cut>,
    /// Tiles of the order that every plan pins.
    num_fixed: usize,
}

impl<'a> Spender<'a> {
    /// Prepare to spend on `model` what `asks` wants, with hits by `curve` and times by `cost`.
    ///
    /// # Errors
    /// If expert slots were asked for by hand, and too few.
    pub fn new(
        model: Model<'a>,
        mut asks: Asks,
        curve: &'a Curve<'a>,
        cost: &'a CostModel,
    ) -> Result<Self, TooFewSlots> {
        if let Some(slots) = asks.expert_slots {
            let slots = slots.min(model.num_experts());
            asks.expert_slots = Some(slots);
            let depth = asks.queue_depth.min(MIN_QUEUE_DEPTH);
            let least = model.min_expert_slots(depth);
            if slots < least {
                return Err(TooFewSlots {
                    asked: slots,
                    least,
                    depth,
                });
            }
            asks.queue_depth = largest(depth, asks.queue_depth, |depth| {
                model.min_expert_slots(depth) <= slots
            });
        }
        let order = pin_order(&model, asks.pin_order);
        let sums = cuts(&model, &order);
        let num_fixed = num_fixed(&sums, &asks);
        let mut spender = Self {
            model,
            asks,
            curve,
            cost,
            depths: Vec::new(),
            order,
            sums,
            num_fixed,
        };
        spender.depths = spender.worthwhile_depths();
        if let Some(&deepest) = spender.depths.last() {
            spender.asks.queue_depth = deepest;
        }
        Ok(spender)
    }

    /// The depths measured, or doublings, from the least to the one asked for, without those that would cost more than one before:
    /// a deeper queue takes slots with it, and a policy may do worse with them.
    fn worthwhile_depths(&self) -> Vec<usize> {
        let (least, asked) = (self.least(1).queue_depth, self.asks.queue_depth);
        let mut depths = self.cost.depths();
        if depths.is_empty() {
            depths = std::iter::successors(Some(least), |depth| depth.checked_mul(2)).collect();
        }
        depths.retain(|depth| (least + 1..asked).contains(depth));
        if asked > least {
            depths.push(asked);
        }
        let cost = |queue_depth| {
            let settings = Settings {
                queue_depth,
                ring_bytes: self.ring_for(queue_depth),
                ..self.asked()
            };
            self.split_cost(
                &self.cost.at(self.depth_in_flight(&settings)),
                self.num_fixed,
                self.slots(&settings),
            )
        };
        let mut kept = vec![least];
        let mut last = cost(least);
        for depth in depths {
            let next = cost(depth);
            let by_hand = self.asks.depth_by_hand && depth == asked;
            if by_hand || next.compare(&last).is_le() {
                kept.push(depth);
                last = next;
            }
        }
        kept
    }

    /// The ring for so many reads in flight: a tile each, one being multiplied and one just done with; as far as was asked for.
    fn ring_for(&self, queue_depth: usize) -> u64 {
        let tiles = (queue_depth as u64).saturating_add(2);
        let ring = tiles.saturating_mul(self.fixed_cut().largest);
        ring.max(MIN_RING_BYTES).min(self.asks.ring_bytes)
    }

    /// Reads in flight: of the trunk, as many as the ring has room for beside the tile in use.
    fn depth_in_flight(&self, settings: &Settings) -> Depth {
        let cut = self.fixed_cut();
        let slots = cut.ring_bytes(settings.ring_bytes).checked_div(cut.largest);
        let free = slots.map_or(usize::MAX, |slots| {
            usize::try_from(slots)
                .unwrap_or(usize::MAX)
                .saturating_sub(1)
        });
        Depth {
            trunk: settings.queue_depth.min(free).max(1),
            experts: settings.queue_depth,
        }
    }

    /// The model spent on.
    pub fn model(&self) -> &Model<'a> {
        &self.model
    }

    /// What was asked for, with expert slots and queue depth as far as the model can use them.
    pub fn asks(&self) -> &Asks {
        &self.asks
    }

    /// The smallest budget that works at all: the context lowered too. `None` if it is past 64 bits.
    pub fn smallest(&self) -> Option<u64> {
        self.total(&self.least(self.asks.context.min(MIN_CONTEXT)))
    }

    /// The smallest budget that works with the context asked for. `None` if it is past 64 bits.
    pub fn floor(&self) -> Option<u64> {
        self.total(&self.least(self.asks.context))
    }

    /// The smallest budget with the whole trunk and head resident, nothing else lowered; `None` if it is past 64 bits.
    pub fn all_resident(&self) -> Option<u64> {
        self.total_of(&self.choice(&self.asked(), self.order.len(), self.asked_slots()))
    }

    /// The choices for a budget; `None` if nothing fits.
    pub fn spend(&self, budget: u64) -> Option<Spent> {
        let settings = self.settings(budget)?;
        let asked = self.asked();
        let complete = settings.context == asked.context
            && settings.prefill_chunk == asked.prefill_chunk
            && settings.queue_depth == asked.queue_depth
            && self.fixed_cut().ring_bytes(settings.ring_bytes)
                == self.fixed_cut().ring_bytes(asked.ring_bytes);
        if complete {
            let split = self.best_split(budget, &asked)?;
            return Some(self.spent(&asked, &split));
        }
        let at = self.cost.at(self.depth_in_flight(&settings));
        let slots = self.slots(&settings);
        let split = Split {
            num_pinned: self.num_fixed,
            slots,
            cost: self.split_cost(&at, self.num_fixed, slots),
        };
        Some(self.spent(&settings, &split))
    }

    /// As [`Self::spend`] with so many expert slots, nothing else by hand: what another division would have cost.
    pub(crate) fn spend_with(&self, budget: u64, slots: usize) -> Option<Cost> {
        let settings = self.asked();
        let at = self.cost.at(self.depth_in_flight(&settings));
        let base = self.base(&settings)?;
        self.split(budget, &settings, &at, base, slots)
            .map(|split| split.cost)
    }

    /// The curve hits are expected by.
    pub(crate) fn curve(&self) -> &Curve<'a> {
        self.curve
    }

    /// The model of cost.
    pub(crate) fn cost(&self) -> &CostModel {
        self.cost
    }

    fn spent(&self, settings: &Settings, split: &Split) -> Spent {
        Spent {
            choice: self.choice(settings, split.num_pinned, split.slots),
            expected: self.curve.at(split.slots),
            cost: split.cost,
            depth: self.depth_in_flight(settings),
        }
    }

    fn asked(&self) -> Settings {
        Settings {
            context: self.asks.context,
            prefill_chunk: self.asks.prefill_chunk,
            queue_depth: self.asks.queue_depth,
            ring_bytes: self.asks.ring_bytes,
        }
    }

    fn least(&self, context: usize) -> Settings {
        Settings {
            context,
            prefill_chunk: 1,
            queue_depth: self.asks.queue_depth.min(MIN_QUEUE_DEPTH),
            ring_bytes: self.asks.ring_bytes.min(MIN_RING_BYTES),
        }
    }

    /// Steps 1 and 2.
    fn settings(&self, budget: u64) -> Option<Settings> {
        let fits = |settings: &Settings| self.total(settings).is_some_and(|total| total <= budget);
        let asked = self.asked();
        let mut settings = self.least(asked.context);
        if !fits(&settings) {
            let least = asked.context.min(MIN_CONTEXT);
            settings.context = least;
            if !fits(&settings) {
                return None;
            }
            settings.context = largest(least, asked.context, |context| {
                fits(&Settings {
                    context,
                    ..settings
                })
            });
            return Some(settings);
        }
        settings.prefill_chunk = largest(1, asked.prefill_chunk, |prefill_chunk| {
            fits(&Settings {
                prefill_chunk,
                ..settings
            })
        });
        if settings.prefill_chunk < asked.prefill_chunk {
            return Some(settings);
        }
        for &queue_depth in &self.depths {
            let deeper = Settings {
                queue_depth,
                ring_bytes: self.ring_for(queue_depth),
                ..settings
            };
            if !fits(&deeper) {
                return Some(settings);
            }
            settings = deeper;
        }
        let slot = self.fixed_cut().largest.max(1);
        let slots = |bytes: u64| usize::try_from(bytes / slot).unwrap_or(usize::MAX);
        let ring = |slots: usize| (slots as u64).saturating_mul(slot);
        let most = largest(
            slots(settings.ring_bytes),
            slots(asked.ring_bytes),
            |slots| {
                fits(&Settings {
                    ring_bytes: ring(slots),
                    ..settings
                })
            },
        );
        settings.ring_bytes = ring(most).max(settings.ring_bytes);
        Some(settings)
    }

    fn fixed_cut(&self) -> &Cut {
        &self.sums[self.num_fixed]
    }

    fn asked_slots(&self) -> usize {
        self.slots(&self.asked())
    }

    fn slots(&self, settings: &Settings) -> usize {
        self.asks
            .expert_slots
            .unwrap_or_else(|| self.model.min_expert_slots(settings.queue_depth))
    }

    fn choice(&self, settings: &Settings, num_pinned: usize, expert_slots: usize) -> Choice {
        let mut pinned: TileSet = self.model.always_pinned();
        for &tile in &self.order[..num_pinned] {
            pinned.insert(tile);
        }
        Choice {
            context: settings.context,
            prefill_chunk: settings.prefill_chunk,
            threads: self.asks.threads,
            queue_depth: settings.queue_depth,
            stream_buffer_bytes: self.sums[num_pinned].ring_bytes(settings.ring_bytes),
            expert_slots,
            pinned,
            verify_experts: self.asks.verify_experts,
        }
    }

    /// The total with the fewest tiles and slots, or those fixed by hand.
    fn total(&self, settings: &Settings) -> Option<u64> {
        self.total_of(&self.choice(settings, self.num_fixed, self.slots(settings)))
    }

    fn total_of(&self, choice: &Choice) -> Option<u64> {
        let lines = ledger::lines(&self.model, choice).ok()?;
        ledger::total_bytes(&lines).ok()
    }
}

/// The largest value in `least..=most` that fits, given that `least` does and that what fits is an initial stretch.
fn largest(least: usize, most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut good, mut bad) = (least, most.max(least));
    if fits(bad) {
        return bad;
    }
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    good
}

#[cfg(test)]
mod tests;
