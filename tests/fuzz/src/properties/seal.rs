//! Digests made right, so that a mutated body is not refused for its digest alone.

use sha2::{Digest as _, Sha256};

/// Tag, length and digest in front of a framed body.
const FRAME: usize = 8 + 8 + 32;

/// The input without its first byte, and, if that is odd, with the digests that its content asks for.
///
/// - `tail`: bytes between the content after the frame and the digest of it that ends the file; `None` if no digest ends it.
pub(super) fn sealed(input: &[u8], tail: Option<usize>) -> Option<Vec<u8>> {
    let (&flag, rest) = input.split_first()?;
    let mut bytes = rest.to_vec();
    if flag & 1 == 1 {
        seal(&mut bytes, tail);
    }
    Some(bytes)
}

fn seal(bytes: &mut [u8], tail: Option<usize>) -> Option<()> {
    let length = u64::from_le_bytes(*bytes.get(8..)?.first_chunk()?);
    let end = FRAME.checked_add(usize::try_from(length).ok()?)?;
    let digest = Sha256::digest(bytes.get(FRAME..end)?);
    bytes.get_mut(16..FRAME)?.copy_from_slice(&digest);
    let at = bytes.len().checked_sub(32)?;
    let content = bytes.get(end..at.checked_sub(tail?)?)?;
    let digest = Sha256::digest(content);
    bytes.get_mut(at..)?.copy_from_slice(&digest);
    Some(())
}
