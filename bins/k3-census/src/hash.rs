//! `--hash`: every byte of every shard, read once, for digests and for NaN among the scales.

use std::path::Path;

use indicatif::ProgressBar;
use k3_shared::{
    checkpoint::{Checkpoint, hex},
    direct::{AlignedBuf, DirectError, DirectFile, Mode},
    formats::census::{Problem, digests::Digest as Digest256},
    ids::{ExpertId, ExpertIdx, LayerIdx},
    names::{ExpertTensor, TensorRole},
    term,
};
use rayon::prelude::*;
use sha2::{Digest as _, Sha256};

use crate::survey::{Survey, SurveyedShard};

/// Bytes of one read: large enough for any disk, small enough for many at a time.
const CHUNK_BYTES: usize = 8 << 20;
/// A scale byte that is not a number (specification 2.4).
const NAN_SCALE: u8 = 255;

/// What reading every byte showed.
#[derive(Debug, Default)]
pub(crate) struct Hashed {
    /// NaN among the scales of the opened layers.
    pub(crate) scale_bytes_nan: u64,
    /// Digests of the experts' blocks, in no order.
    pub(crate) experts: Vec<(ExpertId, Digest256)>,
}

/// Read all shards in the current thread pool and enter their digests into the survey.
pub(crate) fn all(survey: &mut Survey, with_experts: bool, quiet: bool) -> Hashed {
    let total = survey.shards.iter().map(|s| s.record.bytes).sum();
    let bar = term::byte_progress("reading every byte", total, quiet);
    log::info!("--hash reads {}", crate::size(total));
    let checkpoint = &survey.assembly.checkpoint;
    let results: Vec<Result<ShardHash, DirectError>> = survey
        .shards
        .par_iter()
        .with_max_len(1)
        .map_init(
            || AlignedBuf::with_capacity(CHUNK_BYTES),
            |buffer, shard| shard_hash(checkpoint, shard, with_experts, buffer, &bar),
        )
        .collect();
    bar.finish_and_clear();
    let mut hashed = Hashed::default();
    let mut buffered = 0;
    for (shard, result) in survey.shards.iter_mut().zip(results) {
        let name = shard.record.file.clone();
        match result {
            Ok(result) => {
                shard.record.sha256 = Some(result.sha256);
                hashed.scale_bytes_nan += result.nan.count;
                hashed.experts.extend(result.experts);
                survey.problems.extend(result.nan.problem(&name));
                buffered += usize::from(!result.direct);
            }
            Err(e) => survey.problems.push(Problem::of(&name, e.to_string())),
        }
    }
    if buffered > 0 {
        log::info!("{buffered} shards were read through the page cache: no direct I/O there");
    }
    hashed
}

/// SHA-256 of any file, in hex.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn file_sha256(path: &Path) -> Result<String, DirectError> {
    let file = DirectFile::open(path, Mode::Auto)?;
    let mut hash = Sha256::new();
    let mut buffer = AlignedBuf::with_capacity(CHUNK_BYTES);
    each_chunk(&file, file.len()?, &mut buffer, |_, bytes| {
        hash.update(bytes);
    })?;
    Ok(hex(hash.finalize()))
}

struct ShardHash {
    sha256: String,
    nan: Nan,
    experts: Vec<(ExpertId, Digest256)>,
    direct: bool,
}

fn shard_hash(
    checkpoint: &Checkpoint,
    shard: &SurveyedShard,
    with_experts: bool,
    buffer: &mut AlignedBuf,
    bar: &ProgressBar,
) -> Result<ShardHash, DirectError> {
    let file = DirectFile::open(&shard.file.path, Mode::Auto)?;
    let mut hash = Sha256::new();
    let mut scales = Walk::new(ranges(checkpoint, shard, scales_of));
    let blocks = if with_experts {
        ranges(checkpoint, shard, block_of)
    } else {
        Vec::new()
    };
    let mut blocks = Walk::new(blocks);
    let mut nan = Nan::default();
    let mut experts = Vec::new();
    let mut block_hash = Sha256::new();
    each_chunk(&file, shard.record.bytes, buffer, |offset, bytes| {
        hash.update(bytes);
        scales.chunk(offset, bytes, |at, role, part, _| nan.look(at, *role, part));
        blocks.chunk(offset, bytes, |_, id, part, is_last| {
            block_hash.update(part);
            if is_last {
                experts.push((*id, block_hash.finalize_reset().into()));
            }
        });
        bar.inc(bytes.len() as u64);
    })?;
    Ok(ShardHash {
        sha256: hex(hash.finalize()),
        nan,
        experts,
        direct: file.is_direct(),
    })
}

/// Read `bytes` bytes from the start, piece by piece.
fn each_chunk(
    file: &DirectFile,
    bytes: u64,
    buffer: &mut AlignedBuf,
    mut visit: impl FnMut(u64, &[u8]),
) -> Result<(), DirectError> {
    let mut offset = 0;
    while offset < bytes {
        let rest = usize::try_from(bytes - offset).unwrap_or(usize::MAX);
        let len = rest.min(CHUNK_BYTES);
        let payload = file.read_covering(buffer, offset, len)?;
        visit(offset, &buffer[payload]);
        offset += len as u64;
    }
    Ok(())
}

