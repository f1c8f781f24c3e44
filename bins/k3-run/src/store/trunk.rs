//! The trunk as a cyclic sequence of tiles: pinned ones kept, the others streamed through a ring.
//!
//! Reads are issued in order of use, as far ahead as the ring has free slots, across step boundaries but never past the last
//! announced step. A pinned tile is read once, in the first step, into memory of its own.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use k3_shared::{
    direct::{AlignedBuf, DirectFile},
    formats::{census::digests::parse_hex, trunk::OpenTrunk},
    term::shell,
    tiles::{TileClass, TileSpec},
};

use super::{
    Files, StepReads, StoreOptions, Verify,
    readers::{Done, Job, Queue, Readers},
    sync::{Receiver, Sender, channel},
};
use crate::model::SourceError;

/// Where a tile lies and what it holds.
struct Tile {
    spec: TileSpec,
    file: Arc<DirectFile>,
    offset: u64,
    stored_bytes: usize,
    raw_bytes: u64,
    sha256: [u8; 32],
    verified: bool,
    memory: Memory,
}

/// Where a tile's bytes go.
enum Memory {
    /// Into a slot of the ring, each time they are used.
    Ring,
    /// A pinned tile: memory of its own, not read into yet.
    ///
    /// All of it is mapped before the first read. Mappings made one after the other lie side by side, and the system takes them for
    /// one, so that huge pages reach across their ends; mapped one at a time between reads, a quarter of tiles of 8 MiB lay in
    /// small pages, and each mapping waited for the page faults of the reads under way.
    Reserved(AlignedBuf),
    /// A pinned tile that is being read.
    Arriving,
    /// A pinned tile's bytes.
    Resident(AlignedBuf),
}

/// The slots of a ring, mapped side by side and then backed with memory: the tiles they come to hold are of different sizes.
fn ring(slots: usize, slot_bytes: usize) -> Vec<AlignedBuf> {
    let slot = || AlignedBuf::with_capacity(slot_bytes);
    let mut ring: Vec<AlignedBuf> = std::iter::repeat_with(slot).take(slots).collect();
    for slot in &mut ring {
        slot.back_with_memory();
    }
    ring
}

impl Memory {
    fn of(pinned: bool, bytes: usize) -> Self {
        if pinned {
            Self::Reserved(AlignedBuf::with_capacity(bytes))
        } else {
            Self::Ring
        }
    }
}

/// A place in the sequence of announced steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cursor {
    step: usize,
    tile: usize,
}

/// The tiles of a run, handed out in order of use.
pub(super) struct TrunkStream {
    tiles: Vec<Tile>,
    /// Tiles of a step that does not read the head.
    num_without_head: usize,
    /// Whether each announced step reads the head.
    steps: Vec<bool>,
    used: Cursor,
    issued: Cursor,
    /// Pinned loads have their own memory, so only this bounds how many are in flight.
    max_in_flight: usize,
    /// Slots of the ring that nothing is read into.
    free: Vec<AlignedBuf>,
    /// Reads are numbered in order of use; arrivals wait here for their turn, the one due at the front. As long as all that can
    /// be in flight, from the start.
    next_issue: u64,
    next_use: u64,
    arrived: VecDeque<Option<Done>>,
    done: (Sender<Done>, Receiver<Done>),
    readers: Arc<Readers>,
    verify: Verify,
    reads: StepReads,
    /// Checkpoint and trunk as a shell takes them, for the command that repairs a tile.
    folders: String,
}

