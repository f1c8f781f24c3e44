//! Streamed decode steps against a plain reader of the same files, in turns: how much of the disk's time a step uses.
//!
//! `cargo bench -p k3-run --bench streamed -- PLAN [RESIDENT_PLAN] [ROUNDS]`. The reader is as plain as can be: as many threads
//! as the plan has reads in flight, each asking for the plan's read size, one after the other through the trunk. It reads as many
//! bytes as the step before it did, so that a disk whose speed drifts drifts for both. With a plan that holds the same model
//! whole, steps without any reads are measured first; the limit is the larger of both times.

mod plain;

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use k3_run::{
    engine::{Engine, EngineOptions},
    model::{Observer, Output, Segment, SequenceState},
    store::{StepReads, Verify},
};
use k3_shared::{formats::plan::Plan, ids::TokenId};

/// Steps of the resident run: all experts that its tokens choose are read in the first half.
const RESIDENT_STEPS: usize = 20;

/// A ring is read in less.
const READ_AHEAD_ENDS: Duration = Duration::from_millis(700);

/// Nothing is kept of a step.
struct Blind;
impl Observer for Blind {}

/// One engine and one sequence, whose tokens differ from each other.
struct Decoder {
    engine: Engine,
    state: SequenceState,
    next: u32,
}

impl Decoder {
    fn open(plan: Plan) -> Self {
        // Digests are checked when weights first come; the steps measured come after.
        let options = EngineOptions {
            verify: Verify::Never,
            ..EngineOptions::default()
        };
        let engine = Engine::open(plan, &options).unwrap_or_else(|e| panic!("{e}"));
        let state = engine.new_sequence();
        Self {
            engine,
            state,
            next: 0,
        }
    }

    /// Seconds and reads of one step.
    fn step(&mut self) -> (f64, StepReads) {
        let vocab = self.engine.config().vocab_size;
        let token = u32::try_from((self.next as usize * 7919 + 13) % vocab).unwrap_or(0);
        self.next += 1;
        let mut segments = [Segment {
            state: &mut self.state,
            tokens: &[TokenId(token)],
        }];
        let began = Instant::now();
        self.engine
            .step(&mut segments, Output::Last, &mut Blind)
            .unwrap_or_else(|e| panic!("{e}"));
        let seconds = began.elapsed().as_secs_f64();
        (seconds, self.engine.take_reads())
    }
}

fn read_plan(path: &str) -> Plan {
    let text = std::fs::read(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The middle value, or of two the upper one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Median time of a step that reads nothing but its embedding row.
fn resident(plan: Plan) -> f64 {
    assert_eq!(
        plan.predicted.trunk_bytes_per_token + plan.predicted.head_bytes_per_token,
        0,
        "the resident plan holds trunk and head"
    );
    let mut decoder = Decoder::open(plan);
    for _ in 0..RESIDENT_STEPS {
        decoder.step();
    }
    // The same tokens again from the start choose the same experts.
    decoder.state = decoder.engine.new_sequence();
    decoder.next = 0;
    let steps = (0..RESIDENT_STEPS).map(|_| {
        let (seconds, reads) = decoder.step();
        assert_eq!(reads.expert_bytes, 0, "the resident plan holds the experts");
        seconds
    });
    median(steps.collect())
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    let (mut plans, mut rounds) = (Vec::new(), 5);
    for arg in &args {
        match arg.parse() {
            Ok(number) => rounds = number,
            Err(_) => plans.push(arg.as_str()),
        }
    }
    let Some((&streamed, others)) = plans.split_first() else {
        // `cargo bench` runs every benchmark of the package; this one needs a model.
        println!(
            "streamed: give a plan: cargo bench -p k3-run --bench streamed -- PLAN [RESIDENT_PLAN] [ROUNDS]"
        );
        return;
    };
    let floor = others.first().map(|path| resident(read_plan(path)));
    if let Some(seconds) = floor {
        println!("resident step: {seconds:.4} s, median of {RESIDENT_STEPS}");
    }
    let plan = read_plan(streamed);
    println!(
        "{} KiB a read, {} in flight, {} B of ring, {} expert slots",
        plan.read_bytes / 1024,
        plan.queue_depth,
        plan.stream_buffer_bytes,
        plan.expert_slots
    );
    alternate(&plan, floor.unwrap_or(0.0), rounds);
}

/// Steps and plain reads in turns.
#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
fn alternate(plan: &Plan, resident: f64, rounds: usize) {
    let files: Vec<&Path> = plan.trunk_files.iter().map(AsRef::as_ref).collect();
    let mut plain = plain::Reader::open(&files, plan.read_bytes, plan.queue_depth)
        .unwrap_or_else(|e| panic!("{e}"));
    let mut decoder = Decoder::open(plan.clone());
    decoder.engine.announce(&vec![true; rounds + 1]);
    // The first step reads what is pinned.
    decoder.step();
    let (mut ratios, mut in_flight) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        // The reads ahead of the next step end first, so that the disk is the reader's alone. As many come at the end of the step.
        thread::sleep(READ_AHEAD_ENDS);
        let _ = decoder.engine.take_reads();
        let speed = plain.bytes_per_second(plain::SAMPLE_BYTES);
        let (seconds, reads) = decoder.step();
        let again = plain.bytes_per_second(plain::SAMPLE_BYTES);
        let rate = f64::midpoint(speed, again);
        let disk = reads.requested_bytes as f64 / rate;
        let ratio = seconds / disk.max(resident);
        let share = reads.reading_seconds / seconds;
        println!(
            "step {round}: {:.3} GB in {seconds:.3} s, waited {:.3} s; plain reader {:.1} and {:.1} MB/s: limit {:.3} s, ratio {ratio:.3}; \
             a read in flight {:.1} % of the time",
            reads.requested_bytes as f64 / 1e9,
            reads.wait_seconds,
            speed / 1e6,
            again / 1e6,
            disk.max(resident),
            100.0 * share
        );
        ratios.push(ratio);
        in_flight.push(share);
    }
    println!(
        "median ratio {:.3}, a read in flight {:.1} % of the time",
        median(ratios),
        100.0 * median(in_flight)
    );
}
