//! Copying one tile: read its rows from the shards, hash them, write them.

use std::ops::Range;

use k3_shared::{
    direct::{ALIGN, AlignedBuf, DirectError, DirectFile, covering_bytes},
    names::TensorRole,
    tiles::TileSpec,
};
use sha2::{Digest as _, Sha256};

use crate::{
    source::{Source, overlap},
    zeros::{Digest, ZeroDigests, data_runs},
};

/// Bytes moved at a time: enough for full disk speed, however large the tile.
const BLOCK_BYTES: usize = 8 << 20;
/// What all workers' buffers may take together.
const MEMORY_BYTES: usize = 192 << 20;
const MIN_BLOCK_BYTES: usize = 1 << 20;

/// Bytes one of `threads` workers moves at a time.
pub(crate) fn block_bytes(threads: usize) -> usize {
    let share = MEMORY_BYTES / (2 * threads.max(1));
    share.clamp(MIN_BLOCK_BYTES, BLOCK_BYTES) / ALIGN * ALIGN
}

/// Memory the buffers of `threads` workers take.
pub(crate) fn memory_bytes(threads: usize) -> usize {
    let block = block_bytes(threads);
    let each = block + covering_bytes(block);
    each.saturating_mul(threads)
}

/// Where a tile's bytes go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sink<'a> {
    /// The data file.
    pub(crate) file: &'a DirectFile,
    /// Where the tile begins in it.
    pub(crate) offset: u64,
    /// Leave zero pages unwritten: right where nothing was written before, wrong where there may be damage.
    pub(crate) sparse: bool,
}

/// One worker's buffers, and what it reads from.
#[derive(Debug)]
pub(crate) struct Copier<'a> {
    source: &'a Source,
    shards: &'a [DirectFile],
    zeros: &'a ZeroDigests,
    /// The tile's next bytes.
    block: AlignedBuf,
    /// The shard's blocks around the rows wanted.
    window: AlignedBuf,
    step: usize,
}

impl<'a> Copier<'a> {
    /// A worker that moves `step` bytes at a time.
    pub(crate) fn new(
        source: &'a Source,
        shards: &'a [DirectFile],
        zeros: &'a ZeroDigests,
        step: usize,
    ) -> Self {
        Self {
            source,
            shards,
            zeros,
            block: AlignedBuf::with_capacity(step),
            window: AlignedBuf::with_capacity(covering_bytes(step)),
            step,
        }
    }

    /// Read a tile, write it to `sink` if there is one, and return the digest of its stored bytes.
    ///
    /// # Errors
    /// If a read or write fails.
    pub(crate) fn copy(
        &mut self,
        spec: &TileSpec,
        sink: Option<Sink<'_>>,
    ) -> Result<Digest, DirectError> {
        let stored = spec.stored_bytes();
        let sparse = sink.is_none_or(|sink| sink.sparse);
        if sparse && data_bytes(self.source, self.shards, spec)? == 0 {
            return Ok(self.zeros.of(stored));
        }
        let mut hash = Sha256::new();
        let mut start = 0;
        while start < stored {
            let end = stored.min(start + self.step as u64);
            self.fill(spec, start..end)?;
            hash.update(&*self.block);
            if let Some(sink) = sink {
                write(&self.block, sink, start)?;
            }
            start = end;
        }
        Ok(hash.finalize().into())
    }

    /// Make the block hold bytes `range` of the tile as it is stored: rows, holes as zeros, and zero padding.
    fn fill(&mut self, spec: &TileSpec, range: Range<u64>) -> Result<(), DirectError> {
        let place = |at: u64| within_block(at, &range);
        self.block.set_len(place(range.end));
        let mut filled = 0;
        for part in &spec.parts {
            let Some(piece) = overlap(part, &range) else {
                continue;
            };
            let (shard, from) = locate(self.source, self.shards, part.role, || {
                self.source.locate(part, &piece)
            });
            for data in shard.data_ranges(from.clone())? {
                let at = place(piece.start + (data.start - from.start));
                let len = within_block(data.end, &data);
                let payload = shard.read_covering(&mut self.window, data.start, len)?;
                self.block[filled..at].fill(0);
                self.block[at..at + len].copy_from_slice(&self.window[payload]);
                filled = at + len;
            }
        }
        self.block[filled..].fill(0);
        Ok(())
    }
}

/// Bytes from the start of `range` to `at`; both lie within one block, whose length is a `usize`.
fn within_block(at: u64, range: &Range<u64>) -> usize {
    usize::try_from(at - range.start).expect("a block fits memory")
}

/// The shard and range of a tensor's bytes.
///
/// # Panics
/// If the tile's tensor is not one of `source`: tiles are cut from its tensors only.
fn locate<'a>(
    source: &Source,
    shards: &'a [DirectFile],
    role: TensorRole,
    find: impl FnOnce() -> Option<(usize, Range<u64>)>,
) -> (&'a DirectFile, Range<u64>) {
    let found = find().and_then(|(shard, range)| Some((shards.get(shard)?, range)));
    found.unwrap_or_else(|| {
        panic!(
            "{role:?} is not among the {} tensors located",
            source.tensors.len()
        )
    })
}

/// How many of the tile's bytes the shards really hold; the rest are holes.
///
/// # Errors
/// If a shard ends before the tile's rows do.
pub(crate) fn data_bytes(
    source: &Source,
    shards: &[DirectFile],
    spec: &TileSpec,
) -> Result<u64, DirectError> {
    let whole = 0..spec.raw_bytes();
    let mut bytes = 0;
    for part in &spec.parts {
        let Some(piece) = overlap(part, &whole) else {
            continue;
        };
        let (shard, range) = locate(source, shards, part.role, || source.locate(part, &piece));
        bytes += shard
            .data_ranges(range)?
            .iter()
            .map(|data| data.end - data.start)
            .sum::<u64>();
    }
    Ok(bytes)
}

fn write(block: &[u8], sink: Sink<'_>, start: u64) -> Result<(), DirectError> {
    let at = sink.offset + start;
    if !sink.sparse {
        return sink.file.write_all_at(block, at);
    }
    for run in data_runs(block) {
        sink.file
            .write_all_at(&block[run.clone()], at + run.start as u64)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
