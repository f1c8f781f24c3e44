//! The model of cost: how long a decoded token takes at the physical limit (design, section 5).
//!
//! `max(trunk / D + experts / R, (touched + read) / M, flops / F)`: D the disk in order, R the disk an expert at a time, M memory,
//! F arithmetic. Both kinds of read go through one pool of readers, experts first, so their times add up even on two disks.

use k3_shared::{formats::plan::Probe, ledger::Model};

use crate::probe;

/// What a decoded token reads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reads {
    /// Trunk and head payload.
    pub trunk_bytes: f64,
    /// Expert payload.
    pub expert_bytes: f64,
}

/// What a decoded token costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Seconds; `None` where the disk is read and was neither measured nor given.
    pub seconds: Option<f64>,
    /// Bytes read.
    pub bytes: f64,
}

impl Cost {
    /// Order by seconds, where all candidates have them, then by bytes.
    pub fn compare(&self, other: &Self) -> std::cmp::Ordering {
        let seconds = match (self.seconds, other.seconds) {
            (Some(a), Some(b)) => a.total_cmp(&b),
            _ => std::cmp::Ordering::Equal,
        };
        seconds.then(self.bytes.total_cmp(&other.bytes))
    }
}

/// Reads in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Of the trunk: as many as there are readers, and room in the ring.
    pub trunk: usize,
    /// Of experts.
    pub experts: usize,
}

/// What does not depend on the plan.
#[derive(Clone, Debug)]
pub struct CostModel {
    probe: Option<Probe>,
    read_bytes: u64,
    touched: f64,
    flops: f64,
}

impl CostModel {
    /// The model for `model` on the machine of `probe`, whose disk is read `read_bytes` at a time. Figures of a sweep count before
    /// those of the probe itself, so a speed given by hand comes without a sweep.
    pub fn new(model: &Model<'_>, probe: Option<Probe>, read_bytes: u64) -> Self {
        Self {
            probe,
            read_bytes,
            touched: touched_bytes(model),
            flops: flops(model),
        }
    }

    /// The probe with the disk's figures for so many reads in flight.
    pub fn probe_at(&self, depth: Depth) -> Option<Probe> {
        let mut probe = self.probe.clone()?;
        probe::set_speeds(&mut probe, self.read_bytes, depth);
        Some(probe)
    }

    /// The depths that were measured, ascending.
    pub fn depths(&self) -> Vec<usize> {
        let cells = self.probe.iter().flat_map(|probe| &probe.sweep);
        let mut depths: Vec<usize> = cells.map(|cell| cell.depth).collect();
        depths.sort_unstable();
        depths.dedup();
        depths
    }

    /// The speeds at one depth, for many costs.
    pub fn at(&self, depth: Depth) -> CostAt {
        let probe = self.probe_at(depth);
        let speed = |of: fn(&Probe) -> Option<f64>| probe.as_ref().and_then(of);
        let sequential = speed(|probe| probe.disk_bytes_per_second);
        CostAt {
            sequential,
            random: speed(|probe| probe.random_bytes_per_second).or(sequential),
            memory: speed(|probe| probe.memory_bytes_per_second),
            flops_per_second: speed(|probe| probe.flops_per_second),
            touched: self.touched,
            flops: self.flops,
        }
    }
}

/// A [`CostModel`] at one depth.
#[derive(Clone, Copy, Debug)]
pub struct CostAt {
    sequential: Option<f64>,
    random: Option<f64>,
    memory: Option<f64>,
    flops_per_second: Option<f64>,
    touched: f64,
    flops: f64,
}

impl CostAt {
    /// The cost of these reads.
    pub fn cost(&self, reads: Reads) -> Cost {
        let bytes = reads.trunk_bytes + reads.expert_bytes;
        Cost {
            seconds: self.seconds(reads, bytes),
            bytes,
        }
    }

