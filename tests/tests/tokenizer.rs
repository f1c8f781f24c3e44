//! Encodings of the reference library, over the tiny vocabulary and over the released one.

use std::{fmt::Write as _, fs, path::Path};

use k3_run::tokenizer::{Decoder, Specials, Tokenizer, TokenizerError};
use k3_tests::{synth, tokenizer};
use sha2::{Digest as _, Sha256};

/// Encodings by tiktoken 0.14.0 with markers as text. Source: test-checkpoint specification 1.7.
const TINY: [(&str, &[u32]); 14] = [
    ("hello world", &[317, 315]),
    (
        "The  end.\n\nIt's 12345 o'clock",
        &[
            296, 220, 220, 266, 67, 13, 287, 40, 83, 283, 220, 291, 19, 20, 273, 6, 66, 75, 78, 66,
            74,
        ],
    ),
    ("你好。world 你a", &[301, 307, 86, 264, 314, 220, 298, 64]),
    ("  \t x", &[285, 197, 220, 87]),
    ("x   ", &[87, 285, 220]),
    ("café Ça", &[66, 64, 69, 305, 220, 127, 229, 64]),
    ("QUJDRAQUJDRA!!", &[312, 312, 302]),
    ("don'T'S", &[67, 262, 6, 51, 6, 50]),
    ("a\u{301}b", &[64, 136, 223, 65]),
    ("10000 123", &[16, 288, 288, 220, 291]),
    (
        "HTTPServer xML",
        &[39, 51, 51, 47, 50, 260, 85, 260, 220, 87, 44, 43],
    ),
    ("\r\n\r\n a", &[292, 292, 261]),
    ("--==!! =", &[303, 304, 302, 220, 28]),
    (
        "hello<|open|>x<|close|>",
        &[
            317, 27, 91, 78, 79, 266, 91, 29, 87, 27, 91, 66, 75, 78, 82, 68, 91, 29,
        ],
    ),
];

/// Encodings of the released vocabulary with markers as text. Source: specification 5.5.
const RELEASED: [(&str, &[u32]); 11] = [
    ("The capital of France is", &[1008, 10484, 318, 15383, 387]),
    (
        "The quick brown fox jumps over the lazy dog.",
        &[1008, 5072, 16331, 69275, 60062, 1312, 276, 29292, 7751, 13],
    ),
    (
        "你好，世界！我是 Kimi K3。",
        &[33845, 378, 2243, 856, 7808, 24980, 72, 1040, 18, 292],
    ),
    (
        "Kimi K3 是 Moonshot AI 的模型 (moonshot).",
        &[
            42, 30223, 1040, 18, 220, 330, 30218, 10065, 22572, 220, 269, 15662, 347, 115_443,
            10065, 1083,
        ],
    ),
    (
        "a  b\t\tc\n\n\nd \n  e   ",
        &[64, 220, 291, 197, 2529, 3898, 67, 1420, 220, 350, 274],
    ),
    (
        "0 7 42 1234 999999 3.14159 1e-9",
        &[
            15, 220, 22, 220, 5512, 220, 6694, 19, 220, 11275, 11275, 220, 18, 13, 18702, 6276,
            220, 16, 68, 12, 24,
        ],
    ),
    (
        "It's Bob's; they're here, we'll see, I'd go, you've won, don't.",
        &[
            15881, 23396, 1048, 26, 19564, 2397, 11, 20944, 2050, 11, 20020, 970, 11, 19587, 3661,
            11, 4536, 13,
        ],
    ),
    (" ", &[220]),
    ("\n", &[198]),
    (
        "def f(x: int) -> int:\n    if x > 10:\n        return x**2\n    return -x\n",
        &[
            1166, 285, 3940, 25, 754, 8, 2949, 754, 777, 274, 581, 1288, 1677, 220, 795, 777, 337,
            745, 1288, 381, 17, 198, 274, 745, 635, 87, 198,
        ],
    ),
    (
        "literal <|open|> and <|end_of_msg|> and [BOS] here",
        &[
            82319, 22652, 4454, 91, 29, 316, 22652, 517, 5118, 14222, 91, 29, 316, 793, 33, 4110,
            60, 2397,
        ],
    ),
];

fn tiny() -> Tokenizer {
    Tokenizer::parse(&tokenizer::tiny(), Path::new("tiktoken.model")).unwrap()
}

