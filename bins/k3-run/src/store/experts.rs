//! Experts through slots: the shared cache decides, reads go ahead of the trunk's, experts are consumed as they arrive.
//!
//! Decisions are made when a group is requested, so hits and misses never depend on timing. A miss whose slot still holds an
//! unconsumed expert of the same group waits for it; nothing else ever waits for a slot.

use std::{collections::VecDeque, ops::Range, sync::Arc, time::Instant};

use k3_shared::{
    cache::{Decision, ExpertCache, Geometry, GroupBuilder},
    checkpoint::Checkpoint,
    config::Mlp,
    direct::{AlignedBuf, DirectFile, covering_bytes},
    formats::census::digests::ExpertDigests,
    ids::{ExpertId, ExpertIdx, LayerIdx},
};

use super::{
    Files, StepReads, StoreOptions, Verify,
    readers::{Done, Job, Queue, Readers},
    sync::{Receiver, Sender, channel},
};
use crate::model::{ExpertWeights, SourceError};

/// One slot and what lies in it.
struct Slot {
    /// Absent while a reader fills it.
    buffer: Option<AlignedBuf>,
    payload: Range<usize>,
    /// Holds an expert of the current group that was not consumed yet, or is being filled with one.
    busy: bool,
}

/// Where the experts of one layer lie.
struct LayerFile {
    file: Arc<DirectFile>,
    /// First byte of each expert's block.
    offsets: Vec<u64>,
}

/// The bytes of one expert.
struct Block {
    bytes: usize,
    /// Where each tensor lies in them, in file order.
    layout: [Range<usize>; 6],
}

/// The expert slots of a run.
pub(super) struct ExpertSlots {
    cache: ExpertCache,
    groups: GroupBuilder,
    slots: Vec<Slot>,
    layers: Vec<Option<LayerFile>>,
    block: Block,
    /// Misses of the group whose reads are not issued yet, in processing order.
    waiting: VecDeque<Decision>,
    /// Slots of the group that are ready to be consumed.
    ready: VecDeque<(ExpertIdx, u32)>,
    in_flight: Vec<Option<ExpertIdx>>,
    num_in_flight: usize,
    layer: LayerIdx,
    decisions: Vec<Decision>,
    done: (Sender<Done>, Receiver<Done>),
    readers: Arc<Readers>,
    verify: Verify,
    digests: Option<Arc<ExpertDigests>>,
    verified: Vec<bool>,
    reads: StepReads,
}

impl ExpertSlots {
    /// `None` for a model without routed experts.
    pub(super) fn open(
        checkpoint: &Checkpoint,
        num_layers: usize,
        options: &StoreOptions,
        files: &mut Files,
        readers: Arc<Readers>,
    ) -> Result<Option<Self>, SourceError> {
        let config = &checkpoint.config;
        let mut layers = Vec::new();
        for layer in config.layers().take(num_layers) {
            layers.push(match config.mlp(layer) {
                Mlp::Dense => None,
                Mlp::Moe => Some(LayerFile::open(checkpoint, layer, files)?),
            });
        }
        if layers.iter().all(Option::is_none) {
            return Ok(None);
        }
        let moe = &config.moe;
        let geometry = Geometry::new(
            config.num_hidden_layers,
            moe.num_experts,
            moe.num_experts_per_token,
        )?;
        let range = |inner: k3_shared::checkpoint::InnerRange| {
            let start = usize::try_from(inner.offset).unwrap_or(usize::MAX);
            start..start.saturating_add(usize::try_from(inner.len).unwrap_or(usize::MAX))
        };
        let block = Block {
            bytes: usize::try_from(moe.expert_bytes()).unwrap_or(usize::MAX),
            layout: checkpoint.expert_layout().map(range),
        };
        Self::over(geometry, layers, block, options, readers).map(Some)
    }

