use std::io::Write as _;

use proptest::prelude::*;

use super::*;

/// A file: length, header, then `data` zero bytes.
fn file(json: &str, data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.extend(vec![0; data]);
    bytes
}

/// Write the bytes to a file and read its header back.
fn check(bytes: &[u8]) -> Result<Vec<(String, u64, u64)>, Vec<String>> {
    let mut disk = tempfile::tempfile().unwrap();
    disk.write_all(bytes).unwrap();
    let texts = |problems: Vec<Problem>| -> Vec<String> {
        problems.iter().map(ToString::to_string).collect()
    };
    let buffer = map_header(&disk, bytes.len() as u64, "f").map_err(|p| texts(vec![p]))?;
    let header = Header::parse(&buffer, bytes.len() as u64, "f").map_err(texts)?;
    Ok(header
        .entries
        .iter()
        .map(|e| (e.name.to_string(), e.begin, e.end))
        .collect())
}

fn refused(json: &str, data: usize, words: &[&str]) {
    let problems = check(&file(json, data)).expect_err(json);
    for word in words {
        assert!(
            problems.iter().any(|p| p.contains(word)),
            "{word}: {problems:?}"
        );
    }
    let named = |p: &String| p.starts_with("f: ") || p.starts_with("f at byte ");
    assert!(problems.iter().all(named), "{problems:?}");
}

const TWO: &str = r#"{"b":{"dtype":"U8","shape":[2,2],"data_offsets":[4,8]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;

#[test]
fn entries_come_in_file_order_with_their_ranges() {
    let found = check(&file(TWO, 8)).unwrap();
    assert_eq!(found, [("a".into(), 0, 4), ("b".into(), 4, 8)]);
    let bytes = file(TWO, 8);
    let header = Header::parse(&bytes[..8 + TWO.len()], bytes.len() as u64, "f").unwrap();
    assert_eq!(header.shape(&header.entries[1]), [2, 2]);
    assert_eq!(header.header_bytes, 8 + TWO.len() as u64);
    assert_eq!(header.data_bytes, 8);
}

