//! Special tokens: 256 names at fixed offsets from the end of the vocabulary. Source: specification 5.4.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use serde::Deserialize;
use serde_json::Value;

use super::TokenizerError;

/// Special tokens after the vocabulary.
const NUM_SPECIALS: u32 = 256;

/// Names by offset; all others are reserved.
const NAMED: [(u32, &str); 16] = [
    (0, "[BOS]"),
    (1, "[EOS]"),
    (2, "<|end_of_msg|>"),
    (3, "<|open|>"),
    (4, "<|close|>"),
    (5, "<|sep|>"),
    (6, "[start_header_id]"),
    (7, "[end_header_id]"),
    (9, "[EOT]"),
    (18, "<|media_begin|>"),
    (19, "<|media_content|>"),
    (20, "<|media_end|>"),
    (21, "<|media_pad|>"),
    (65, "<osagent_mode>"),
    (254, "[UNK]"),
    (255, "[PAD]"),
];

/// The special tokens of a vocabulary.
pub(super) struct SpecialTokens {
    base: u32,
    names: Vec<String>,
    ids: HashMap<String, u32>,
    longest: usize,
}

impl SpecialTokens {
    /// The special tokens that follow `base` ordinary ones; none if their ids would not fit.
    pub(super) fn after(base: usize) -> Option<Self> {
        let base = u32::try_from(base).ok()?;
        base.checked_add(NUM_SPECIALS)?;
        let named = BTreeMap::from(NAMED);
        let name = |offset: u32| match named.get(&offset) {
            Some(&name) => name.to_owned(),
            None => format!("<|reserved_token_{}|>", base + offset),
        };
        let names: Vec<String> = (0..NUM_SPECIALS).map(name).collect();
        let longest = names.iter().map(String::len).max().unwrap_or(0);
        let ids = names.iter().cloned().zip(base..).collect();
        Some(Self {
            base,
            names,
            ids,
            longest,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn id(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    pub(super) fn name(&self, id: u32) -> Option<&str> {
        let offset = id.checked_sub(self.base)?;
        self.names.get(offset as usize).map(String::as_str)
    }

    /// The earliest marker in `text`: where it starts, its length and id.
    ///
    /// Every name starts with an opening bracket and has the closing one as its last byte only, so at each opening bracket there
    /// is one candidate, and the search is linear.
    pub(super) fn find(&self, text: &[u8]) -> Option<(usize, usize, u32)> {
        text.iter().enumerate().find_map(|(start, &first)| {
            let closing = match first {
                b'<' => b'>',
                b'[' => b']',
                _ => return None,
            };
            let rest = text.get(start..)?;
            let len = 1 + rest.iter().take(self.longest).position(|&b| b == closing)?;
            let id = self.id(std::str::from_utf8(rest.get(..len)?).ok()?)?;
            Some((start, len, id))
        })
    }

    /// Check that a `tokenizer_config.json` gives the same names to the ids it lists.
    ///
    /// # Errors
    /// If it is not JSON of the expected form, or an id has another name.
    pub(super) fn check_config(&self, text: &[u8], path: &Path) -> Result<(), TokenizerError> {
        #[derive(Deserialize)]
        struct Added {
            content: String,
        }
        let damaged = |source| TokenizerError::Config {
            path: path.to_owned(),
            source,
        };
        let mut config: BTreeMap<String, Value> = serde_json::from_slice(text).map_err(damaged)?;
        let Some(listed) = config.remove("added_tokens_decoder") else {
            return Ok(());
        };
        let listed: BTreeMap<String, Added> = serde_json::from_value(listed).map_err(damaged)?;
        for (id, added) in listed {
            let expected = id.parse().ok().and_then(|id| self.name(id));
            if expected != Some(added.content.as_str()) {
                return Err(TokenizerError::Disagrees {
                    path: path.to_owned(),
                    found: added.content,
                    expected: expected
                        .map_or("not a special token".to_owned(), |n| format!("{n:?}")),
                    id,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_unique_and_closes_with_its_last_byte_only() {
        let specials = SpecialTokens::after(163_584).unwrap();
        assert_eq!(specials.ids.len(), 256);
        for name in &specials.names {
            let closing = if name.starts_with('[') { ']' } else { '>' };
            assert!(name.starts_with(['<', '[']), "{name}");
            assert_eq!(name.find(closing), Some(name.len() - 1), "{name}");
            assert_eq!(
                specials.find(name.as_bytes()),
                specials.id(name).map(|id| (0, name.len(), id))
            );
        }
        assert_eq!(specials.id("<|reserved_token_163592|>"), Some(163_592));
        assert_eq!(specials.id("<|end_of_msg|>"), Some(163_586));
        assert_eq!(specials.id("[PAD]"), Some(163_839));
        assert_eq!(specials.name(163_840), None);
        assert_eq!(specials.name(163_583), None);
    }

    #[test]
    fn ids_that_would_not_fit_are_refused() {
        assert!(SpecialTokens::after(u32::MAX as usize - 255).is_none());
        assert!(SpecialTokens::after(usize::MAX).is_none());
    }
}
