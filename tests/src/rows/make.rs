//! A row from the plan and the report of its run.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use k3_shared::{formats::plan::Plan, host};
use serde::{Deserialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};

use super::{Machine, Measured, PerToken, Planned, Row, RowError, SCHEMA, median};

/// What a row says besides plan and report.
#[derive(Clone, Debug)]
pub struct Made<'a> {
    /// The ladder.
    pub target: &'a str,
    /// Which of its rows.
    pub name: &'a str,
    /// Which repeat.
    pub round: u32,
    /// When, UTC.
    pub date: &'a str,
    /// The revision of the source.
    pub tree: &'a str,
    /// What held the run to its memory.
    pub cap: &'a str,
}

/// The members of `k3.run/1` that a row is made from.
#[derive(Debug, Deserialize)]
struct Report {
    prompt_ids: Vec<u32>,
    generated_ids: Vec<u32>,
    finish: String,
    identity: String,
    isa: String,
    threads: usize,
    planned_peak_bytes: u64,
    peak_rss_bytes: u64,
    steps: Vec<Step>,
}

#[derive(Debug, Deserialize)]
struct Step {
    mode: String,
    flops: f64,
    bound_by: String,
    seconds: f64,
    trunk_bytes_read: f64,
    head_bytes_read: f64,
    expert_bytes_read: f64,
    bytes_requested: f64,
    expert_requests: f64,
    expert_hits: f64,
    touched_bytes: f64,
    parts: BTreeMap<String, f64>,
}

/// Make a row of a run.
///
/// # Errors
/// If plan or report cannot be read, or the run did not generate what was asked.
pub fn make(made: &Made<'_>, plan: &Path, report: &Path) -> Result<Row, RowError> {
    let planned: Plan = load(plan, "plan of k3-plan")?;
    let ran: Report = load(report, "report of k3-run")?;
    let unusable = |why: String| RowError::Unusable {
        path: report.to_owned(),
        why,
    };
    if ran.finish != "length" {
        return Err(unusable(format!(
            "the run ended by {:?}, not by its length",
            ran.finish
        )));
    }
    if ran.identity != planned.identity {
        return Err(unusable(format!("not a run of {}", plan.display())));
    }
    let measured = measure(ran)
        .ok_or_else(|| unusable("no decode step; generate at least 2 tokens".to_owned()))?;
    Ok(Row {
        schema: SCHEMA.to_owned(),
        target: made.target.to_owned(),
        name: made.name.to_owned(),
        round: made.round,
        date: made.date.to_owned(),
        tree: made.tree.to_owned(),
        cap: made.cap.to_owned(),
        machine: Machine {
            cpu: host::cpu_model(),
            cores: planned.host.cores,
            available_bytes: planned.host.available_bytes,
            kernel: kernel(),
        },
        plan: decisions(planned),
        report: measured,
    })
}