/// A byte range of a file and what it is.
struct Span<T> {
    offset: u64,
    bytes: u64,
    what: T,
}

/// The spans of one kind in a shard, in file order.
fn ranges<T>(
    checkpoint: &Checkpoint,
    shard: &SurveyedShard,
    of: impl Fn(&Checkpoint, &SurveyedShard, ExpertId, &mut Vec<Span<T>>),
) -> Vec<Span<T>> {
    let mut spans = Vec::new();
    let opened = |layer: &&LayerIdx| layer.get() < checkpoint.layers;
    for &layer in shard.expert_layers.iter().filter(opened) {
        let experts = (0..).map(ExpertIdx).take(checkpoint.config.moe.num_experts);
        for expert in experts {
            of(checkpoint, shard, ExpertId { layer, expert }, &mut spans);
        }
    }
    spans.sort_unstable_by_key(|span| span.offset);
    spans
}

fn scales_of(
    checkpoint: &Checkpoint,
    shard: &SurveyedShard,
    id: ExpertId,
    spans: &mut Vec<Span<TensorRole>>,
) {
    for tensor in ExpertTensor::ALL.into_iter().filter(|t| !t.is_packed()) {
        if let Ok((at, offset)) = checkpoint.expert_tensor(id, tensor)
            && checkpoint.shard_path(at) == shard.file.path
        {
            spans.push(Span {
                offset,
                bytes: checkpoint.expert_layout()[tensor as usize].len,
                what: TensorRole::Expert(id, tensor),
            });
        }
    }
}

fn block_of(
    checkpoint: &Checkpoint,
    shard: &SurveyedShard,
    id: ExpertId,
    spans: &mut Vec<Span<ExpertId>>,
) {
    if let Ok(block) = checkpoint.expert(id)
        && checkpoint.shard_path(block.shard) == shard.file.path
    {
        spans.push(Span {
            offset: block.offset,
            bytes: block.bytes,
            what: id,
        });
    }
}

/// Follows sorted spans through the chunks of a file.
struct Walk<T> {
    spans: Vec<Span<T>>,
    /// The first span that does not end before the next chunk.
    next: usize,
}

impl<T> Walk<T> {
    fn new(spans: Vec<Span<T>>) -> Self {
        Self { spans, next: 0 }
    }

    /// Tell `visit` of each part of a span in this chunk: its offset in the file, the span, the bytes, whether it ends here.
    fn chunk(&mut self, offset: u64, bytes: &[u8], mut visit: impl FnMut(u64, &T, &[u8], bool)) {
        let chunk_end = offset + bytes.len() as u64;
        while let Some(span) = self.spans.get(self.next) {
            let span_end = span.offset.saturating_add(span.bytes);
            let (begin, end) = (span.offset.max(offset), span_end.min(chunk_end));
            if begin >= chunk_end {
                break;
            }
            if begin < end
                && let (Ok(from), Ok(to)) = (
                    usize::try_from(begin - offset),
                    usize::try_from(end - offset),
                )
                && let Some(part) = bytes.get(from..to)
            {
                visit(begin, &span.what, part, end == span_end);
            }
            if span_end > chunk_end {
                break;
            }
            self.next += 1;
        }
    }
}

/// NaN among the scales of one shard.
#[derive(Default)]
struct Nan {
    count: u64,
    first: Option<(TensorRole, u64)>,
}

impl Nan {
    fn look(&mut self, offset: u64, role: TensorRole, scales: &[u8]) {
        let found: u64 = scales.iter().map(|&b| u64::from(b == NAN_SCALE)).sum();
        if found > 0 && self.first.is_none() {
            let at = scales.iter().position(|&b| b == NAN_SCALE).unwrap_or(0);
            self.first = Some((role, offset + at as u64));
        }
        self.count += found;
    }

    fn problem(&self, file: &str) -> Option<Problem> {
        let (role, offset) = self.first?;
        let message = format!(
            "{} scale bytes of this shard are 255, which is NaN; the release has none (k3-run stops there unless \
             --allow-nan-scales)",
            self.count
        );
        Some(Problem::in_tensor(file, role.name(), Some(offset), message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_seen_whole_however_the_file_is_cut() {
        let file: Vec<u8> = (0..100).collect();
        let spans = || {
            let list = [(3, 4), (7, 1), (20, 50), (90, 10)];
            let span = |(offset, bytes)| Span {
                offset,
                bytes,
                what: offset,
            };
            list.map(span).into()
        };
        for chunk in [1, 2, 3, 7, 10, 33, 64, 100] {
            let mut walk = Walk::new(spans());
            let mut seen: Vec<(u64, Vec<u8>)> = Vec::new();
            let mut part = Vec::new();
            for (i, bytes) in file.chunks(chunk).enumerate() {
                walk.chunk((i * chunk) as u64, bytes, |at, what, bytes, is_last| {
                    assert_eq!(u64::from(bytes[0]), at);
                    part.extend_from_slice(bytes);
                    if is_last {
                        seen.push((*what, std::mem::take(&mut part)));
                    }
                });
            }
            let want = [
                (3, file[3..7].to_vec()),
                (7, vec![7]),
                (20, file[20..70].to_vec()),
                (90, file[90..].to_vec()),
            ];
            assert_eq!(seen, want, "chunks of {chunk}");
        }
    }
}
