//! Facts about a vocabulary made here: the 256 bytes and whatever tokens a test needs.

use std::fmt::Write as _;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use proptest::prelude::*;

use super::*;

/// A vocabulary file of the single bytes in order and `tokens` after them.
fn file(tokens: &[&[u8]]) -> String {
    let mut text = String::new();
    let bytes: Vec<[u8; 1]> = (0..=255).map(|b| [b]).collect();
    let bytes = bytes.iter().map(<[u8; 1]>::as_slice);
    for (rank, token) in bytes.chain(tokens.iter().copied()).enumerate() {
        writeln!(text, "{} {rank}", STANDARD.encode(token)).unwrap();
    }
    text
}

fn parse(text: &str) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::parse(text.as_bytes(), Path::new("v/tiktoken.model"))
}

fn tokenizer(tokens: &[&[u8]]) -> Tokenizer {
    parse(&file(tokens)).unwrap()
}

fn encode(tokenizer: &Tokenizer, text: impl AsRef<[u8]>) -> Vec<u32> {
    tokenizer.encode(text.as_ref(), Specials::AsText).unwrap()
}

fn message<T: std::fmt::Debug>(result: Result<T, TokenizerError>) -> String {
    result.unwrap_err().to_string()
}

/// The merge rule written down plainly: search all pairs again after every merge.
fn plain_merge(tokenizer: &Tokenizer, piece: &[u8]) -> Vec<u32> {
    let rank = |bytes: &[u8]| tokenizer.vocabulary.rank(bytes);
    if let Some(rank) = rank(piece) {
        return vec![rank];
    }
    let mut parts: Vec<Vec<u8>> = piece.iter().map(|&b| vec![b]).collect();
    loop {
        let pairs = parts.windows(2).enumerate();
        let ranked = pairs.filter_map(|(i, pair)| Some((rank(&pair.concat())?, i)));
        let Some((_, i)) = ranked.min() else { break };
        let right = parts.remove(i + 1);
        parts[i].extend(right);
    }
    parts.iter().map(|part| rank(part).unwrap()).collect()
}

#[test]
fn a_damaged_line_is_an_error_naming_file_and_line() {
    let good = file(&[]);
    for (from, to, line) in [
        ("YQ== 97\n", "YQ==97\n", 98),
        ("YQ== 97\n", "Y!== 97\n", 98),
        ("YQ== 97\n", "YQ== +97\n", 98),
        ("YQ== 97\n", "YQ==  97\n", 98),
        ("YQ== 97\n", "YQ== 97\r\n", 98),
        ("YQ== 97\n", "YQ== 99999999999\n", 98),
        ("YQ== 97\n", " 97\n", 98),
        ("YQ== 97\n", "\nYQ== 97\n", 98),
        ("YQ== 97\n", "YQ== 256\n", 98),
        ("YQ== 97\n", "YQ== 96\n", 98),
        ("YQ== 97\n", "YA== 97\n", 98),
    ] {
        assert!(good.contains(from));
        let found = message(parse(&good.replacen(from, to, 1)));
        assert!(
            found.starts_with(&format!("v/tiktoken.model:{line}: ")),
            "{to:?}: {found}"
        );
    }
    assert!(message(parse("")).starts_with("v/tiktoken.model:1: "));
}

#[test]
fn a_vocabulary_without_every_single_byte_is_an_error() {
    let found = message(parse(&file(&[]).replacen("YQ== 97", "YWE= 97", 1)));
    assert_eq!(
        found,
        "v/tiktoken.model: no line has the single byte 0x61; copy the file from the release again"
    );
}

#[test]
fn lines_may_come_in_any_order_and_the_last_without_line_end() {
    let text = file(&[b"ab"]);
    let mut lines: Vec<&str> = text.lines().collect();
    lines.reverse();
    let tokenizer = parse(&lines.join("\n")).unwrap();
    assert_eq!(encode(&tokenizer, "ab"), [256]);
    assert_eq!(tokenizer.token_bytes(256), Some(b"ab".as_slice()));
    assert_eq!(tokenizer.token_bytes(0), Some([0].as_slice()));
}

#[test]
fn special_tokens_follow_the_vocabulary() {
    let tokenizer = tokenizer(&[b"ab"]);
    assert_eq!(tokenizer.vocab_size(), 257 + 256);
    assert_eq!(tokenizer.special_id("[BOS]"), Some(257));
    assert_eq!(tokenizer.token_bytes(257), Some(b"[BOS]".as_slice()));
    assert_eq!(
        tokenizer.token_bytes(265),
        Some(b"<|reserved_token_265|>".as_slice())
    );
    assert_eq!(tokenizer.token_bytes(513), None);
    assert_eq!(tokenizer.special_id("<|nothing|>"), None);
}

