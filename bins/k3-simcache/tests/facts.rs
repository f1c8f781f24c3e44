//! Working sets, reuse, phases and labels.
#![expect(clippy::unwrap_used, reason = "a helper of tests fails its test")]

use std::collections::BTreeSet;

use common::{failure, json, traces, write_pairs, write_trace};
use k3_shared::{
    cache::PolicyKind,
    formats::trace::{Mode, Trace, TraceRecord, TraceRow},
    ids::{ExpertIdx, LayerIdx},
};
use k3_simcache::{CacheSize, PartArgs, Phase, Replay, simulate};
use proptest::prelude::*;

mod common;

fn replay_of(records: &[TraceRecord]) -> Replay {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.trace");
    write_trace(&path, records);
    Replay::new(Trace::open(&path).unwrap(), &path, &PartArgs::default()).unwrap()
}

/// `[tokens]`: phase and (layer, expert) of every row, by the number of its first record.
fn tokens(records: &[TraceRecord]) -> Vec<(Phase, BTreeSet<(u32, u32)>)> {
    let mut tokens: Vec<(Phase, BTreeSet<(u32, u32)>)> = Vec::new();
    let (mut first, mut step) = (0, None);
    for record in records {
        if step != Some(record.step) {
            (first, step) = (tokens.len(), Some(record.step));
            let row = (record.mode.into(), BTreeSet::new());
            tokens.extend(std::iter::repeat_n(row, record.rows.len()));
        }
        for (token, experts) in tokens[first..].iter_mut().zip(record.experts.chunks(3)) {
            token
                .1
                .extend(experts.iter().map(|expert| (record.layer.0, expert.0)));
        }
    }
    tokens
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_union_is_the_experts_of_every_stretch_of_tokens_counted_once(records in traces()) {
        let tokens = tokens(&records);
        let unions = replay_of(&records).unions();
        for phase in [Phase::Prefill, Phase::Decode] {
            for width in 1..=16 {
                let stretches: Vec<usize> = tokens
                    .windows(width)
                    .filter(|stretch| stretch.iter().all(|token| token.0 == phase))
                    .map(|stretch| stretch.iter().flat_map(|token| &token.1).collect::<BTreeSet<_>>().len())
                    .collect();
                let found = unions.iter().find(|union| union.phase == phase && union.tokens == width);
                match found {
                    None => prop_assert!(stretches.is_empty()),
                    Some(union) => {
                        let mean = stretches.iter().sum::<usize>() as f64 / stretches.len() as f64;
                        prop_assert_eq!(union.stretches, stretches.len());
                        prop_assert!((union.mean_experts - mean).abs() < 1e-9);
                    }
                }
            }
        }
    }

    #[test]
    fn gaps_are_the_tokens_since_the_last_request(records in traces()) {
        let tokens = tokens(&records);
        let replay = replay_of(&records);
        let gaps = replay.gaps();
        for phase in [Phase::Prefill, Phase::Decode] {
            let mut asked = 0;
            let mut one_ago = 0;
            for (number, (of, experts)) in tokens.iter().enumerate().filter(|(_, token)| token.0 == phase) {
                assert_eq!(*of, phase);
                asked += experts.len();
                let before = number.checked_sub(1).map(|before| &tokens[before].1);
                one_ago += experts.iter().filter(|e| before.is_some_and(|b| b.contains(e))).count();
            }
            let of_phase: Vec<_> = gaps.iter().filter(|gap| gap.phase == phase).collect();
            if asked == 0 {
                prop_assert!(of_phase.is_empty());
                continue;
            }
            prop_assert_eq!(of_phase[0].tokens, Some(1));
            prop_assert!((of_phase[0].share - one_ago as f64 / asked as f64).abs() < 1e-9);
            let all: f64 = of_phase.iter().map(|gap| gap.share).sum();
            prop_assert!((all - 1.0).abs() < 1e-9);
        }
    }

    /// The curve answers for caches that hold the largest group; `layer-quota` beside it has every size simulated.
    #[test]
    fn the_lru_curve_is_what_caches_of_each_size_count(records in traces()) {
        let replay = replay_of(&records);
        let geometry = replay.geometry;
        let sizes: Vec<CacheSize> = (1..45).map(|slots| CacheSize { slots, capacity_bytes: 0 }).collect();
        let rows = simulate(&replay, &[PolicyKind::Lru], &sizes).unwrap();
        let mut by_curve = 0;
        for row in rows {
            let mut cache = k3_shared::cache::ExpertCache::new(PolicyKind::Lru, row.slots, geometry).unwrap();
            let mut hits = [0; 2];
            for (layer, keys, phase) in replay.groups() {
                let before = cache.counters().hits;
                cache.request_group(layer, keys);
                hits[usize::from(phase == Some(Phase::Decode))] += cache.counters().hits - before;
            }
            prop_assert_eq!(row.all.hits, hits[0] + hits[1], "{} slots", row.slots);
            prop_assert_eq!(row.decode.map_or(0, |decode| decode.hits), hits[1]);
            by_curve += usize::from(row.slots >= replay.largest_group());
        }
        prop_assert!(by_curve > 30, "most sizes are read off the curve");
    }

    #[test]
    fn prefill_and_decode_make_up_the_whole(records in traces()) {
        let replay = replay_of(&records);
        let sizes = [CacheSize { slots: 9, capacity_bytes: 0 }];
        for row in simulate(&replay, &PolicyKind::ALL, &sizes).unwrap() {
            let of = |part: Option<k3_simcache::Counted>| part.map_or((0, 0), |p| (p.requests, p.hits));
            let (prefill, decode) = (of(row.prefill), of(row.decode));
            prop_assert_eq!(row.all.requests, prefill.0 + decode.0);
            prop_assert_eq!(row.all.hits, prefill.1 + decode.1);
            prop_assert!(prefill.0 > 0 && (decode.0 > 0) == (records.len() > 3));
        }
    }
}

