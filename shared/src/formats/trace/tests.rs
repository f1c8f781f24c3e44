//! Facts about the trace format.

use std::io::Cursor;

use proptest::prelude::*;

use super::*;

fn header() -> TraceHeader {
    TraceHeader {
        identity: "0123abcd".to_owned(),
        layers: 3,
        experts: 12,
        top_k: 2,
        expert_bytes: 17_547_264,
    }
}

fn record(step: u64, mode: Mode, layer: u32, rows: &[(u32, u32, [u32; 2])]) -> TraceRecord {
    TraceRecord {
        step,
        mode,
        layer: LayerIdx(layer),
        rows: rows
            .iter()
            .map(|&(sequence, position, _)| TraceRow { sequence, position })
            .collect(),
        experts: rows
            .iter()
            .flat_map(|(_, _, experts)| experts.map(ExpertIdx))
            .collect(),
    }
}

fn sample() -> Vec<TraceRecord> {
    vec![
        record(0, Mode::Prefill, 1, &[(0, 0, [10, 2]), (0, 1, [2, 11])]),
        record(0, Mode::Prefill, 2, &[(0, 0, [0, 1]), (0, 1, [1, 0])]),
        record(1, Mode::Decode, 1, &[(0, 2, [7, 3])]),
    ]
}

fn written(records: &[TraceRecord]) -> Vec<u8> {
    let mut writer = TraceWriter::new(Vec::new(), header()).unwrap();
    for record in records {
        writer.write(record).unwrap();
    }
    writer.finish().unwrap()
}

fn read(bytes: &[u8]) -> Result<Vec<TraceRecord>, TraceError> {
    let path = Path::new("run.trace");
    let mut reader = TraceReader::new(Cursor::new(bytes), bytes.len() as u64, path)?;
    let mut records = Vec::new();
    while let Some(record) = reader.next_record()? {
        records.push(record);
    }
    assert!(reader.next_record()?.is_none(), "the end stays the end");
    Ok(records)
}

fn message(bytes: &[u8]) -> String {
    read(bytes).unwrap_err().to_string()
}

/// Where the records of [`sample`] begin.
fn body_start() -> usize {
    written(&[]).len() - RECORD_BYTES - DIGEST_BYTES
}

#[test]
fn version_1_has_these_bytes() {
    let golden = include_bytes!("../../../tests/golden/trace-v1.bin");
    assert_eq!(written(&sample()), golden);
    assert_eq!(read(golden).unwrap(), sample());
}

#[test]
fn records_are_plain_little_endian_numbers() {
    let bytes = written(&sample());
    let start = body_start();
    let first = [
        &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0][..],
        &[0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 2, 0],
        &[0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 11, 0],
    ]
    .concat();
    assert_eq!(bytes[start..start + first.len()], first);
}

#[test]
fn a_trace_cut_at_a_record_is_an_error() {
    let bytes = written(&sample());
    let cut = body_start() + 2 * (RECORD_BYTES + 2 * 12);
    let error = message(&bytes[..cut]);
    assert!(
        error.contains(&format!("run.trace: byte {cut}: cut short after 2 records")),
        "{error}"
    );
    assert!(error.contains("k3-run --trace"), "{error}");
}

#[test]
fn a_row_count_beyond_the_file_is_refused_before_anything_is_allocated() {
    let mut bytes = written(&sample());
    let at = body_start() + 12;
    bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = message(&bytes);
    assert!(
        error.contains(&format!("byte {at}: 4294967295 rows")),
        "{error}"
    );
}

#[test]
fn another_version_and_an_unknown_mode_are_named() {
    let mut bytes = written(&sample());
    bytes[7] = 2;
    assert!(
        message(&bytes).contains(r"K3TRACE\x02"),
        "{}",
        message(&bytes)
    );
    let mut bytes = written(&sample());
    let at = body_start() + 16;
    bytes[at] = 9;
    assert!(
        message(&bytes).contains(&format!("byte {at}: mode 9")),
        "{}",
        message(&bytes)
    );
}

#[test]
fn records_that_cannot_be_are_not_written() {
    let refused = |records: &[TraceRecord]| {
        let mut writer = TraceWriter::new(Vec::new(), header()).unwrap();
        let results: Vec<_> = records.iter().map(|r| writer.write(r)).collect();
        results.into_iter().next_back().unwrap().is_err()
    };
    let good = record(1, Mode::Decode, 1, &[(0, 0, [0, 1])]);
    assert!(!refused(std::slice::from_ref(&good)));
    assert!(
        refused(&[good.clone(), good.clone()]),
        "the same step and layer"
    );
    assert!(
        refused(&[good.clone(), record(0, Mode::Decode, 2, &[(0, 0, [0, 1])])]),
        "an earlier step"
    );
    assert!(
        refused(&[record(0, Mode::Decode, 3, &[(0, 0, [0, 1])])]),
        "a layer too many"
    );
    assert!(
        refused(&[record(0, Mode::Decode, 1, &[(0, 0, [0, 12])])]),
        "an expert too many"
    );
    assert!(
        refused(&[record(0, Mode::Decode, 1, &[(0, 0, [5, 5])])]),
        "an expert twice"
    );
    assert!(refused(&[record(0, Mode::Decode, 1, &[])]), "no rows");
    let uneven = TraceRecord {
        experts: vec![ExpertIdx(1)],
        ..good
    };
    assert!(refused(&[uneven]), "half a row");
}

