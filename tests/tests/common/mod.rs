//! The pipeline in one process: checkpoint, trunk, plan, run, with everything a run computes kept for comparison.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test binary uses its own part"
)]
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]

use std::path::{Path, PathBuf};

use clap::Parser as _;
use k3_run::{
    engine::{Engine, EngineOptions},
    generate::{Generated, Request, generate},
    model::{Observer, Output, Routing},
    observe::{StepObserver, StepRows},
    sampler::Sampler,
};
use k3_shared::{
    formats::plan::Plan,
    ids::{ExpertIdx, LayerIdx},
    term::Outcome,
};
use k3_tests::synth::{self, Options};
use serde_json::Value;

/// The golden prompt of the tiny checkpoint.
pub const TINY_PROMPT: [u32; 12] = [5, 17, 300, 42, 411, 9, 128, 77, 256, 33, 560, 2];

/// A checkpoint and its trunk in a folder that goes away with it.
pub struct Fixture {
    dir: tempfile::TempDir,
    pub model: PathBuf,
    pub trunk: PathBuf,
}

impl Fixture {
    /// The tiny checkpoint, its trunk cut into tiles of `tile_bytes`.
    pub fn tiny(tile_bytes: &str) -> Self {
        let fixture = Self::empty();
        synth::tiny(&fixture.model).unwrap();
        fixture.pack(&["--tile-bytes", tile_bytes]);
        fixture
    }

    /// A checkpoint of another shape.
    pub fn custom(config: &Value, options: Options) -> Self {
        let fixture = Self::empty();
        synth::custom(&fixture.model, config, options).unwrap();
        fixture.pack(&["--tile-bytes", "8Ki"]);
        fixture
    }

    /// No checkpoint yet. The folder lies beside the build, on a disk rather than in memory, so that direct reads are real.
    pub fn empty() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (model, trunk) = (dir.path().join("model"), dir.path().join("trunk"));
        Self { dir, model, trunk }
    }

    /// A path inside the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Pack the trunk.
    pub fn pack(&self, flags: &[&str]) {
        let mut line = vec!["k3-pack".into(), self.model.clone().into_os_string()];
        line.extend([self.trunk.clone().into_os_string(), "-q".into()]);
        line.extend(flags.iter().map(Into::into));
        let outcome = k3_pack::run(&k3_pack::Cli::parse_from(line), &mut Vec::new()).unwrap();
        assert_eq!(outcome, Outcome::Done);
    }

    /// Plan with these flags.
    pub fn plan(&self, flags: &[&str]) -> Plan {
        let (outcome, out) = self.try_plan(flags);
        assert_eq!(outcome, Outcome::Done, "{flags:?}");
        serde_json::from_slice(&out).unwrap()
    }

    /// Plan with these flags; what came out may be a refusal.
    pub fn try_plan(&self, flags: &[&str]) -> (Outcome, Vec<u8>) {
        let mut line = vec!["k3-plan".into(), "-q".into()];
        line.extend(["--probe-cache".into(), "none".into(), "--model".into()]);
        line.push(self.model.clone().into_os_string());
        line.extend(["--trunk".into(), self.trunk.clone().into_os_string()]);
        line.extend(flags.iter().map(Into::into));
        let mut out = Vec::new();
        let outcome = k3_plan::run(&k3_plan::Cli::parse_from(line), &mut out).unwrap();
        (outcome, out)
    }
}

/// Everything a run computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Generated ids.
    pub ids: Vec<u32>,
    /// Logits of every generated token, then those of every scored prompt row are in `prompt_logits`.
    pub logits: Vec<Vec<f32>>,
    /// Logits of every prompt row, when they were asked for.
    pub prompt_logits: Vec<Vec<f32>>,
    /// The stream after each layer, all prompt rows in order: `hidden[layer]` is `[rows, hidden]`.
    pub hidden: Vec<Vec<f32>>,
    /// Experts and weights of each prompt row: `routed[layer]`, empty for dense layers.
    pub routed: Vec<Vec<(Vec<ExpertIdx>, Vec<f32>)>>,
}

