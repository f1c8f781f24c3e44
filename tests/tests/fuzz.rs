//! What the fuzz targets check, on their committed seeds and on mutants of them: bounded, and the same on every machine.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;
#[allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    unreachable_pub,
    reason = "a check fails by panicking; the fuzz targets name its items from outside"
)]
#[path = "../fuzz/src/properties/mod.rs"]
mod properties;

#[path = "fuzz/mutate.rs"]
mod mutate;
#[path = "fuzz/seeds.rs"]
mod seeds;

use std::{
    fs,
    panic::catch_unwind,
    path::{Path, PathBuf},
};

use mutate::Mutator;
use properties::TARGETS;

/// Mutants of each target.
const MUTANTS: usize = 50_000;

fn folder(kind: &str, target: &str) -> PathBuf {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    fuzz.join(kind).join(target)
}

/// The files of a folder by name; none if it is not there.
fn inputs(kind: &str, target: &str) -> Vec<(String, Vec<u8>)> {
    let Ok(files) = fs::read_dir(folder(kind, target)) else {
        return Vec::new();
    };
    let mut inputs: Vec<_> = files
        .map(|file| {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read(path).unwrap())
        })
        .collect();
    inputs.sort_unstable();
    inputs
}

/// Seeds are golden: a format that changes changes them. `K3_WRITE_SEEDS=1` writes them anew.
#[test]
fn committed_seeds_are_those_of_the_rule() {
    let mut bytes = 0;
    for (target, _) in TARGETS {
        let wanted = seeds::of(target);
        if std::env::var_os("K3_WRITE_SEEDS").is_some() {
            let folder = folder("seeds", target);
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder).unwrap();
            for (name, seed) in &wanted {
                fs::write(folder.join(name), seed).unwrap();
            }
        }
        let found = inputs("seeds", target);
        assert!(found.len() >= 3, "{target}: {} seeds", found.len());
        assert!(
            found == wanted,
            "{target}: the seeds are others; write them with K3_WRITE_SEEDS=1"
        );
        bytes += found.iter().map(|(_, seed)| seed.len()).sum::<usize>();
    }
    assert!(bytes < 200_000, "{bytes} bytes of seeds");
}

fn check(target: &str, check: fn(&[u8]), input: &[u8], what: &dyn Fn() -> String) {
    if catch_unwind(|| check(input)).is_err() {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{target}"));
        fs::write(&path, input).unwrap();
        panic!("{target}: {}: the input is {}", what(), path.display());
    }
}

#[test]
fn every_seed_and_every_input_that_once_failed_holds() {
    for (target, property) in TARGETS {
        for kind in ["seeds", "regressions"] {
            for (name, input) in inputs(kind, target) {
                check(target, property, &input, &|| format!("{kind}/{name}"));
            }
        }
    }
}

/// Without this a target may pass because nothing gets past the first check of its parser.
#[test]
fn every_target_accepts_a_seed() {
    for (target, _) in TARGETS {
        let accepted = inputs("seeds", target)
            .iter()
            .any(|(_, seed)| seeds::is_accepted(target, seed));
        assert!(accepted, "{target}");
    }
}

fn mutants_hold(target: &str) {
    let (_, property) = TARGETS.iter().find(|(name, _)| *name == target).unwrap();
    let seeds: Vec<Vec<u8>> = ["seeds", "regressions"]
        .into_iter()
        .flat_map(|kind| inputs(kind, target))
        .map(|(_, seed)| seed)
        .collect();
    let mut mutator = Mutator::new(&seeds);
    for number in 0..MUTANTS {
        let mutant = mutator.next_mutant();
        check(target, *property, &mutant, &|| format!("mutant {number}"));
    }
}

macro_rules! mutants {
    ($($test:ident $target:literal)*) => {$(
        #[test]
        fn $test() {
            mutants_hold($target);
        }
    )*};
}

mutants! {
    mutants_of_shard_headers_hold "safetensors"
    mutants_of_configs_hold "config"
    mutants_of_trunk_records_hold "trunk"
    mutants_of_plans_hold "plan"
    mutants_of_traces_hold "trace"
    mutants_of_states_hold "state"
    mutants_of_tokenizer_files_hold "tokenizer_files"
    mutants_of_text_hold "tokenizer_text"
}
