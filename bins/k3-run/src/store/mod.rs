//! Weights from disk: trunk tiles pinned or streamed through a ring, experts through slots, embedding rows one by one.
//!
//! One pool of reader threads serves two bounded queues. Every read carries the buffer it fills, so a reader never waits for
//! memory; expert reads go first, and the next trunk tile may always be read because its ring slot is its own. What is read
//! for a step is counted when the step uses it, so that counters follow from the plan and not from timing.

mod experts;
mod readers;
mod trunk;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use k3_shared::{
    cache::PolicyKind,
    checkpoint::{Checkpoint, TensorLocation},
    config::Config,
    direct::{AlignedBuf, DirectFile, Mode, covering_bytes},
    formats::trunk::OpenTrunk,
    ids::{ExpertIdx, LayerIdx, TokenId},
    ledger::TileSet,
    names::TensorRole,
    tiles::TileSpec,
};

use crate::{
    kernels::widen,
    model::{ExpertWeights, SourceError, WeightSource},
};
use experts::ExpertSlots;
use readers::Readers;
use trunk::TrunkStream;

/// When tiles and experts are checked against their digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Verify {
    /// Each when it is first loaded.
    #[default]
    First,
    /// Each whenever it is loaded.
    Always,
    /// None.
    Never,
}

/// What was read for a step, and how long the step waited for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReads {
    /// Trunk payload.
    pub trunk_bytes: u64,
    /// Payload of the head and of the vectors before it.
    pub head_bytes: u64,
    /// Expert payload.
    pub expert_bytes: u64,
    /// Everything asked of the disk, widened and padded.
    pub requested_bytes: u64,
    /// Distinct experts asked for.
    pub expert_requests: u64,
    /// Of these, resident ones.
    pub expert_hits: u64,
    /// Seconds in which the arithmetic waited for a read.
    pub wait_seconds: f64,
}

/// How the store is laid out: what a plan decided.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Tiles that stay in memory.
    pub pinned: TileSet,
    /// Slots of the ring.
    pub ring_slots: usize,
    /// Bytes of one slot.
    pub ring_slot_bytes: usize,
    /// Slots for experts.
    pub expert_slots: usize,
    /// Replacement policy.
    pub policy: PolicyKind,
    /// Reads in flight, each on a thread of its own.
    pub queue_depth: usize,
    /// Direct or buffered reads.
    pub mode: Mode,
    /// When to check digests.
    pub verify: Verify,
    /// Digests of the experts, where the plan names them.
    pub expert_digests: Option<ExpertDigests>,
}

/// SHA-256 of each expert's block.
pub type ExpertDigests = Arc<BTreeMap<(LayerIdx, ExpertIdx), [u8; 32]>>;

/// The weights of a run.
pub struct Store {
    trunk: TrunkStream,
    experts: Option<ExpertSlots>,
    embedding: Embedding,
    reads: StepReads,
    num_layers: usize,
}

impl Store {
    /// Open every file the run will read.
    ///
    /// # Errors
    /// If a file cannot be opened, or an expert's tensors do not lie together.
    pub fn open(
        trunk: &OpenTrunk,
        checkpoint: &Checkpoint,
        options: &StoreOptions,
    ) -> Result<Self, SourceError> {
        let readers = Arc::new(Readers::start(options.queue_depth)?);
        let mut files = Files::new(options.mode);
        let stream = TrunkStream::open(trunk, options, &mut files, Arc::clone(&readers))?;
        let experts = ExpertSlots::open(checkpoint, options, &mut files, readers)?;
        let embedding = Embedding::open(checkpoint, &mut files)?;
        files.tell();
        Ok(Self {
            trunk: stream,
            experts,
            embedding,
            reads: StepReads::default(),
            num_layers: checkpoint.layers,
        })
    }

    /// What was read since the last call.
    pub fn take_reads(&mut self) -> StepReads {
        let mut reads = std::mem::take(&mut self.reads);
        self.trunk.add_reads(&mut reads);
        if let Some(experts) = &mut self.experts {
            experts.add_reads(&mut reads);
        }
        reads
    }

    /// Bytes read ahead that no step used; the reads still in flight are waited for.
    pub fn discard_readahead(&mut self) -> u64 {
        self.trunk.discard()
    }

    /// Layers the store serves.
    pub fn num_layers(&self) -> usize {
        self.num_layers
    }
}

impl WeightSource for Store {
    fn announce(&mut self, steps_with_head: &[bool]) {
        self.trunk.announce(steps_with_head);
    }

    fn with_tile(&mut self, use_it: &mut dyn FnMut(&TileSpec, &[u8])) -> Result<(), SourceError> {
        self.trunk.with_tile(use_it)
    }

    fn embedding_row(&mut self, token: TokenId, out: &mut [f32]) -> Result<(), SourceError> {
        self.reads.requested_bytes += self.embedding.read(token, out)?;
        Ok(())
    }

    fn request_experts(
        &mut self,
        layer: LayerIdx,
        experts: &[ExpertIdx],
    ) -> Result<(), SourceError> {
        match &mut self.experts {
            Some(slots) => slots.request(layer, experts),
            None => Err(SourceError::Other(format!(
                "layer {layer} of this model has no experts"
            ))),
        }
    }

    fn with_next_expert(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError> {
        match &mut self.experts {
            Some(slots) => slots.with_next(use_it),
            None => Ok(false),
        }
    }
}

/// Open files by path, each opened once.
struct Files {
    mode: Mode,
    open: BTreeMap<PathBuf, Arc<DirectFile>>,
    fallback: Option<String>,
}

impl Files {
    fn new(mode: Mode) -> Self {
        Self {
            mode,
            open: BTreeMap::new(),
            fallback: None,
        }
    }

    fn get(&mut self, path: &Path) -> Result<Arc<DirectFile>, SourceError> {
        if let Some(file) = self.open.get(path) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(DirectFile::open(path, self.mode)?);
        if self.fallback.is_none() {
            self.fallback = file.fallback();
        }
        self.open.insert(path.to_owned(), Arc::clone(&file));
        Ok(file)
    }

    /// Say once where direct reads were refused.
    fn tell(&self) {
        if let Some(why) = &self.fallback {
            log::info!("{why}");
        }
    }
}

/// Rows of the embedding, read when they are needed: 14 KB a token instead of 2.3 GB resident.
struct Embedding {
    file: Arc<DirectFile>,
    place: TensorLocation,
    buffer: AlignedBuf,
}

impl Embedding {
    fn open(checkpoint: &Checkpoint, files: &mut Files) -> Result<Self, SourceError> {
        let place = checkpoint
            .tensor(TensorRole::Embedding)
            .map_err(|e| SourceError::Other(e.to_string()))?;
        let file = files.get(checkpoint.shard_path(place.shard))?;
        let buffer =
            AlignedBuf::with_capacity(covering_bytes(row_bytes(&checkpoint.config, &place)));
        Ok(Self {
            file,
            place,
            buffer,
        })
    }

    /// Bytes asked of the disk.
    fn read(&mut self, token: TokenId, out: &mut [f32]) -> Result<u64, SourceError> {
        let row = out.len() * self.place.dtype.bytes();
        let offset = self.place.offset + token.get() as u64 * row as u64;
        let range = self.file.read_covering(&mut self.buffer, offset, row)?;
        widen(
            crate::model::stored(self.place.dtype, &self.buffer[range]),
            out,
        );
        Ok(self.buffer.len() as u64)
    }
}

fn row_bytes(config: &Config, place: &TensorLocation) -> usize {
    config.hidden_size * place.dtype.bytes()
}
