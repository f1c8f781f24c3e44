//! Checkpoints with some bytes changed, and engines driven step by step.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt as _,
    path::PathBuf,
};

use clap::Parser as _;
use k3_run::{
    engine::{Engine, EngineOptions},
    model::{ModelError, Observer, Output, Segment, SequenceState},
};
use k3_shared::{
    checkpoint::Checkpoint,
    formats::plan::Plan,
    ids::{ExpertId, ExpertIdx, LayerIdx, TokenId},
    names::{LayerTensor, TensorRole},
};
use k3_tests::synth;

use crate::common::Fixture;

/// Where a piece of a checkpoint lies.
pub struct Place {
    pub path: PathBuf,
    pub offset: u64,
    pub bytes: usize,
}

impl Place {
    pub fn tensor(fixture: &Fixture, role: TensorRole) -> Self {
        let checkpoint = Checkpoint::open(&fixture.model, None).unwrap();
        let found = checkpoint.tensor(role).unwrap();
        let path = checkpoint.shard_path(found.shard).to_owned();
        Self {
            path,
            offset: found.offset,
            bytes: usize::try_from(found.bytes).unwrap(),
        }
    }

    pub fn layer(fixture: &Fixture, layer: u32, tensor: LayerTensor) -> Self {
        Self::tensor(fixture, TensorRole::Layer(LayerIdx(layer), tensor))
    }

    /// The six tensors of an expert, which lie together.
    pub fn expert(fixture: &Fixture, layer: u32, expert: u32) -> Self {
        let checkpoint = Checkpoint::open(&fixture.model, None).unwrap();
        let id = ExpertId {
            layer: LayerIdx(layer),
            expert: ExpertIdx(expert),
        };
        let found = checkpoint.expert(id).unwrap();
        let path = checkpoint.shard_path(found.shard).to_owned();
        Self {
            path,
            offset: found.offset,
            bytes: usize::try_from(found.bytes).unwrap(),
        }
    }

    /// Part `index` of `count` equal ones: a row of a matrix, a value of a vector.
    #[must_use]
    pub fn part(&self, index: usize, count: usize) -> Self {
        let bytes = self.bytes / count;
        let offset = self.offset + (index * bytes) as u64;
        Self {
            path: self.path.clone(),
            offset,
            bytes,
        }
    }

    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        OpenOptions::new()
            .read(true)
            .open(&self.path)
            .unwrap()
            .read_exact_at(&mut bytes, self.offset)
            .unwrap();
        bytes
    }

    pub fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes);
        OpenOptions::new()
            .write(true)
            .open(&self.path)
            .unwrap()
            .write_all_at(bytes, self.offset)
            .unwrap();
    }

    pub fn swap(&self, other: &Self) {
        let (a, b) = (self.read(), other.read());
        self.write(&b);
        other.write(&a);
    }

    /// End the file in the middle of this.
    pub fn cut(&self) {
        let file = OpenOptions::new().write(true).open(&self.path).unwrap();
        file.set_len(self.offset + self.bytes as u64 / 2).unwrap();
    }
}

/// The tiny checkpoint changed before it is packed.
pub fn changed(change: impl FnOnce(&Fixture)) -> Fixture {
    let fixture = Fixture::empty();
    synth::tiny(&fixture.model).unwrap();
    change(&fixture);
    fixture.pack(&["--tile-bytes", "16Ki"]);
    fixture
}

/// Why k3-plan does not plan this.
pub fn plan_error(fixture: &Fixture, flags: &[&str]) -> String {
    let mut line = vec!["k3-plan".into(), "-q".into()];
    line.extend(["--probe-cache".into(), "none".into(), "--model".into()]);
    line.push(fixture.model.clone().into_os_string());
    line.extend(["--trunk".into(), fixture.trunk.clone().into_os_string()]);
    line.extend(flags.iter().map(Into::into));
    let error = k3_plan::run(&k3_plan::Cli::parse_from(line), &mut Vec::new()).unwrap_err();
    format!("{error:#}")
}

/// Rename every shard, in the index too.
pub fn rename_shards(fixture: &Fixture, name: impl Fn(usize) -> String) {
    let index_path = fixture.model.join("model.safetensors.index.json");
    let mut index = fs::read_to_string(&index_path).unwrap();
    let mut shards: Vec<String> = fs::read_dir(&fixture.model)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    shards.sort();
    for (number, shard) in shards.iter().enumerate() {
        fs::rename(fixture.model.join(shard), fixture.model.join(name(number))).unwrap();
        index = index.replace(&format!("\"{shard}\""), &format!("\"{}\"", name(number)));
    }
    fs::write(index_path, index).unwrap();
}

/// Keeps the logits of the last row.
#[derive(Default)]
struct LastLogits(Vec<f32>);

impl Observer for LastLogits {
    fn logits(&mut self, first_id: usize, logits: &[f32]) {
        self.0.truncate(first_id);
        self.0.extend_from_slice(logits);
    }
}

/// An engine, and one sequence through it.
pub struct Steps {
    pub engine: Engine,
    pub state: SequenceState,
}

impl Steps {
    pub fn open(plan: &Plan) -> Self {
        let engine = Engine::open(plan.clone(), &EngineOptions::default()).unwrap();
        let state = engine.new_sequence();
        Self { engine, state }
    }

    /// Advance by `ids`; the logits of the last of them.
    pub fn step(&mut self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        let tokens: Vec<TokenId> = ids.iter().copied().map(TokenId).collect();
        let mut last = LastLogits::default();
        self.engine.announce(&[true]);
        let mut segments = [Segment {
            state: &mut self.state,
            tokens: &tokens,
        }];
        self.engine.step(&mut segments, Output::Last, &mut last)?;
        Ok(last.0)
    }
}

/// The largest absolute difference.
pub fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .fold(0.0, |max, (a, b)| max.max((a - b).abs()))
}
