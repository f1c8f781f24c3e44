//! Headers of shards: what is accepted tiles the file exactly, and the format's own library accepts it too.

use std::collections::HashSet;

use k3_shared::formats::safetensors::{Entry, Header, StoredDtype, header_len};

use super::NAME;

/// Longest file that is made whole for the format's own library to look at.
const ORACLE_BYTES: u64 = 1 << 16;

/// The first 8 bytes are the length of a file that begins with the rest.
pub fn check(input: &[u8]) {
    let Some((size, start)) = input.split_first_chunk::<8>() else {
        return;
    };
    let file_bytes = u64::from_le_bytes(*size);
    let Some(&prefix) = start.first_chunk::<8>() else {
        return;
    };
    let Ok(len) = header_len(prefix, file_bytes, NAME) else {
        return;
    };
    // A file that is shorter than it says cannot be mapped.
    let Some(header) = start.get(..len) else {
        return;
    };
    let Ok(parsed) = Header::parse(header, file_bytes, NAME) else {
        return;
    };
    tiles_exactly(&parsed, file_bytes);
    let again = written(&parsed);
    let again = Header::parse(&again, again.len() as u64 + parsed.data_bytes, NAME)
        .expect("what was parsed is valid when written again");
    assert_eq!(again.entries.len(), parsed.entries.len());
    // By name: empty tensors at one place have no order there.
    for (a, b) in by_name(&again).into_iter().zip(by_name(&parsed)) {
        assert_eq!((&a.name, a.dtype), (&b.name, b.dtype));
        assert_eq!((a.begin, a.end), (b.begin, b.end));
        assert_eq!(again.shape(a), parsed.shape(b));
    }
    if file_bytes <= ORACLE_BYTES && parsed.entries.iter().all(|e| is_known(e.dtype)) {
        let mut file = header.to_vec();
        file.resize(
            usize::try_from(file_bytes).expect("at most ORACLE_BYTES"),
            0,
        );
        safetensors::SafeTensors::read_metadata(&file).expect("the library takes what we take");
    }
}

/// Whether the library in use knows the type; it learnt some after its first release.
fn is_known(dtype: StoredDtype) -> bool {
    serde_json::from_str::<safetensors::Dtype>(&format!("\"{}\"", dtype.name())).is_ok()
}

fn tiles_exactly(header: &Header<'_>, file_bytes: u64) {
    let mut end = 0;
    let mut names = HashSet::new();
    for entry in &header.entries {
        assert_eq!(entry.begin, end);
        let elements: u128 = header.shape(entry).iter().map(|&d| u128::from(d)).product();
        let bits = elements * u128::from(entry.dtype.bits());
        assert_eq!(bits, 8 * u128::from(entry.end - entry.begin));
        assert!(names.insert(&entry.name), "{} twice", entry.name);
        end = entry.end;
    }
    assert_eq!(header.header_bytes + end, file_bytes);
}

fn by_name<'h, 'a>(header: &'h Header<'a>) -> Vec<&'h Entry<'a>> {
    let mut entries: Vec<_> = header.entries.iter().collect();
    entries.sort_unstable_by_key(|e| &e.name);
    entries
}

/// The file's beginning, written plainly.
fn written(header: &Header<'_>) -> Vec<u8> {
    let entry = |e: &Entry<'_>| {
        let value = serde_json::json!({
            "dtype": e.dtype.name(), "shape": header.shape(e), "data_offsets": [e.begin, e.end],
        });
        (e.name.clone().into_owned(), value)
    };
    let tensors: serde_json::Map<_, _> = header.entries.iter().map(entry).collect();
    let json = serde_json::Value::Object(tensors).to_string();
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}
