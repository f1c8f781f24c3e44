//! Digests of the embedding's rows. The rows stay in their shard, where a run reads one a token; what it reads has to be what was
//! packed with the rest.

use std::{io::Write as _, path::Path};

use k3_shared::{
    direct::{AlignedBuf, DirectFile, covering_bytes},
    formats::trunk::{EMBEDDING_NAME, EmbeddingRecord},
    term::AtomicFile,
};
use sha2::{Digest as _, Sha256};

use crate::{
    error::PackError,
    folders::folder_error,
    pool::{Ended, Pool},
    source::{Located, Source},
    zeros::{Digest, ZeroDigests},
};

/// Bytes one job reads.
const PIECE_BYTES: usize = 1 << 20;

/// Digests of all rows, in order, and how the work ended.
///
/// # Errors
/// If the shard cannot be read.
pub(crate) fn row_digests(
    source: &Source,
    shards: &[DirectFile],
    pool: &Pool,
) -> Result<(Ended, Vec<u8>), PackError> {
    let table = &source.embedding;
    let (rows, row_bytes) = shape(table);
    let each = (PIECE_BYTES / row_bytes.max(1)).max(1);
    let zeros = ZeroDigests::default();
    let mut digests = vec![0; rows * size_of::<Digest>()];
    let ended = pool.run(
        rows.div_ceil(each),
        || AlignedBuf::with_capacity(covering_bytes(each * row_bytes)),
        |buf, job| {
            let first = job * each;
            let count = each.min(rows - first);
            let file = shards.get(table.shard);
            hash_rows(
                file,
                table.offset,
                row_bytes,
                first..first + count,
                buf,
                &zeros,
            )
        },
        |job, found: Vec<Digest>| {
            let at = job * each * size_of::<Digest>();
            let into = digests.get_mut(at..).unwrap_or_default();
            for (to, digest) in into.chunks_exact_mut(size_of::<Digest>()).zip(&found) {
                to.copy_from_slice(digest);
            }
        },
    )?;
    Ok((ended, digests))
}

/// Rows, and bytes of one.
fn shape(table: &Located) -> (usize, usize) {
    let rows = table.shape.first().copied().unwrap_or(0);
    let cols: usize = table.shape.iter().skip(1).product();
    (rows, cols * table.dtype.bytes())
}

fn hash_rows(
    file: Option<&DirectFile>,
    table: u64,
    row_bytes: usize,
    rows: std::ops::Range<usize>,
    buf: &mut AlignedBuf,
    zeros: &ZeroDigests,
) -> Result<Vec<Digest>, PackError> {
    let Some(file) = file else {
        return Ok(Vec::new());
    };
    let offset = table + (rows.start * row_bytes) as u64;
    let len = rows.len() * row_bytes;
    if file.data_ranges(offset..offset + len as u64)?.is_empty() {
        return Ok(vec![zeros.of(row_bytes as u64); rows.len()]);
    }
    let payload = file.read_covering(buf, offset, len)?;
    let bytes = buf.get(payload).unwrap_or_default();
    let rows = bytes.chunks_exact(row_bytes.max(1));
    Ok(rows.map(|row| Sha256::digest(row).into()).collect())
}

/// Write them beside the record that names them.
///
/// # Errors
/// If the folder cannot be written.
pub(crate) fn write(folder: &Path, digests: &[u8]) -> Result<EmbeddingRecord, PackError> {
    let path = folder.join(EMBEDDING_NAME);
    let failed = || folder_error(&path, "write");
    let mut file = AtomicFile::create(&path).map_err(failed())?;
    file.write_all(digests).map_err(failed())?;
    file.commit().map_err(failed())?;
    Ok(EmbeddingRecord {
        path: EMBEDDING_NAME.into(),
        rows: digests.len() / size_of::<Digest>(),
    })
}
