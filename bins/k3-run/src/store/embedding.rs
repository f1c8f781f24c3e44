//! Rows of the embedding, read when they are needed: 14 KB a token instead of 2.3 GB resident.

use std::{fs::File, os::unix::fs::FileExt as _, path::PathBuf, sync::Arc};

use k3_shared::{
    checkpoint::{Checkpoint, TensorLocation},
    config::Config,
    direct::{AlignedBuf, DirectFile, covering_bytes},
    ids::TokenId,
    names::TensorRole,
};
use sha2::{Digest as _, Sha256};

use super::{Files, Verify};
use crate::{kernels::widen, model::SourceError};

/// Bytes of a digest.
const DIGEST_BYTES: usize = 32;

/// The table, and what its rows are checked against.
pub(super) struct Embedding {
    file: Arc<DirectFile>,
    place: TensorLocation,
    buffer: AlignedBuf,
    digests: Option<Digests>,
}

/// One digest a row, looked up where it lies.
struct Digests {
    path: PathBuf,
    file: File,
    verify: Verify,
    /// A bit a row: it was checked.
    checked: Vec<u64>,
}

impl Embedding {
    /// - `digests`: a file of one digest a row.
    pub(super) fn open(
        checkpoint: &Checkpoint,
        digests: Option<&PathBuf>,
        verify: Verify,
        files: &mut Files,
    ) -> Result<Self, SourceError> {
        let place = checkpoint
            .tensor(TensorRole::Embedding)
            .map_err(|e| SourceError::Other(e.to_string()))?;
        let file = files.get(checkpoint.shard_path(place.shard))?;
        let buffer =
            AlignedBuf::with_capacity(covering_bytes(row_bytes(&checkpoint.config, &place)));
        let digests = match digests {
            Some(path) if verify != Verify::Never => Some(Digests {
                file: File::open(path).map_err(|e| unreadable(path, &e))?,
                path: path.clone(),
                verify,
                checked: vec![0; checkpoint.config.vocab_size.div_ceil(64)],
            }),
            _ => None,
        };
        Ok(Self {
            file,
            place,
            buffer,
            digests,
        })
    }

    /// Read a row; bytes asked of the disk.
    pub(super) fn read(&mut self, token: TokenId, out: &mut [f32]) -> Result<u64, SourceError> {
        let row = out.len() * self.place.dtype.bytes();
        let offset = self.place.offset + token.get() as u64 * row as u64;
        let range = self.file.read_covering(&mut self.buffer, offset, row)?;
        let bytes = &self.buffer[range];
        let mut asked = self.buffer.len() as u64;
        if let Some(digests) = &mut self.digests
            && digests.wants(token)
        {
            asked += DIGEST_BYTES as u64;
            if !digests.hold(token, bytes)? {
                let path = self.file.path();
                return Err(SourceError::Digest {
                    path: path.to_owned(),
                    offset,
                    what: format!("row {} of the embedding", token.0),
                    repair: format!("download {} again", path.display()),
                });
            }
        }
        widen(crate::model::stored(self.place.dtype, bytes), out);
        Ok(asked)
    }
}

impl Digests {
    fn wants(&self, token: TokenId) -> bool {
        let checked = self.checked.get(token.get() / 64).copied().unwrap_or(0);
        self.verify == Verify::Always || checked >> (token.get() % 64) & 1 == 0
    }

    /// Whether these are the bytes of the row of `token`.
    fn hold(&mut self, token: TokenId, bytes: &[u8]) -> Result<bool, SourceError> {
        let mut wanted = [0; DIGEST_BYTES];
        let at = (token.get() * DIGEST_BYTES) as u64;
        self.file
            .read_exact_at(&mut wanted, at)
            .map_err(|e| unreadable(&self.path, &e))?;
        let holds = Sha256::digest(bytes)[..] == wanted;
        if holds && let Some(checked) = self.checked.get_mut(token.get() / 64) {
            *checked |= 1 << (token.get() % 64);
        }
        Ok(holds)
    }
}

fn unreadable(path: &std::path::Path, error: &std::io::Error) -> SourceError {
    SourceError::Other(format!(
        "{}: {error} (make it anew: k3-pack --force)",
        path.display()
    ))
}

fn row_bytes(config: &Config, place: &TensorLocation) -> usize {
    config.hidden_size * place.dtype.bytes()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use k3_shared::{checkpoint::ShardIdx, direct::Mode, names::Dtype, release};

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
                digests: None,
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
