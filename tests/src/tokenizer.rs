//! The tiny checkpoint's vocabulary: every byte, and 64 tokens that exercise the split pattern and the merges.
//!
//! Source: test-checkpoint specification 1.7.

use std::{io, path::Path};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use k3_shared::term;

/// Name of the vocabulary file.
pub const VOCABULARY_FILE: &str = "tiktoken.model";

/// Tokens after the single bytes, in order of rank from 256.
const TOKENS: [&[u8]; 64] = [
    b" t",
    b"he",
    b" the",
    b"in",
    b"er",
    b" a",
    b"on",
    b"re",
    b"or",
    b"at",
    b"en",
    b"is",
    b" w",
    b"nd",
    b" and",
    b" s",
    b"es",
    b" o",
    b"ou",
    b"it",
    b"ing",
    b" of",
    b" i",
    b" in",
    b"ar",
    b"an",
    b"ll",
    b"'s",
    b"'t",
    b"  ",
    b"    ",
    b"\n\n",
    b"00",
    b"000",
    b"12",
    b"123",
    b"\r\n",
    b"ab",
    b"abc",
    b"Th",
    b"The",
    b"\xe4\xbd",
    "你".as_bytes(),
    b"\xe5\xa5",
    "好".as_bytes(),
    "你好".as_bytes(),
    b"!!",
    b"--",
    b"==",
    "é".as_bytes(),
    b"\xe3\x80",
    "。".as_bytes(),
    b"QU",
    b"JD",
    b"QUJD",
    b"RA",
    b"QUJDRA",
    b" wor",
    b"ld",
    b" world",
    b"hell",
    b"hello",
    b"ti",
    b"tion",
];

/// The vocabulary file: a line a token, base64, a space and the rank.
pub fn tiny() -> Vec<u8> {
    // Single bytes come in the released order: the printable ones of Latin-1, then the rest.
    let printable = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff);
    let rest = (0..=0x20).chain(0x7f..=0xa0).chain([0xad]);
    let bytes: Vec<[u8; 1]> = printable.chain(rest).map(|byte: u8| [byte]).collect();
    let tokens = bytes.iter().map(<[u8; 1]>::as_slice).chain(TOKENS);
    let lines = tokens.enumerate();
    let text: String = lines
        .map(|(rank, token)| format!("{} {rank}\n", STANDARD.encode(token)))
        .collect();
    text.into_bytes()
}

/// Write the vocabulary into `dir`.
///
/// # Errors
/// If the file cannot be written.
pub fn write_tiny(dir: &Path) -> io::Result<()> {
    term::write_atomic(&dir.join(VOCABULARY_FILE), &tiny())
}
