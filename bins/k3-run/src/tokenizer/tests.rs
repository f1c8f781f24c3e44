use std::fmt::Write as _;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use proptest::prelude::*;

use super::*;

/// The lines of a vocabulary: 256 bytes in numeric order, then `merges`.
fn lines(merges: &[&[u8]]) -> Vec<String> {
    let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    bytes
        .iter()
        .map(<[u8; 1]>::as_slice)
        .chain(merges.iter().copied())
        .enumerate()
        .map(|(rank, token)| format!("{} {rank}", BASE64_STANDARD.encode(token)))
        .collect()
}

fn file(lines: &[String]) -> Vec<u8> {
    let mut file = String::new();
    for line in lines {
        writeln!(file, "{line}").unwrap();
    }
    file.into_bytes()
}

/// 256 bytes in numeric order, then `merges` from 256 on.
pub(super) fn vocabulary(merges: &[&[u8]]) -> Vocabulary {
    Vocabulary::parse(Path::new("v"), &file(&lines(merges))).unwrap()
}

fn tokenizer(merges: &[&[u8]]) -> Tokenizer {
    Tokenizer::parse(&file(&lines(merges))).unwrap()
}

fn parse_error(lines: &[String]) -> String {
    match Tokenizer::parse(&file(lines)) {
        Ok(_) => panic!("a wrong vocabulary was taken"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_wrong_line_is_an_error_that_names_file_and_line() {
    let good = lines(&[b"ab"]);
    for (line, text, says) in [
        (3, "Ag==", "one space"),
        (3, "", "one space"),
        (3, "A!== 2", "base64"),
        (3, " 2", "empty"),
        (3, "Ag== x", "decimal"),
        (3, "Ag== +2", "decimal"),
        (3, "Ag== 2 ", "decimal"),
        (3, "Ag== 2\r", "decimal"),
        (3, "Ag== 4294967296", "decimal"),
        (3, "Ag== 257", "rank 257 in a file of 257 lines"),
        (3, "Ag== 1", "rank 1 was given"),
        (257, "Ag== 256", "already has rank 2"),
    ] {
        let mut lines = good.clone();
        text.clone_into(&mut lines[line - 1]);
        let message = parse_error(&lines);
        assert!(
            message.starts_with(&format!("tiktoken.model: line {line}: ")),
            "{message}"
        );
        assert!(message.contains(says), "{message}");
    }
}

#[test]
fn a_missing_byte_is_an_error() {
    let mut lines = lines(&[b"ab"]);
    lines[0x41] = format!("{} {}", BASE64_STANDARD.encode("xyz"), 0x41);
    assert!(parse_error(&lines).contains("0x41"));
    assert!(parse_error(&[]).contains("0x00"));
}

#[test]
fn lines_may_come_in_any_order_and_the_last_line_feed_may_be_absent() {
    let mut lines = lines(&[b"ab", b"abc"]);
    lines.reverse();
    let file = file(&lines);
    for file in [&file[..], &file[..file.len() - 1]] {
        let tokenizer = Tokenizer::parse(file).unwrap();
        assert_eq!(tokenizer.encode(b"abc", Specials::AsText).unwrap(), [257]);
        assert_eq!(tokenizer.vocab_size(), 258 + 256);
    }
}

#[test]
fn a_folder_without_vocabulary_is_told_from_a_broken_one() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Tokenizer::open(dir.path()).map(|tokenizer| tokenizer.eos_id());
    assert!(matches!(open(), Err(TokenizerError::Missing { .. })));
    std::fs::create_dir(dir.path().join("tiktoken.model")).unwrap();
    assert!(matches!(open(), Err(TokenizerError::Io { .. })));
    std::fs::remove_dir(dir.path().join("tiktoken.model")).unwrap();
    std::fs::write(dir.path().join("tiktoken.model"), file(&lines(&[]))).unwrap();
    assert_eq!(open().unwrap(), 257);
    let config =
        |id: u32| format!(r#"{{"added_tokens_decoder":{{"{id}":{{"content":"[EOS]"}}}}}}"#);
    std::fs::write(dir.path().join("tokenizer_config.json"), config(257)).unwrap();
    assert_eq!(open().unwrap(), 257);
    std::fs::write(dir.path().join("tokenizer_config.json"), config(258)).unwrap();
    assert!(matches!(open(), Err(TokenizerError::ConfigDisagrees { id, .. }) if id == "258"));
}

#[test]
fn row_49_a_contraction_may_end_in_a_long_s() {
    let tokenizer = tokenizer(&[b"I'"]);
    assert_eq!(
        tokenizer.encode(b"I'S", Specials::AsText).unwrap(),
        [256, 0x53]
    );
    assert_eq!(
        tokenizer
            .encode("I'ſ".as_bytes(), Specials::AsText)
            .unwrap(),
        [256, 0xC5, 0xBF]
    );
    assert_eq!(
        tokenizer.encode(b"I'q", Specials::AsText).unwrap(),
        [0x49, 0x27, 0x71]
    );
}

#[test]
fn a_run_of_invalid_utf8_is_one_piece() {
    let tokenizer = tokenizer(&[
        b"\xFF\xFE",
        b"a\xFF",
        b"\xE4\xBD",
        b"\xE4\xBD\xFF",
        b"\xFFb",
    ]);
    let encode = |text: &[u8]| tokenizer.encode(text, Specials::AsText).unwrap();
    // Merges across the border to valid text do not happen; merges inside the run do, whatever made its bytes invalid.
    assert_eq!(encode(b"a\xFF\xFEb"), [0x61, 256, 0x62]);
    assert_eq!(encode(b"\xE4\xBD\xFFb"), [259, 0x62]);
    assert_eq!(encode(b"\xE4\xBD"), [258]);
    assert_eq!(encode("你".as_bytes()), [258, 0xA0]);
}

#[test]
fn row_49_special_tokens_are_text_unless_asked_for() {
    let tokenizer = tokenizer(&[]);
    let text = b"a<|sep|>\xFF[BOS]<|sep|";
    let plain = tokenizer.encode(text, Specials::AsText).unwrap();
    assert_eq!(plain, text.map(u32::from));
    let ids = tokenizer.encode(text, Specials::Recognized).unwrap();
    assert_eq!(ids[..4], [0x61, 261, 0xFF, 256]);
    assert_eq!(ids[4..], b"<|sep|".map(u32::from));
    assert_eq!(tokenizer.special_id("<|sep|>"), Some(261));
    assert_eq!(tokenizer.special_name(261), Some("<|sep|>"));
    assert_eq!(tokenizer.special_name(0x61), None);
}

#[test]
fn a_megabyte_of_one_letter_and_25_001_emoji_are_cut_and_encoded() {
    let powers: Vec<Vec<u8>> = (1..8).map(|power| vec![b'a'; 1 << power]).collect();
    let mut merges: Vec<&[u8]> = powers.iter().map(Vec::as_slice).collect();
    merges.push("😀".as_bytes());
    merges.push(b"\xF0\x9F");
    let tokenizer = tokenizer(&merges);
    let ids = tokenizer
        .encode(&vec![b'a'; 1_000_000], Specials::AsText)
        .unwrap();
    // 40 runs of 25,000 = 195 x 128 + 32 + 8.
    let run: Vec<u32> = [[262; 195].as_slice(), &[260, 258]].concat();
    assert_eq!(ids, run.repeat(40));
    // No merge leads to the emoji inside a run, but the one past the cut is a piece by itself, and a token.
    let ids = tokenizer
        .encode("😀".repeat(25_001).as_bytes(), Specials::AsText)
        .unwrap();
    assert_eq!(ids.len(), 3 * 25_000 + 1);
    assert_eq!(ids.last(), Some(&263));
}

#[test]
fn thirty_thousand_spaces_are_cut_once() {
    let tokenizer = tokenizer(&[b"    ", b" e"]);
    let text = " ".repeat(30_000) + "e";
    let ids = tokenizer.encode(text.as_bytes(), Specials::AsText).unwrap();
    assert_eq!(ids.len(), 30_000);
    assert_eq!(ids.last(), Some(&257));
}

#[test]
fn decoding_replaces_what_is_no_text() {
    let tokenizer = tokenizer(&["你".as_bytes()]);
    assert_eq!(tokenizer.decode(&[256, 0xE4, 0x61]), "你\u{FFFD}a");
    assert_eq!(tokenizer.decode(&[257, 258]), "[BOS][EOS]");
    assert_eq!(tokenizer.decode(&[0x61, 100_000, 0x62]), "a\u{FFFD}b");
    assert_eq!(tokenizer.token_bytes(512), Some("[PAD]".as_bytes()));
    assert_eq!(tokenizer.token_bytes(513), None);
}

#[test]
fn a_stream_shows_whole_characters_only() {
    let tokenizer = tokenizer(&[]);
    let mut decoder = Decoder::default();
    let shown: Vec<String> = "é😀"
        .bytes()
        .map(|byte| decoder.push(&tokenizer, byte.into()))
        .collect();
    assert_eq!(shown, ["", "é", "", "", "", "😀"]);
    assert_eq!(decoder.push(&tokenizer, 0xF0), "");
    // The next byte shows that the last was none of a character; it is itself the beginning of one.
    assert_eq!(decoder.push(&tokenizer, 0xE4), "\u{FFFD}");
    assert_eq!(decoder.finish(), "\u{FFFD}");
}

proptest! {
    #[test]
    fn any_bytes_survive_encoding(
        text in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..200),
            any::<String>().prop_map(String::into_bytes),
            "([a-c ]|é|你|<\\|sep\\|>|\\[BOS\\]|\n){0,40}".prop_map(String::into_bytes),
        ],
        recognized in any::<bool>(),
    ) {
        let tokenizer = tokenizer(&[b"ab", b"abc", b"\xFF\xFF", b" a", "é".as_bytes(), b"\xE4\xBD"]);
        let specials = if recognized { Specials::Recognized } else { Specials::AsText };
        let ids = tokenizer.encode(&text, specials).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap()).copied().collect();
        prop_assert_eq!(bytes, text);
    }

    #[test]
    fn a_stream_and_the_whole_decode_alike(
        ids in proptest::collection::vec(
            prop_oneof![Just(0xF0), Just(0x9F), Just(0x98), Just(0x80), Just(0xE4), Just(0xC3), 0..560_u32],
            0..60,
        ),
    ) {
        let tokenizer = tokenizer(&[b"\x98\x80", b"a\xF0", b"\x9F\x98", "你".as_bytes(), b"\xE4\xBD", b"\xA0z"]);
        let mut decoder = Decoder::default();
        let mut text = String::new();
        for &id in &ids {
            text += &decoder.push(&tokenizer, id);
            prop_assert!(decoder.held() <= 3);
        }
        text += &decoder.finish();
        prop_assert_eq!(text, tokenizer.decode(&ids));
    }
}
