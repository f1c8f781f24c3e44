use std::{io, path::PathBuf};

/// Why a tokenizer could not be loaded. Every variant names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// There is no vocabulary file; token ids can still be used.
    #[error(
        "{}: no such file (name the folder that holds it with --tokenizer DIR, or give token ids with --ids)",
        path.display()
    )]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("{}: cannot be read", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line of the vocabulary is wrong.
    #[error("{}: line {line}: {problem} (download the file again)", path.display())]
    Line {
        /// The vocabulary file.
        path: PathBuf,
        /// Its line, counted from one.
        line: usize,
        /// What is wrong with it.
        problem: LineProblem,
    },
    /// The vocabulary cannot spell every text.
    #[error(
        "{}: no line holds the single byte 0x{byte:02X}, so some texts could not be encoded (download the file again)",
        path.display()
    )]
    MissingByte {
        /// The vocabulary file.
        path: PathBuf,
        /// The first byte without a token.
        byte: u8,
    },
    /// The vocabulary is too large for 32-bit offsets and ids.
    #[error("{}: {bytes} bytes is no vocabulary; 4 GiB is the limit (download the file again)", path.display())]
    TooLarge {
        /// The vocabulary file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
    },
    /// `tokenizer_config.json` is not the JSON expected.
    #[error("{}: not a tokenizer configuration (download the file again)", path.display())]
    ConfigJson {
        /// The configuration file.
        path: PathBuf,
        /// Where it went wrong.
        source: serde_json::Error,
    },
    /// `tokenizer_config.json` names a special token otherwise than the rule does.
    #[error(
        "{}: added_tokens_decoder gives id {id} the text {found:?}, but with this tiktoken.model {expected} \
         (both files must come from one release; download them again)",
        path.display()
    )]
    ConfigDisagrees {
        /// The configuration file.
        path: PathBuf,
        /// The key in `added_tokens_decoder`.
        id: String,
        /// The text it gives.
        found: String,
        /// What the rule says about the id.
        expected: String,
    },
}

/// What is wrong with a line of a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineProblem {
    /// Not two fields with one space between them.
    #[error("not a base64 token, one space and a decimal rank")]
    Shape,
    /// The first field is not base64.
    #[error("the token is not base64")]
    Base64,
    /// The token has no bytes.
    #[error("the token is empty")]
    Empty,
    /// The second field is not a number.
    #[error("the rank is not a decimal number")]
    Rank,
    /// The rank is past the end of the file.
    #[error("rank {rank} in a file of {lines} lines; ranks must be dense")]
    NotDense {
        /// The rank.
        rank: u32,
        /// Lines of the file.
        lines: usize,
    },
    /// Another line has the same rank.
    #[error("rank {0} was given on an earlier line")]
    RankTwice(u32),
    /// Another line has the same token.
    #[error("the token already has rank {0}")]
    TokenTwice(u32),
}

/// Text could not be cut into pieces.
#[derive(Debug, thiserror::Error)]
#[error(
    "the text could not be split into pieces; encode it elsewhere and give its token ids with --ids-file FILE"
)]
pub struct EncodeError {
    /// Why the search was given up.
    pub source: Box<fancy_regex::Error>,
}
