//! Text to token ids and back, as the released model was trained with.
//!
//! Encoding is special markers (if they are recognised), outer cuts, the published split pattern, then byte-pair merges over the
//! pieces. Text is bytes: what is not UTF-8 passes through unchanged, every maximal run of it as one piece. Nothing is added:
//! no begin or end token. Source: specification 5.

mod decode;
mod merge;
mod special;
mod split;
mod vocabulary;

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use fancy_regex::Regex;

pub use decode::Decoder;
use special::SpecialTokens;
use vocabulary::Vocabulary;

/// Name of the vocabulary file in a model folder.
pub const VOCABULARY_FILE: &str = "tiktoken.model";
/// Name of the file that lists special tokens, where there is one.
pub const CONFIG_FILE: &str = "tokenizer_config.json";

/// Why there is no tokenizer, or no ids.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// There is no vocabulary file.
    #[error("{}: not there; copy it from the release, or give --tokenizer DIR or --ids", path.display())]
    Missing {
        /// The file looked for.
        path: PathBuf,
    },
    /// A file cannot be read.
    #[error("{}: cannot read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line of the vocabulary is damaged.
    #[error("{}:{line}: {what}; copy the file from the release again", path.display())]
    Line {
        /// The vocabulary file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong there.
        what: String,
    },
    /// A byte could not be encoded.
    #[error("{}: no line has the single byte {byte:#04x}; copy the file from the release again", path.display())]
    NoByte {
        /// The vocabulary file.
        path: PathBuf,
        /// The byte.
        byte: u8,
    },
    /// There are more tokens than ids.
    #[error("{}: {lines} lines are more than 32-bit ids can number", path.display())]
    TooMany {
        /// The vocabulary file.
        path: PathBuf,
        /// Its lines.
        lines: usize,
    },
    /// The list of special tokens is damaged.
    #[error("{}: {source}; copy the file from the release again", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Where and what is wrong.
        source: serde_json::Error,
    },
    /// The list of special tokens is not that of this model.
    #[error(
        "{}: added_tokens_decoder: id {id} is {found:?}, here it is {expected}; \
         copy {CONFIG_FILE} and {VOCABULARY_FILE} from one release",
        path.display()
    )]
    Disagrees {
        /// The file.
        path: PathBuf,
        /// The id, as written.
        id: String,
        /// Its name in the file.
        found: String,
        /// Its name by specification 5.4.
        expected: String,
    },
    /// The split pattern failed.
    #[error("the split pattern: {0}")]
    Pattern(#[from] Box<fancy_regex::Error>),
}

/// What markers such as `<|open|>` in a text are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Ordinary text. The choice for all text that others wrote: it cannot imitate the structure of a conversation.
    AsText,
    /// The special tokens of that name.
    Recognized,
}

/// A vocabulary with its special tokens and split pattern.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    specials: SpecialTokens,
    pattern: Regex,
}

/// The size only: the tables are megabytes.
impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vocab_size = self.vocab_size();
        f.debug_struct("Tokenizer")
            .field("vocab_size", &vocab_size)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Read `tiktoken.model` from `dir`, and check `tokenizer_config.json` against it where there is one.
    ///
    /// # Errors
    /// [`TokenizerError::Missing`] if there is no vocabulary file; others if a file cannot be read, is damaged, or the two
    /// disagree on a special token.
    pub fn open(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join(VOCABULARY_FILE);
        let Some(text) = read(&path)? else {
            return Err(TokenizerError::Missing { path });
        };
        let tokenizer = Self::parse(&text, &path)?;
        let path = dir.join(CONFIG_FILE);
        if let Some(text) = read(&path)? {
            tokenizer.specials.check_config(&text, &path)?;
        }
        Ok(tokenizer)
    }

    /// Make a tokenizer of the bytes of a vocabulary file; `path` is for errors only.
    ///
    /// # Errors
    /// If a line is not base64, a space and a rank; ranks are not dense and unique; a token is empty or comes twice; a single
    /// byte is no token.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, TokenizerError> {
        let vocabulary = Vocabulary::parse(bytes, path)?;
        let lines = vocabulary.len();
        let specials = SpecialTokens::after(lines).ok_or_else(|| TokenizerError::TooMany {
            path: path.to_owned(),
            lines,
        })?;
        let pattern = split::pattern().map_err(Box::new)?;
        Ok(Self {
            vocabulary,
            specials,
            pattern,
        })
    }

    /// Number of ids, special tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len() + self.specials.len()
    }

    /// The id of a special token by its name, `[EOS]` for instance.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.specials.id(name)
    }

    /// The bytes of a token, of a special token its name; none for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let special = || self.specials.name(id).map(str::as_bytes);
        self.vocabulary.token(id as usize).or_else(special)
    }

    /// The ids of a text; no begin or end token is added. The bytes of the ids, one after another, are the text.
    ///
    /// # Errors
    /// If the pattern gives up on a piece, which the outer cuts keep from happening.
    pub fn encode(&self, text: &[u8], specials: Specials) -> Result<Vec<u32>, TokenizerError> {
        Ok(self.encode_counting(text, specials)?.0)
    }

    /// The ids, and how many vocabulary lookups they took.
    fn encode_counting(
        &self,
        text: &[u8],
        specials: Specials,
    ) -> Result<(Vec<u32>, usize), TokenizerError> {
        let mut ids = Vec::new();
        let mut lookups = 0;
        let mut rest = text;
        if specials == Specials::Recognized {
            while let Some((start, len, id)) = self.specials.find(rest) {
                let (before, marker) = rest.split_at(start);
                lookups += self.encode_ordinary(before, &mut ids)?;
                ids.push(id);
                rest = marker.get(len..).unwrap_or_default();
            }
        }
        lookups += self.encode_ordinary(rest, &mut ids)?;
        Ok((ids, lookups))
    }

    /// Append the ids of text without markers; returns the lookups.
    fn encode_ordinary(&self, text: &[u8], ids: &mut Vec<u32>) -> Result<usize, TokenizerError> {
        let mut lookups = 0;
        let mut invalid = Vec::new();
        for chunk in text.utf8_chunks() {
            if !chunk.valid().is_empty() {
                lookups += self.encode_invalid(&mut invalid, ids);
                lookups += self.encode_valid(chunk.valid(), ids)?;
            }
            invalid.extend_from_slice(chunk.invalid());
        }
        Ok(lookups + self.encode_invalid(&mut invalid, ids))
    }

    /// Append the ids of a run of bytes that are not UTF-8, and empty it.
    fn encode_invalid(&self, run: &mut Vec<u8>, ids: &mut Vec<u32>) -> usize {
        let lookups = merge::encode_piece(&self.vocabulary, run, ids);
        run.clear();
        lookups
    }

    fn encode_valid(&self, text: &str, ids: &mut Vec<u32>) -> Result<usize, TokenizerError> {
        let mut lookups = 0;
        for cut in split::outer_cuts(text) {
            let slice = &text[cut];
            let mut end = 0;
            for piece in self.pattern.find_iter(slice) {
                let piece = piece.map_err(Box::new)?;
                debug_assert_eq!(piece.start(), end, "the alternatives cover every character");
                end = piece.end();
                lookups += merge::encode_piece(&self.vocabulary, piece.as_str().as_bytes(), ids);
            }
            debug_assert_eq!(end, slice.len(), "the alternatives cover every character");
        }
        Ok(lookups)
    }
}

/// A whole file, or none where there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokenizerError::Io {
            path: path.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests;