    fn seconds(&self, reads: Reads, bytes: f64) -> Option<f64> {
        let over = |amount: f64, speed: Option<f64>| match speed {
            _ if amount <= 0.0 => Some(0.0),
            Some(speed) => Some(amount / speed),
            None => None,
        };
        let trunk = over(reads.trunk_bytes, self.sequential)?;
        let disk = trunk + over(reads.expert_bytes, self.random)?;
        let memory = over(self.touched + bytes, self.memory).unwrap_or(0.0);
        let arithmetic = over(self.flops, self.flops_per_second).unwrap_or(0.0);
        let limit = disk.max(memory).max(arithmetic);
        (limit > 0.0 && limit.is_finite()).then_some(limit)
    }

    /// Which of disk, memory and arithmetic the reads are bound by.
    pub fn bound_by(&self, reads: Reads) -> &'static str {
        let bytes = reads.trunk_bytes + reads.expert_bytes;
        let Some(all) = self.seconds(reads, bytes) else {
            return "disk";
        };
        let without = |at: Self| at.seconds(reads, bytes).unwrap_or(0.0) < all;
        let fast = Some(f64::INFINITY);
        if without(Self {
            sequential: fast,
            random: fast,
            ..*self
        }) {
            "disk"
        } else if without(Self {
            memory: fast,
            ..*self
        }) {
            "memory"
        } else {
            "arithmetic"
        }
    }
}

/// Weights that one token multiplies: the trunk, the head and the chosen experts, wherever they lie.
fn touched_bytes(model: &Model<'_>) -> f64 {
    let trunk: f64 = model.tiles.iter().map(|tile| tile.raw_bytes() as f64).sum();
    trunk + model.experts_per_token() as f64 * model.config.moe.expert_bytes() as f64
}

/// A multiplication and an addition for every weight touched.
fn flops(model: &Model<'_>) -> f64 {
    let trunk: f64 = model
        .tiles
        .iter()
        .flat_map(|tile| &tile.parts)
        .map(|part| part.rows.len() as f64 * part.cols as f64)
        .sum();
    let moe = &model.config.moe;
    let expert = 3.0 * moe.routed_expert_hidden_size as f64 * moe.moe_intermediate_size as f64;
    2.0 * (trunk + model.experts_per_token() as f64 * expert)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(disk: Option<f64>) -> CostAt {
        CostAt {
            sequential: disk,
            random: disk,
            memory: None,
            flops_per_second: None,
            touched: 300.0,
            flops: 1000.0,
        }
    }

    #[test]
    fn the_limit_is_the_slowest_of_disk_memory_and_arithmetic() {
        let reads = Reads {
            trunk_bytes: 60.0,
            expert_bytes: 40.0,
        };
        let disk = machine(Some(10.0));
        assert_eq!(disk.cost(reads).seconds, Some(10.0));
        assert_eq!(disk.bound_by(reads), "disk");
        let memory = CostAt {
            memory: Some(20.0),
            ..disk
        };
        assert_eq!(memory.cost(reads).seconds, Some(20.0));
        assert_eq!(memory.bound_by(reads), "memory");
        let arithmetic = CostAt {
            flops_per_second: Some(25.0),
            ..memory
        };
        assert_eq!(arithmetic.cost(reads).seconds, Some(40.0));
        assert_eq!(arithmetic.bound_by(reads), "arithmetic");
        let experts_slower = CostAt {
            random: Some(2.0),
            ..disk
        };
        assert_eq!(experts_slower.cost(reads).seconds, Some(26.0));
    }

    #[test]
    fn a_disk_that_is_not_read_need_not_be_known() {
        let unknown = CostAt {
            memory: Some(1.0),
            ..machine(None)
        };
        let reads = Reads {
            trunk_bytes: 1.0,
            expert_bytes: 0.0,
        };
        assert_eq!(unknown.cost(reads).seconds, None);
        assert_eq!(unknown.cost(Reads::default()).seconds, Some(300.0));
    }
}
