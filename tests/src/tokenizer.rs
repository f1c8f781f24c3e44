//! The tokenizer file of the tiny checkpoint: 256 bytes in the order of the release, and 64 merged tokens.

use std::{fmt::Write as _, io, path::Path};

use base64::{Engine as _, prelude::BASE64_STANDARD};

/// Name of the vocabulary file in a model folder.
pub const VOCABULARY_FILE: &str = "tiktoken.model";

/// Tokens 256 to 319, in order.
const MERGED: [&[u8]; 64] = [
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
    b"\xE4\xBD",
    "你".as_bytes(),
    b"\xE5\xA5",
    "好".as_bytes(),
    "你好".as_bytes(),
    b"!!",
    b"--",
    b"==",
    "é".as_bytes(),
    b"\xE3\x80",
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

/// The single bytes in the order of their ids: printable Latin-1 first, then the others.
fn single_bytes() -> impl Iterator<Item = u8> {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let printable_first = (0..=u8::MAX).filter(move |&byte| printable(byte));
    printable_first.chain((0..=u8::MAX).filter(move |&byte| !printable(byte)))
}

/// The bytes of the tiny `tiktoken.model`: 320 lines, so that ids end at 575 with the special tokens.
pub fn tiny() -> Vec<u8> {
    let mut file = String::new();
    let single: Vec<[u8; 1]> = single_bytes().map(|byte| [byte]).collect();
    let tokens = single.iter().map(<[u8; 1]>::as_slice).chain(MERGED);
    for (rank, token) in tokens.enumerate() {
        writeln!(file, "{} {rank}", BASE64_STANDARD.encode(token))
            .expect("a String takes any text");
    }
    file.into_bytes()
}

/// Write the tiny `tiktoken.model` into `dir`.
///
/// # Errors
/// If the file cannot be written.
pub fn write_tiny(dir: &Path) -> io::Result<()> {
    k3_shared::term::write_atomic(&dir.join(VOCABULARY_FILE), &tiny())
}
