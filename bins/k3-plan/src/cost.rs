//! The model of cost: how long a decoded token takes.
//!
//! The larger of reading and computing, which overlap:
//!
//! - reading: `trunk / D + experts / R`, D the disk in order, R the disk an expert at a time. Both go through one pool of readers,
//!   experts first, so their times add up even on two disks.
//! - computing: the trunk's and head's weights, then the chosen experts', each at the larger of its time in memory (bytes touched,
//!   M) and in arithmetic (operations, F). What is read from disk goes through memory once more.
//!
//! The physical limit that a report names (design, section 5) takes M and F whole. Kernels for one vector do not reach them, and
//! by how much is theirs, not the machine's: the shares here are those that `cargo bench -p k3-run --bench kernels -- 'x1 '`
//! prints, and hold for both vector instruction sets.

use k3_shared::{formats::plan::Probe, ledger::Model};

use crate::probe;

/// Of M, by a matrix that is as large as memory is slow: measured 85 to 92 % of a plain loop over the same bytes.
const MEMORY_SHARE: f64 = 0.88;
/// Of F, by MXFP4 weights, which cost more to decode than to multiply: 32 of 265 GFLOP/s a core are two for each of 16 G weights a
/// second with AVX2, twice both with AVX-512.
const DECODING_SHARE: f64 = 0.25;

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
    touched: Touched,
}

/// Weights that a token multiplies, wherever they lie.
#[derive(Clone, Copy, Debug)]
struct Touched {
    trunk: Share,
    experts: Share,
}

/// Of one kind of weights.
#[derive(Clone, Copy, Debug)]
struct Share {
    bytes: f64,
    flops: f64,
}

impl CostModel {
    /// The model for `model` on the machine of `probe`, whose disk is read `read_bytes` at a time. Figures of a sweep count before
    /// those of the probe itself, so a speed given by hand comes without a sweep.
    pub fn new(model: &Model<'_>, probe: Option<Probe>, read_bytes: u64) -> Self {
        Self {
            probe,
            read_bytes,
            touched: Touched::of(model),
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
    touched: Touched,
}

impl CostAt {
    /// The cost of these reads.
    pub fn cost(&self, reads: Reads) -> Cost {
        Cost {
            seconds: self.seconds(reads),
            bytes: reads.trunk_bytes + reads.expert_bytes,
        }
    }

    fn seconds(&self, reads: Reads) -> Option<f64> {
        let over = |amount: f64, speed: Option<f64>| match speed {
            _ if amount <= 0.0 => Some(0.0),
            Some(speed) => Some(amount / speed),
            None => None,
        };
        let trunk = over(reads.trunk_bytes, self.sequential)?;
        let disk = trunk + over(reads.expert_bytes, self.random)?;
        let memory = self.memory.map(|speed| speed * MEMORY_SHARE);
        let part = |touched: Share, read: f64, decoding: f64| {
            let arithmetic = self.flops_per_second.map(|speed| speed * decoding);
            let memory = over(touched.bytes + read, memory).unwrap_or(0.0);
            memory.max(over(touched.flops, arithmetic).unwrap_or(0.0))
        };
        let Touched { trunk, experts } = self.touched;
        let computing =
            part(trunk, reads.trunk_bytes, 1.0) + part(experts, reads.expert_bytes, DECODING_SHARE);
        let seconds = disk.max(computing);
        (seconds > 0.0 && seconds.is_finite()).then_some(seconds)
    }

    /// Which of disk, memory and arithmetic the reads are bound by.
    pub fn bound_by(&self, reads: Reads) -> &'static str {
        let Some(all) = self.seconds(reads) else {
            return "disk";
        };
        let without = |at: Self| at.seconds(reads).unwrap_or(0.0) < all;
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

impl Touched {
    /// The trunk, the head and the chosen experts; a multiplication and an addition for every weight.
    fn of(model: &Model<'_>) -> Self {
        let parts = model.tiles.iter().flat_map(|tile| &tile.parts);
        let weights: f64 = parts
            .map(|part| part.rows.len() as f64 * part.cols as f64)
            .sum();
        let moe = &model.config.moe;
        let chosen = model.experts_per_token() as f64;
        let expert = 3.0 * moe.routed_expert_hidden_size as f64 * moe.moe_intermediate_size as f64;
        Self {
            trunk: Share {
                bytes: model.tiles.iter().map(|tile| tile.raw_bytes() as f64).sum(),
                flops: 2.0 * weights,
            },
            experts: Share {
                bytes: chosen * moe.expert_bytes() as f64,
                flops: 2.0 * chosen * expert,
            },
        }
    }
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
            touched: Touched {
                trunk: Share {
                    bytes: 200.0,
                    flops: 600.0,
                },
                experts: Share {
                    bytes: 100.0,
                    flops: 400.0,
                },
            },
        }
    }

    fn seconds(at: CostAt, trunk_bytes: f64, expert_bytes: f64) -> Option<f64> {
        let reads = Reads {
            trunk_bytes,
            expert_bytes,
        };
        at.cost(reads).seconds
    }

    #[test]
    fn reading_and_computing_overlap_and_the_slower_counts() {
        let reads = Reads {
            trunk_bytes: 60.0,
            expert_bytes: 40.0,
        };
        let disk = machine(Some(10.0));
        assert_eq!(seconds(disk, 60.0, 40.0), Some(10.0));
        assert_eq!(disk.bound_by(reads), "disk");
        let memory = CostAt {
            memory: Some(20.0 / MEMORY_SHARE),
            ..disk
        };
        let got = seconds(memory, 60.0, 40.0).unwrap();
        assert!((got - 20.0).abs() < 1e-9, "{got}");
        assert_eq!(memory.bound_by(reads), "memory");
        let experts_slower = CostAt {
            random: Some(2.0),
            ..disk
        };
        assert_eq!(seconds(experts_slower, 60.0, 40.0), Some(26.0));
        assert_eq!(machine(Some(10.0)).bound_by(Reads::default()), "disk");
    }

    #[test]
    fn weights_that_take_decoding_are_bound_by_it_where_memory_is_fast() {
        let fast = CostAt {
            memory: Some(1e9 / MEMORY_SHARE),
            flops_per_second: Some(100.0),
            ..machine(Some(1e9))
        };
        // 600 of the trunk at 100 a second, 400 of experts at a quarter of it.
        let got = seconds(fast, 0.0, 0.0).unwrap();
        assert!((got - 22.0).abs() < 1e-6, "{got}");
        assert_eq!(fast.bound_by(Reads::default()), "arithmetic");
    }

    #[test]
    fn a_disk_that_is_not_read_need_not_be_known() {
        let unknown = CostAt {
            memory: Some(1.0 / MEMORY_SHARE),
            ..machine(None)
        };
        assert_eq!(seconds(unknown, 1.0, 0.0), None);
        let resident = seconds(unknown, 0.0, 0.0).unwrap();
        assert!((resident - 300.0).abs() < 1e-9, "{resident}");
    }
}
