//! A steady decode step allocates nothing and starts no thread, under any policy.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fs,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use common::Fixture;
use k3_run::{
    engine::{Engine, EngineOptions},
    model::{Observer, Output, Segment, SequenceState},
    store::StepReads,
};
use k3_shared::{
    cache::{ExpertCache, Geometry, GroupBuilder, PolicyKind},
    formats::plan::Plan,
    ids::{ExpertIdx, LayerIdx, TokenId},
};

/// Counts every allocation of the process, on whichever thread.
struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as in `alloc`.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Keeps the likeliest token.
#[derive(Default)]
struct Greedy {
    token: u32,
    best: f32,
}

impl Observer for Greedy {
    fn logits(&mut self, first_id: usize, logits: &[f32]) {
        if first_id == 0 {
            self.best = f32::NEG_INFINITY;
        }
        for (id, &logit) in (first_id..).zip(logits) {
            if logit > self.best {
                (self.best, self.token) = (logit, u32::try_from(id).unwrap());
            }
        }
    }
}

struct Run {
    engine: Engine,
    state: SequenceState,
    observer: Greedy,
}

impl Run {
    fn step(&mut self, tokens: &[TokenId]) {
        let mut segments = [Segment {
            state: &mut self.state,
            tokens,
        }];
        self.engine
            .step(&mut segments, Output::Last, &mut self.observer)
            .unwrap();
    }

    /// Decode so many tokens; the allocations, and what was read.
    fn decode(&mut self, count: usize) -> (usize, StepReads) {
        self.engine.take_reads();
        let before = COUNT.load(Ordering::Relaxed);
        for _ in 0..count {
            self.step(&[TokenId(self.observer.token)]);
        }
        (
            COUNT.load(Ordering::Relaxed) - before,
            self.engine.take_reads(),
        )
    }
}

fn num_threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

/// Decoded before the measurement, and again in it.
const DECODED: usize = 100;

/// What `DECODED` steps of a warm engine allocate, and what they read.
fn measure(plan: &Plan, threads: usize) -> (usize, StepReads) {
    let options = EngineOptions {
        threads: Some(threads),
        ..EngineOptions::default()
    };
    let mut engine = Engine::open(plan.clone(), &options).unwrap();
    // Enough rows for every expert to be asked for once.
    let prompt: Vec<TokenId> = (0..192).map(|n| TokenId(n * 37 % 576)).collect();
    let chunks = prompt.chunks(16);
    engine.announce(&vec![true; chunks.len() + 2 * DECODED]);
    let mut run = Run {
        state: engine.new_sequence(),
        engine,
        observer: Greedy::default(),
    };
    for tokens in chunks {
        run.step(tokens);
    }
    run.decode(DECODED);
    let tasks = num_threads();
    let measured = run.decode(DECODED);
    assert_eq!(num_threads(), tasks, "{threads} threads");
    measured
}

/// What a warm cache of fewer slots than a token asks for allocates in 200 decode steps.
fn measure_cache(kind: PolicyKind) -> usize {
    let geometry = Geometry::new(9, 16, 4).unwrap();
    let mut cache = ExpertCache::new(kind, 20, geometry).unwrap();
    let (mut groups, mut decisions) = (GroupBuilder::new(geometry), Vec::new());
    let mut random = 1u32;
    let mut before = 0;
    for step in 0..400 {
        if step == 200 {
            before = COUNT.load(Ordering::Relaxed);
        }
        for layer in (1..9).map(LayerIdx) {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (first, gap) = (random >> 28, random >> 26 & 3);
            let experts = (0..4).map(|nth| ExpertIdx((first + nth * (gap + 1)) % 16));
            let group = groups.group(layer, experts).unwrap();
            cache.request_group_into(layer, group, &mut decisions);
        }
    }
    let counters = cache.counters();
    assert!(
        counters.misses() > counters.requests / 3,
        "{kind}: {counters:?}"
    );
    COUNT.load(Ordering::Relaxed) - before
}

/// One test, because allocations of another one running beside it would be counted.
#[test]
fn a_steady_decode_step_allocates_nothing_and_starts_no_thread() {
    for kind in PolicyKind::ALL
        .into_iter()
        .filter(|kind| !kind.is_replay_only())
    {
        assert_eq!(measure_cache(kind), 0, "{kind}");
    }
    let fixture = Fixture::tiny("8Ki");
    let common = [
        "--budget",
        "200M",
        "--context",
        "600",
        "--expert-slots",
        "144",
    ];
    let streamed = [
        "--pin",
        "0",
        "--stream-buffers",
        "40Ki",
        "--queue-depth",
        "4",
    ];
    for (flags, streams) in [(&[][..], false), (&streamed[..], true)] {
        let plan = fixture.plan(&[&common[..], flags].concat());
        for threads in [1, 2] {
            // The thread that opens an engine joins its pool for life, so each gets a thread of its own, as a process has one.
            let measured = thread::scope(|scope| scope.spawn(|| measure(&plan, threads)).join());
            let (allocations, reads) = measured.unwrap();
            let how = format!("{threads} threads, {flags:?}");
            assert_eq!(reads.expert_hits, reads.expert_requests, "{how}");
            assert_eq!(reads.trunk_bytes > 0, streams, "{how}");
            assert_eq!(allocations, 0, "in {DECODED} steps: {how}");
        }
    }
}