impl TrunkStream {
    pub(super) fn open(
        trunk: &OpenTrunk,
        options: &StoreOptions,
        files: &mut Files,
        readers: Arc<Readers>,
    ) -> Result<Self, SourceError> {
        let mut tiles = Vec::new();
        for (index, (record, spec)) in trunk.trunk.tiles().zip(&trunk.specs).enumerate() {
            let path = trunk.files.get(record.file).ok_or_else(|| {
                SourceError::Other(format!("tile {index}: names no data file (re-run k3-pack)"))
            })?;
            let stored_bytes = usize::try_from(record.stored_bytes)
                .map_err(|e| SourceError::Other(format!("tile {index}: {e}")))?;
            tiles.push(Tile {
                spec: spec.clone(),
                file: files.get(path)?,
                offset: record.offset,
                stored_bytes,
                raw_bytes: record.raw_bytes,
                sha256: parse_hex(&record.sha256).ok_or_else(|| {
                    SourceError::Other(format!("tile {index}: sha256 is not a digest"))
                })?,
                verified: false,
                memory: Memory::of(options.pinned.contains(index), stored_bytes),
            });
        }
        let folders = format!("{} {}", shell(&options.model_dir), shell(&trunk.dir));
        Ok(Self::over(tiles, options, readers, folders))
    }

    fn over(
        tiles: Vec<Tile>,
        options: &StoreOptions,
        readers: Arc<Readers>,
        folders: String,
    ) -> Self {
        let num_without_head = tiles
            .iter()
            .position(|t| t.spec.class() == TileClass::Final)
            .unwrap_or(tiles.len());
        let max_in_flight = options.queue_depth.max(1);
        Self {
            num_without_head,
            steps: Vec::new(),
            used: Cursor::default(),
            issued: Cursor::default(),
            max_in_flight,
            free: ring(options.ring_slots, options.ring_slot_bytes),
            next_issue: 0,
            next_use: 0,
            arrived: (0..options.ring_slots + max_in_flight)
                .map(|_| None)
                .collect(),
            done: channel(options.ring_slots + max_in_flight),
            readers,
            verify: options.verify,
            reads: StepReads::default(),
            folders,
            tiles,
        }
    }

    pub(super) fn announce(&mut self, steps_with_head: &[bool]) {
        self.steps.extend_from_slice(steps_with_head);
        self.issue();
    }

    /// What was read for the steps since [`Self::add_reads`].
    pub(super) fn reads(&self) -> &StepReads {
        &self.reads
    }

    /// Add what was read for the steps since the last call.
    pub(super) fn add_reads(&mut self, to: &mut StepReads) {
        let reads = std::mem::take(&mut self.reads);
        to.trunk_bytes += reads.trunk_bytes;
        to.head_bytes += reads.head_bytes;
        to.requested_bytes += reads.requested_bytes;
        to.wait_seconds += reads.wait_seconds;
    }

    /// Wait for the reads in flight and forget what no step used; returns its bytes.
    pub(super) fn discard(&mut self) -> u64 {
        self.steps.truncate(self.used.step);
        let in_flight = usize::try_from(self.next_issue - self.next_use).unwrap_or(usize::MAX);
        while self.arrived.iter().flatten().count() < in_flight {
            let Some(done) = self.done.1.recv() else {
                break;
            };
            self.keep(done);
        }
        let unused = self.arrived.iter_mut().filter_map(Option::take);
        unused.map(|done| done.buffer.len() as u64).sum()
    }

    fn tiles_in_step(&self, with_head: bool) -> usize {
        if with_head {
            self.tiles.len()
        } else {
            self.num_without_head
        }
    }

    /// Move a cursor on by one tile.
    fn advance(&self, cursor: Cursor) -> Cursor {
        let with_head = self.steps.get(cursor.step).copied().unwrap_or(true);
        if cursor.tile + 1 < self.tiles_in_step(with_head) {
            Cursor {
                tile: cursor.tile + 1,
                ..cursor
            }
        } else {
            Cursor {
                step: cursor.step + 1,
                tile: 0,
            }
        }
    }

    /// Issue reads in order of use while there is memory for them.
    fn issue(&mut self) {
        while self.issued.step < self.steps.len() {
            let index = self.issued.tile;
            let all_under_way = self.next_issue - self.next_use >= self.max_in_flight as u64;
            let memory = &mut self.tiles[index].memory;
            let buffer = match memory {
                Memory::Ring => self.free.pop(),
                // Read when the sequence first comes to it, and never again.
                Memory::Arriving | Memory::Resident(_) => {
                    self.issued = self.advance(self.issued);
                    continue;
                }
                Memory::Reserved(_) if all_under_way => None,
                Memory::Reserved(_) => match std::mem::replace(memory, Memory::Arriving) {
                    Memory::Reserved(buffer) => Some(buffer),
                    _ => None,
                },
            };
            let Some(buffer) = buffer else {
                return;
            };
            self.submit(index, buffer);
            self.issued = self.advance(self.issued);
        }
    }

