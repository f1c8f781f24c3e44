//! How a budget is spent: what a run cannot do without, then speed, in a fixed order.
//!
//! 1. The floor: one prompt row a step, four reads in flight, a 64 MiB ring, one token's experts of a layer. The context asked
//!    for is lowered only if even this does not fit.
//! 2. Prefill chunk, queue depth and ring, one after the other, up to what was asked for.
//! 3. Trunk tiles, then the head: each pinned byte saves exactly one byte of reads a token.
//! 4. Once all of that is resident, expert slots, at most as many as there are experts.
//!
//! A step begins only when the one before it is complete, and within step 3 a larger budget pins a superset. So more memory
//! never streams more.

use k3_shared::{
    ledger::{self, Choice, MIN_RING_SLOTS, Model, TileSet},
    tiles::TileClass,
};

use crate::cli::PinOrder;

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
    /// Tiles that may be pinned or not, in the order they are.
    order: Vec<usize>,
    /// Sums over the order's prefixes and suffixes.
    sums: Vec<Cut>,
    /// Tiles of the order that every plan pins.
    num_fixed: usize,
}

/// The order cut in two: what is pinned and what streams.
#[derive(Clone, Copy, Debug, Default)]
struct Cut {
    /// Stored bytes before the cut.
    pinned_bytes: u64,
    /// Stored bytes after it.
    streamed_bytes: u64,
    /// The largest tile after it.
    largest: u64,
    /// Tiles after it.
    num_streamed: usize,
}

impl Cut {
    /// Bytes of a ring of at most `asked` bytes: whole slots, at least two, never more than there is to hold.
    fn ring_bytes(&self, asked: u64) -> u64 {
        let fit = |bytes: u64| bytes.checked_div(self.largest).unwrap_or(0);
        let slots = fit(asked)
            .min(fit(self.streamed_bytes))
            .max(MIN_RING_SLOTS as u64)
            .min(self.num_streamed as u64);
        slots.saturating_mul(self.largest)
    }
}

