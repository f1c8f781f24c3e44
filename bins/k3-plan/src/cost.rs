//! The model of cost: how long a decoded token takes.
//!
//! The larger of two times:
//!
//! - reading: `trunk / D + experts / R`, D the disk in order, R the disk an expert at a time. Both go through one pool of readers,
//!   experts first, so their times add up even on two disks.
//! - computing, and what it waits for. Computing is the trunk's and head's weights, then the chosen experts', each at the larger of
//!   its time in memory (bytes touched, W) and in arithmetic (operations, F). What is read from disk goes through memory once more.
//!   The trunk is read ahead, but which experts a layer needs is known only when its router has spoken: what their reads take,
//!   behind those of the trunk that are under way by then, beyond the arithmetic that can go on without the last of them
//!   (`Meanwhile`), is waited for, layer after layer.
//!
//! W is a share of memory's speed a tile at a time, as k3-run comes to weights, or of the limit M where only that was measured or
//! given. The physical limit that a report names (design, section 5) takes M and F whole.

use k3_shared::{
    formats::plan::Probe,
    ledger::Model,
    names::{LayerTensor, TensorRole},
    tiles::TilePart,
};

use crate::probe;

/// Of the speed of plain loops, by a matrix that is as large as memory is slow: 85 to 92 % over the same bytes
/// (`cargo bench -p k3-run --bench kernels -- 'x1 '`).
const MEMORY_SHARE: f64 = 0.88;
/// Of F, by MXFP4 weights, which cost more to decode than to multiply: the experts of a token of five layers, 4.2 GFLOP, take 36 to
/// 39 ms whether memory is read at 40 or 75 GB/s, where F is 520 GFLOP/s (AVX-512; with AVX2 kernels and F are half as fast).
const DECODING_SHARE: f64 = 0.22;

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
    meanwhile: Meanwhile,
}