/// One layer, three experts a row; positions as given, a step each list.
fn steps(positions: &[&[u32]]) -> Vec<TraceRecord> {
    let record = |(step, positions): (u64, &&[u32])| TraceRecord {
        step,
        mode: if positions.len() > 1 {
            Mode::Prefill
        } else {
            Mode::Decode
        },
        layer: LayerIdx(1),
        rows: positions
            .iter()
            .map(|&position| TraceRow {
                sequence: 0,
                position,
            })
            .collect(),
        experts: positions
            .iter()
            .flat_map(|&p| [p, p + 1, p + 2].map(ExpertIdx))
            .collect(),
    };
    (0..).zip(positions).map(record).collect()
}

#[test]
fn rows_of_positions_computed_before_are_labelled() {
    let incremental = replay_of(&steps(&[&[0, 1, 2], &[3, 4], &[5], &[6]]));
    assert_eq!(incremental.facts.repeated_tokens, Some(0));
    assert!(incremental.warnings.is_empty());
    assert_eq!(incremental.facts.decode_tokens, Some(2));
    // As `k3-run --recompute` does: every step begins at the first position again.
    let again = replay_of(&steps(&[&[0, 1, 2], &[0, 1, 2, 3], &[0, 1, 2, 3, 4]]));
    assert_eq!(again.facts.repeated_tokens, Some(5));
    assert!(
        again.warnings[0].contains("artefact"),
        "{:?}",
        again.warnings
    );
}

#[test]
fn a_report_says_which_checkpoint_and_which_run() {
    let dir = tempfile::tempdir().unwrap();
    let digest = |name: &str, positions: &[&[u32]]| {
        let path = dir.path().join(name);
        write_trace(&path, &steps(positions));
        let report = json(&["--slots", "4", "--policy", "lru"], &path);
        assert_eq!(report["trace"]["identity"], "test");
        report["trace"]["digest"].as_str().unwrap().to_owned()
    };
    let one = digest("a", &[&[0, 1], &[2]]);
    assert_eq!(one.len(), 64);
    assert_eq!(one, digest("b", &[&[0, 1], &[2]]));
    assert_ne!(one, digest("c", &[&[0, 1], &[3]]));
}

#[test]
fn seconds_a_token_are_bytes_a_token_at_the_disks_speed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.trace");
    write_trace(&path, &steps(&[&[0, 1, 2], &[3], &[7]]));
    let report = json(
        &["--slots", "12", "--policy", "lru", "--disk-speed", "500"],
        &path,
    );
    let row = &report["rows"][0];
    // Experts 0 to 4, then 5 and 7, 8, 9; of 1,000 bytes each.
    assert_eq!(row["prefill"]["bytes_read"], 5000);
    assert_eq!(row["decode"]["bytes_read"], 4000);
    assert_eq!(row["decode"]["bytes_per_token"], 2000.0);
    assert_eq!(row["decode"]["seconds_per_token"], 4.0);
    assert_eq!(row["seconds_per_token"], 18.0 / 5.0);
    assert_eq!(report["trace"]["working_set"], 3);
}

#[test]
fn a_grouped_view_asks_for_a_layer_s_experts_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pairs");
    let pairs: Vec<(i32, i32)> = (0..24).map(|i| (i / 4 % 2, i * 5 % 7)).collect();
    write_pairs(&path, &pairs);
    let part = PartArgs {
        grouped: true,
        top_k: 4,
        ..PartArgs::default()
    };
    let replay = Replay::new(Trace::open(&path).unwrap(), &path, &part).unwrap();
    assert!(replay.groups().all(|(_, keys, _)| keys.len() == 4));
    assert_eq!(replay.facts.requests, 24);
    assert_eq!(replay.facts.tokens, Some(3));
    let own = dir.path().join("run.trace");
    write_trace(&own, &steps(&[&[0, 1]]));
    assert!(failure(&["--grouped"], &own).contains("--grouped is for header-less traces"));
}