#[test]
fn a_contraction_folds_case_even_to_the_long_s() {
    let tokenizer = tokenizer(&[b"I'"]);
    assert_eq!(encode(&tokenizer, "I'S"), [256, 83]);
    assert_eq!(encode(&tokenizer, "I'\u{17f}"), [256, 0xc5, 0xbf]);
    // Not a contraction: the apostrophe begins the next piece.
    assert_eq!(encode(&tokenizer, "I'q"), [73, 39, 113]);
}

#[test]
fn a_maximal_run_that_is_not_utf8_is_one_piece() {
    let tokenizer = tokenizer(&[b"\xff\xfe", b"\xfe\xe4", b"a\xff", b"\xe4\xbd"]);
    // Two ill-formed sequences side by side merge; across valid text nothing does.
    assert_eq!(encode(&tokenizer, b"a\xff\xfe\xe4\xbd"), [97, 256, 259]);
    assert_eq!(encode(&tokenizer, b"\xffa\xfe"), [0xff, 97, 0xfe]);
    assert_eq!(encode(&tokenizer, b"\xfe\xe4"), [257]);
    assert_eq!(encode(&tokenizer, b""), Vec::<u32>::new());
}

#[test]
fn merges_of_equal_rank_go_from_the_left() {
    let tokenizer = tokenizer(&[b"aa", b"aaaa"]);
    assert_eq!(encode(&tokenizer, "aaaaa"), [257, 97]);
    assert_eq!(encode(&tokenizer, "aaaaaaa"), [257, 256, 97]);
}

#[test]
fn a_megabyte_of_one_letter_takes_at_most_three_lookups_a_byte() {
    let doubled: Vec<Vec<u8>> = (1..=8).map(|power| vec![b'a'; 1 << power]).collect();
    let doubled: Vec<&[u8]> = doubled.iter().map(Vec::as_slice).collect();
    let tokenizer = tokenizer(&doubled);
    let text = vec![b'a'; 1_000_000];
    let (ids, lookups) = tokenizer
        .encode_counting(&text, Specials::Recognized)
        .unwrap();
    assert!(lookups <= 3 * text.len(), "{lookups}");
    // 40 pieces of 25,000 = 97 x 256 + 128 + 32 + 8.
    let piece: Vec<u32> = [vec![263; 97], vec![262, 260, 258]].concat();
    assert_eq!(ids, piece.repeat(40));
}

#[test]
fn a_long_run_of_emoji_and_of_invalid_bytes_takes_at_most_three_lookups_a_byte() {
    let tokenizer = tokenizer(&["🦀".as_bytes(), b"\xf0\x9f"]);
    let text = "🦀".repeat(25_001);
    let (ids, lookups) = tokenizer
        .encode_counting(text.as_bytes(), Specials::AsText)
        .unwrap();
    assert!(lookups <= 3 * text.len(), "{lookups}");
    // Without a path to its rank by pairs the long piece stays in halves; the last crab is alone after the cut, a token.
    let expected: Vec<u32> = [[257, 0xa6, 0x80].repeat(25_000), vec![256]].concat();
    assert_eq!(ids, expected);
    let text = vec![0xff; 1_000_000];
    let (ids, lookups) = tokenizer.encode_counting(&text, Specials::AsText).unwrap();
    assert!(lookups <= 3 * text.len(), "{lookups}");
    assert_eq!(ids, vec![0xff; 1_000_000]);
}

#[test]
fn long_runs_of_every_class_stay_within_the_limit_of_the_pattern() {
    let tokenizer = tokenizer(&[]);
    for run in [
        " ",
        "\n",
        " \n",
        "A",
        "a",
        "Aa",
        "的",
        "ァ",
        "\u{301}",
        "1",
        "!",
        "!\n",
        "\u{1c}",
        "'s",
        "A\u{301}'",
    ] {
        for text in [
            run.repeat(30_000),
            format!("{}x", run.repeat(30_000)),
            format!("x{}", run.repeat(30_000)),
        ] {
            assert_eq!(encode(&tokenizer, &text).len(), text.len(), "{run:?}");
        }
    }
}

