//! Text to token ids and back (specification 5).
//!
//! Encoding cuts text into pieces with the published regular expression, under the official limits on run length, and merges
//! byte pairs inside each piece. Text is bytes: what is not UTF-8 is kept, each maximal run of it being a piece. Special tokens in
//! text are recognised only on request, so that a prompt cannot write conversation structure by accident.

mod decode;
mod error;
mod merge;
mod special;
mod split;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

pub use decode::Decoder;
pub use error::{EncodeError, LineProblem, TokenizerError};

use merge::Merger;
use special::{NUM_SPECIALS, SpecialTokens};
use split::split;
use vocabulary::Vocabulary;

/// The vocabulary file of a model folder.
const VOCABULARY_FILE: &str = "tiktoken.model";
/// The file that names special tokens; it may be absent.
const CONFIG_FILE: &str = "tokenizer_config.json";

/// What the text of a special token means in text to encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Ordinary text: for everything that people or documents wrote.
    AsText,
    /// The special token: for text that a program composed.
    Recognized,
}

/// A vocabulary with its special tokens, ready to encode and decode.
///
/// Ids are `0..base` in the order of the vocabulary file, then 256 special ones.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    specials: SpecialTokens,
}

impl Tokenizer {
    /// Read `tiktoken.model` in `dir`, and compare with `tokenizer_config.json` if there is one.
    ///
    /// # Errors
    /// [`TokenizerError::Missing`] if there is no vocabulary; otherwise if a file cannot be read, a line is wrong, or the two
    /// files disagree.
    pub fn open(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join(VOCABULARY_FILE);
        let Some(file) = read_if_present(&path)? else {
            return Err(TokenizerError::Missing { path });
        };
        let tokenizer = Self::parse_as(&path, &file)?;
        let path = dir.join(CONFIG_FILE);
        if let Some(json) = read_if_present(&path)? {
            tokenizer.check_config(&path, &json)?;
        }
        Ok(tokenizer)
    }

    /// A tokenizer from the bytes of a `tiktoken.model`.
    ///
    /// # Errors
    /// If a line is malformed, the ranks are not dense, a token is there twice, or a single byte is missing.
    pub fn parse(file: &[u8]) -> Result<Self, TokenizerError> {
        Self::parse_as(Path::new(VOCABULARY_FILE), file)
    }

    /// Compare with the special tokens that the bytes of a `tokenizer_config.json` name; `path` names it in errors.
    ///
    /// # Errors
    /// If it is not JSON, or names a token otherwise.
    pub fn check_config(&self, path: &Path, json: &[u8]) -> Result<(), TokenizerError> {
        self.specials.check_config(path, json)
    }

    fn parse_as(path: &Path, file: &[u8]) -> Result<Self, TokenizerError> {
        let vocabulary = Vocabulary::parse(path, file)?;
        let too_large = |_| TokenizerError::TooLarge {
            path: PathBuf::from(path),
            bytes: file.len(),
        };
        let base = u32::try_from(vocabulary.len()).map_err(too_large)?;
        Ok(Self {
            vocabulary,
            specials: SpecialTokens::after(base),
        })
    }

    /// Number of ids: ordinary and special tokens. The model's vocabulary must be of this size.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len() + NUM_SPECIALS as usize
    }

    /// The ids of `text`. No special token is added at either end.
    ///
    /// The official limits hold, stretch by stretch of valid UTF-8: slices of 400,000 code points, and runs of white space or of
    /// anything else cut every 25,000. Markers of special tokens are searched first, so that no limit cuts one in two.
    ///
    /// # Errors
    /// If the regular expression gives up, for which no text is known.
    pub fn encode(&self, text: &[u8], specials: Specials) -> Result<Vec<u32>, EncodeError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut merger = Merger::default();
        let mut rest = text;
        if specials == Specials::Recognized {
            while let Some((at, len, id)) = self.specials.find(rest) {
                self.encode_ordinary(&mut merger, &rest[..at], &mut ids)?;
                ids.push(id);
                rest = &rest[at + len..];
            }
        }
        self.encode_ordinary(&mut merger, rest, &mut ids)?;
        Ok(ids)
    }

    fn encode_ordinary(
        &self,
        merger: &mut Merger,
        text: &[u8],
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        // `text[invalid..at]` is the run of invalid bytes being gathered; a chunk ends after at most 3 of them.
        let (mut invalid, mut at) = (0, 0);
        for chunk in text.utf8_chunks() {
            if !chunk.valid().is_empty() {
                self.encode_run(merger, &text[invalid..at], ids);
                split(chunk.valid(), |piece| {
                    merger.encode(&self.vocabulary, piece.as_bytes(), ids);
                })?;
                at += chunk.valid().len();
                invalid = at;
            }
            at += chunk.invalid().len();
        }
        self.encode_run(merger, &text[invalid..], ids);
        Ok(())
    }

    fn encode_run(&self, merger: &mut Merger, invalid: &[u8], ids: &mut Vec<u32>) {
        if !invalid.is_empty() {
            merger.encode(&self.vocabulary, invalid, ids);
        }
    }

    /// The bytes of a token, special ones included; not always UTF-8. `None` if there is no such id.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary
            .token(id)
            .or_else(|| self.specials.name(id).map(str::as_bytes))
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD as in [`String::from_utf8_lossy`], and so does an id that
    /// there is no token for.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|&id| self.bytes_or_replacement(id))
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn bytes_or_replacement(&self, id: u32) -> &[u8] {
        self.token_bytes(id).unwrap_or("\u{FFFD}".as_bytes())
    }

    /// The id of a special token by its text, such as `<|end_of_msg|>`.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.specials.id(name.as_bytes())
    }

    /// The text of a special token; `None` for any other id.
    pub fn special_name(&self, id: u32) -> Option<&str> {
        self.specials.name(id)
    }

    /// The id of `[EOS]`, the end of a raw completion. (A conversation ends with the id that the model's configuration names.)
    pub fn eos_id(&self) -> u32 {
        self.specials.eos()
    }
}

fn read_if_present(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokenizerError::Io {
            path: path.to_owned(),
            source,
        }),
    }
}
