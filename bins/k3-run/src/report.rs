//! The report of a run (`k3.run/1`).

use std::{fmt, path::PathBuf};

use k3_shared::{
    config::Config,
    formats::{
        plan::{Plan, Probe},
        trace::Mode,
    },
};
use serde::Serialize;

use crate::{
    model::{Part, PartTimes, StepProfile},
    store::StepReads,
};

/// The schema tag.
pub const SCHEMA: &str = "k3.run/1";

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// All tokens asked for were generated.
    Length,
    /// A stop token came.
    Stop,
    /// A signal came.
    Interrupted,
    /// It stopped rather than print a wrong token.
    Error,
}

/// What kept a step from being faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BoundBy {
    /// The arithmetic waited for reads for more than half of the time.
    Disk,
    /// It did not, and by the plan's probe of the machine the bytes touched take longer than the operations.
    Memory,
    /// It did not, and by the probe the operations take longer.
    Arithmetic,
    /// It did not, and there is no probe to tell memory from arithmetic.
    Compute,
}

impl BoundBy {
    /// Of a step, or of several, that took `spent` and did `flops` operations on the machine that was probed.
    pub fn of(spent: &Spent, flops: f64, probe: Option<&Probe>) -> Self {
        if spent.wait_seconds > spent.seconds / 2.0 {
            return Self::Disk;
        }
        let rates = probe.and_then(|p| Some((p.memory_bytes_per_second?, p.flops_per_second?)));
        match rates {
            None => Self::Compute,
            Some((memory, arithmetic)) => {
                let bytes = (spent.touched_bytes + spent.bytes_requested) as f64;
                if bytes / memory >= flops / arithmetic {
                    Self::Memory
                } else {
                    Self::Arithmetic
                }
            }
        }
    }
}

impl fmt::Display for BoundBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Disk => "disk",
            Self::Memory => "memory",
            Self::Arithmetic => "arithmetic",
            Self::Compute => "compute",
        })
    }
}

/// One forward step.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// `prefill` or `decode`.
    pub mode: Mode,
    /// Rows computed.
    pub rows: usize,
    /// Operations of the matrices, a multiplication and an addition counted as two: two for every weight a row is multiplied
    /// with, and for every weight of the head where it ran. Attention over earlier positions and the recurrence are not in it.
    pub flops: f64,
    /// What kept it from being faster.
    pub bound_by: BoundBy,
    /// Wall time and reads.
    #[serde(flatten)]
    pub spent: Spent,
}

/// Time and reads of a step, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spent {
    /// Wall time.
    pub seconds: f64,
    /// Trunk payload.
    pub trunk_bytes_read: u64,
    /// Payload of the head and the final vectors.
    pub head_bytes_read: u64,
    /// Expert payload.
    pub expert_bytes_read: u64,
    /// Everything asked of the disk, widened and padded.
    pub bytes_requested: u64,
    /// Distinct experts asked for.
    pub expert_requests: u64,
    /// Of these, resident ones.
    pub expert_hits: u64,
    /// Time in which the arithmetic waited for a read.
    pub wait_seconds: f64,
    /// The rest.
    pub compute_seconds: f64,
    /// Time in which at least one read was in flight, whether the arithmetic waited for it or not; reads ahead of the next step
    /// included.
    pub reading_seconds: f64,
    /// Bytes that had to come from memory, whatever else was read for them: see [`StepProfile::touched_bytes`].
    pub touched_bytes: u64,
    /// Wall time by part.
    pub parts: PartTimes,
}

impl Spent {
    /// What one step took.
    pub fn new(seconds: f64, reads: &StepReads, profile: &StepProfile) -> Self {
        Self {
            seconds,
            trunk_bytes_read: reads.trunk_bytes,
            head_bytes_read: reads.head_bytes,
            expert_bytes_read: reads.expert_bytes,
            bytes_requested: reads.requested_bytes,
            expert_requests: reads.expert_requests,
            expert_hits: reads.expert_hits,
            wait_seconds: reads.wait_seconds,
            compute_seconds: (seconds - reads.wait_seconds).max(0.0),
            reading_seconds: reads.reading_seconds,
            touched_bytes: profile.touched_bytes,
            parts: profile.parts,
        }
    }

    /// Add a part that came after the step, and belongs to it.
    pub fn add_part(&mut self, part: Part, seconds: f64) {
        self.seconds += seconds;
        self.compute_seconds += seconds;
        self.parts.add(part, seconds);
    }

    fn add(&mut self, other: &Self) {
        self.seconds += other.seconds;
        self.trunk_bytes_read += other.trunk_bytes_read;
        self.head_bytes_read += other.head_bytes_read;
        self.expert_bytes_read += other.expert_bytes_read;
        self.bytes_requested += other.bytes_requested;
        self.expert_requests += other.expert_requests;
        self.expert_hits += other.expert_hits;
        self.wait_seconds += other.wait_seconds;
        self.compute_seconds += other.compute_seconds;
        self.reading_seconds += other.reading_seconds;
        self.touched_bytes += other.touched_bytes;
        self.parts.add_all(&other.parts);
    }
}

/// All steps together.
#[derive(Clone, Debug, Serialize)]
pub struct Totals {
    /// The sums.
    #[serde(flatten)]
    pub spent: Spent,
    /// What kept the steps together from being faster.
    pub bound_by: BoundBy,
    /// Read ahead and never used, after an early stop.
    pub readahead_discarded_bytes: u64,
}

