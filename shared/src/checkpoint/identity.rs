//! Digests that name a checkpoint.

use std::{fmt::Write as _, fs::File, io, ops::Range, os::unix::fs::FileExt as _};

use sha2::{Digest as _, Sha256};

use super::ShardScan;
use crate::config::Config;

/// How much of either end of a trunk run is hashed.
const SAMPLE_BYTES: u64 = 64 << 10;

/// What a shard adds to the identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardDigest {
    pub(super) header: String,
    pub(super) first: String,
    pub(super) last: String,
}

/// Lower-case hex of a digest.
pub fn hex(bytes: impl AsRef<[u8]>) -> String {
    let mut text = String::with_capacity(64);
    for byte in bytes.as_ref() {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Digests of a shard's header and of both ends of its trunk run (absolute byte range).
pub(super) fn shard_digest(
    header: &[u8],
    file: &File,
    run: &Range<u64>,
) -> io::Result<ShardDigest> {
    let sample = SAMPLE_BYTES.min(run.end - run.start);
    let digest_at = |offset: u64| -> io::Result<String> {
        // At most 64 KiB.
        let mut bytes = vec![0; usize::try_from(sample).unwrap_or(0)];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(hex(Sha256::digest(&bytes)))
    };
    Ok(ShardDigest {
        header: hex(Sha256::digest(header)),
        first: digest_at(run.start)?,
        last: digest_at(run.end - sample)?,
    })
}

/// The identity over shards in byte order of their names; `None` if one of them could not be read.
pub(super) fn identity(config: &Config, shards: &[ShardScan]) -> Option<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{}\n", config.to_canonical()));
    for shard in shards {
        let ShardDigest {
            header,
            first,
            last,
        } = shard.digest.as_ref()?;
        let (name, bytes) = (&shard.file.name, shard.bytes);
        hash.update(format!("{name} {bytes} {header} {first} {last}\n"));
    }
    Some(hex(hash.finalize()))
}
