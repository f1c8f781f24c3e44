//! Policies on traces of stated statistics: none may be good on one prompt only.
#![expect(clippy::unwrap_used, reason = "a helper of tests fails its test")]

use std::io::Cursor;

use k3_shared::{cache::PolicyKind, formats::trace::Trace};
use k3_simcache::{CacheSize, PartArgs, Phase, Replay, generated::Statistics, simulate};

/// Below one token's 1,472 experts, but for the last.
const SLOTS: [usize; 5] = [227, 455, 911, 1367, 3647];

fn replay(statistics: &Statistics) -> Replay {
    let trace = statistics
        .write(Cursor::new(Vec::new()))
        .unwrap()
        .into_inner();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), trace).unwrap();
    let trace = Trace::open(file.path()).unwrap();
    Replay::new(trace, file.path(), &PartArgs::default()).unwrap()
}

#[test]
fn the_default_policy_is_the_best_or_close_to_it_whatever_the_statistics() {
    let sizes = SLOTS.map(|slots| CacheSize {
        slots,
        capacity_bytes: 0,
    });
    let online: Vec<PolicyKind> = PolicyKind::ALL
        .into_iter()
        .filter(|kind| !kind.is_replay_only())
        .collect();
    let mut means = vec![0.0; online.len()];
    // A seed that nothing was chosen by.
    for statistics in Statistics::SAMPLES.map(|sample| Statistics {
        seed: 7_919,
        ..sample
    }) {
        let rows = simulate(&replay(&statistics), &online, &sizes).unwrap();
        let rate = |policy: usize, size: usize| {
            100.0 * rows[policy * SLOTS.len() + size].decode.unwrap().hit_rate
        };
        let default = online
            .iter()
            .position(|&kind| kind == PolicyKind::DEFAULT)
            .unwrap();
        for (size, slots) in SLOTS.iter().enumerate() {
            for (policy, kind) in online.iter().enumerate() {
                let lost = rate(policy, size) - rate(default, size);
                assert!(
                    lost < 1.0,
                    "{kind} hits {lost} points more at {slots} slots: {statistics:?}"
                );
                means[policy] += rate(policy, size);
            }
        }
    }
    let default = PolicyKind::DEFAULT;
    let of_default = means[online.iter().position(|&kind| kind == default).unwrap()];
    for (kind, mean) in online
        .iter()
        .zip(&means)
        .filter(|(kind, _)| **kind != default)
    {
        assert!(
            of_default > 1.1 * mean,
            "{kind} hits {mean} in all, {default} {of_default}"
        );
    }
}

#[test]
fn a_generated_trace_has_its_statistics() {
    let replayed = replay(&Statistics {
        repeat: 0.5,
        zipf: 0.0,
        decoded: 40,
        ..Statistics::RELEASED
    });
    assert_eq!(replayed.facts.decode_tokens, Some(40));
    assert_eq!(replayed.facts.prefill_tokens, Some(8));
    assert_eq!(replayed.facts.working_set, 1472);
    assert_eq!(replayed.facts.repeated_tokens, Some(0));
    let gaps = replayed.gaps();
    let before = gaps
        .iter()
        .find(|gap| gap.phase == Phase::Decode && gap.tokens == Some(1))
        .unwrap();
    // Half repeat the token before; drawn again where that would select an expert twice, which is why it is a little less.
    assert!((0.40..0.52).contains(&before.share), "{}", before.share);

    let flat = replay(&Statistics::RELEASED).facts;
    let steep = replay(&Statistics {
        zipf: 1.2,
        ..Statistics::RELEASED
    })
    .facts;
    assert!(
        steep.distinct_experts < flat.distinct_experts / 2,
        "{steep:?} {flat:?}"
    );
}

#[test]
fn a_seed_chooses_the_whole_trace() {
    let bytes = |seed| {
        let statistics = Statistics {
            seed,
            layers: 3,
            ..Statistics::SAMPLES[3]
        };
        statistics.write(Vec::new()).unwrap()
    };
    assert_eq!(bytes(1), bytes(1));
    assert_ne!(bytes(1), bytes(2));
}