/// The least time the machine allows, by the plan's probe of it (design, section 5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Limit {
    /// Sequential direct reads.
    pub disk_bytes_per_second: Option<f64>,
    /// Streaming reads from memory.
    pub memory_bytes_per_second: Option<f64>,
    /// Fused multiply-adds counted as two.
    pub flops_per_second: Option<f64>,
    /// The largest of bytes over disk, bytes over memory and operations over arithmetic; null without a probe.
    pub seconds: Option<f64>,
}

/// A saved state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StateReport {
    /// The file.
    pub path: PathBuf,
    /// Tokens computed in it.
    pub position: u64,
    /// Tokens it holds.
    pub tokens: u64,
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// What was generated, the stop token included.
    pub generated_ids: Vec<u32>,
    /// The generated text, the stop token left out; null without a tokenizer.
    pub text: Option<String>,
    /// How it ended.
    pub finish: Finish,
    /// Why, when it ended in error.
    pub error: Option<String>,
    /// The saved state it went on from, if it did.
    pub resumed: Option<StateReport>,
    /// The last state it saved, if it did.
    pub saved: Option<StateReport>,
    /// Identity of the checkpoint.
    pub identity: String,
    /// Layers run.
    pub num_layers: usize,
    /// Whether experts were checked against digests.
    pub experts_verified: bool,
    /// Epsilon of MLA's low-rank norms.
    pub mla_norm_eps: f64,
    /// Whether a scale byte of 255 counted as factor 0.
    pub allow_nan_scales: bool,
    /// Instruction set.
    pub isa: &'static str,
    /// Compute threads.
    pub threads: usize,
    /// Replacement policy of the expert slots.
    pub cache_policy: String,
    /// Expert slots.
    pub expert_slots: usize,
    /// Sum of the ledger.
    pub planned_peak_bytes: u64,
    /// `VmHWM` of this process.
    pub peak_rss_bytes: u64,
    /// Every step.
    pub steps: Vec<StepReport>,
    /// Their sum.
    pub totals: Totals,
    /// What the machine allows.
    pub limit: Limit,
}

/// Sum of all steps, on the machine that was probed.
pub fn totals(
    steps: &[StepReport],
    readahead_discarded_bytes: u64,
    probe: Option<&Probe>,
) -> Totals {
    let mut spent = Spent::default();
    for step in steps {
        spent.add(&step.spent);
    }
    let flops = steps.iter().map(|step| step.flops).sum();
    Totals {
        bound_by: BoundBy::of(&spent, flops, probe),
        spent,
        readahead_discarded_bytes,
    }
}

/// The least time these steps could have taken on the machine the plan measured.
pub fn limit(plan: &Plan, steps: &[StepReport]) -> Limit {
    let Some(probe) = &plan.probe else {
        return Limit::default();
    };
    let over = |amount: f64, rate: Option<f64>| rate.map_or(0.0, |rate| amount / rate);
    let mut seconds = 0.0;
    for step in steps {
        let read = step.spent.bytes_requested as f64;
        let touched = step.spent.touched_bytes as f64;
        let disk = over(read, probe.disk_bytes_per_second);
        let memory = over(touched + read, probe.memory_bytes_per_second);
        let arithmetic = over(step.flops, probe.flops_per_second);
        seconds += disk.max(memory).max(arithmetic);
    }
    Limit {
        disk_bytes_per_second: probe.disk_bytes_per_second,
        memory_bytes_per_second: probe.memory_bytes_per_second,
        flops_per_second: probe.flops_per_second,
        seconds: Some(seconds),
    }
}

/// [`StepReport::flops`] of a step of `rows` rows, of which the head ran over `head_rows`.
pub fn flops(config: &Config, num_layers: usize, rows: usize, head_rows: usize) -> f64 {
    let head = config.vocab_size * config.hidden_size;
    2.0 * (rows as f64 * active_weights(config, num_layers) + (head_rows * head) as f64)
}

/// Weights one row is multiplied with: the matrices of the layers that run, and its chosen experts.
fn active_weights(config: &Config, num_layers: usize) -> f64 {
    use k3_shared::{config::Mlp, names::TensorRole, tiles::layer_matrices};
    let moe = &config.moe;
    let expert = 3 * moe.routed_expert_hidden_size * moe.moe_intermediate_size;
    let mut weights = 0.0;
    for layer in config.layers().take(num_layers) {
        for tensor in layer_matrices(config, layer) {
            let shape = TensorRole::Layer(layer, tensor).spec(config).shape;
            weights += shape.iter().product::<usize>() as f64;
        }
        if config.mlp(layer) == Mlp::Moe {
            weights += (moe.num_experts_per_token * expert) as f64;
        }
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_bound_by_what_takes_longest() {
        let spent = |seconds, wait_seconds, touched_bytes| Spent {
            seconds,
            wait_seconds,
            touched_bytes,
            ..Spent::default()
        };
        let measured = serde_json::json!({
            "disk_bytes_per_second": null,
            "memory_bytes_per_second": 10.0,
            "flops_per_second": 100.0,
            "date": "2000-01-01",
        });
        let probe: Probe = serde_json::from_value(measured).unwrap();
        let waiting = spent(10.0, 5.1, 1_000_000);
        assert_eq!(BoundBy::of(&waiting, 1.0, Some(&probe)), BoundBy::Disk);
        let working = spent(10.0, 4.9, 50);
        assert_eq!(BoundBy::of(&working, 499.0, Some(&probe)), BoundBy::Memory);
        assert_eq!(
            BoundBy::of(&working, 501.0, Some(&probe)),
            BoundBy::Arithmetic
        );
        assert_eq!(BoundBy::of(&working, 501.0, None), BoundBy::Compute);
    }
}
