//! Damaged, missing and foreign files: a run stops and says what to do rather than print a wrong token.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]
mod common;
#[path = "common/process.rs"]
mod process;

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command};

use common::{Fixture, golden, ids};
use k3_shared::{
    checkpoint::Checkpoint,
    formats::trunk::Trunk,
    ids::{ExpertId, ExpertIdx, LayerIdx},
    names::{ExpertTensor, TensorRole},
};
use process::{Done, Setup, finish, ids_of, poke, shorten, tool};

/// Selected in layer 1 by the last row of the golden prompt (test-checkpoint specification 1.5).
const USED: ExpertId = ExpertId {
    layer: LayerIdx(1),
    expert: ExpertIdx(5),
};

fn golden_ids() -> Vec<u32> {
    ids(&golden("tiny_eps1e-6.json")["generated_ids"])
}

/// The file of an expert's tensor, and where the tensor begins.
fn place(setup: &Setup, id: ExpertId, tensor: Option<ExpertTensor>) -> (PathBuf, u64) {
    let checkpoint = Checkpoint::open(&setup.fixture.model, None).unwrap();
    let place = checkpoint.expert(id).unwrap();
    let inner = tensor.map_or(0, |tensor| {
        let role = TensorRole::Expert(id, tensor);
        checkpoint.tensor(role).unwrap().offset - place.offset
    });
    (
        checkpoint.shard_path(place.shard).to_owned(),
        place.offset + inner,
    )
}

#[track_caller]
fn assert_stopped(done: &Done, setup: &Setup) {
    assert_eq!(done.text().trim(), "", "no token is printed");
    let report = setup.report();
    assert_eq!(
        (ids_of(&report), &report["finish"]),
        (Vec::new(), &"error".into())
    );
    assert!(
        done.stderr.contains(report["error"].as_str().unwrap()),
        "{}",
        done.stderr
    );
}

#[test]
fn a_flipped_byte_of_the_trunk_is_an_error_whose_repair_command_works() {
    // Names that a shell would split.
    let mut fixture = Fixture::empty();
    (fixture.model, fixture.trunk) = (fixture.path("a model"), fixture.path("it's a trunk"));
    k3_tests::synth::tiny(&fixture.model).unwrap();
    fixture.pack(&["--tile-bytes", "8Ki"]);
    let plan = fixture.path("plan.json");
    let setup = Setup { fixture, plan };
    setup.replan(&["--budget", "floor"]);
    let open = Trunk::open(&setup.fixture.trunk).unwrap();
    let tiles: Vec<_> = open.trunk.tiles().collect();
    let of_layer_7 = open
        .specs
        .iter()
        .position(|s| s.layer() == Some(LayerIdx(7)))
        .unwrap();
    for (tile, target) in [(of_layer_7, "7"), (tiles.len() - 1, "output")] {
        poke(&open.files[0], tiles[tile].offset + 100, |byte| byte ^ 0x10);
        let what = format!("tile {tile} of the trunk");
        let done = setup
            .run_golden(&["--gen", "2"])
            .expect(1)
            .says(&["trunk.bin", &what]);
        assert_stopped(&done, &setup);
        // As typed into a shell that finds the tools.
        let command = done
            .stderr
            .split("(repair with: ")
            .nth(1)
            .unwrap()
            .trim_end();
        let command = command.strip_suffix(')').unwrap();
        assert!(
            command.starts_with(&format!("k3-pack --repair {target} ")),
            "{command}"
        );
        let pack = tool("k3-pack");
        let folder = std::path::Path::new(pack.get_program())
            .parent()
            .unwrap()
            .to_owned();
        finish(
            Command::new("/bin/sh")
                .args(["-c", command])
                .env("PATH", folder),
        )
        .expect(0);
        setup.run_golden(&["--gen", "2"]).expect(0);
        assert_eq!(ids_of(&setup.report()), golden_ids()[..2]);
    }
}

#[test]
fn digests_are_not_checked_where_the_user_said_so() {
    let setup = Setup::new(&["--budget", "200M"]);
    let open = Trunk::open(&setup.fixture.trunk).unwrap();
    // A padding byte: damage that changes no result.
    let padded = open
        .trunk
        .tiles()
        .find(|tile| tile.raw_bytes < tile.stored_bytes)
        .unwrap();
    poke(&open.files[0], padded.offset + padded.raw_bytes, |byte| {
        byte ^ 1
    });
    setup
        .run_golden(&["--gen", "2"])
        .expect(1)
        .says(&["k3-pack --repair"]);
    setup
        .run_golden(&["--gen", "2", "--verify", "always"])
        .expect(1);
    setup.run_golden(&["--gen", "2", "--no-verify"]).expect(0);
    assert_eq!(ids_of(&setup.report()), golden_ids()[..2]);
}