#[test]
fn markers_are_found_wherever_they_begin() {
    let tokenizer = tokenizer(&[]);
    let [open, eos] = ["<|open|>", "[EOS]"].map(|name| tokenizer.special_id(name).unwrap());
    let recognized = |text: &str| {
        tokenizer
            .encode(text.as_bytes(), Specials::Recognized)
            .unwrap()
    };
    assert_eq!(recognized("<|open|>"), [open]);
    assert_eq!(recognized("\"<|open|>"), [34, open]);
    assert_eq!(recognized("<<|open|><|<|open|>"), [60, open, 60, 124, open]);
    assert_eq!(recognized("[[EOS]]"), [91, eos, 93]);
    assert_eq!(
        recognized("<[EOS]|open|>"),
        [60, eos, 124, 111, 112, 101, 110, 124, 62]
    );
    assert_eq!(recognized("<|open|").len(), 7);
    assert_eq!(recognized("<|OPEN|>").len(), 8);
    assert_eq!(encode(&tokenizer, "<|open|>").len(), 8);
    let bytes = tokenizer
        .encode(b"\xff<|open|>\xff", Specials::Recognized)
        .unwrap();
    assert_eq!(bytes, [0xff, open, 0xff]);
}

#[test]
fn an_incomplete_character_is_held_back_until_it_is_whole_or_broken() {
    let tokenizer = tokenizer(&[]);
    let mut decoder = Decoder::default();
    let pushed = "é€🦀".bytes().map(|b| decoder.push(&tokenizer, b.into()));
    assert_eq!(
        pushed.collect::<Vec<_>>(),
        ["", "é", "", "", "€", "", "", "", "🦀"]
    );
    assert_eq!(decoder.push(&tokenizer, 0xf0), "");
    assert_eq!(decoder.push(&tokenizer, 0x9f), "");
    assert_eq!(decoder.push(&tokenizer, 97), "\u{fffd}a");
    assert_eq!(decoder.push(&tokenizer, 0xe2), "");
    assert_eq!(decoder.push(&tokenizer, u32::MAX), "\u{fffd}\u{fffd}");
    assert_eq!(decoder.push(&tokenizer, 0xe2), "");
    assert_eq!(decoder.push(&tokenizer, 0x82), "");
    assert_eq!(decoder.finish(), "\u{fffd}");
}

fn text() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        Just("<|open|>"),
        Just("[EOS]"),
        Just("<|"),
        Just("'s"),
        Just("  "),
        Just("\r\n"),
        Just("你好"),
        Just("ab"),
        Just("A"),
        Just("\u{301}"),
        Just("🦀"),
        Just("12345"),
        Just("é"),
    ];
    let bytes = prop_oneof![
        3 => word.prop_map(|w| w.as_bytes().to_vec()),
        1 => any::<char>().prop_map(|c| c.to_string().into_bytes()),
        1 => prop::collection::vec(any::<u8>(), 1..4),
    ];
    prop::collection::vec(bytes, 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn the_bytes_of_the_ids_are_the_text(text in text()) {
        let tokenizer = tokenizer(&[b"ab", b"\xe4\xbd", b"  ", b"12", b"<|", b"\x80\x80"]);
        for specials in [Specials::AsText, Specials::Recognized] {
            let ids = tokenizer.encode(&text, specials).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap()).copied().collect();
            prop_assert_eq!(&bytes, &text);
            prop_assert_eq!(tokenizer.decode(&ids), String::from_utf8_lossy(&text));
            if specials == Specials::AsText {
                prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocabulary.len()));
            }
        }
    }

    #[test]
    fn a_piece_merges_as_by_the_plain_rule(piece in "[abc]{0,60}", tokens in prop::collection::hash_set("[abc]{2,5}", 0..60)) {
        let tokens: Vec<&[u8]> = tokens.iter().map(String::as_bytes).collect();
        let tokenizer = tokenizer(&tokens);
        let mut ids = Vec::new();
        let lookups = merge::encode_piece(&tokenizer.vocabulary, piece.as_bytes(), &mut ids);
        prop_assert!(lookups <= 3 * piece.len().max(1));
        prop_assert_eq!(ids, plain_merge(&tokenizer, piece.as_bytes()));
    }

    #[test]
    fn streamed_text_is_the_decoded_text(ids in prop::collection::vec(prop_oneof![0x70u32..0x100, 0u32..600], 0..40)) {
        let tokenizer = tokenizer(&[b"ab", b"\xe4\xbd", b"\xa0\xf0", b"\xff\xe2"]);
        let mut decoder = Decoder::default();
        let mut streamed = String::new();
        for &id in &ids {
            streamed += &decoder.push(&tokenizer, id);
            prop_assert!(decoder.pending.len() <= 3);
        }
        streamed += &decoder.finish();
        prop_assert_eq!(streamed, tokenizer.decode(&ids));
    }
}
