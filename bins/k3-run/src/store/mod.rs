//! Weights from disk: trunk tiles pinned or streamed through a ring, experts through slots, embedding rows one by one.
//!
//! One pool of reader threads serves two bounded queues. Every read carries the buffer it fills, so a reader never waits for
//! memory; expert reads go first, and the next trunk tile may always be read because its ring slot is its own. What is read
//! for a step is counted when the step uses it, so that counters follow from the plan and not from timing.

mod activity;
mod embedding;
mod experts;
#[cfg(test)]
mod model;
mod readers;
mod sync;
mod trunk;
mod watch;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use k3_shared::{
    cache::PolicyKind,
    checkpoint::Checkpoint,
    direct::{DirectFile, Interpose, Mode},
    formats::{census::digests::ExpertDigests, trunk::OpenTrunk},
    ids::{ExpertIdx, LayerIdx, TokenId},
    ledger::TileSet,
    tiles::TileSpec,
};

use crate::model::{ExpertWeights, Progress, SourceError, WeightSource};
use embedding::Embedding;
use experts::ExpertSlots;
use readers::Readers;
use trunk::TrunkStream;
use watch::Watch;

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
    /// Seconds in which at least one read was in flight, for this step or ahead of the next.
    pub reading_seconds: f64,
}

/// How the store is laid out: what a plan decided.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The checkpoint folder, for the command that repairs a tile.
    pub model_dir: PathBuf,
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
    /// The most asked of one read call.
    pub read_bytes: usize,
    /// Direct or buffered reads.
    pub mode: Mode,
    /// What lies between the files and the disk.
    pub interpose: Interpose,
    /// When to check digests.
    pub verify: Verify,
    /// Digests of the experts, where the plan names them.
    pub expert_digests: Option<Arc<ExpertDigests>>,
    /// Set to a signal's number to end the run at the next tile.
    pub interrupt: Arc<AtomicUsize>,
}

/// The weights of a run.
pub struct Store {
    trunk: TrunkStream,
    experts: Option<ExpertSlots>,
    embedding: Embedding,
    watch: Watch,
    readers: Arc<Readers>,
    /// [`Readers::busy`] when it was last taken.
    busy: Duration,
    reads: StepReads,
    /// What [`Self::take_reads`] took.
    taken: Progress,
    interrupt: Arc<AtomicUsize>,
}

impl Store {
    /// Open every file that a run of the first `num_layers` layers reads.
    ///
    /// # Errors
    /// If a file cannot be opened, or an expert's tensors do not lie together.
    pub fn open(
        trunk: &OpenTrunk,
        checkpoint: &Checkpoint,
        num_layers: usize,
        options: &StoreOptions,
    ) -> Result<Self, SourceError> {
        // A group has at most the experts of one layer.
        let expert_reads = options.expert_slots.min(checkpoint.config.moe.num_experts);
        let trunk_reads = options.ring_slots + options.queue_depth.max(1);
        let readers = Readers::start(options.queue_depth, expert_reads, trunk_reads)?;
        let readers = Arc::new(readers);
        let mut files = Files::new(options);
        let stream = TrunkStream::open(trunk, options, &mut files, Arc::clone(&readers))?;
        let expert_readers = Arc::clone(&readers);
        let experts =
            ExpertSlots::open(checkpoint, num_layers, options, &mut files, expert_readers)?;
        let embedding = Embedding::open(
            checkpoint,
            trunk.embedding.as_ref(),
            options.verify,
            &mut files,
        )?;
        files.tell();
        Ok(Self {
            trunk: stream,
            experts,
            embedding,
            watch: Watch::over(files.open.keys())?,
            readers,
            busy: Duration::ZERO,
            reads: StepReads::default(),
            taken: Progress::default(),
            interrupt: Arc::clone(&options.interrupt),
        })
    }

    /// What was read since the last call.
    pub fn take_reads(&mut self) -> StepReads {
        self.taken = self.progress();
        let mut reads = std::mem::take(&mut self.reads);
        self.trunk.add_reads(&mut reads);
        if let Some(experts) = &mut self.experts {
            experts.add_reads(&mut reads);
        }
        let busy = self.readers.busy();
        reads.reading_seconds = busy.saturating_sub(self.busy).as_secs_f64();
        self.busy = busy;
        reads
    }

    /// Bytes read ahead that no step used; the reads still in flight are waited for.
    pub fn discard_readahead(&mut self) -> u64 {
        self.trunk.discard()
    }
}

impl WeightSource for Store {
    fn announce(&mut self, steps_with_head: &[bool]) {
        self.trunk.announce(steps_with_head);
    }

    fn progress(&self) -> Progress {
        let experts = self.experts.as_ref().map(ExpertSlots::reads);
        let mut progress = self.taken;
        for reads in [Some(&self.reads), Some(self.trunk.reads()), experts] {
            let Some(reads) = reads else { continue };
            progress.bytes += reads.requested_bytes;
            progress.expert_requests += reads.expert_requests;
            progress.expert_hits += reads.expert_hits;
        }
        progress
    }

    fn end_step(&mut self) -> Result<(), SourceError> {
        self.watch.check()
    }

    fn with_tile(&mut self, use_it: &mut dyn FnMut(&TileSpec, &[u8])) -> Result<(), SourceError> {
        if self.interrupt.load(Ordering::Relaxed) != 0 {
            return Err(SourceError::Interrupted);
        }
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

    fn with_ready_expert(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError> {
        match &mut self.experts {
            Some(slots) => slots.with_ready(use_it),
            None => Ok(false),
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
    read_bytes: usize,
    interpose: Interpose,
    open: BTreeMap<PathBuf, Arc<DirectFile>>,
    fallback: Option<String>,
}

impl Files {
    fn new(options: &StoreOptions) -> Self {
        Self {
            mode: options.mode,
            read_bytes: options.read_bytes,
            interpose: options.interpose.clone(),
            open: BTreeMap::new(),
            fallback: None,
        }
    }

    fn get(&mut self, path: &Path) -> Result<Arc<DirectFile>, SourceError> {
        if let Some(file) = self.open.get(path) {
            return Ok(Arc::clone(file));
        }
        let file = DirectFile::open(path, self.mode)?.with_max_transfer(self.read_bytes);
        let file = Arc::new(self.interpose.apply(file));
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