#[test]
fn a_file_cut_short_after_planning_is_1_and_named() {
    let setup = Setup::new(&["--budget", "200M"]);
    let trunk = setup.fixture.trunk.join("trunk.bin");
    let whole = fs::read(&trunk).unwrap();
    shorten(&trunk);
    setup
        .run_golden(&[])
        .expect(1)
        .says(&["trunk.bin", "k3-pack --force"]);
    fs::write(&trunk, whole).unwrap();
    let (shard, _) = place(&setup, USED, None);
    shorten(&shard);
    let name = shard.file_name().unwrap().to_str().unwrap();
    let done = setup.run_golden(&[]).expect(1).says(&[name, "k3-census"]);
    assert!(done.stdout.is_empty());
}

#[test]
fn a_missing_shard_is_1_and_named() {
    let setup = Setup::new(&["--budget", "200M"]);
    let (shard, _) = place(&setup, USED, None);
    fs::remove_file(&shard).unwrap();
    let name = shard.file_name().unwrap().to_str().unwrap();
    setup.run_golden(&[]).expect(1).says(&[name, "k3-census"]);
}

#[test]
fn the_trunk_of_another_checkpoint_is_refused() {
    let setup = Setup::new(&["--budget", "200M"]);
    let other = Setup::new(&["--budget", "200M"]);
    // The same shapes and sizes; one weight at the start of a trunk run differs.
    let checkpoint = Checkpoint::open(&other.fixture.model, None).unwrap();
    let specs = Trunk::open(&other.fixture.trunk).unwrap().specs;
    let of_layer_5 = specs
        .iter()
        .filter(|spec| spec.layer() == Some(LayerIdx(5)));
    let tensors = of_layer_5.flat_map(|spec| &spec.parts);
    let places = tensors.map(|part| checkpoint.tensor(part.role).unwrap());
    let first = places.min_by_key(|place| place.offset).unwrap();
    poke(checkpoint.shard_path(first.shard), first.offset, |byte| {
        byte ^ 1
    });
    other.fixture.pack(&["--force", "--tile-bytes", "8Ki"]);
    other.replan(&["--budget", "200M"]);
    assert_ne!(other.read_plan().identity, setup.read_plan().identity);
    fs::rename(&setup.fixture.trunk, setup.path("own trunk")).unwrap();
    fs::rename(&other.fixture.trunk, &setup.fixture.trunk).unwrap();
    setup
        .run_golden(&[])
        .expect(1)
        .says(&["another checkpoint", "k3-pack --force"]);
    // A plan for the right trunk and the wrong checkpoint is as wrong.
    let mut crossed = other.read_plan();
    crossed.trunk_dir = setup.path("own trunk");
    setup.write_plan(&crossed);
    setup
        .run_golden(&[])
        .expect(1)
        .says(&["another checkpoint", "k3-pack --force"]);
}

#[test]
fn a_flipped_bit_of_an_expert_is_noticed_where_there_are_digests() {
    let setup = Setup::new(&["--budget", "200M"]);
    setup.run_golden(&["--gen", "2"]).expect(0);
    assert_eq!(setup.report()["experts_verified"], false);
    let census = [setup.fixture.model.to_str().unwrap(), "--hash", "--experts"];
    finish(tool("k3-census").args(census)).expect(0);
    setup.replan(&["--budget", "200M"]);
    assert!(
        setup.read_plan().expert_digests.is_some(),
        "the planner finds them"
    );
    setup.run_golden(&["--gen", "2"]).expect(0);
    assert_eq!(setup.report()["experts_verified"], true);
    assert_eq!(ids_of(&setup.report()), golden_ids()[..2]);

    let (shard, offset) = place(&setup, USED, Some(ExpertTensor::W1Packed));
    poke(&shard, offset + 40, |byte| byte ^ 0x08);
    let name = shard.file_name().unwrap().to_str().unwrap();
    let done = setup.run_golden(&["--gen", "2"]).expect(1);
    let done = done.says(&["expert 5 of layer 1", name, "digest"]);
    assert_stopped(&done, &setup);
    // Unchecked it goes unnoticed, and the report says that nobody looked.
    setup.run_golden(&["--gen", "2", "--no-verify"]).expect(0);
    assert_eq!(setup.report()["experts_verified"], false);
    // Digests that changed since the plan are no digests.
    let digests = setup.fixture.model.join("k3-experts.sha256");
    poke(&digests, 200, |byte| byte ^ 1);
    setup
        .run_golden(&[])
        .expect(1)
        .says(&["k3-experts.sha256", "k3-plan --budget"]);
    fs::remove_file(&digests).unwrap();
    setup.replan(&["--budget", "200M"]);
    setup.run_golden(&["--gen", "2"]).expect(0);
    assert_eq!(setup.report()["experts_verified"], false);
}