impl Record {
    /// All logits as bits, so that NaN and signed zero count.
    pub fn bits(&self) -> Vec<Vec<u32>> {
        let all = self.logits.iter().chain(&self.prompt_logits);
        all.map(|row| row.iter().map(|x| x.to_bits()).collect())
            .collect()
    }
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Ask {
    pub prompt: Vec<u32>,
    pub num_tokens: usize,
    pub recompute: bool,
    /// Keep the logits of every prompt row.
    pub all_rows: bool,
}

impl Ask {
    pub fn new(prompt: &[u32], num_tokens: usize) -> Self {
        Self {
            prompt: prompt.to_vec(),
            num_tokens,
            recompute: false,
            all_rows: false,
        }
    }
}

/// Keeps everything.
#[derive(Default)]
pub struct Capture {
    record: Record,
    last: Vec<f32>,
    rows: usize,
    mode_is_prefill: bool,
    output: Option<Output>,
    tiles: Vec<Vec<f32>>,
}

impl Observer for Capture {
    fn routed(&mut self, layer: LayerIdx, routings: &[Routing]) {
        if self.mode_is_prefill {
            let routed = &mut self.record.routed;
            routed.resize(routed.len().max(layer.get() + 1), Vec::new());
            let pairs = routings
                .iter()
                .map(|r| (r.experts.clone(), r.weights.clone()));
            routed[layer.get()].extend(pairs);
        }
    }

    fn hidden(&mut self, layer: LayerIdx, stream: &[f32]) {
        if self.mode_is_prefill {
            let hidden = &mut self.record.hidden;
            hidden.resize(hidden.len().max(layer.get() + 1), Vec::new());
            hidden[layer.get()].extend_from_slice(stream);
        }
    }

    fn logits(&mut self, first_id: usize, logits: &[f32]) {
        let rows = if self.output == Some(Output::All) {
            self.rows
        } else {
            1
        };
        let width = logits.len() / rows;
        if first_id == 0 {
            self.tiles = vec![Vec::new(); rows];
        }
        for (row, logits) in self.tiles.iter_mut().zip(logits.chunks_exact(width)) {
            assert_eq!(row.len(), first_id, "head tiles come in order");
            row.extend_from_slice(logits);
        }
    }
}

impl StepObserver for Capture {
    fn begin(&mut self, rows: &StepRows<'_>, output: Output) {
        self.rows = rows.ids.len();
        self.mode_is_prefill = rows.mode == k3_shared::formats::trace::Mode::Prefill;
        self.output = Some(output);
        self.tiles.clear();
    }

    fn end(&mut self) -> std::io::Result<()> {
        if self.output == Some(Output::All) {
            self.record.prompt_logits.extend(self.tiles.iter().cloned());
        }
        if let Some(last) = self.tiles.pop() {
            self.last = last;
        }
        Ok(())
    }

    fn generated(&mut self) -> std::io::Result<()> {
        self.record.logits.push(self.last.clone());
        Ok(())
    }

    fn last_logits(&self) -> &[f32] {
        &self.last
    }

    fn as_observer(&mut self) -> &mut dyn Observer {
        self
    }
}

/// Run a plan in this process; greedy, stopping at nothing.
pub fn try_run(plan: &Plan, options: &EngineOptions, ask: &Ask) -> (Record, Generated) {
    let mut engine = Engine::open(plan.clone(), options).unwrap();
    let request = Request {
        prompt_ids: ask.prompt.clone(),
        num_tokens: ask.num_tokens,
        stop_ids: Vec::new(),
        recompute: ask.recompute,
        score_prompt: ask.all_rows,
        leave_rows: 0,
    };
    let mut sampler = Sampler::new(0.0, 1.0, 0).unwrap();
    let mut capture = Capture::default();
    let mut emit = |_| Ok(());
    let generated = generate(&mut engine, &request, &mut sampler, &mut capture, &mut emit);
    let mut record = capture.record;
    record.ids.clone_from(&generated.ids);
    (record, generated)
}

/// As [`try_run`], of a run that must not fail.
pub fn run(plan: &Plan, options: &EngineOptions, ask: &Ask) -> Record {
    let (record, generated) = try_run(plan, options, ask);
    assert!(generated.error.is_none(), "{:?}", generated.error);
    record
}

/// A golden file.
pub fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden")
        .join(name);
    let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

/// A list of numbers of a golden file.
pub fn numbers(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_f64().unwrap())
        .collect()
}

/// A list of ids of a golden file.
pub fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The largest difference between computed and golden values.
pub fn worst(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter()
        .zip(want)
        .map(|(g, w)| (f64::from(*g) - w).abs())
        .fold(0.0, f64::max)
}

/// The place of the largest value, of equals the first.
pub fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    best
}
