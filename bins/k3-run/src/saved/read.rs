//! A saved state back into a sequence.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use k3_shared::{formats::codec, term::shell};
use sha2::{Digest as _, Sha256};

use super::{DIGEST_BYTES, Header, Origin, SavedError, TAG, WHAT};
use crate::model::{MixerState, SequenceState};

/// Values converted at a time.
const PIECE: usize = 4096;

/// A saved state whose header was read, and whose values are still to come.
#[derive(Debug)]
pub struct Reader<R = BufReader<File>> {
    path: PathBuf,
    file: R,
    /// The header.
    pub header: Header,
    /// Where the values begin, and where the file ends.
    values_at: u64,
    file_bytes: u64,
}

impl Reader {
    /// Open a state and check its header against itself.
    ///
    /// # Errors
    /// If it cannot be read, is none, or is damaged.
    pub fn open(path: &Path) -> Result<Self, SavedError> {
        let read = |source| SavedError::Read {
            path: path.to_owned(),
            offset: 0,
            source,
        };
        let file = File::open(path).map_err(read)?;
        let file_bytes = file.metadata().map_err(read)?.len();
        Self::new(BufReader::with_capacity(1 << 20, file), file_bytes, path)
    }
}

impl<R: Read> Reader<R> {
    /// Read the header of a state of `file_bytes` bytes and check it against itself; `path` names it in errors.
    ///
    /// # Errors
    /// If it is no state, or a damaged one.
    pub fn new(mut file: R, file_bytes: u64, path: &Path) -> Result<Self, SavedError> {
        let (header, values_at): (Header, u64) =
            codec::read_framed(&mut file, file_bytes, TAG, WHAT).map_err(|source| {
                SavedError::Header {
                    path: path.to_owned(),
                    source,
                }
            })?;
        let reader = Self {
            path: path.to_owned(),
            file,
            header,
            values_at,
            file_bytes,
        };
        let ids = reader.header.ids.len() as u64;
        if reader.header.position >= ids || reader.header.generated > ids {
            return Err(reader.damaged(0, "its counts of tokens contradict each other".into()));
        }
        Ok(reader)
    }

    /// Refuse a state that something else was computed with.
    ///
    /// # Errors
    /// [`SavedError::Foreign`], naming what differs.
    pub fn belongs(&self, origin: &Origin, model_dir: &Path) -> Result<(), SavedError> {
        let made = &self.header.origin;
        let differs = |field, found: String, wanted: String, remedy: String| {
            Err(SavedError::Foreign {
                path: self.path.clone(),
                field,
                found,
                wanted,
                remedy,
            })
        };
        if made.identity != origin.identity {
            let remedy = format!(
                "plan for the checkpoint it was made with; this one is {}",
                shell(model_dir)
            );
            let (found, wanted) = (made.identity.clone(), origin.identity.clone());
            return differs("identity", found, wanted, remedy);
        }
        if made.num_layers != origin.num_layers {
            let remedy = format!("plan as many: k3-plan --layers {}", made.num_layers);
            let (found, wanted) = (made.num_layers.to_string(), origin.num_layers.to_string());
            return differs("layers", found, wanted, remedy);
        }
        if made.mla_norm_eps.to_bits() != origin.mla_norm_eps.to_bits() {
            let (found, wanted) = (made.mla_norm_eps, origin.mla_norm_eps);
            let remedy = format!("add --mla-norm-eps {found:e}");
            return differs(
                "mla_norm_eps",
                format!("{found:e}"),
                format!("{wanted:e}"),
                remedy,
            );
        }
        if made.allow_nan_scales != origin.allow_nan_scales {
            let add = if made.allow_nan_scales {
                "add"
            } else {
                "leave out"
            };
            let (found, wanted) = (made.allow_nan_scales, origin.allow_nan_scales);
            let remedy = format!("{add} --allow-nan-scales");
            return differs(
                "allow_nan_scales",
                found.to_string(),
                wanted.to_string(),
                remedy,
            );
        }
        Ok(())
    }

    /// Read the values into `state`, an empty sequence of the same model with room for them.
    ///
    /// # Errors
    /// If they cannot be read, are not as many, or are not those that were written. `state` is then of no use.
    pub fn read_into(mut self, state: &mut SequenceState) -> Result<Header, SavedError> {
        let position = usize::try_from(self.header.position)
            .ok()
            .filter(|&position| position <= state.context)
            .ok_or_else(|| {
                let problem = format!(
                    "holds {} positions, more than the plan's context of {} (plan again: k3-plan --context {})",
                    self.header.position,
                    state.context,
                    self.header.ids.len()
                );
                self.damaged(0, problem)
            })?;
        let wanted = value_bytes(state, position);
        let found = (self.file_bytes - self.values_at).checked_sub(DIGEST_BYTES);
        if found != Some(wanted) {
            let problem = format!(
                "{} bytes follow the header, not the {} of the values and their digest",
                self.file_bytes - self.values_at,
                wanted + DIGEST_BYTES
            );
            return Err(self.damaged(self.values_at, problem));
        }
        let mut values = Values {
            file: &mut self.file,
            digest: Sha256::new(),
            at: self.values_at,
        };
        let read = values.fill(state, position).and_then(|()| values.verify());
        let at = values.at;
        match read {
            Ok(true) => {
                state.position = position;
                Ok(self.header)
            }
            Ok(false) => Err(self.damaged(
                self.values_at,
                "the values are not the ones that were written".into(),
            )),
            Err(source) => Err(SavedError::Read {
                path: self.path,
                offset: at,
                source,
            }),
        }
    }

    fn damaged(&self, offset: u64, problem: String) -> SavedError {
        SavedError::Damaged {
            path: self.path.clone(),
            offset,
            problem,
        }
    }
}

/// Bytes of the values of `positions` positions.
fn value_bytes(state: &SequenceState, positions: usize) -> u64 {
    let of = |mixer: &MixerState| match mixer {
        MixerState::Kda(kda) => kda.bytes(),
        MixerState::Mla(cache) => positions * cache.width() * size_of::<f32>(),
    };
    state.mixers.iter().map(|mixer| of(mixer) as u64).sum()
}

struct Values<'a, R> {
    file: &'a mut R,
    digest: Sha256,
    at: u64,
}

impl<R: Read> Values<'_, R> {
    fn fill(&mut self, state: &mut SequenceState, positions: usize) -> io::Result<()> {
        for mixer in &mut state.mixers {
            match mixer {
                MixerState::Kda(kda) => {
                    self.get(&mut kda.matrix)?;
                    for history in &mut kda.history {
                        self.get(history)?;
                    }
                }
                MixerState::Mla(cache) => {
                    let mut latent = vec![0.0; cache.width()];
                    for position in 0..positions {
                        self.get(&mut latent)?;
                        cache.store(position, &latent);
                    }
                }
            }
        }
        Ok(())
    }

    fn get(&mut self, values: &mut [f32]) -> io::Result<()> {
        let mut piece = [0; 4 * PIECE];
        for values in values.chunks_mut(PIECE) {
            let bytes = &mut piece[..4 * values.len()];
            self.file.read_exact(bytes)?;
            self.digest.update(&*bytes);
            self.at += bytes.len() as u64;
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }

    /// Whether the digest that follows is that of the values read.
    fn verify(&mut self) -> io::Result<bool> {
        let mut written = [0; 32];
        self.file.read_exact(&mut written)?;
        Ok(std::mem::take(&mut self.digest).finalize()[..] == written)
    }
}
