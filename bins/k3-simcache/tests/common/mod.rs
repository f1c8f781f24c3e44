//! Small traces, and the tool as a function.
#![allow(dead_code, reason = "each test uses its part")]

use std::{io::Cursor, path::Path};

use clap::Parser as _;
use k3_shared::{
    formats::trace::{Mode, TraceHeader, TraceRecord, TraceRow, TraceWriter},
    ids::{ExpertIdx, LayerIdx},
    term::Outcome,
};
use k3_simcache::{Cli, run};
use proptest::prelude::*;
use serde_json::Value;

pub(crate) const HEADER: (u32, u32, u32, u64) = (4, 12, 3, 1000);

pub(crate) fn header() -> TraceHeader {
    let (layers, experts, top_k, expert_bytes) = HEADER;
    TraceHeader {
        identity: "test".to_owned(),
        layers,
        experts,
        top_k,
        expert_bytes,
    }
}

pub(crate) fn write_trace(path: &Path, records: &[TraceRecord]) {
    let mut writer = TraceWriter::new(Cursor::new(Vec::new()), header()).unwrap();
    for record in records {
        writer.write(record).unwrap();
    }
    std::fs::write(path, writer.finish().unwrap().into_inner()).unwrap();
}

pub(crate) fn write_pairs(path: &Path, pairs: &[(i32, i32)]) {
    let bytes: Vec<u8> = pairs
        .iter()
        .flat_map(|(l, e)| [*l, *e])
        .flat_map(i32::to_le_bytes)
        .collect();
    std::fs::write(path, bytes).unwrap();
}

pub(crate) fn json(args: &[&str], trace: &Path) -> Value {
    let head = ["k3-simcache", "--format", "json"];
    let cli = Cli::try_parse_from(
        head.iter()
            .chain(args)
            .copied()
            .chain([trace.to_str().unwrap()]),
    )
    .unwrap();
    let mut out = Vec::new();
    assert_eq!(run(&cli, &mut out).unwrap(), Outcome::Done);
    serde_json::from_slice(&out).unwrap()
}

pub(crate) fn failure(args: &[&str], trace: &Path) -> String {
    let cli = Cli::try_parse_from(
        ["k3-simcache"]
            .iter()
            .chain(args)
            .copied()
            .chain([trace.to_str().unwrap()]),
    )
    .unwrap();
    format!("{:#}", run(&cli, &mut Vec::new()).unwrap_err())
}

pub(crate) fn selections(rows: usize) -> impl Strategy<Value = Vec<Vec<u32>>> {
    let selection = prop::sample::subsequence((0..12).collect::<Vec<u32>>(), 3).prop_shuffle();
    prop::collection::vec(selection, rows)
}

/// One prefill of four rows and up to twenty decode steps of one or two rows, through layers 1 to 3.
pub(crate) fn traces() -> impl Strategy<Value = Vec<TraceRecord>> {
    let step = (1usize..3).prop_flat_map(|rows| prop::collection::vec(selections(rows), 3));
    let prefill = prop::collection::vec(selections(4), 3);
    (prefill, prop::collection::vec(step, 0..20)).prop_map(|(prefill, decode)| {
        let mut records = Vec::new();
        for (step, layers) in (0u64..).zip(std::iter::once(prefill).chain(decode)) {
            for (layer, rows) in (1..).zip(layers) {
                records.push(TraceRecord {
                    step,
                    mode: if step == 0 {
                        Mode::Prefill
                    } else {
                        Mode::Decode
                    },
                    layer: LayerIdx(layer),
                    rows: (0..)
                        .zip(&rows)
                        .map(|(sequence, _)| TraceRow {
                            sequence,
                            position: 0,
                        })
                        .collect(),
                    experts: rows.into_iter().flatten().map(ExpertIdx).collect(),
                });
            }
        }
        records
    })
}
