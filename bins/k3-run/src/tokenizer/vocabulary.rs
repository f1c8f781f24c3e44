//! The vocabulary file: a token a line, base64 of its bytes, a space, its rank. Source: specification 5.1.

use std::{collections::HashMap, ops::Range, path::Path};

use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::TokenizerError;

/// Byte strings of the ordinary tokens by rank, which is their id, and back.
pub(super) struct Vocabulary {
    /// Tokens one after another by rank.
    bytes: Vec<u8>,
    /// End of each token in `bytes`.
    ends: Vec<usize>,
    ranks: HashMap<Box<[u8]>, u32>,
    longest: usize,
}

impl Vocabulary {
    /// Read a vocabulary; `path` is for errors only.
    ///
    /// # Errors
    /// If a line is not of the format, ranks are not dense and unique, a token is empty or comes twice, or one of the 256 single
    /// bytes is no token.
    pub(super) fn parse(text: &[u8], path: &Path) -> Result<Self, TokenizerError> {
        let bad = |line: usize, what: String| TokenizerError::Line {
            path: path.to_owned(),
            line: line + 1,
            what,
        };
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        let lines: Vec<&[u8]> = text.split(|&b| b == b'\n').collect();
        // Line and token by rank: every rank is below the number of lines and taken once, so all are there.
        let mut by_rank: Vec<Option<(usize, Vec<u8>)>> = vec![None; lines.len()];
        for (line, text) in lines.iter().enumerate() {
            let (token, rank) = parse_line(text).map_err(|what| bad(line, what))?;
            let count = lines.len();
            let slot = by_rank.get_mut(rank as usize).ok_or_else(|| {
                bad(
                    line,
                    format!("rank {rank} is not below the number of lines, {count}"),
                )
            })?;
            if let Some((first, _)) = slot {
                return Err(bad(
                    line,
                    format!("rank {rank} was on line {} already", *first + 1),
                ));
            }
            *slot = Some((line, token));
        }
        let mut vocabulary = Self {
            bytes: Vec::with_capacity(text.len()),
            ends: Vec::with_capacity(lines.len()),
            ranks: HashMap::with_capacity(lines.len()),
            longest: 0,
        };
        for ((line, token), rank) in by_rank.into_iter().flatten().zip(0u32..) {
            vocabulary.bytes.extend_from_slice(&token);
            vocabulary.ends.push(vocabulary.bytes.len());
            vocabulary.longest = vocabulary.longest.max(token.len());
            if let Some(first) = vocabulary.ranks.insert(token.into(), rank) {
                let what = format!("rank {rank} has the same token as rank {first}");
                return Err(bad(line, what));
            }
        }
        match (0..=255u8).find(|&byte| vocabulary.rank(&[byte]).is_none()) {
            Some(byte) => Err(TokenizerError::NoByte {
                path: path.to_owned(),
                byte,
            }),
            None => Ok(vocabulary),
        }
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The rank of a token of exactly these bytes.
    pub(super) fn rank(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest {
            return None;
        }
        self.ranks.get(bytes).copied()
    }

    /// The bytes of a token.
    pub(super) fn token(&self, rank: usize) -> Option<&[u8]> {
        let end = *self.ends.get(rank)?;
        let start = match rank.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        self.bytes.get(Range { start, end })
    }
}

fn parse_line(line: &[u8]) -> Result<(Vec<u8>, u32), String> {
    let what = || {
        format!(
            "{:?} is not base64, a space and a rank",
            String::from_utf8_lossy(line)
        )
    };
    let space = line.iter().position(|&b| b == b' ').ok_or_else(what)?;
    let (token, rank) = line.split_at(space);
    let token = STANDARD.decode(token).map_err(|_| what())?;
    if token.is_empty() {
        return Err("the token is empty".to_owned());
    }
    // Digits only: the parser of integers would also take a plus sign.
    let digits = rank.get(1..).filter(|d| d.iter().all(u8::is_ascii_digit));
    let digits = digits
        .and_then(|d| std::str::from_utf8(d).ok())
        .ok_or_else(what)?;
    Ok((token, digits.parse().map_err(|_| what())?))
}