    fn over(
        geometry: Geometry,
        layers: Vec<Option<LayerFile>>,
        block: Block,
        options: &StoreOptions,
        readers: Arc<Readers>,
    ) -> Result<Self, SourceError> {
        let slots = options.expert_slots;
        let capacity = covering_bytes(block.bytes);
        let slot = || Slot {
            buffer: Some(AlignedBuf::with_capacity(capacity)),
            payload: 0..0,
            busy: false,
        };
        Ok(Self {
            cache: ExpertCache::new(options.policy, slots, geometry)?,
            groups: GroupBuilder::new(geometry),
            slots: std::iter::repeat_with(slot).take(slots).collect(),
            layers,
            block,
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            in_flight: vec![None; slots],
            num_in_flight: 0,
            layer: LayerIdx(0),
            decisions: Vec::new(),
            done: channel(slots),
            readers,
            verify: options.verify,
            digests: options.expert_digests.clone(),
            verified: vec![false; geometry.keys()],
            reads: StepReads::default(),
        })
    }

    /// What was read for the steps since [`Self::add_reads`].
    pub(super) fn reads(&self) -> &StepReads {
        &self.reads
    }

    /// Add what was read for the steps since the last call.
    pub(super) fn add_reads(&mut self, to: &mut StepReads) {
        let reads = std::mem::take(&mut self.reads);
        to.expert_bytes += reads.expert_bytes;
        to.requested_bytes += reads.requested_bytes;
        to.expert_requests += reads.expert_requests;
        to.expert_hits += reads.expert_hits;
        to.wait_seconds += reads.wait_seconds;
    }

    /// Request the distinct experts of a step and layer.
    pub(super) fn request(
        &mut self,
        layer: LayerIdx,
        experts: &[ExpertIdx],
    ) -> Result<(), SourceError> {
        self.layer = layer;
        let group = self.groups.group(layer, experts.iter().copied())?;
        self.cache
            .request_group_into(layer, group, &mut self.decisions);
        self.reads.expert_requests += self.decisions.len() as u64;
        for decision in &self.decisions {
            let slot = decision.slot.ok_or_else(|| {
                SourceError::Other("the cache policy keeps no slot for an expert in use".into())
            })?;
            if decision.is_hit() {
                self.reads.expert_hits += 1;
                let expert = self.cache.geometry().id(decision.key).expert;
                self.slots[slot as usize].busy = true;
                self.ready.push_back((expert, slot));
            } else {
                self.waiting.push_back(*decision);
            }
        }
        self.issue()
    }

    /// Issue reads in processing order until one's slot is in use.
    fn issue(&mut self) -> Result<(), SourceError> {
        while let Some(decision) = self.waiting.front() {
            let Some(slot) = decision
                .slot
                .filter(|&slot| !self.slots[slot as usize].busy)
            else {
                break;
            };
            let key = decision.key;
            self.waiting.pop_front();
            let id = self.cache.geometry().id(key);
            let (file, offset) = self.place(id)?;
            let slot_state = &mut self.slots[slot as usize];
            let buffer = slot_state.buffer.take().ok_or_else(|| {
                SourceError::Other(format!("slot {slot} is being read into already"))
            })?;
            slot_state.busy = true;
            let hash = self.digests.is_some()
                && match self.verify {
                    Verify::First => !self.verified[key.get()],
                    Verify::Always => true,
                    Verify::Never => false,
                };
            self.in_flight[slot as usize] = Some(id.expert);
            self.num_in_flight += 1;
            let job = Job {
                file,
                offset,
                len: self.block.bytes,
                buffer,
                hash,
                tag: u64::from(slot),
                done: self.done.0.clone(),
            };
            self.readers.submit(Queue::Experts, job);
        }
        Ok(())
    }

    fn place(&self, id: ExpertId) -> Result<(Arc<DirectFile>, u64), SourceError> {
        let layer = self.layers.get(id.layer.get()).and_then(Option::as_ref);
        let found =
            layer.and_then(|l| Some((Arc::clone(&l.file), *l.offsets.get(id.expert.get())?)));
        found.ok_or_else(|| {
            SourceError::Other(format!("layer {} has no expert {}", id.layer, id.expert))
        })
    }

