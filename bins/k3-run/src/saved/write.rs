//! A sequence into a stream of bytes.

use std::io::{self, Write};

use k3_shared::formats::codec;
use sha2::{Digest as _, Sha256};

use super::{Header, TAG, WHAT};
use crate::{
    model::{MixerState, SequenceState},
    observe::each_little_endian,
};

/// Write `header` and the values of `state`; returns how many bytes that was.
///
/// # Errors
/// If `out` fails, or the header is over the format's limit.
pub fn write(out: &mut dyn Write, header: &Header, state: &SequenceState) -> io::Result<u64> {
    let framed = codec::write_framed(out, TAG, WHAT, header).map_err(|error| match error {
        codec::CodecError::Io { source, .. } => source,
        other => io::Error::other(other),
    })?;
    let mut values = Values {
        out,
        digest: Sha256::new(),
        bytes: 0,
    };
    for mixer in &state.mixers {
        match mixer {
            MixerState::Kda(kda) => {
                values.put(&kda.matrix)?;
                for history in &kda.history {
                    values.put(history)?;
                }
            }
            MixerState::Mla(cache) => {
                let mut latent = vec![0.0; cache.width()];
                for position in 0..state.position {
                    cache.load_into(position, &mut latent);
                    values.put(&latent)?;
                }
            }
        }
    }
    let Values { out, digest, bytes } = values;
    let digest = digest.finalize();
    out.write_all(&digest)?;
    Ok(framed + bytes + digest.len() as u64)
}

struct Values<'a> {
    out: &'a mut dyn Write,
    digest: Sha256,
    bytes: u64,
}

impl Values<'_> {
    fn put(&mut self, values: &[f32]) -> io::Result<()> {
        each_little_endian(values, |bytes| {
            self.digest.update(bytes);
            self.out.write_all(bytes)?;
            self.bytes += bytes.len() as u64;
            Ok(())
        })
    }
}
