//! Weights from disk: trunk tiles pinned or streamed through a ring, experts through slots, embedding rows one by one.
//!
//! One pool of reader threads serves two bounded queues. Every read carries the buffer it fills, so a reader never waits for
//! memory; expert reads go first, and the next trunk tile may always be read because its ring slot is its own. What is read
//! for a step is counted when the step uses it, so that counters follow from the plan and not from timing.

mod activity;
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
    checkpoint::{Checkpoint, TensorLocation},
    config::Config,
    direct::{AlignedBuf, DirectFile, Interpose, Mode, covering_bytes},
    formats::{census::digests::ExpertDigests, trunk::OpenTrunk},
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
        let embedding = Embedding::open(checkpoint, &mut files)?;
        files.tell();
        Ok(Self {
            trunk: stream,
            experts,
            embedding,
            watch: Watch::over(files.open.keys())?,
            readers,
            busy: Duration::ZERO,
            reads: StepReads::default(),
            interrupt: Arc::clone(&options.interrupt),
        })
    }

    /// What was read since the last call.
    pub fn take_reads(&mut self) -> StepReads {
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use k3_shared::{checkpoint::ShardIdx, names::Dtype, release};

    use super::*;

    /// The last row of the released table begins 4,697,606,728 bytes into its shard: past what 32 bits hold.
    #[test]
    fn row_39_the_last_embedding_row_of_the_release_is_read_from_its_own_place() {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        let (rows, hidden) = (config.vocab_size, config.hidden_size);
        let (table, row) = (2_348_810_824, hidden as u64 * 2);
        let last = table + (rows as u64 - 1) * row;
        assert!(last > u64::from(u32::MAX));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model-00094-of-000096.safetensors");
        let file = std::fs::File::create(&path).unwrap();
        file.write_all_at(&[0x80, 0x3f].repeat(hidden), last)
            .unwrap();
        // Where a 32-bit offset would end up.
        let wrapped = u64::from(u32::try_from(last & u64::from(u32::MAX)).unwrap());
        file.write_all_at(&[0x00, 0x40].repeat(hidden), wrapped)
            .unwrap();
        let place = TensorLocation {
            shard: ShardIdx(0),
            dtype: Dtype::Bf16,
            shape: vec![rows, hidden],
            offset: table,
            bytes: rows as u64 * row,
        };
        for mode in [Mode::Auto, Mode::Buffered] {
            let mut embedding = Embedding {
                file: Arc::new(DirectFile::open(&path, mode).unwrap()),
                buffer: AlignedBuf::with_capacity(covering_bytes(row_bytes(&config, &place))),
                place: place.clone(),
            };
            let mut out = vec![0.0; hidden];
            let token = TokenId(u32::try_from(rows).unwrap() - 1);
            let requested = embedding.read(token, &mut out).unwrap();
            assert!(out.iter().all(|x| x.to_bits() == 1f32.to_bits()));
            assert!(
                requested <= 5 * 4096,
                "the blocks of one row, not {requested} bytes"
            );
        }
    }
}