    /// Give an expert of the group that is there to `use_it`; `false` when none is.
    pub(super) fn with_ready(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError> {
        // All that has arrived, so that slots that can be read into again are known.
        while let Some(done) = self.done.1.try_recv() {
            self.arrive(done)?;
        }
        let Some((expert, slot)) = self.ready.pop_front() else {
            return Ok(false);
        };
        let slot = &mut self.slots[slot as usize];
        if let Some(buffer) = &slot.buffer {
            let block = &buffer[slot.payload.clone()];
            use_it(
                expert,
                ExpertWeights {
                    block,
                    layout: &self.block.layout,
                },
            );
        }
        slot.busy = false;
        self.issue()?;
        Ok(true)
    }

    /// Give the next expert of the group to `use_it`, waiting for it if need be; `false` when all were given.
    pub(super) fn with_next(
        &mut self,
        use_it: &mut dyn FnMut(ExpertIdx, ExpertWeights<'_>),
    ) -> Result<bool, SourceError> {
        if self.with_ready(use_it)? {
            return Ok(true);
        }
        if self.num_in_flight == 0 {
            debug_assert!(
                self.waiting.is_empty(),
                "a slot is busy and nobody will free it"
            );
            return Ok(false);
        }
        let began = Instant::now();
        let done = self
            .done
            .1
            .recv()
            .ok_or_else(|| SourceError::Other("the reader threads are gone".into()))?;
        self.reads.wait_seconds += began.elapsed().as_secs_f64();
        self.arrive(done)?;
        self.with_ready(use_it)
    }

    fn arrive(&mut self, done: Done) -> Result<(), SourceError> {
        let index = usize::try_from(done.tag).unwrap_or(usize::MAX);
        let expert = self.in_flight.get_mut(index).and_then(Option::take);
        let Some(expert) = expert else {
            return Err(SourceError::Other("a read nobody asked for arrived".into()));
        };
        self.num_in_flight -= 1;
        let id = ExpertId {
            layer: self.layer,
            expert,
        };
        self.reads.requested_bytes += done.buffer.len() as u64;
        let payload = done.payload.map_err(|error| {
            SourceError::Other(format!("expert {expert} of layer {}: {error}", self.layer))
        })?;
        self.check(id, done.digest)?;
        self.reads.expert_bytes += self.block.bytes as u64;
        let slot = &mut self.slots[index];
        slot.payload = payload;
        slot.buffer = Some(done.buffer);
        self.ready
            .push_back((expert, u32::try_from(index).unwrap_or(u32::MAX)));
        Ok(())
    }

    fn check(&mut self, id: ExpertId, digest: Option<[u8; 32]>) -> Result<(), SourceError> {
        let (Some(found), Some(digests)) = (digest, &self.digests) else {
            return Ok(());
        };
        if digests.get(id) != Some(&found) {
            let (file, offset) = self.place(id)?;
            return Err(SourceError::Digest {
                path: file.path().to_owned(),
                offset,
                what: format!("expert {} of layer {}", id.expert, id.layer),
                repair: format!("download {} again", file.path().display()),
            });
        }
        if let Some(key) = self.cache.geometry().key(id) {
            self.verified[key.get()] = true;
        }
        Ok(())
    }
}

impl LayerFile {
    fn open(
        checkpoint: &Checkpoint,
        layer: LayerIdx,
        files: &mut Files,
    ) -> Result<Self, SourceError> {
        let num_experts = u32::try_from(checkpoint.config.moe.num_experts).unwrap_or(u32::MAX);
        let mut offsets = Vec::with_capacity(num_experts as usize);
        let mut shard = None;
        for expert in (0..num_experts).map(ExpertIdx) {
            let place = checkpoint
                .expert(ExpertId { layer, expert })
                .map_err(|e| SourceError::Other(e.to_string()))?;
            if *shard.get_or_insert(place.shard) != place.shard {
                return Err(SourceError::Other(format!(
                    "layer {layer}: its experts lie in several shards; the release keeps a layer in one"
                )));
            }
            offsets.push(place.offset);
        }
        let shard =
            shard.ok_or_else(|| SourceError::Other(format!("layer {layer}: no experts")))?;
        Ok(Self {
            file: files.get(checkpoint.shard_path(shard))?,
            offsets,
        })
    }
}

#[cfg(test)]
mod tests;
