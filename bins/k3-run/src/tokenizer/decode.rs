//! Ids back to text, all at once or as they come.

use super::Tokenizer;

/// Turns ids into text one at a time, holding back a character until all its bytes are there.
///
/// What [`push`](Self::push) and [`finish`](Self::finish) return is, put together, what [`Tokenizer::decode`] returns.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    /// At most 3 bytes: the beginning of a character.
    pending: Vec<u8>,
}

impl Decoder {
    /// The text that `id` completes; empty while a character lacks bytes.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.pending
            .extend_from_slice(tokenizer.bytes_or_replacement(id));
        let held = incomplete_suffix(&self.pending);
        let whole = self.pending.len() - held;
        let text = String::from_utf8_lossy(&self.pending[..whole]).into_owned();
        self.pending.drain(..whole);
        text
    }

    /// Bytes held back.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.pending.len()
    }

    /// The text of what is held back: U+FFFD if anything is, since no more bytes will come.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// How many bytes at the end are the beginning of a character and may still become one.
fn incomplete_suffix(bytes: &[u8]) -> usize {
    let invalid = bytes
        .utf8_chunks()
        .last()
        .map_or(&[][..], |chunk| chunk.invalid());
    match str::from_utf8(invalid) {
        Err(error) if error.error_len().is_none() => invalid.len(),
        _ => 0,
    }
}
