//! The tokenizer against encodings that the tiktoken library made.
//!
//! Golden files: `tests/golden/tokenizer`, made by `tests/reference/tokenizer.py`.

use std::{fs, path::Path};

use k3_run::tokenizer::{Specials, Tokenizer, TokenizerError};
use k3_tests::{
    synth::{self, Recipe, SynthError},
    tokenizer::{tiny, write_tiny},
};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

fn tiny_tokenizer() -> Tokenizer {
    Tokenizer::parse(&tiny()).expect("the tiny vocabulary is well formed")
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer
        .encode(text.as_bytes(), Specials::AsText)
        .expect("every text can be split")
}

fn encode_specials(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer
        .encode(text.as_bytes(), Specials::Recognized)
        .expect("every text can be split")
}

fn hex_sha256(bytes: impl AsRef<[u8]>) -> String {
    k3_shared::checkpoint::hex(Sha256::digest(bytes))
}

#[test]
fn the_tiny_vocabulary_is_the_specified_file() {
    let file = tiny();
    assert_eq!(file.len(), 2814);
    assert_eq!(
        hex_sha256(&file),
        "c92f693a8d0b95c726d4b6352781357a86040a0ef6268bd2dc27b115dbf84458"
    );
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        Tokenizer::open(dir.path()),
        Err(TokenizerError::Missing { .. })
    ));
    write_tiny(dir.path()).unwrap();
    let tokenizer = Tokenizer::open(dir.path()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 576);
    assert_eq!(tokenizer.eos_id(), 321);
}

#[test]
fn the_tiny_checkpoint_comes_with_its_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    synth::tiny(dir.path()).unwrap();
    let tokenizer = Tokenizer::open(dir.path()).unwrap();
    let recipe = Recipe::tiny().unwrap();
    assert_eq!(tokenizer.vocab_size(), recipe.config().vocab_size);
    let end = tokenizer.special_id("<|end_of_msg|>");
    assert_eq!(recipe.config().eos_token_id, end);
}

#[test]
fn a_vocabulary_that_was_there_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiktoken.model");
    fs::write(&path, "downloaded").unwrap();
    let error = synth::tiny(dir.path()).unwrap_err();
    assert!(
        matches!(&error, SynthError::Occupied { found, .. } if found == "tiktoken.model"),
        "{error}"
    );
    assert_eq!(fs::read(&path).unwrap(), b"downloaded");
}

#[test]
fn row_49_the_tiny_vocabulary_gives_the_specified_ids() {
    let tokenizer = tiny_tokenizer();
    for (text, ids) in [
        ("hello world", &[317, 315][..]),
        (
            "The  end.\n\nIt's 12345 o'clock",
            &[
                296, 220, 220, 266, 67, 13, 287, 40, 83, 283, 220, 291, 19, 20, 273, 6, 66, 75, 78,
                66, 74,
            ],
        ),
        ("你好。world 你a", &[301, 307, 86, 264, 314, 220, 298, 64]),
        ("  \t x", &[285, 197, 220, 87]),
        ("x   ", &[87, 285, 220]),
        ("caf\u{e9} \u{c7}a", &[66, 64, 69, 305, 220, 127, 229, 64]),
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
    ] {
        assert_eq!(encode(&tokenizer, text), ids, "{text:?}");
    }
    let text = "hello<|open|>x<|close|>";
    assert_eq!(encode_specials(&tokenizer, text), [317, 323, 87, 324]);
}

#[test]
fn tiny_ids_decode_as_specified() {
    let tokenizer = tiny_tokenizer();
    assert_eq!(tokenizer.decode(&[301, 307, 256, 257]), "你好。 the");
    assert_eq!(tokenizer.decode(&[297]), "\u{FFFD}");
    assert_eq!(tokenizer.decode(&[317, 323, 575]), "hello<|open|>[PAD]");
}