    fn submit(&mut self, index: usize, buffer: AlignedBuf) {
        let tile = &self.tiles[index];
        let hash = match self.verify {
            Verify::First => !tile.verified,
            Verify::Always => true,
            Verify::Never => false,
        };
        let job = Job {
            file: Arc::clone(&tile.file),
            offset: tile.offset,
            len: tile.stored_bytes,
            buffer,
            hash,
            tag: self.next_issue,
            done: self.done.0.clone(),
        };
        self.next_issue += 1;
        self.readers.submit(Queue::Trunk, job);
    }

    /// Give the next tile to `use_it`, waiting for it if need be.
    pub(super) fn with_tile(
        &mut self,
        use_it: &mut dyn FnMut(&TileSpec, &[u8]),
    ) -> Result<(), SourceError> {
        if self.used.step >= self.steps.len() {
            self.announce(&[true]);
        }
        let index = self.used.tile;
        if !matches!(self.tiles[index].memory, Memory::Resident(_)) {
            let done = self.arrival()?;
            self.check(index, &done)?;
            self.count(index, done.buffer.len() as u64);
            let tile = &mut self.tiles[index];
            if matches!(tile.memory, Memory::Ring) {
                use_it(&tile.spec, &done.buffer);
                self.free.push(done.buffer);
            } else {
                tile.memory = Memory::Resident(done.buffer);
            }
        }
        let tile = &self.tiles[index];
        if let Memory::Resident(bytes) = &tile.memory {
            use_it(&tile.spec, bytes);
        }
        self.used = self.advance(self.used);
        self.issue();
        Ok(())
    }

    /// The next read in order of use.
    fn arrival(&mut self) -> Result<Done, SourceError> {
        let began = Instant::now();
        let done = loop {
            if let Some(done) = self.arrived.front_mut().and_then(Option::take) {
                break done;
            }
            let done = self
                .done
                .1
                .recv()
                .ok_or_else(|| SourceError::Other("the reader threads are gone".into()))?;
            self.keep(done);
        };
        self.reads.wait_seconds += began.elapsed().as_secs_f64();
        self.next_use += 1;
        self.arrived.rotate_left(1);
        Ok(done)
    }

    /// Let an arrival wait for its turn.
    fn keep(&mut self, done: Done) {
        let ahead = usize::try_from(done.tag - self.next_use).unwrap_or(usize::MAX);
        if let Some(place) = self.arrived.get_mut(ahead) {
            *place = Some(done);
        }
    }

    fn check(&mut self, index: usize, done: &Done) -> Result<(), SourceError> {
        if let Err(error) = &done.payload {
            return Err(SourceError::Other(format!("trunk tile {index}: {error}")));
        }
        let tile = &mut self.tiles[index];
        if let Some(digest) = done.digest {
            if digest != tile.sha256 {
                let layer = tile
                    .spec
                    .layer()
                    .map_or_else(|| "output".into(), |l| l.to_string());
                return Err(SourceError::Digest {
                    path: tile.file.path().to_owned(),
                    offset: tile.offset,
                    what: format!("tile {index} of the trunk (layer {layer})"),
                    repair: format!("k3-pack --repair {layer} {}", self.folders),
                });
            }
            tile.verified = true;
        }
        Ok(())
    }

    fn count(&mut self, index: usize, requested: u64) {
        let tile = &self.tiles[index];
        match tile.spec.class() {
            TileClass::Trunk => self.reads.trunk_bytes += tile.raw_bytes,
            TileClass::Head | TileClass::Final => self.reads.head_bytes += tile.raw_bytes,
        }
        self.reads.requested_bytes += requested;
    }
}

#[cfg(test)]
pub(in crate::store) mod tests;