fn as_text(tokenizer: &Tokenizer, text: impl AsRef<[u8]>) -> Vec<u32> {
    tokenizer.encode(text.as_ref(), Specials::AsText).unwrap()
}

fn recognized(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer
        .encode(text.as_bytes(), Specials::Recognized)
        .unwrap()
}

/// A folder with the tiny vocabulary and a `tokenizer_config.json`.
fn open_with_config(config: &str) -> Result<Tokenizer, TokenizerError> {
    let dir = tempfile::tempdir().unwrap();
    tokenizer::write_tiny(dir.path()).unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    Tokenizer::open(dir.path())
}

#[test]
fn the_tiny_file_is_the_published_one() {
    let file = tokenizer::tiny();
    assert_eq!(file.len(), 2814);
    let digest = Sha256::digest(&file)
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        });
    assert_eq!(
        digest,
        "c92f693a8d0b95c726d4b6352781357a86040a0ef6268bd2dc27b115dbf84458"
    );
}

#[test]
fn the_tiny_checkpoint_has_its_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = synth::Recipe::tiny().unwrap();
    synth::tiny(dir.path()).unwrap();
    let tokenizer = Tokenizer::open(dir.path()).unwrap();
    assert_eq!(tokenizer.vocab_size(), recipe.config().vocab_size);
    let eos = tokenizer.special_id("<|end_of_msg|>");
    assert_eq!(recipe.config().eos_token_id, eos);
}

#[test]
fn a_vocabulary_that_is_there_already_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiktoken.model");
    fs::write(&path, "downloaded").unwrap();
    let error = synth::tiny(dir.path()).unwrap_err();
    assert!(
        matches!(&error, synth::SynthError::Occupied { found, .. } if found == "tiktoken.model")
    );
    assert_eq!(fs::read(&path).unwrap(), b"downloaded");
}

#[test]
fn tiny_encodings_are_those_of_the_reference_library() {
    let tokenizer = tiny();
    for (text, ids) in TINY {
        assert_eq!(as_text(&tokenizer, text), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids), text);
        if !text.contains("<|") {
            assert_eq!(recognized(&tokenizer, text), ids, "{text:?}");
        }
    }
}

#[test]
fn markers_are_tokens_only_where_they_are_recognized() {
    let tokenizer = tiny();
    let ids = [317, 323, 87, 324];
    assert_eq!(recognized(&tokenizer, "hello<|open|>x<|close|>"), ids);
    assert_eq!(tokenizer.decode(&ids), "hello<|open|>x<|close|>");
    assert_eq!(recognized(&tokenizer, "\"<|sep|>\""), [1, 325, 1]);
}

#[test]
fn special_tokens_of_tiny_have_the_published_ids() {
    let tokenizer = tiny();
    for (name, id) in [
        ("[BOS]", 320),
        ("[EOS]", 321),
        ("<|end_of_msg|>", 322),
        ("<|open|>", 323),
        ("<|close|>", 324),
        ("<|sep|>", 325),
        ("[start_header_id]", 326),
        ("[end_header_id]", 327),
        ("<|reserved_token_328|>", 328),
        ("[EOT]", 329),
        ("<|media_begin|>", 338),
        ("<|media_content|>", 339),
        ("<|media_end|>", 340),
        ("<|media_pad|>", 341),
        ("<osagent_mode>", 385),
        ("[UNK]", 574),
        ("[PAD]", 575),
    ] {
        assert_eq!(tokenizer.special_id(name), Some(id), "{name}");
        assert_eq!(tokenizer.token_bytes(id), Some(name.as_bytes()));
    }
    assert_eq!(tokenizer.vocab_size(), 576);
}

#[test]
fn decoding_gives_text_and_replacement_characters() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.decode(&[301, 307, 256, 257]), "你好。 the");
    assert_eq!(tokenizer.decode(&[297]), "\u{fffd}");
    let mut decoder = Decoder::default();
    assert_eq!(decoder.push(&tokenizer, 297), "");
    // 0xA0 completes E4 BD to the character of token 298.
    let last = as_text(&tokenizer, b"\xa0")[0];
    assert_eq!(decoder.push(&tokenizer, last), "你");
    assert_eq!(decoder.finish(), "");
}