#[test]
fn a_nan_scale_of_a_used_expert_stops_the_step_unless_allowed() {
    let setup = Setup::new(&["--budget", "200M"]);
    let (shard, offset) = place(&setup, USED, Some(ExpertTensor::W1Scale));
    poke(&shard, offset, |_| 255);
    let done = setup.run_golden(&["--gen", "2"]).expect(1);
    let done = done.says(&["layer 1,", "not finite", "--allow-nan-scales"]);
    assert_stopped(&done, &setup);
    assert_eq!(setup.report()["allow_nan_scales"], false);
    setup
        .run_golden(&["--gen", "2", "--allow-nan-scales"])
        .expect(0);
    let report = setup.report();
    assert_eq!(
        (&report["allow_nan_scales"], &report["finish"]),
        (&true.into(), &"length".into())
    );
}

#[test]
fn an_output_that_cannot_be_written_is_an_error_before_the_run() {
    let setup = Setup::new(&["--budget", "200M"]);
    let folder = setup.path("folder");
    fs::create_dir(&folder).unwrap();
    let file = setup.path("file");
    fs::write(&file, "").unwrap();
    // A folder's name, a folder that is none, one that does not exist: unwritable for root too.
    let bad = [
        folder.clone(),
        file.join("x"),
        setup.path("nowhere").join("x"),
    ];
    for flag in [
        "--json",
        "--trace",
        "--dump-logits",
        "--dump-hidden",
        "--score",
    ] {
        for path in &bad {
            let mut command = tool("k3-run");
            command.arg("--plan").arg(&setup.plan).args([
                "--ids",
                "1,2",
                "--gen",
                "2",
                "--no-stop",
            ]);
            let done = finish(command.arg(flag).arg(path)).expect(2).says(&[flag]);
            assert!(
                done.stdout.is_empty(),
                "{flag}: a token came first: {}",
                done.text()
            );
        }
    }
    assert_eq!(
        fs::read_dir(&folder).unwrap().count(),
        0,
        "nothing is left behind"
    );
    // An output that is there is replaced, and readable as any file.
    fs::write(setup.path("report.json"), "old").unwrap();
    let mut command = setup.command(&["--ids", "1,2", "--gen", "1"]);
    finish(&mut command).expect(0);
    assert_eq!(setup.report()["schema"], "k3.run/1");
    let mode = fs::metadata(setup.path("report.json"))
        .unwrap()
        .permissions()
        .mode();
    assert_ne!(mode & 0o044, 0, "{mode:o}");
}

#[test]
fn the_number_of_threads_changes_nothing_but_the_report() {
    let setup = Setup::new(&["--budget", "200M", "--threads", "2"]);
    let mut outputs = Vec::new();
    for threads in ["1", "2"] {
        let logits = setup.path(threads);
        let flags = [
            "--gen",
            "4",
            "--threads",
            threads,
            "--dump-logits",
            logits.to_str().unwrap(),
        ];
        setup.run_golden(&flags).expect(0);
        assert_eq!(setup.report()["threads"].to_string(), threads);
        outputs.push(fs::read(&logits).unwrap());
    }
    assert!(outputs[0] == outputs[1], "logits differ");
    setup
        .run_golden(&["--threads", "0"])
        .expect(2)
        .says(&["--threads"]);
}

#[test]
fn a_shard_or_trunk_written_to_during_the_run_stops_it_and_is_named() {
    let setup = Setup::new(&["--budget", "floor"]);
    let shard = place(&setup, USED, None).0;
    let trunk = setup.read_plan().trunk_files[0].clone();
    for file in [shard, trunk] {
        let child = setup.start(&["--ids", "1,2,3", "--no-stop", "--gen", "4000"]);
        // Some steps are done by then, and far from all.
        std::thread::sleep(std::time::Duration::from_millis(500));
        poke(&file, 4096, |byte| byte);
        let done = Done::of(child.wait_with_output().unwrap()).expect(1);
        let report = setup.report();
        assert_eq!(report["finish"], "error");
        let generated = ids_of(&report).len();
        assert!(generated > 0 && generated < 4000, "{generated} tokens");
        done.says(&[
            file.to_str().unwrap(),
            "changed during the run",
            "k3-census",
        ]);
    }
}