/// What is computed while a layer's experts are read.
#[derive(Clone, Copy, Debug)]
struct Meanwhile {
    /// Layers with experts.
    layers: f64,
    /// Trunk weights between the router and the experts, of all layers: into the latent space, and the shared experts.
    trunk: Share,
    /// Of the chosen experts, all but the one that comes last.
    expert_share: f64,
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
            in_flight: depth.trunk as f64 * self.read_bytes as f64,
            memory: speed(|probe| {
                let tiled = probe.weights_bytes_per_second;
                Some(tiled.or(probe.memory_bytes_per_second)? * MEMORY_SHARE)
            }),
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
    /// Bytes of the trunk under way at a time.
    in_flight: f64,
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
        let trunk_reads = over(reads.trunk_bytes, self.sequential)?;
        let expert_reads = over(reads.expert_bytes, self.random)?;
        let part = |touched: Share, read: f64, decoding: f64| {
            let arithmetic = self.flops_per_second.map(|speed| speed * decoding);
            let memory = over(touched.bytes + read, self.memory).unwrap_or(0.0);
            memory.max(over(touched.flops, arithmetic).unwrap_or(0.0))
        };
        let Touched {
            trunk,
            experts,
            meanwhile,
        } = self.touched;
        let trunk = part(trunk, reads.trunk_bytes, 1.0);
        let experts = part(experts, reads.expert_bytes, DECODING_SHARE);
        // All layers are taken to miss alike, so the sum over them is the one of the totals.
        let hidden = part(meanwhile.trunk, 0.0, 1.0) + meanwhile.expert_share * experts;
        let queued = if reads.expert_bytes > 0.0 {
            reads.trunk_bytes.min(self.in_flight * meanwhile.layers)
        } else {
            0.0
        };
        let waiting = (over(queued, self.sequential)? + expert_reads - hidden).max(0.0);
        let seconds = (trunk_reads + expert_reads).max(trunk + experts + waiting);
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
        let parts = || model.tiles.iter().flat_map(|tile| &tile.parts);
        let weights = |part: &TilePart| part.rows.len() as f64 * part.cols as f64;
        let meanwhile = |part: &&TilePart| {
            use LayerTensor::{LatentDown, SharedDown, SharedGate, SharedUp};
            let during = [LatentDown, SharedGate, SharedUp, SharedDown];
            matches!(part.role, TensorRole::Layer(_, tensor) if during.contains(&tensor))
        };
        let moe = &model.config.moe;
        let chosen = model.experts_per_token() as f64;
        let expert = 3.0 * moe.routed_expert_hidden_size as f64 * moe.moe_intermediate_size as f64;
        Self {
            trunk: Share {
                bytes: model.tiles.iter().map(|tile| tile.raw_bytes() as f64).sum(),
                flops: 2.0 * parts().map(weights).sum::<f64>(),
            },
            experts: Share {
                bytes: chosen * moe.expert_bytes() as f64,
                flops: 2.0 * chosen * expert,
            },
            meanwhile: Meanwhile {
                layers: model.num_moe_layers() as f64,
                trunk: Share {
                    bytes: parts().filter(meanwhile).map(|p| p.bytes() as f64).sum(),
                    flops: 2.0 * parts().filter(meanwhile).map(weights).sum::<f64>(),
                },
                expert_share: 1.0 - 1.0 / moe.num_experts_per_token.max(1) as f64,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(disk: Option<f64>) -> CostAt {
        let share = |bytes, flops| Share { bytes, flops };
        CostAt {
            sequential: disk,
            random: disk,
            in_flight: 5.0,
            memory: None,
            flops_per_second: None,
            touched: Touched {
                trunk: share(200.0, 600.0),
                experts: share(100.0, 400.0),
                meanwhile: Meanwhile {
                    layers: 2.0,
                    trunk: share(40.0, 0.0),
                    expert_share: 0.75,
                },
            },
        }
    }

    fn assert_seconds(at: CostAt, trunk_bytes: f64, expert_bytes: f64, want: f64) {
        let reads = Reads {
            trunk_bytes,
            expert_bytes,
        };
        let got = at.cost(reads).seconds.unwrap();
        assert!((got - want).abs() < 1e-6, "{got}, not {want}");
    }

    #[test]
    fn reading_the_trunk_and_computing_overlap_and_the_slower_counts() {
        let reads = Reads {
            trunk_bytes: 60.0,
            expert_bytes: 40.0,
        };
        let disk = machine(Some(10.0));
        assert_seconds(disk, 60.0, 40.0, 10.0);
        assert_eq!(disk.bound_by(reads), "disk");
        let memory = CostAt {
            memory: Some(20.0),
            ..disk
        };
        // 260 and 140 bytes of memory; the experts' 4 seconds end before the arithmetic meanwhile.
        assert_seconds(memory, 60.0, 40.0, 20.0);
        assert_eq!(memory.bound_by(reads), "memory");
        let experts_slower = CostAt {
            random: Some(2.0),
            ..disk
        };
        assert_seconds(experts_slower, 60.0, 40.0, 26.0);
        assert_eq!(machine(Some(10.0)).bound_by(Reads::default()), "disk");
    }

    #[test]
    fn experts_are_waited_for_beyond_what_is_computed_meanwhile() {
        let resident = CostAt {
            memory: Some(20.0),
            sequential: Some(50.0),
            ..machine(Some(5.0))
        };
        // The trunk's 10 seconds, the experts' 7; of the 8 that their reads take, 2 and 5.25 are hidden.
        assert_seconds(resident, 0.0, 40.0, 10.0 + 7.0 + 0.75);
        let reads = Reads {
            trunk_bytes: 0.0,
            expert_bytes: 40.0,
        };
        assert_eq!(resident.bound_by(reads), "disk");
        assert_seconds(resident, 0.0, 0.0, 15.0);
        // Twice they come behind 5 bytes of the trunk, if so many are read at all; all that is read goes through memory again.
        assert_seconds(resident, 100.0, 40.0, 15.0 + 7.0 + 0.75 + 0.2);
        assert_seconds(resident, 4.0, 40.0, 10.2 + 7.0 + 0.75 + 0.08);
        assert_seconds(resident, 4.0, 0.0, 10.2 + 5.0);
    }

    #[test]
    fn weights_that_take_decoding_are_bound_by_it_where_memory_is_fast() {
        let fast = CostAt {
            memory: Some(1e9),
            flops_per_second: Some(100.0),
            ..machine(Some(1e9))
        };
        assert_seconds(fast, 0.0, 0.0, 6.0 + 4.0 / DECODING_SHARE);
        assert_eq!(fast.bound_by(Reads::default()), "arithmetic");
    }

    #[test]
    fn a_disk_that_is_not_read_need_not_be_known() {
        let unknown = CostAt {
            memory: Some(1.0),
            ..machine(None)
        };
        let one_byte = Reads {
            trunk_bytes: 1.0,
            expert_bytes: 0.0,
        };
        assert_eq!(unknown.cost(one_byte).seconds, None);
        assert_seconds(unknown, 0.0, 0.0, 300.0);
    }
}