#[test]
fn thirty_thousand_spaces_are_cut_after_25_000() {
    let tokenizer = tiny();
    let ids = as_text(&tokenizer, format!("{}end", " ".repeat(30_000)));
    // 25,000 spaces are fours; of the 5,000 after the cut the last goes alone, 4,999 are 1,249 fours, a pair and one.
    let fours = [vec![286; 6250], vec![286; 1249]].concat();
    assert_eq!(ids, [fours, vec![285, 220, 220, 266, 67]].concat());
}

#[test]
fn long_runs_of_one_character_keep_every_byte() {
    let tokenizer = tiny();
    for text in [
        "a".repeat(1_000_000),
        "🦀".repeat(25_001),
        "QUJDRA".repeat(5000),
    ] {
        let ids = as_text(&tokenizer, &text);
        assert_eq!(tokenizer.decode(&ids), text);
    }
    assert_eq!(
        as_text(&tokenizer, "a".repeat(1_000_000)),
        vec![64; 1_000_000]
    );
    assert_eq!(as_text(&tokenizer, "🦀".repeat(25_001)).len(), 4 * 25_001);
    // A cut after 25,000 letters falls into the 4,167th word, after its first four letters.
    let ids = [vec![312; 4166], vec![310, 311], vec![312; 833]].concat();
    assert_eq!(as_text(&tokenizer, "QUJDRA".repeat(5000)), ids);
}

#[test]
fn a_folder_without_a_vocabulary_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    match Tokenizer::open(dir.path()) {
        Err(TokenizerError::Missing { path }) => {
            assert_eq!(path, dir.path().join("tiktoken.model"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tokenizer_config_must_agree_on_every_id_it_lists() {
    let listed = |id: &str, name: &str| {
        open_with_config(&format!(
            r#"{{"added_tokens_decoder": {{"320": {{"content": "[BOS]", "special": true}}, "{id}": {{"content": "{name}"}}}}, "x": 1}}"#
        ))
    };
    assert!(listed("323", "<|open|>").is_ok());
    assert!(open_with_config("{}").is_ok());
    for (id, name) in [
        ("324", "<|open|>"),
        ("319", "tion"),
        ("576", "<|more|>"),
        ("328", "<|reserved|>"),
        ("x", "[EOS]"),
    ] {
        let error = listed(id, name).unwrap_err();
        assert!(matches!(&error, TokenizerError::Disagrees { id: found, .. } if found == id));
        let message = error.to_string();
        assert!(
            message.contains(&format!("id {id} is {name:?}")),
            "{message}"
        );
        assert!(message.contains("tokenizer_config.json: "), "{message}");
    }
    for damaged in [
        "",
        "{",
        r#"{"added_tokens_decoder": {"320": "[BOS]"}}"#,
        "[]",
    ] {
        let error = open_with_config(damaged).unwrap_err();
        assert!(
            matches!(error, TokenizerError::Config { .. }),
            "{damaged}: {error}"
        );
    }
}

#[test]
#[ignore = "needs the released vocabulary: K3_TOKENIZER=DIR cargo test -p k3-tests --test tokenizer -- --ignored"]
fn released_encodings_are_those_of_the_reference_library() {
    let dir =
        std::env::var_os("K3_TOKENIZER").expect("K3_TOKENIZER names a folder with tiktoken.model");
    let tokenizer = Tokenizer::open(dir.as_ref()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 163_840);
    for (text, ids) in RELEASED {
        assert_eq!(as_text(&tokenizer, text), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids), text);
    }
    assert_eq!(
        as_text(&tokenizer, b"a\x00b\x01c\x7fd"),
        [64, 188, 65, 189, 66, 221, 67]
    );
    assert_eq!(
        recognized(
            &tokenizer,
            "literal <|open|> and <|end_of_msg|> and [BOS] here"
        ),
        [
            82319, 220, 163_587, 316, 220, 163_586, 316, 220, 163_584, 2397
        ]
    );
    for (text, count) in [
        ("QUJDRA".repeat(5000), 19_999),
        (format!("{}end", " ".repeat(30_000)), 121),
        ("word ".repeat(6000), 6001),
        ("word ".repeat(100_000), 100_002),
    ] {
        assert_eq!(as_text(&tokenizer, &text).len(), count, "{:?}", &text[..10]);
    }
}
