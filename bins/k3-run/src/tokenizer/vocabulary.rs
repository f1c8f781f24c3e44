//! The vocabulary: token bytes by id, and id by token bytes.
//!
//! All tokens lie in one buffer, and the hash table holds ids only, so that 163,584 tokens take about 4 MB and not 15.

use std::{
    hash::{BuildHasher as _, RandomState},
    path::Path,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use hashbrown::{HashTable, hash_table::Entry};

use super::error::{LineProblem, TokenizerError};

/// Where a token lies in the buffer.
#[derive(Clone, Copy, Default)]
struct Span {
    start: u32,
    len: u32,
}

/// Byte strings numbered from zero, each number used and no string twice.
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    spans: Vec<Span>,
    by_bytes: HashTable<u32>,
    hasher: RandomState,
    longest: usize,
}

impl Vocabulary {
    /// Read the lines of a `tiktoken.model`: base64 token, space, rank (specification 5.1), in any order.
    ///
    /// # Errors
    /// If a line is malformed, the ranks are not dense, a token is there twice, or a single byte is missing.
    pub(super) fn parse(path: &Path, file: &[u8]) -> Result<Self, TokenizerError> {
        if u32::try_from(file.len()).is_err() {
            return Err(TokenizerError::TooLarge {
                path: path.to_owned(),
                bytes: file.len(),
            });
        }
        let body = file.strip_suffix(b"\n").unwrap_or(file);
        let num_lines = if body.is_empty() {
            0
        } else {
            body.split(|&byte| byte == b'\n').count()
        };
        let mut vocabulary = Self {
            bytes: Vec::with_capacity(file.len() / 2),
            spans: vec![Span::default(); num_lines],
            by_bytes: HashTable::with_capacity(num_lines),
            hasher: RandomState::new(),
            longest: 0,
        };
        for (index, line) in body
            .split(|&byte| byte == b'\n')
            .take(num_lines)
            .enumerate()
        {
            vocabulary
                .add_line(line)
                .map_err(|problem| TokenizerError::Line {
                    path: path.to_owned(),
                    line: index + 1,
                    problem,
                })?;
        }
        vocabulary.bytes.shrink_to_fit();
        for byte in 0..=u8::MAX {
            if vocabulary.id(&[byte]).is_none() {
                return Err(TokenizerError::MissingByte {
                    path: path.to_owned(),
                    byte,
                });
            }
        }
        Ok(vocabulary)
    }

    fn add_line(&mut self, line: &[u8]) -> Result<(), LineProblem> {
        let line = str::from_utf8(line).map_err(|_| LineProblem::Shape)?;
        let (token, rank) = line.split_once(' ').ok_or(LineProblem::Shape)?;
        // `u32::from_str` would take a leading plus sign.
        if rank.is_empty() || !rank.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(LineProblem::Rank);
        }
        let rank: u32 = rank.parse().map_err(|_| LineProblem::Rank)?;
        let start = self.bytes.len();
        BASE64_STANDARD
            .decode_vec(token, &mut self.bytes)
            .map_err(|_| LineProblem::Base64)?;
        let token = &self.bytes[start..];
        if token.is_empty() {
            return Err(LineProblem::Empty);
        }
        self.longest = self.longest.max(token.len());
        let lines = self.spans.len();
        let span = self
            .spans
            .get_mut(rank as usize)
            .ok_or(LineProblem::NotDense { rank, lines })?;
        if span.len != 0 {
            return Err(LineProblem::RankTwice(rank));
        }
        // Decoded tokens are shorter than the file, whose length fits in 32 bits.
        *span = Span {
            start: u32::try_from(start).map_err(|_| LineProblem::Shape)?,
            len: u32::try_from(token.len()).map_err(|_| LineProblem::Shape)?,
        };
        self.index(rank)
    }

    fn index(&mut self, rank: u32) -> Result<(), LineProblem> {
        let Self {
            bytes,
            spans,
            by_bytes,
            hasher,
            ..
        } = self;
        let token_of = |rank: u32| slice(bytes, spans[rank as usize]);
        let token = token_of(rank);
        match by_bytes.entry(
            hasher.hash_one(token),
            |&other| token_of(other) == token,
            |&other| hasher.hash_one(token_of(other)),
        ) {
            Entry::Occupied(other) => Err(LineProblem::TokenTwice(*other.get())),
            Entry::Vacant(place) => {
                place.insert(rank);
                Ok(())
            }
        }
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }

    /// The bytes of a token.
    pub(super) fn token(&self, id: u32) -> Option<&[u8]> {
        let span = self.spans.get(id as usize)?;
        Some(slice(&self.bytes, *span))
    }

    /// The id of the token with these bytes. Takes constant time: what is longer than any token is not looked at.
    pub(super) fn id(&self, token: &[u8]) -> Option<u32> {
        if token.len() > self.longest {
            return None;
        }
        self.by_bytes
            .find(self.hasher.hash_one(token), |&id| {
                slice(&self.bytes, self.spans[id as usize]) == token
            })
            .copied()
    }
}

fn slice(bytes: &[u8], span: Span) -> &[u8] {
    &bytes[span.start as usize..][..span.len as usize]
}
