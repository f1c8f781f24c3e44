//! Small binary bodies, and the header that frames them. The only place that names bincode.
//!
//! A framed body is an 8-byte tag holding name and version, the body's length as a `u64`, the body's SHA-256, then the body. A
//! body is bincode 1.3.3 with fixed-width little-endian integers, at most [`BODY_LIMIT`] bytes, and nothing after it.

use std::io::{self, Read, Write};

use bincode::Options;
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

/// The most bytes a body may have: bodies are headers and small tables; bulk data follows them as plain records.
pub const BODY_LIMIT: u64 = 64 << 20;

/// Bytes of a frame before its body.
pub const FRAME_BYTES: u64 = 8 + 8 + 32;

/// Why a body could not be written or read. The caller adds the file's name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// A value that does not fit the format.
    #[error("cannot encode {what}")]
    Encode {
        /// What was being encoded.
        what: &'static str,
        /// bincode's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Bytes that are no such value: cut short, too long, or not what was meant.
    #[error("{what} of {bytes} bytes cannot be decoded")]
    Decode {
        /// What was being decoded.
        what: &'static str,
        /// Length of the body.
        bytes: u64,
        /// bincode's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Another kind of file, or another version.
    #[error("byte 0: {what} begins with \"{}\", not \"{}\"", show(*found), show(*want))]
    Tag {
        /// What was expected.
        what: &'static str,
        /// The first 8 bytes there are.
        found: [u8; 8],
        /// The first 8 bytes there should be.
        want: [u8; 8],
    },
    /// A length field beyond the limit or beyond the file.
    #[error("byte 8: {what} claims {bytes} bytes, but at most {limit} are possible here")]
    Length {
        /// What was expected.
        what: &'static str,
        /// The field's value.
        bytes: u64,
        /// The most there can be.
        limit: u64,
    },
    /// The body is not the one that was written.
    #[error("byte 16: the SHA-256 of {what} does not match its {bytes} bytes")]
    Digest {
        /// What was expected.
        what: &'static str,
        /// Length of the body.
        bytes: u64,
    },
    /// The file ends too early or cannot be read or written.
    #[error("{what}: {op}")]
    Io {
        /// What was being read or written.
        what: &'static str,
        /// What failed.
        op: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

fn show(tag: [u8; 8]) -> String {
    tag.escape_ascii().to_string()
}

fn options() -> impl Options {
    bincode::DefaultOptions::new()
        .with_fixint_encoding()
        .with_little_endian()
        .with_limit(BODY_LIMIT)
        .reject_trailing_bytes()
}

/// The bytes of `value`; `what` names it in an error.
///
/// # Errors
/// If the value is over [`BODY_LIMIT`] or holds a sequence of unknown length.
pub fn encode<T: Serialize + ?Sized>(what: &'static str, value: &T) -> Result<Vec<u8>, CodecError> {
    options()
        .serialize(value)
        .map_err(|source| CodecError::Encode { what, source })
}

/// The value in `body`, which must hold nothing else; `what` names it in an error.
///
/// # Errors
/// If the bytes are cut short, followed by others, over [`BODY_LIMIT`], or no such value.
pub fn decode<T: DeserializeOwned>(what: &'static str, body: &[u8]) -> Result<T, CodecError> {
    options()
        .deserialize(body)
        .map_err(|source| CodecError::Decode {
            what,
            bytes: body.len() as u64,
            source,
        })
}

/// Write `tag`, length, digest and the encoded `value`; returns how many bytes that was.
///
/// # Errors
/// As [`encode`], or if `writer` fails.
pub fn write_framed<T: Serialize + ?Sized>(
    writer: &mut (impl Write + ?Sized),
    tag: [u8; 8],
    what: &'static str,
    value: &T,
) -> Result<u64, CodecError> {
    let body = encode(what, value)?;
    let bytes = body.len() as u64;
    let mut frame = Vec::with_capacity(body.len() + 48);
    frame.extend_from_slice(&tag);
    frame.extend_from_slice(&bytes.to_le_bytes());
    frame.extend_from_slice(&Sha256::digest(&body));
    frame.extend_from_slice(&body);
    writer.write_all(&frame).map_err(|source| CodecError::Io {
        what,
        op: "cannot be written",
        source,
    })?;
    Ok(frame.len() as u64)
}

/// Read what [`write_framed`] wrote from a source of `available` bytes; returns the value and how many bytes it took.
///
/// # Errors
/// If the tag is another, the length is over [`BODY_LIMIT`] or over what is available, the digest does not match, or the
/// body does not decode. Nothing is allocated before the length has been checked.
pub fn read_framed<T: DeserializeOwned>(
    reader: &mut (impl Read + ?Sized),
    available: u64,
    tag: [u8; 8],
    what: &'static str,
) -> Result<(T, u64), CodecError> {
    let io = |op| move |source| CodecError::Io { what, op, source };
    let mut found = [0; 8];
    let mut length = [0; 8];
    let mut digest = [0; 32];
    reader
        .read_exact(&mut found)
        .map_err(io("the tag is cut short"))?;
    if found != tag {
        return Err(CodecError::Tag {
            what,
            found,
            want: tag,
        });
    }
    reader
        .read_exact(&mut length)
        .map_err(io("the length is cut short"))?;
    reader
        .read_exact(&mut digest)
        .map_err(io("the digest is cut short"))?;
    let bytes = u64::from_le_bytes(length);
    let limit = BODY_LIMIT.min(available.saturating_sub(FRAME_BYTES));
    let too_long = || CodecError::Length { what, bytes, limit };
    if bytes > limit {
        return Err(too_long());
    }
    let mut body = vec![0; usize::try_from(bytes).map_err(|_| too_long())?];
    reader
        .read_exact(&mut body)
        .map_err(io("the body is cut short"))?;
    if Sha256::digest(&body)[..] != digest {
        return Err(CodecError::Digest { what, bytes });
    }
    Ok((decode(what, &body)?, FRAME_BYTES + bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Sample = (u32, String, Option<u64>, Vec<(u16, bool)>);

    const TAG: [u8; 8] = *b"K3TEST\0\x01";

    fn framed(value: &Sample) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_framed(&mut bytes, TAG, "a sample", value).unwrap();
        bytes
    }

    fn unframed(bytes: &[u8]) -> Result<(Sample, u64), CodecError> {
        read_framed(&mut &bytes[..], bytes.len() as u64, TAG, "a sample")
    }

    #[test]
    fn integers_are_fixed_width_and_little_endian() {
        let body = encode("a pair", &(0x0102_u16, "ab")).unwrap();
        assert_eq!(body, [2, 1, 2, 0, 0, 0, 0, 0, 0, 0, b'a', b'b']);
    }

    #[test]
    fn trailing_bytes_are_refused() {
        let mut body = encode("a number", &7u32).unwrap();
        assert_eq!(decode::<u32>("a number", &body).unwrap(), 7);
        body.push(0);
        let error = decode::<u32>("a number", &body).unwrap_err();
        assert!(error.to_string().contains("a number of 5 bytes"), "{error}");
    }

    #[test]
    fn a_length_beyond_the_data_is_refused_before_anything_is_allocated() {
        let mut bytes = framed(&(1, "x".into(), None, vec![]));
        bytes[8..16].copy_from_slice(&(1u64 << 60).to_le_bytes());
        assert!(matches!(unframed(&bytes), Err(CodecError::Length { .. })));
        // Inside a body: a string said to be longer than the body is.
        let mut body = encode("a string", "abc").unwrap();
        body[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
        assert!(decode::<String>("a string", &body).is_err());
    }

    #[test]
    fn another_tag_is_named() {
        let mut bytes = framed(&(1, "x".into(), None, vec![]));
        bytes[7] = 9;
        let error = unframed(&bytes).unwrap_err().to_string();
        assert!(error.contains(r#""K3TEST\x00\t""#), "{error}");
    }

    proptest! {
        #[test]
        fn what_is_framed_reads_back(value: Sample) {
            let bytes = framed(&value);
            prop_assert_eq!(unframed(&bytes).unwrap(), (value, bytes.len() as u64));
        }

        #[test]
        fn a_flipped_bit_is_an_error(value: Sample, at: prop::sample::Index, bit in 0..8) {
            let mut bytes = framed(&value);
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            prop_assert!(unframed(&bytes).is_err());
        }

        #[test]
        fn a_cut_file_is_an_error(value: Sample, at: prop::sample::Index) {
            let bytes = framed(&value);
            prop_assert!(unframed(&bytes[..at.index(bytes.len())]).is_err());
        }
    }
}