fn load<T: DeserializeOwned>(path: &Path, what: &'static str) -> Result<T, RowError> {
    let text = fs::read(path).map_err(|source| RowError::Io {
        path: path.to_owned(),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|source| RowError::Input {
        path: path.to_owned(),
        what,
        source,
    })
}

/// The kernel's release, or nothing where `/proc` does not tell.
fn kernel() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease")
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

fn decisions(plan: Plan) -> Planned {
    let probe = plan.probe.unwrap_or_default();
    Planned {
        num_layers: plan.num_layers,
        budget_bytes: plan.budget_bytes,
        total_bytes: plan.total_bytes,
        pinned_trunk_bytes: plan.pinned_trunk_bytes,
        streamed_trunk_bytes: plan.streamed_trunk_bytes,
        head_pinned: plan.head_pinned,
        expert_slots: plan.expert_slots,
        cache_policy: plan.cache_policy,
        context: plan.context,
        prefill_chunk: plan.prefill_chunk,
        stream_buffer_bytes: plan.stream_buffer_bytes,
        read_bytes: plan.read_bytes,
        queue_depth: plan.queue_depth,
        predicted_seconds_per_token: plan.predicted.seconds_per_token.map(rounded),
        disk_bytes_per_second: probe.disk_bytes_per_second.map(f64::round),
        memory_bytes_per_second: probe.memory_bytes_per_second.map(f64::round),
        flops_per_second: probe.flops_per_second.map(f64::round),
    }
}

/// To the microsecond: clocks are no better, and rows are read by people.
fn rounded(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// `None` without a decode step.
fn measure(ran: Report) -> Option<Measured> {
    let (decode, prefill): (Vec<Step>, Vec<Step>) = ran
        .steps
        .into_iter()
        .partition(|step| step.mode == "decode");
    let seconds: Vec<f64> = decode.iter().map(|step| step.seconds).collect();
    let middle = median(&seconds);
    // The nearest step to the median: its parts add up to its time, which parts of several steps would not.
    let off = |step: &&Step| (step.seconds - middle).abs();
    let typical = decode
        .iter()
        .min_by(|a, b| f64::total_cmp(&off(a), &off(b)))?;
    let mean = |figure: fn(&Step) -> f64| {
        (decode.iter().map(figure).sum::<f64>() / decode.len() as f64).round()
    };
    let tenth = |figure: fn(&Step) -> f64| {
        (10.0 * decode.iter().map(figure).sum::<f64>() / decode.len() as f64).round() / 10.0
    };
    let parts = typical
        .parts
        .iter()
        .map(|(part, &s)| (part.clone(), rounded(s)));
    Some(Measured {
        identity: ran.identity,
        isa: ran.isa,
        threads: ran.threads,
        prompt_rows: ran.prompt_ids.len(),
        prompt_sha256: digest(&ran.prompt_ids),
        generated_ids: ran.generated_ids,
        planned_peak_bytes: ran.planned_peak_bytes,
        peak_rss_bytes: ran.peak_rss_bytes,
        prefill_seconds: rounded(prefill.iter().map(|step| step.seconds).sum()),
        decode_seconds: seconds.iter().copied().map(rounded).collect(),
        token: PerToken {
            trunk_bytes: mean(|step| step.trunk_bytes_read),
            head_bytes: mean(|step| step.head_bytes_read),
            expert_bytes: mean(|step| step.expert_bytes_read),
            requested_bytes: mean(|step| step.bytes_requested),
            touched_bytes: mean(|step| step.touched_bytes),
            flops: mean(|step| step.flops),
            expert_requests: tenth(|step| step.expert_requests),
            expert_hits: tenth(|step| step.expert_hits),
        },
        parts: parts.filter(|&(_, seconds)| seconds > 0.0).collect(),
        bound_by: typical.bound_by.clone(),
    })
}

fn digest(ids: &[u32]) -> String {
    let mut hash = Sha256::new();
    for id in ids {
        hash.update(id.to_le_bytes());
    }
    let mut text = String::new();
    for byte in hash.finalize() {
        write!(text, "{byte:02x}").expect("a String takes any text");
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row of a run that streams: 2 s a token, of which the disk's 3 GB/s explain 1.9.
    pub(in crate::rows) fn row(name: &str, round: u32) -> Row {
        Row {
            schema: SCHEMA.to_owned(),
            target: "ladder".to_owned(),
            name: name.to_owned(),
            round,
            date: "2026-01-02T03:04:05Z".to_owned(),
            tree: "0123456789ab".to_owned(),
            cap: "memory.max".to_owned(),
            machine: Machine {
                cpu: "a processor".to_owned(),
                cores: 2,
                available_bytes: 24_000_000_000,
                kernel: "6.1".to_owned(),
            },
            plan: Planned {
                num_layers: 5,
                budget_bytes: 1_000_000_000,
                total_bytes: 990_000_000,
                pinned_trunk_bytes: 500_000_000,
                streamed_trunk_bytes: 5_000_000_000,
                head_pinned: false,
                expert_slots: 20,
                cache_policy: "reuse-odds".to_owned(),
                context: 512,
                prefill_chunk: 24,
                stream_buffer_bytes: 1 << 28,
                read_bytes: 4 << 20,
                queue_depth: 4,
                predicted_seconds_per_token: Some(1.9),
                disk_bytes_per_second: Some(3e9),
                memory_bytes_per_second: Some(40e9),
                flops_per_second: Some(400e9),
            },
            report: Measured {
                identity: "model".to_owned(),
                isa: "avx2".to_owned(),
                threads: 2,
                prompt_rows: 3,
                prompt_sha256: "prompt".to_owned(),
                generated_ids: vec![1, 2, 3],
                planned_peak_bytes: 990_000_000,
                peak_rss_bytes: 950_000_000,
                prefill_seconds: 4.0,
                decode_seconds: vec![2.0, 2.25, 1.75],
                token: PerToken {
                    trunk_bytes: 4.4e9,
                    head_bytes: 0.3e9,
                    expert_bytes: 1e9,
                    requested_bytes: 5.7e9,
                    touched_bytes: 8e9,
                    flops: 16e9,
                    expert_requests: 64.0,
                    expert_hits: 1.0,
                },
                parts: BTreeMap::from([
                    ("waiting_seconds".to_owned(), 1.5),
                    ("kda_projections_seconds".to_owned(), 0.5),
                ]),
                bound_by: "disk".to_owned(),
            },
        }
    }

    #[test]
    fn the_limit_is_the_slowest_of_disk_memory_and_arithmetic() {
        let limit = row("a", 1).limit().unwrap();
        assert!((limit.disk - 1.9).abs() < 1e-9);
        assert!((limit.memory - 13.7 / 40.0).abs() < 1e-9);
        assert!((limit.arithmetic - 0.04).abs() < 1e-9);
        assert!((limit.seconds() - limit.disk).abs() < 1e-12);
    }

    fn step(mode: &str, seconds: f64) -> Step {
        Step {
            mode: mode.to_owned(),
            flops: 2.0,
            bound_by: "disk".to_owned(),
            seconds,
            trunk_bytes_read: 100.0 * seconds,
            head_bytes_read: 0.0,
            expert_bytes_read: 0.0,
            bytes_requested: 0.0,
            expert_requests: 1.0,
            expert_hits: 0.5,
            touched_bytes: 0.0,
            parts: BTreeMap::from([
                ("waiting_seconds".to_owned(), seconds),
                ("head_seconds".to_owned(), 0.0),
            ]),
        }
    }

    fn report(steps: Vec<Step>) -> Report {
        Report {
            prompt_ids: vec![1, 2],
            generated_ids: vec![3],
            finish: "length".to_owned(),
            identity: "model".to_owned(),
            isa: "avx2".to_owned(),
            threads: 2,
            planned_peak_bytes: 1,
            peak_rss_bytes: 1,
            steps,
        }
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "small whole numbers and halves are exact")]
    fn parts_are_those_of_the_step_of_median_time_and_bytes_are_means() {
        let steps = [
            ("prefill", 9.0),
            ("decode", 1.0),
            ("decode", 5.0),
            ("decode", 3.0),
        ];
        let steps = steps.map(|(mode, seconds)| step(mode, seconds)).into();
        let measured = measure(report(steps)).unwrap();
        assert_eq!(measured.decode_seconds, [1.0, 5.0, 3.0]);
        assert_eq!(measured.prefill_seconds, 9.0);
        assert_eq!(
            measured.parts,
            BTreeMap::from([("waiting_seconds".to_owned(), 3.0)])
        );
        assert_eq!(measured.token.trunk_bytes, 300.0);
        assert_eq!(measured.token.expert_hits, 0.5);
    }

    #[test]
    fn a_run_without_a_decode_step_is_no_row() {
        assert!(measure(report(vec![step("prefill", 1.0)])).is_none());
    }
}
