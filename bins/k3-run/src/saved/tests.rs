use std::{fs, time::Duration};

use k3_shared::config::Config;
use proptest::prelude::*;

use super::*;
use crate::model::{MixerState, SequenceState};

fn config() -> Config {
    let text = include_str!("../../../k3-plan/tests/tiny.config.json");
    Config::parse(text.as_bytes(), "config.json".as_ref()).unwrap()
}

/// A sequence with different values everywhere.
fn sequence(position: usize) -> SequenceState {
    let mut state = SequenceState::new(&config(), 5, 9);
    let mut next = 0.0f32;
    let mut fill = |values: &mut [f32]| {
        for value in values {
            next += 0.25;
            *value = next;
        }
    };
    for mixer in &mut state.mixers {
        match mixer {
            MixerState::Kda(kda) => {
                fill(&mut kda.matrix);
                kda.history.iter_mut().for_each(|history| fill(history));
            }
            MixerState::Mla(cache) => {
                let mut latent = vec![0.0; cache.width()];
                for position in 0..position {
                    fill(&mut latent);
                    cache.store(position, &latent);
                }
            }
        }
    }
    state.position = position;
    state
}

fn header(position: u64) -> Header {
    Header {
        origin: Origin {
            identity: "abc".into(),
            num_layers: 5,
            mla_norm_eps: 1e-6,
            allow_nan_scales: false,
        },
        ids: (0..u32::try_from(position).unwrap() + 2).collect(),
        generated: 2,
        position,
        sampling: Sampling {
            temperature: 0.5,
            top_p: 0.9,
            generator: 77,
        },
    }
}

fn bytes(position: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let written = write(&mut bytes, &header(position as u64), &sequence(position)).unwrap();
    assert_eq!(written, bytes.len() as u64);
    bytes
}

/// Read a file of these bytes back, into room for `context` positions.
fn read_back(bytes: &[u8], context: usize) -> Result<(Header, SequenceState), SavedError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    fs::write(&path, bytes).unwrap();
    let mut state = SequenceState::new(&config(), 5, context);
    let header = Reader::open(&path)?.read_into(&mut state)?;
    Ok((header, state))
}

#[test]
fn a_state_reads_back_into_any_context_that_holds_it() {
    let want = sequence(6);
    let bytes = bytes(6);
    assert!(bytes.len() as u64 <= size_of_state(&config(), 5, 6));
    for context in [6, 9, 40] {
        let (header, state) = read_back(&bytes, context).unwrap();
        assert_eq!(header, self::header(6));
        assert_eq!((state.position, state.context), (6, context));
        for (got, want) in state.mixers.iter().zip(&want.mixers) {
            match (got, want) {
                (MixerState::Kda(got), MixerState::Kda(want)) => assert_eq!(got, want),
                (MixerState::Mla(got), MixerState::Mla(want)) => {
                    assert_eq!(got.visible(6), want.visible(6));
                }
                _ => panic!("the layers are others"),
            }
        }
    }
    let error = read_back(&bytes, 5).unwrap_err().to_string();
    assert!(error.contains("--context"), "{error}");
}

#[test]
fn a_state_of_something_else_is_refused_by_field() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    fs::write(&path, bytes(3)).unwrap();
    let reader = Reader::open(&path).unwrap();
    let ours = header(3).origin;
    reader.belongs(&ours, "model".as_ref()).unwrap();
    let change = |change: &dyn Fn(&mut Origin)| {
        let mut other = ours.clone();
        change(&mut other);
        let error = reader.belongs(&other, "model".as_ref()).unwrap_err();
        error.to_string()
    };
    let identity = change(&|o| o.identity = "xyz".into());
    assert!(
        identity.contains("abc") && identity.contains("xyz") && identity.contains("identity"),
        "{identity}"
    );
    assert!(change(&|o| o.num_layers = 6).contains("--layers 5"));
    assert!(change(&|o| o.mla_norm_eps = 1e-5).contains("--mla-norm-eps 1e-6"));
    assert!(change(&|o| o.allow_nan_scales = true).contains("leave out --allow-nan-scales"));
}

#[test]
fn counts_that_contradict_each_other_are_refused() {
    for (position, generated) in [(5, 2), (9, 0), (3, 6)] {
        let mut header = header(3);
        header.position = position;
        header.generated = generated;
        let mut bytes = Vec::new();
        write(&mut bytes, &header, &sequence(3)).unwrap();
        let error = read_back(&bytes, 9).unwrap_err();
        assert!(matches!(error, SavedError::Damaged { .. }), "{error}");
    }
}

#[test]
fn intervals_are_tokens_or_time() {
    let seconds = |n| Ok(Interval::Time(Duration::from_secs(n)));
    assert_eq!("12".parse(), Ok(Interval::Tokens(12)));
    assert_eq!("90s".parse(), seconds(90));
    assert_eq!("30m".parse(), seconds(1800));
    assert_eq!("2h".parse(), seconds(7200));
    for wrong in [
        "",
        "0",
        "0m",
        "m",
        "-1",
        "1d",
        "1.5h",
        "99999999999999999999",
        "7 m",
    ] {
        assert!(wrong.parse::<Interval>().is_err(), "{wrong}");
    }
}

#[test]
fn saves_alternate_and_a_second_run_or_an_old_state_is_in_nobody_s_way() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let position = |path: &std::path::Path| Reader::open(path).unwrap().header.position;
    let mut keeper = Keeper::open(&path, Some(Interval::Tokens(3)), false, 1).unwrap();
    assert!(matches!(
        Keeper::open(&path, None, true, 1),
        Err(SavedError::Busy { .. })
    ));
    assert!(!keeper.is_due(2));
    assert!(keeper.is_due(1));
    for saved in 1..=3 {
        keeper
            .save(&header(saved), &sequence(saved.try_into().unwrap()))
            .unwrap();
        assert_eq!(position(&path), saved);
        assert!(!keeper.is_due(2), "counting begins anew");
    }
    assert_eq!(position(&previous(&path)), 2);
    drop(keeper);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    assert!(matches!(
        Keeper::open(&path, None, false, 1),
        Err(SavedError::Exists { .. })
    ));
    assert!(matches!(
        Keeper::open(&path, None, true, u64::MAX / 4),
        Err(SavedError::NoRoom { .. })
    ));
    Keeper::open(&path, None, true, 1).unwrap();
    // A damaged state names the one before it.
    fs::write(&path, b"junk").unwrap();
    let error = Reader::open(&path).unwrap_err().to_string();
    assert!(error.contains("state.previous"), "{error}");
}

proptest! {
    #[test]
    fn a_flipped_bit_is_an_error(at: prop::sample::Index, bit in 0..8) {
        let mut bytes = bytes(2);
        let at = at.index(bytes.len());
        bytes[at] ^= 1u8 << bit;
        prop_assert!(read_back(&bytes, 9).is_err());
    }

    #[test]
    fn a_cut_or_longer_file_is_an_error(at: prop::sample::Index) {
        let mut bytes = bytes(2);
        prop_assert!(read_back(&bytes[..at.index(bytes.len())], 9).is_err());
        bytes.push(0);
        prop_assert!(read_back(&bytes, 9).is_err());
    }
}
