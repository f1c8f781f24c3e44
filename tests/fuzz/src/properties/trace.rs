//! Traces: what is read to its end is written again byte for byte, and its groups hold what its records name.

use std::collections::BTreeSet;

use k3_shared::formats::trace::{
    TraceHeader, TraceReader, TraceRecord, TraceWriter, cache_groups, parse_pairs,
};

use super::{NAME, seal::sealed};

/// The fixed part of the end record.
const END_RECORD: usize = 20;
/// Groups are rebuilt for models of at most as many experts: their order in the file is sorted anew for each input.
const MOST_EXPERTS: u32 = 1024;

/// A trace after one byte, which if odd asks for its digests to be made right.
pub fn check(input: &[u8]) {
    let Some(bytes) = sealed(input, Some(END_RECORD)) else {
        return;
    };
    if let Ok(pairs) = parse_pairs(&bytes, NAME.as_ref()) {
        let raw = |n: u32| n.to_le_bytes();
        let written = pairs.iter().flat_map(|p| [raw(p.layer.0), raw(p.expert.0)]);
        assert!(written.flatten().eq(bytes.iter().copied()));
    }
    let Some((header, records)) = read(&bytes) else {
        return;
    };
    let mut writer = TraceWriter::new(Vec::new(), header.clone()).expect("its header was read");
    for record in &records {
        writer.write(record).expect("its record was read");
    }
    assert_eq!(writer.finish().expect("a vector takes all"), bytes);
    if header.experts <= MOST_EXPERTS {
        groups_are_the_records(&bytes, &records);
    }
}

/// Everything of a whole trace.
fn read(bytes: &[u8]) -> Option<(TraceHeader, Vec<TraceRecord>)> {
    let mut reader = TraceReader::new(bytes, bytes.len() as u64, NAME.as_ref()).ok()?;
    let header = reader.header().clone();
    let mut records = Vec::new();
    while let Some(record) = reader.next_record().ok()? {
        assert_eq!(
            record.experts.len(),
            record.rows.len() * header.top_k as usize
        );
        assert!(record.layer.0 < header.layers);
        assert!(record.experts.iter().all(|e| e.0 < header.experts));
        records.push(record);
    }
    assert!(reader.digest().is_some(), "a whole trace has a digest");
    Some((header, records))
}

fn groups_are_the_records(bytes: &[u8], records: &[TraceRecord]) {
    let mut reader =
        TraceReader::new(bytes, bytes.len() as u64, NAME.as_ref()).expect("read before");
    let geometry = reader.header().geometry().expect("read before");
    let groups = cache_groups(&mut reader).expect("read before");
    assert_eq!(groups.len(), records.len());
    for (group, record) in groups.iter().zip(records) {
        assert_eq!((group.step, group.layer), (record.step, record.layer));
        let keys: BTreeSet<u32> = group
            .keys
            .iter()
            .map(|&k| geometry.id(k).expert.0)
            .collect();
        assert_eq!(keys.len(), group.keys.len(), "an expert twice");
        assert_eq!(keys, record.experts.iter().map(|e| e.0).collect());
    }
}