#[test]
fn padding_metadata_and_unknown_fields_are_allowed() {
    check(&file("{}", 0)).unwrap();
    check(&file("{}      ", 0)).unwrap();
    check(&file(r#"{"__metadata__":{"format":"pt"}}"#, 0)).unwrap();
    let extra = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":{"x":[1,null]}}}"#;
    check(&file(extra, 1)).unwrap();
}

#[test]
fn a_header_longer_than_the_file_or_the_limit_is_refused_before_allocation() {
    for length in [u64::MAX, u64::MAX - 7, 1 << 40, MAX_HEADER_BYTES + 1] {
        let problems = check(&length.to_le_bytes()).unwrap_err();
        assert!(problems[0].contains("at most 100000000"), "{problems:?}");
    }
    for length in [MAX_HEADER_BYTES, 1] {
        let problems = check(&length.to_le_bytes()).unwrap_err();
        assert!(problems[0].contains("but the file has 8"), "{problems:?}");
    }
    for bytes in [&b""[..], &[0; 7]] {
        assert!(check(bytes).unwrap_err()[0].contains("too few"));
    }
}

#[test]
fn text_that_is_not_a_header_is_refused_at_its_byte() {
    refused("", 0, &["does not begin with '{'"]);
    refused(" {}", 0, &["does not begin with '{'"]);
    refused("[]", 0, &["does not begin with '{'"]);
    refused("{", 0, &["malformed", "at byte"]);
    refused("{}x", 0, &["malformed", "at byte 10"]);
    refused("{} {}", 0, &["malformed"]);
    refused(
        r#"{"a":1}"#,
        0,
        &["f: a at byte", "dtype, shape and data_offsets"],
    );
    refused("{\"a\n\":1}", 0, &["malformed"]);
    let mut bytes = file(r#"{"a":1}"#, 0);
    bytes[10] = 0xff;
    assert!(check(&bytes).unwrap_err()[0].contains("at byte 10: the header is not UTF-8"));
}

#[test]
fn fields_are_present_once_and_of_their_types() {
    for (tensor, word) in [
        (
            r#"{"shape":[1],"data_offsets":[0,1]}"#,
            "missing field `dtype`",
        ),
        (
            r#"{"dtype":"U8","data_offsets":[0,1]}"#,
            "missing field `shape`",
        ),
        (
            r#"{"dtype":"U8","shape":[1]}"#,
            "missing field `data_offsets`",
        ),
        (
            r#"{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}"#,
            "duplicate field",
        ),
        (
            r#"{"dtype":"U9","shape":[1],"data_offsets":[0,1]}"#,
            "unknown dtype \"U9\"",
        ),
        (
            r#"{"dtype":"u8","shape":[1],"data_offsets":[0,1]}"#,
            "unknown dtype",
        ),
        (r#"{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}"#, "-1"),
        (
            r#"{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}"#,
            "1.0",
        ),
        (
            r#"{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}"#,
            "string",
        ),
        (
            r#"{"dtype":"U8","shape":[1],"data_offsets":[0]}"#,
            "length 1",
        ),
        (
            r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}"#,
            "malformed",
        ),
        (
            r#"{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}"#,
            "malformed",
        ),
    ] {
        refused(
            &format!(r#"{{"name":{tensor}}}"#),
            1,
            &["f: name at byte", word],
        );
    }
}

#[test]
fn a_name_twice_is_refused_even_if_nothing_else_is_wrong() {
    let zero = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    refused(
        &format!(r#"{{"a":{zero},"a":{zero}}}"#),
        0,
        &["f: a at", "twice"],
    );
    refused(
        &format!(r#"{{"a":{zero},"\u0061":{zero}}}"#),
        0,
        &["f: a at", "twice"],
    );
    refused(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, &["twice"]);
}

#[test]
fn metadata_maps_strings_to_strings() {
    for value in [
        "1",
        "[]",
        "null",
        r#"{"a":1}"#,
        r#"{"a":null}"#,
        r#"{"a":{}}"#,
    ] {
        refused(&format!(r#"{{"__metadata__":{value}}}"#), 0, &["malformed"]);
    }
}

#[test]
fn escaped_names_are_unescaped() {
    let json = r#"{"a\"\u00e9\ud83d\ude00\/":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    assert_eq!(check(&file(json, 1)).unwrap()[0].0, "a\"\u{e9}\u{1f600}/");
    refused(
        r#"{"\ud83d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
        1,
        &["malformed"],
    );
}

fn ranges(list: &[(u64, u64, u64)]) -> String {
    let entries: Vec<String> = (0..)
        .zip(list)
        .map(|(i, (len, b, e))| {
            format!(r#""t{i}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{b},{e}]}}"#)
        })
        .collect();
    format!("{{{}}}", entries.join(","))
}

#[test]
fn tensors_tile_the_data_exactly() {
    check(&file(&ranges(&[(4, 4, 8), (4, 0, 4)]), 8)).unwrap();
    refused(&ranges(&[(4, 1, 5)]), 5, &["t0", "1 bytes before it"]);
    refused(
        &ranges(&[(4, 0, 4), (4, 6, 10)]),
        10,
        &["t1", "2 bytes before it"],
    );
    refused(
        &ranges(&[(4, 0, 4), (4, 2, 6)]),
        6,
        &["t1", "2 bytes inside"],
    );
    refused(&ranges(&[(4, 0, 4), (4, 0, 4)]), 4, &["4 bytes inside"]);
    refused(&ranges(&[(4, 4, 0)]), 4, &["t0", "end before they begin"]);
    refused(&ranges(&[(4, 0, 4)]), 3, &["t0", "truncated"]);
    refused(&ranges(&[(4, 0, 4)]), 5, &["1 bytes after the last tensor"]);
    refused(&ranges(&[]), 1, &["1 bytes after"]);
    refused(
        &ranges(&[(4, 0, 4), (1, u64::MAX - 1, u64::MAX)]),
        4,
        &["t1", "truncated"],
    );
}

#[test]
fn all_problems_of_a_header_come_together() {
    let problems = check(&file(&ranges(&[(5, 0, 4), (4, 6, 10), (4, 8, 12)]), 13)).unwrap_err();
    assert_eq!(problems.len(), 4, "{problems:#?}");
    let many: Vec<_> = (0..300).map(|i| (2, i, i + 1)).collect();
    let problems = check(&file(&ranges(&many), 300)).unwrap_err();
    assert_eq!(problems.len(), 101);
    assert!(problems[100].contains("200 more"), "{}", problems[100]);
}

#[test]
fn sizes_are_shape_times_type_without_overflow() {
    let one = |dtype: &str, shape: &str, end: u64| {
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
    };
    check(&file(&one("F32", "[]", 4), 4)).unwrap();
    check(&file(&one("F4", "[3,2]", 3), 3)).unwrap();
    check(&file(&one("F6_E2M3", "[4]", 3), 3)).unwrap();
    check(&file(&one("U8", "[0,9]", 0), 0)).unwrap();
    check(&file(&one("F64", "[0,0]", 0), 0)).unwrap();
    refused(&one("F4", "[3]", 2), 2, &["12 bits, not whole bytes"]);
    refused(&one("F32", "[2]", 4), 4, &["is 8 bytes, but"]);
    refused(
        &one("U8", "[4294967296,4294967296]", 0),
        0,
        &["more bytes than 64 bits"],
    );
    refused(
        &one("U8", "[18446744073709551615]", 0),
        0,
        &["more bytes than 64 bits"],
    );
    refused(
        &one("F32", "[4611686018427387905]", 4),
        4,
        &["more bytes than 64 bits"],
    );
}

#[test]
fn a_git_lfs_pointer_is_called_one() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    assert!(check(pointer).unwrap_err()[0].contains("Git-LFS pointer"));
}

#[test]
fn dtypes_and_names_are_inverse() {
    for &dtype in StoredDtype::ALL {
        assert_eq!(StoredDtype::parse(dtype.name()), Some(dtype));
        assert_eq!(
            dtype.bits(),
            serde_json::from_str::<safetensors::Dtype>(&format!("\"{}\"", dtype.name()))
                .unwrap()
                .bitsize() as u64
        );
    }
}

/// What the format's own library makes of a file.
fn oracle(bytes: &[u8]) -> bool {
    safetensors::SafeTensors::deserialize(bytes).is_ok()
}

/// Rules of ours that the library does not have.
fn is_stricter(problems: &[String]) -> bool {
    let ours = |p: &String| {
        p.contains("does not begin with '{'")
            || p.contains("appears twice")
            // A tensor or an element type may be written as a list or an object there.
            || p.contains("expected an object with dtype")
            || p.contains("expected __metadata__ as an object")
    };
    problems.iter().any(ours)
}

fn agree(bytes: &[u8]) {
    match check(bytes) {
        Ok(_) => assert!(
            oracle(bytes),
            "accepted: {:?}",
            String::from_utf8_lossy(bytes)
        ),
        Err(problems) => assert!(
            !oracle(bytes) || is_stricter(&problems),
            "refused: {:?} {problems:?}",
            String::from_utf8_lossy(bytes)
        ),
    }
}

#[test]
fn the_oracle_accepts_what_these_tests_accept() {
    assert!(oracle(&file(TWO, 8)));
    assert!(!oracle(&file(TWO, 9)));
    assert!(!oracle(&file(TWO, 7)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn mutated_headers_are_judged_as_the_library_judges_them(
        edits in prop::collection::vec((0usize..200, prop::sample::select(b"\"\\{}[],:0123456789abUF84eE.- xt\n".to_vec())), 0..4),
        cut in 0usize..12,
    ) {
        let mut bytes = file(TWO, 8);
        for (at, byte) in edits {
            let at = 8 + at % (bytes.len() - 8);
            bytes[at] = byte;
        }
        if cut < 4 {
            bytes.truncate(bytes.len() - cut);
        }
        agree(&bytes);
    }

    #[test]
    fn random_ranges_are_judged_as_the_library_judges_them(
        list in prop::collection::vec((0u64..6, 0u64..12, 0u64..12), 0..5),
        data in 0usize..14,
    ) {
        agree(&file(&ranges(&list), data));
    }

    #[test]
    fn tiled_files_in_any_order_are_accepted(
        mut lens in prop::collection::vec(0u64..9, 0..8),
        swap in any::<prop::sample::Index>(),
    ) {
        let mut begin = 0;
        let mut list: Vec<_> = lens.drain(..).map(|len| {
            begin += len;
            (len, begin - len, begin)
        }).collect();
        if !list.is_empty() {
            let at = swap.index(list.len());
            list.rotate_left(at);
        }
        let bytes = file(&ranges(&list), usize::try_from(begin).unwrap());
        prop_assert!(check(&bytes).is_ok());
        prop_assert!(oracle(&bytes));
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        agree(&bytes);
    }
}
