//! The packer on synthetic checkpoints: the tiny one to the byte, the whole release by its sizes.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]

use std::{
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
};

use clap::Parser as _;
use k3_pack::{Cli, run};
use k3_shared::{
    checkpoint::{Checkpoint, hex},
    formats::trunk::{OpenTrunk, Trunk},
    term::Outcome,
};
use k3_tests::synth;
use sha2::{Digest as _, Sha256};

fn pack(model: &Path, trunk: &Path, flags: &[&str]) -> (Outcome, String) {
    let mut line = vec![
        "k3-pack".into(),
        model.as_os_str().to_owned(),
        trunk.into(),
        "-q".into(),
    ];
    line.extend(flags.iter().map(Into::into));
    let mut out = Vec::new();
    let outcome = run(&Cli::parse_from(line), &mut out).unwrap();
    (outcome, String::from_utf8(out).unwrap())
}

fn read(path: &Path, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    let file = fs::File::open(path).unwrap();
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

fn assert_rows_are_the_shards(checkpoint: &Checkpoint, open: &OpenTrunk) {
    for (record, spec) in open.trunk.tiles().zip(&open.specs) {
        for part in &spec.parts {
            let found = checkpoint.tensor(part.role).unwrap();
            let first = found.offset + part.rows.start as u64 * part.row_bytes();
            let want = read(checkpoint.shard_path(found.shard), first, part.bytes());
            let at = record.offset + part.offset;
            let stored = read(&open.files[record.file], at, part.bytes());
            assert!(stored == want, "{:?} rows {:?}", part.role, part.rows);
        }
    }
}

#[test]
fn the_tiny_checkpoint_packs_to_known_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (model, trunk) = (dir.path().join("model"), dir.path().join("trunk"));
    synth::tiny(&model).unwrap();
    assert_eq!(pack(&model, &trunk, &[]).0, Outcome::Done);
    let open = Trunk::open(&trunk).unwrap();
    let checkpoint = Checkpoint::open(&model, None).unwrap();
    assert_eq!(open.trunk.identity, checkpoint.identity());
    // The dense layer, eight KDA and four MLA layers (test-checkpoint specification 1.3).
    assert_eq!(open.trunk.trunk_bytes, 358_528 + 8 * 372_784 + 4 * 315_600);
    assert_eq!(open.trunk.head_bytes, 576 * 160 * 2);
    assert_rows_are_the_shards(&checkpoint, &open);
    // Pins order of use, alignment and padding: another digest means that old trunks no longer fit.
    let stored = fs::read(&open.files[0]).unwrap();
    assert_eq!(stored.len() as u64, open.trunk.stored_bytes);
    assert_eq!(
        hex(Sha256::digest(stored)),
        "e52234a5a3dab850996b1661aea6f81d4dc5a95516a4fe4c8fe834011ef1eb7a"
    );
    let (outcome, text) = pack(&model, &trunk, &["--verify"]);
    assert_eq!(outcome, Outcome::Done, "{text}");
}

#[test]
fn threads_stripes_and_the_page_cache_change_no_tile() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    synth::tiny(&model).unwrap();
    let stripe = dir.path().join("other disk");
    let mut digests = Vec::new();
    for (name, flags) in [
        ("one", &["--threads", "1"][..]),
        ("many", &["--threads", "9", "--buffered"]),
        ("striped", &["--stripe", stripe.to_str().unwrap()]),
    ] {
        let trunk = dir.path().join(name);
        pack(&model, &trunk, &[flags, &["--tile-bytes", "16Ki"]].concat());
        let open = Trunk::open(&trunk).unwrap();
        digests.push(
            open.trunk
                .tiles()
                .map(|t| t.sha256.clone())
                .collect::<Vec<_>>(),
        );
        assert_eq!(pack(&model, &trunk, &["--verify"]).0, Outcome::Done);
    }
    assert!(digests.iter().all(|d| *d == digests[0]));
}

#[test]
fn the_release_packs_to_the_published_sizes_and_its_holes_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (model, trunk) = (dir.path().join("model"), dir.path().join("trunk"));
    synth::replica(&model).unwrap();
    assert_eq!(pack(&model, &trunk, &[]).0, Outcome::Done);
    let open = Trunk::open(&trunk).unwrap();
    assert_eq!(open.trunk.trunk_bytes, 108_811_877_376);
    assert_eq!(open.trunk.head_bytes, 2_348_810_240);
    let metadata = fs::metadata(&open.files[0]).unwrap();
    assert_eq!(metadata.len(), open.trunk.stored_bytes);
    assert!(
        metadata.blocks() * 512 < 1 << 20,
        "{} blocks",
        metadata.blocks()
    );
    assert_eq!(pack(&model, &trunk, &["--verify"]).0, Outcome::Done);
}
