//! The 256 special tokens that follow the vocabulary (specification 5.4).

use std::{collections::HashMap, path::Path};

use serde::Deserialize;

use super::error::TokenizerError;

/// Special tokens after the last ordinary one.
pub(super) const NUM_SPECIALS: u32 = 256;

/// Offset of the end of a raw completion.
const EOS: u32 = 1;

/// The named ones, as offsets from the first. All others are reserved.
const NAMED: [(u32, &str); 16] = [
    (0, "[BOS]"),
    (EOS, "[EOS]"),
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

/// The special tokens of one vocabulary, and the search for them in text.
pub(super) struct SpecialTokens {
    base: u32,
    names: Vec<String>,
    ids: HashMap<Box<[u8]>, u32>,
    /// The lengths that occur, longest first.
    lengths: Vec<usize>,
}

impl SpecialTokens {
    /// The special tokens of a vocabulary of `base` ordinary ones.
    pub(super) fn after(base: u32) -> Self {
        let mut names: Vec<String> = (0..NUM_SPECIALS)
            .map(|offset| format!("<|reserved_token_{}|>", u64::from(base) + u64::from(offset)))
            .collect();
        for (offset, name) in NAMED {
            name.clone_into(&mut names[offset as usize]);
        }
        let ids: HashMap<Box<[u8]>, u32> = (base..)
            .zip(&names)
            .map(|(id, name)| (name.as_bytes().into(), id))
            .collect();
        let mut lengths: Vec<usize> = names.iter().map(String::len).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        Self {
            base,
            names,
            ids,
            lengths,
        }
    }

    /// The text of a special token.
    pub(super) fn name(&self, id: u32) -> Option<&str> {
        let offset = id.checked_sub(self.base)?;
        self.names.get(offset as usize).map(String::as_str)
    }

    /// The id of a special token.
    pub(super) fn id(&self, name: &[u8]) -> Option<u32> {
        self.ids.get(name).copied()
    }

    /// The id of `[EOS]`.
    pub(super) fn eos(&self) -> u32 {
        self.base + EOS
    }

    /// The first marker in `text`, wherever it begins, and the longest where two begin together: its offset, length and id.
    pub(super) fn find(&self, text: &[u8]) -> Option<(usize, usize, u32)> {
        text.iter()
            .enumerate()
            .filter(|(_, byte)| matches!(byte, b'<' | b'['))
            .find_map(|(at, _)| {
                self.lengths.iter().find_map(|&len| {
                    let marker = text[at..].get(..len)?;
                    Some((at, len, self.id(marker)?))
                })
            })
    }

    /// Compare with the table of a `tokenizer_config.json`.
    ///
    /// # Errors
    /// If it is not JSON, or names a token otherwise; the id is in the message.
    pub(super) fn check_config(&self, path: &Path, json: &[u8]) -> Result<(), TokenizerError> {
        let config: TokenizerConfig =
            serde_json::from_slice(json).map_err(|source| TokenizerError::ConfigJson {
                path: path.to_owned(),
                source,
            })?;
        for (id, added) in config.added_tokens_decoder {
            let expected = match id.parse().ok().and_then(|id| self.name(id)) {
                Some(name) if name == added.content => continue,
                Some(name) => format!("it is {name:?}"),
                None => format!(
                    "special ids are {} to {}",
                    self.base,
                    u64::from(self.base) + u64::from(NUM_SPECIALS) - 1
                ),
            };
            return Err(TokenizerError::ConfigDisagrees {
                path: path.to_owned(),
                id,
                found: added.content,
                expected,
            });
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    added_tokens_decoder: std::collections::BTreeMap<String, AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_special_token_has_its_own_name_and_id() {
        let specials = SpecialTokens::after(163_584);
        assert_eq!(specials.ids.len(), 256);
        for id in 163_584..163_840 {
            let name = specials.name(id).unwrap();
            assert_eq!(specials.id(name.as_bytes()), Some(id));
            assert_eq!(
                specials.find(format!("x{name}").as_bytes()),
                Some((1, name.len(), id))
            );
        }
        assert_eq!(specials.name(163_583), None);
        assert_eq!(specials.name(163_840), None);
    }

    #[test]
    fn names_stand_at_the_released_ids() {
        let specials = SpecialTokens::after(163_584);
        for (id, name) in [
            (163_584, "[BOS]"),
            (163_585, "[EOS]"),
            (163_586, "<|end_of_msg|>"),
            (163_587, "<|open|>"),
            (163_588, "<|close|>"),
            (163_589, "<|sep|>"),
            (163_590, "[start_header_id]"),
            (163_591, "[end_header_id]"),
            (163_592, "<|reserved_token_163592|>"),
            (163_593, "[EOT]"),
            (163_602, "<|media_begin|>"),
            (163_603, "<|media_content|>"),
            (163_604, "<|media_end|>"),
            (163_605, "<|media_pad|>"),
            (163_649, "<osagent_mode>"),
            (163_838, "[UNK]"),
            (163_839, "[PAD]"),
        ] {
            assert_eq!(specials.name(id), Some(name));
        }
    }

    #[test]
    fn the_earliest_marker_is_found_inside_a_piece_and_after_a_false_start() {
        let specials = SpecialTokens::after(320);
        assert_eq!(specials.find(b"\"user\"<|sep|>[BOS]"), Some((6, 7, 325)));
        assert_eq!(specials.find(b"<|<|<|sep|>"), Some((4, 7, 325)));
        assert_eq!(specials.find(b"[[EOT]<|sep|>"), Some((1, 5, 329)));
        assert_eq!(specials.find(b"<|sep|> <|open|>"), Some((0, 7, 325)));
        assert_eq!(specials.find(b"<|sep| > [eos] <|"), None);
        assert_eq!(specials.find(b"\xFF\xFE<|close|>\xFF"), Some((2, 9, 324)));
    }

    #[test]
    fn a_configuration_must_agree_and_the_error_names_the_id() {
        let specials = SpecialTokens::after(320);
        let check = |json: &str| {
            specials
                .check_config(Path::new("tokenizer_config.json"), json.as_bytes())
                .map_err(|e| e.to_string())
        };
        let table = |id: &str, text: &str| {
            format!(
                r#"{{"model_max_length":1,"added_tokens_decoder":{{"{id}":{{"content":"{text}","special":true}}}}}}"#
            )
        };
        assert_eq!(check("{}"), Ok(()));
        assert_eq!(check(&table("321", "[EOS]")), Ok(()));
        assert_eq!(check(&table("328", "<|reserved_token_328|>")), Ok(()));
        for (id, text, says) in [
            ("321", "[BOS]", "id 321 "),
            ("319", "x", "320 to 575"),
            ("576", "x", "id 576 "),
            ("-1", "x", "id -1 "),
        ] {
            let message = check(&table(id, text)).unwrap_err();
            assert!(message.contains(says), "{message}");
            assert!(message.starts_with("tokenizer_config.json: "), "{message}");
        }
        assert!(check("{\"added_tokens_decoder\": 3}").is_err());
    }
}
