//! Dividing what is left between trunk tiles and expert slots.

use std::{cmp::Ordering, collections::BinaryHeap};

use super::{Settings, Spender, order::Cut};
use crate::cost::{Cost, CostAt, Reads};

/// One division of what is left between trunk and slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    pub(super) num_pinned: usize,
    pub(super) slots: usize,
    pub(super) cost: Cost,
}

/// Two sizes, and the least any division between them can cost.
#[derive(Clone, Copy, Debug)]
struct Gap {
    low: Split,
    high: Split,
    bound: Cost,
}

impl Ord for Gap {
    /// The lowest bound is the greatest: a heap gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        let bounds = other.bound.compare(&self.bound);
        bounds.then(other.low.slots.cmp(&self.low.slots))
    }
}

impl PartialOrd for Gap {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Gap {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Gap {}

/// What is divided.
struct Division<'s, 'a> {
    spender: &'s Spender<'a>,
    budget: u64,
    settings: &'s Settings,
    at: CostAt,
    /// Everything but the trunk, its ring, and slots above the fewest.
    base: u64,
    /// Fewest slots.
    least: usize,
}

impl Division<'_, '_> {
    fn with(&self, slots: usize) -> Option<Split> {
        let Self {
            budget,
            settings,
            at,
            base,
            ..
        } = self;
        self.spender.split(*budget, settings, at, *base, slots)
    }

    /// The sizes of the curve's series that fit, with the fewest slots and the most, ascending; all sizes where they are few: with
    /// some policies a slot more can cost hits, which in short traces shows.
    fn ends(&self, first: Split) -> Vec<Split> {
        let most = self.most_slots();
        let curve = self.spender.curve;
        let above = self.least + 1..=most;
        let sizes: Vec<usize> = if most - self.least <= curve.tries() {
            above.collect()
        } else {
            let between = |size: &usize| above.contains(size) && *size < most;
            let series = curve.series().iter().copied().filter(between);
            series.chain([most]).collect()
        };
        let more = sizes.into_iter().filter_map(|slots| self.with(slots));
        std::iter::once(first).chain(more).collect()
    }

    /// The least cost of these and of what lies between them.
    fn search(&self, ends: &[Split]) -> Option<Split> {
        let mut best = *ends
            .iter()
            .min_by(|a, b| a.cost.compare(&b.cost).then(a.slots.cmp(&b.slots)))?;
        let gap = |low: &Split, high: &Split| Gap {
            low: *low,
            high: *high,
            bound: self
                .spender
                .split_cost(&self.at, low.num_pinned, high.slots),
        };
        let pairs = ends.iter().zip(ends.iter().skip(1));
        let mut gaps: BinaryHeap<Gap> = pairs.map(|(low, high)| gap(low, high)).collect();
        for _ in 0..self.spender.curve.tries() {
            let Some(lowest) = gaps.pop() else {
                break;
            };
            if lowest.bound.compare(&best.cost).is_ge() {
                break;
            }
            let middle = usize::midpoint(lowest.low.slots, lowest.high.slots);
            if middle == lowest.low.slots {
                continue;
            }
            if let Some(split) = self.with(middle) {
                if split.cost.compare(&best.cost).is_lt() {
                    best = split;
                }
                gaps.push(gap(&lowest.low, &split));
                gaps.push(gap(&split, &lowest.high));
            }
        }
        Some(best)
    }

    /// The same division with what is left over in slots, unless that costs more.
    fn filled_up(&self, split: Split) -> Option<Split> {
        let spender = self.spender;
        let held = spender.sums[split.num_pinned].held(self.settings.ring_bytes);
        let spent = self
            .base
            .checked_add(held)?
            .checked_add(spender.slot_bytes(split.slots - self.least)?)?;
        let more = spender.slots_in(self.budget.saturating_sub(spent));
        let slots = split.slots.saturating_add(more);
        let full = self.with(slots.min(spender.model.num_experts()))?;
        full.cost.compare(&split.cost).is_le().then_some(full)
    }

    /// The most slots that fit with as little of the trunk held as can be.
    fn most_slots(&self) -> usize {
        let spender = self.spender;
        let ring = self.settings.ring_bytes;
        let held = match spender.asks.pin_bytes {
            Some(_) => Some(spender.fixed_cut().held(ring)),
            None => spender.sums.iter().map(|cut| cut.held(ring)).min(),
        };
        let spent = self.base.saturating_add(held.unwrap_or(0));
        let more = spender.slots_in(self.budget.saturating_sub(spent));
        let all = spender.model.num_experts().max(self.least);
        self.least.saturating_add(more).min(all)
    }
}

impl Spender<'_> {
    /// Step 3: the division that costs least; of equal ones, that with fewest slots, filled up.
    ///
    /// Branch and bound over the number of slots: between two sizes no division costs less than the tiles pinned beside the smaller
    /// with the hits of the larger would. The gap with the lowest bound is halved until no bound is below the best found.
    pub(super) fn best_split(&self, budget: u64, settings: &Settings) -> Option<Split> {
        let division = Division {
            spender: self,
            budget,
            settings,
            at: self.cost.at(self.depth_in_flight(settings)),
            base: self.base(settings)?,
            least: self.slots(settings),
        };
        let first = division.with(division.least)?;
        if self.asks.expert_slots.is_some() {
            return Some(first);
        }
        let best = division.search(&division.ends(first))?;
        Some(division.filled_up(best).unwrap_or(best))
    }

    fn slots_in(&self, bytes: u64) -> usize {
        let slots = bytes / self.model.expert_slot_bytes().max(1);
        usize::try_from(slots).unwrap_or(usize::MAX)
    }

    fn slot_bytes(&self, slots: usize) -> Option<u64> {
        self.model.expert_slot_bytes().checked_mul(slots as u64)
    }

    /// The longest prefix of the order that fits beside `slots` slots, and what that costs. Pinning the last of what streams frees
    /// the ring, so the total is no monotone function of the prefix, and all are tried.
    pub(super) fn split(
        &self,
        budget: u64,
        settings: &Settings,
        at: &CostAt,
        base: u64,
        slots: usize,
    ) -> Option<Split> {
        let more = slots.checked_sub(self.slots(settings))?;
        let with_slots = self.slot_bytes(more)?.checked_add(base)?;
        let fits = |cut: &Cut| {
            with_slots
                .checked_add(cut.held(settings.ring_bytes))
                .is_some_and(|total| total <= budget)
        };
        let num_pinned = match self.asks.pin_bytes {
            Some(_) => Some(self.num_fixed).filter(|&fixed| fits(&self.sums[fixed])),
            None => self.sums.iter().rposition(fits),
        }?;
        Some(Split {
            num_pinned,
            slots,
            cost: self.split_cost(at, num_pinned, slots),
        })
    }

    pub(super) fn split_cost(&self, at: &CostAt, num_pinned: usize, slots: usize) -> Cost {
        let expert = self.model.config.moe.expert_bytes() as f64;
        at.cost(Reads {
            trunk_bytes: self.sums[num_pinned].payload as f64,
            expert_bytes: self.curve.at(slots).hits.missed_per_token() * expert,
        })
    }

    /// Everything but the trunk, its ring, and slots above the fewest; `None` past 64 bits.
    pub(super) fn base(&self, settings: &Settings) -> Option<u64> {
        let nothing = &self.sums[0];
        let total = self.total_of(&self.choice(settings, 0, self.slots(settings)))?;
        Some(total - nothing.ring_bytes(settings.ring_bytes))
    }
}