#[test]
fn a_header_that_names_no_experts_is_refused() {
    for bad in [
        TraceHeader {
            top_k: 0,
            ..header()
        },
        TraceHeader {
            top_k: 13,
            ..header()
        },
        TraceHeader {
            experts: MAX_EXPERTS + 1,
            ..header()
        },
        TraceHeader {
            layers: 0,
            ..header()
        },
    ] {
        assert!(
            TraceWriter::new(Vec::new(), bad.clone()).is_err(),
            "{bad:?}"
        );
        let mut bytes = Vec::new();
        crate::formats::codec::write_framed(&mut bytes, TAG, "a header", &bad).unwrap();
        assert!(
            matches!(read(&bytes), Err(TraceError::Record { offset: 48, .. })),
            "{bad:?}"
        );
    }
}

#[test]
fn groups_are_the_distinct_experts_of_a_step_and_layer_in_file_order() {
    let bytes = written(&sample());
    let path = Path::new("run.trace");
    let mut reader = TraceReader::new(&bytes[..], bytes.len() as u64, path).unwrap();
    let groups = cache_groups(&mut reader).unwrap();
    let keys: Vec<Vec<u32>> = groups
        .iter()
        .map(|group| group.keys.iter().map(|key| key.0).collect())
        .collect();
    // File order is 0, 1, 10, 11, 2, 3, ...; layer 1 begins at key 12.
    assert_eq!(keys, [vec![22, 23, 14], vec![24, 25], vec![15, 19]]);
    let facts: Vec<_> = groups
        .iter()
        .map(|g| (g.step, g.mode, g.layer.0, g.rows))
        .collect();
    let want = [
        (0, Mode::Prefill, 1, 2),
        (0, Mode::Prefill, 2, 2),
        (1, Mode::Decode, 1, 1),
    ];
    assert_eq!(facts, want);
}

#[test]
fn both_kinds_are_told_apart_and_what_is_neither_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    std::fs::write(&path, written(&sample())).unwrap();
    assert!(matches!(Trace::open(&path), Ok(Trace::Recorded(_))));
    let pairs = [1i32, 498, 92, 0].map(i32::to_le_bytes).concat();
    std::fs::write(&path, &pairs).unwrap();
    let Ok(Trace::Pairs(read)) = Trace::open(&path) else {
        panic!("these are pairs");
    };
    let read: Vec<_> = read.iter().map(|p| (p.layer.0, p.expert.0)).collect();
    assert_eq!(read, [(1, 498), (92, 0)]);

    for (bytes, offset, problem) in [
        (&b""[..], 0, "no pair"),
        (&pairs[..15], 8, "cut short"),
        (b"{\"schema\": \"k3.plan/1\"} ", 0, "layer"),
        (&[1, 0, 0, 0, 255, 255, 255, 255], 4, "expert -1"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = Trace::open(&path).unwrap_err().to_string();
        assert!(
            error.contains(&format!("byte {offset}: ")) && error.contains(problem),
            "{error}"
        );
    }
}

/// Any trace that fits [`header`].
fn traces() -> impl Strategy<Value = Vec<TraceRecord>> {
    let experts = prop::sample::subsequence((0..12).collect::<Vec<u32>>(), 2).prop_shuffle();
    let row = (any::<u32>(), any::<u32>(), experts).prop_map(|(s, p, e)| (s, p, [e[0], e[1]]));
    let rows = prop::collection::vec(row, 1..4);
    let mode = prop_oneof![Just(Mode::Prefill), Just(Mode::Decode)];
    prop::collection::btree_map((0u64..1 << 40, 0u32..3), (mode, rows), 0..8).prop_map(|all| {
        all.into_iter()
            .map(|((step, layer), (mode, rows))| record(step, mode, layer, &rows))
            .collect()
    })
}

proptest! {
    #[test]
    fn what_is_written_reads_back(records in traces()) {
        prop_assert_eq!(read(&written(&records)).unwrap(), records);
    }

    #[test]
    fn a_flipped_bit_is_an_error(records in traces(), at: prop::sample::Index, bit in 0..8) {
        let mut bytes = written(&records);
        let at = at.index(bytes.len());
        bytes[at] ^= 1u8 << bit;
        prop_assert!(read(&bytes).is_err());
    }

    #[test]
    fn a_cut_or_lengthened_trace_is_an_error(records in traces(), at: prop::sample::Index) {
        let mut bytes = written(&records);
        prop_assert!(read(&bytes[..at.index(bytes.len())]).is_err());
        bytes.push(0);
        prop_assert!(read(&bytes).is_err());
    }
}