#[test]
fn special_names_stand_at_the_specified_tiny_ids() {
    let tokenizer = tiny_tokenizer();
    for (id, name) in [
        (320, "[BOS]"),
        (321, "[EOS]"),
        (322, "<|end_of_msg|>"),
        (323, "<|open|>"),
        (324, "<|close|>"),
        (325, "<|sep|>"),
        (326, "[start_header_id]"),
        (327, "[end_header_id]"),
        (328, "<|reserved_token_328|>"),
        (329, "[EOT]"),
        (338, "<|media_begin|>"),
        (341, "<|media_pad|>"),
        (385, "<osagent_mode>"),
        (574, "[UNK]"),
        (575, "[PAD]"),
    ] {
        assert_eq!(tokenizer.special_id(name), Some(id));
        assert_eq!(tokenizer.special_name(id), Some(name));
        assert_eq!(tokenizer.token_bytes(id), Some(name.as_bytes()));
    }
}

#[derive(Deserialize)]
struct Golden {
    schema: String,
    vocabulary_sha256: String,
    texts: Vec<GoldenText>,
    long: Vec<GoldenLong>,
}

#[derive(Deserialize)]
struct GoldenText {
    text: String,
    ids: Vec<u32>,
    /// Absent where recognising special tokens makes no difference.
    ids_with_specials: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct GoldenLong {
    parts: Vec<(String, usize)>,
    num_ids: usize,
    sha256_of_le_u32: String,
}

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden/tokenizer")
        .join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn check_against_tiktoken(vocabulary: &[u8], golden_file: &str) {
    let golden: Golden =
        serde_json::from_slice(&golden(golden_file)).expect("the golden file is JSON");
    assert_eq!(golden.schema, "k3.golden-tokenizer/1");
    assert_eq!(golden.vocabulary_sha256, hex_sha256(vocabulary));
    let tokenizer = Tokenizer::parse(vocabulary).expect("the vocabulary is well formed");
    assert!(golden.texts.len() > 400 && golden.long.len() > 10);
    for GoldenText {
        text,
        ids,
        ids_with_specials,
    } in &golden.texts
    {
        assert_eq!(encode(&tokenizer, text), *ids, "{text:?}");
        let with_specials = ids_with_specials.as_ref().unwrap_or(ids);
        assert_eq!(
            encode_specials(&tokenizer, text),
            *with_specials,
            "{text:?}"
        );
        assert_eq!(tokenizer.decode(ids), *text);
    }
    for GoldenLong {
        parts,
        num_ids,
        sha256_of_le_u32,
    } in &golden.long
    {
        let text: String = parts
            .iter()
            .map(|(text, times)| text.repeat(*times))
            .collect();
        let ids = encode(&tokenizer, &text);
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(
            (ids.len(), hex_sha256(bytes)),
            (*num_ids, sha256_of_le_u32.clone()),
            "{parts:?}"
        );
    }
}

#[test]
fn texts_encode_as_tiktoken_encodes_them_with_the_tiny_vocabulary() {
    check_against_tiktoken(&tiny(), "tiny.json");
}

#[test]
fn texts_split_as_tiktoken_splits_them_under_merges_that_would_cross_borders() {
    check_against_tiktoken(&golden("learned.tiktoken"), "learned.json");
}

/// Encodings with the released vocabulary (specification 5.5), without special tokens.
const RELEASED: [(&str, &[u32]); 12] = [
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
    ("a\0b\u{1}c\u{7F}d", &[64, 188, 65, 189, 66, 221, 67]),
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

#[test]
#[ignore = "needs K3_TOKENIZER, a folder with the released tiktoken.model"]
fn the_released_vocabulary_gives_the_published_ids() {
    let dir =
        std::env::var_os("K3_TOKENIZER").expect("K3_TOKENIZER names the folder of tiktoken.model");
    let tokenizer = Tokenizer::open(Path::new(&dir)).unwrap();
    assert_eq!(tokenizer.vocab_size(), 163_840);
    for (text, ids) in RELEASED {
        assert_eq!(encode(&tokenizer, text), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids), text);
    }
    let (text, _) = RELEASED[11];
    assert_eq!(
        encode_specials(&tokenizer, text),
        [
            82319, 220, 163_587, 316, 220, 163_586, 316, 220, 163_584, 2397
        ]
    );
    for (text, num_ids) in [
        ("QUJDRA".repeat(5000), 19_999),
        (" ".repeat(30_000) + "end", 121),
        ("word ".repeat(6000), 6001),
        ("word ".repeat(100_000), 100_002),
    ] {
        assert_eq!(encode(&tokenizer, &text).len(), num_ids);
    }
}