impl<'a> Spender<'a> {
    /// Prepare to spend on `model` what `asks` wants.
    ///
    /// # Errors
    /// If expert slots were asked for by hand, and too few.
    pub fn new(model: Model<'a>, mut asks: Asks) -> Result<Self, TooFewSlots> {
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
        Ok(Self {
            model,
            asks,
            order,
            sums,
            num_fixed,
        })
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
    pub fn spend(&self, budget: u64) -> Option<Choice> {
        let mut settings = self.settings(budget)?;
        let asked = self.asked();
        let complete = settings.context == asked.context
            && settings.prefill_chunk == asked.prefill_chunk
            && settings.queue_depth == asked.queue_depth
            && self.fixed_cut().ring_bytes(settings.ring_bytes)
                == self.fixed_cut().ring_bytes(asked.ring_bytes);
        let mut num_pinned = self.num_fixed;
        let mut slots = self.slots(&settings);
        if complete {
            settings = asked;
            if self.asks.pin_bytes.is_none() {
                num_pinned = self.most_pinned(budget, &settings);
            }
            let resident = num_pinned == self.order.len() || self.asks.pin_bytes.is_some();
            if resident && self.asks.expert_slots.is_none() {
                slots = self.most_slots(budget, &settings, num_pinned, slots);
            }
        }
        Some(self.choice(&settings, num_pinned, slots))
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
        settings.queue_depth = largest(settings.queue_depth, asked.queue_depth, |queue_depth| {
            fits(&Settings {
                queue_depth,
                ..settings
            })
        });
        if settings.queue_depth == asked.queue_depth {
            let slot = self.fixed_cut().largest.max(1);
            let slots = |bytes: u64| usize::try_from(bytes / slot).unwrap_or(usize::MAX);
            let least = slots(settings.ring_bytes);
            let ring = |slots: usize| (slots as u64).saturating_mul(slot);
            let most = largest(least, slots(asked.ring_bytes), |slots| {
                fits(&Settings {
                    ring_bytes: ring(slots),
                    ..settings
                })
            });
            settings.ring_bytes = ring(most).max(settings.ring_bytes);
        }
        Some(settings)
    }

    /// Step 3: the longest prefix of the order that fits. Pinning the last of what streams frees the ring, so the total is no
    /// monotone function of the prefix, and all are tried.
    fn most_pinned(&self, budget: u64, settings: &Settings) -> usize {
        let slots = self.slots(settings);
        let nothing = &self.sums[0];
        let Some(base) = self
            .total_of(&self.choice(settings, 0, slots))
            .map(|total| total - nothing.ring_bytes(settings.ring_bytes))
        else {
            return 0;
        };
        let fits = |cut: &Cut| {
            base.checked_add(cut.pinned_bytes)
                .and_then(|sum| sum.checked_add(cut.ring_bytes(settings.ring_bytes)))
                .is_some_and(|total| total <= budget)
        };
        self.sums.iter().rposition(fits).unwrap_or(0)
    }

    /// Step 4: what is left, in slots.
    fn most_slots(
        &self,
        budget: u64,
        settings: &Settings,
        num_pinned: usize,
        least: usize,
    ) -> usize {
        let spent = self.total_of(&self.choice(settings, num_pinned, least));
        let left = budget.saturating_sub(spent.unwrap_or(budget));
        let more = left / self.model.expert_slot_bytes().max(1);
        usize::try_from(more)
            .unwrap_or(usize::MAX)
            .saturating_add(least)
            .min(self.model.num_experts())
            .max(least)
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

/// Tiles that every plan pins: by hand, the longest prefix within the size given; else the prefix that takes least memory with
/// the smallest ring, which is none unless a ring would take more than all there is to stream.
fn num_fixed(sums: &[Cut], asks: &Asks) -> usize {
    let ring = asks.ring_bytes.min(MIN_RING_BYTES);
    let found = match asks.pin_bytes {
        Some(bytes) => sums.iter().rposition(|cut| cut.pinned_bytes <= bytes),
        None => (0..sums.len()).min_by_key(|&at| {
            let cut = &sums[at];
            cut.pinned_bytes.saturating_add(cut.ring_bytes(ring))
        }),
    };
    found.unwrap_or(0)
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

/// The tiles that may stream, in the order they are pinned: the layers' first, the head's last.
fn pin_order(model: &Model<'_>, order: PinOrder) -> Vec<usize> {
    let of_class = |class: TileClass| {
        let tiles = model.tiles.iter().enumerate();
        tiles
            .filter(move |(_, tile)| tile.class() == class)
            .map(|(at, _)| at)
    };
    let mut tiles: Vec<usize> = of_class(TileClass::Trunk).collect();
    if order == PinOrder::Spread {
        tiles = spread(&tiles);
    }
    tiles.extend(of_class(TileClass::Head));
    tiles
}

/// Tiles in an order each prefix of which is spread evenly over the sequence: by bit-reversed place.
fn spread(tiles: &[usize]) -> Vec<usize> {
    let bits = tiles.len().next_power_of_two().trailing_zeros();
    if bits == 0 {
        return tiles.to_vec();
    }
    (0..1usize << bits)
        .filter_map(|place| {
            tiles
                .get(place.reverse_bits() >> (usize::BITS - bits))
                .copied()
        })
        .collect()
}

/// All cuts of the order: element `k` has the first `k` tiles pinned.
fn cuts(model: &Model<'_>, order: &[usize]) -> Vec<Cut> {
    let sizes: Vec<u64> = order
        .iter()
        .map(|&tile| model.tiles[tile].stored_bytes())
        .collect();
    let mut cuts = vec![Cut::default(); sizes.len() + 1];
    for (at, size) in sizes.iter().enumerate() {
        cuts[at + 1].pinned_bytes = cuts[at].pinned_bytes.saturating_add(*size);
    }
    for (at, size) in sizes.iter().enumerate().rev() {
        let after = cuts[at + 1];
        let cut = &mut cuts[at];
        cut.streamed_bytes = after.streamed_bytes.saturating_add(*size);
        cut.largest = after.largest.max(*size);
        cut.num_streamed = after.num_streamed + 1;
    }
    cuts
}

#[cfg(test)]
mod tests;
