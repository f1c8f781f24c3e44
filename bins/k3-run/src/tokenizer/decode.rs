//! From ids back to text, whole or as the ids come.

use super::Tokenizer;

/// What an id outside the vocabulary decodes to: U+FFFD.
const UNKNOWN: &[u8] = "\u{fffd}".as_bytes();

impl Tokenizer {
    /// The text of `ids`: their bytes one after another, ill-formed UTF-8 replaced by U+FFFD as [`String::from_utf8_lossy`] does.
    ///
    /// Special tokens are their names; an id outside the vocabulary is U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|&id| self.bytes_or_unknown(id))
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn bytes_or_unknown(&self, id: u32) -> &[u8] {
        self.token_bytes(id).unwrap_or(UNKNOWN)
    }
}

/// Decodes ids as they come, in whole characters.
///
/// The pieces from [`Decoder::push`] and [`Decoder::finish`], one after another, are [`Tokenizer::decode`] of all ids.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    /// An incomplete character: at most 3 bytes that more bytes could complete.
    pub(super) pending: Vec<u8>,
}

impl Decoder {
    /// Take the next token; the text that is certain now.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.pending
            .extend_from_slice(tokenizer.bytes_or_unknown(id));
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = bad;
                    let Some(len) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = rest.get(len..).unwrap_or_default();
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        text
    }

    /// The end of the text: U+FFFD if it ends inside a character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
