//! `k3-pack` as a process.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]

mod fixture;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use fixture::{LAYERS, Model, Shape};
use k3_shared::{
    config::Config,
    formats::trunk::{OpenTrunk, Trunk},
    names::{TensorRole, layer_tensors},
    tiles::FINAL_VECTORS,
};
use sha2::{Digest as _, Sha256};

/// A checkpoint and a place for trunks, in a folder whose name has a space.
struct Bench {
    _dir: tempfile::TempDir,
    model: Model,
    root: PathBuf,
    trunk: PathBuf,
}

impl Bench {
    fn new(shape: Shape) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("with space");
        Self {
            model: Model::write(&root.join("model"), shape),
            trunk: root.join("trunk"),
            root,
            _dir: dir,
        }
    }

    fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_k3-pack"));
        command
            .arg(&self.model.dir)
            .arg(&self.trunk)
            .args(flags)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, flags: &[&str]) -> Output {
        self.command(flags).output().unwrap()
    }

    fn pack(&self, flags: &[&str]) -> OpenTrunk {
        let output = self.run(flags);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert_eq!(stdout(&output), "", "stdout is for results");
        Trunk::open(&self.trunk).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&self.trunk)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Every tile must hold the checkpoint's rows, zeros after them, and match its digest; every tensor must be there.
    fn assert_exact(&self, open: &OpenTrunk, layers: usize) {
        let mut seen: BTreeMap<TensorRole, usize> = BTreeMap::new();
        for (record, spec) in open.trunk.tiles().zip(&open.specs) {
            let stored = read_at(&open.files[record.file], record.offset, record.stored_bytes);
            assert_eq!(
                format!("{:x?}", Sha256::digest(&stored).as_slice()),
                hex_list(&record.sha256)
            );
            let mut want = vec![0; stored.len()];
            for part in &spec.parts {
                let tensor = self.model.tensor(part.role);
                let row = usize::try_from(part.row_bytes()).unwrap();
                let rows = &tensor[part.rows.start * row..part.rows.end * row];
                let at = usize::try_from(part.offset).unwrap();
                want[at..at + rows.len()].copy_from_slice(rows);
                *seen.entry(part.role).or_default() += rows.len();
            }
            assert!(stored == want, "{} rows {:?}", record.tensor, record.rows);
        }
        for role in trunk_roles(&self.model.config, layers) {
            let bytes = seen.remove(&role).unwrap_or(0);
            assert_eq!(bytes as u64, self.model.spec(role).bytes(), "{role:?}");
        }
        assert_eq!(seen.len(), 0, "nothing else is packed");
    }
}

/// Every tensor of the trunk of the first `layers` layers.
fn trunk_roles(config: &Config, layers: usize) -> Vec<TensorRole> {
    config
        .layers()
        .take(layers)
        .flat_map(|l| layer_tensors(config, l).map(move |t| TensorRole::Layer(l, t)))
        .chain(FINAL_VECTORS)
        .chain([TensorRole::OutputHead])
        .collect()
}

fn hex_list(hex: &str) -> String {
    let bytes: Vec<u8> = (0..hex.len() / 2)
        .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
        .collect();
    format!("{bytes:x?}")
}

fn read_at(path: &Path, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    let file = fs::File::open(path).unwrap();
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

fn flip(path: &Path, offset: u64) {
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("not killed")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn every_tile_holds_the_checkpoints_rows() {
    let bench = Bench::new(Shape::default());
    for flags in [
        &[][..],
        &["--force", "--tile-bytes", "4Ki", "--threads", "3"],
        &["--force", "--tile-bytes", "20K", "--buffered"],
    ] {
        let open = bench.pack(flags);
        bench.assert_exact(&open, LAYERS);
        assert_eq!(
            bench.names(),
            ["embedding.sha256", "trunk.bin", "trunk.json"]
        );
        let spec_bytes = |role: &TensorRole| bench.model.spec(*role).bytes();
        let roles = trunk_roles(&bench.model.config, LAYERS);
        let layers = roles.iter().filter(|r| matches!(r, TensorRole::Layer(..)));
        assert_eq!(open.trunk.trunk_bytes, layers.map(spec_bytes).sum::<u64>());
        assert_eq!(open.trunk.head_bytes, spec_bytes(&TensorRole::OutputHead));
    }
}

#[test]
fn only_the_first_layers_are_packed_when_asked() {
    let bench = Bench::new(Shape::default());
    let open = bench.pack(&["--layers", "2"]);
    assert_eq!(open.trunk.num_layers, 2);
    assert_eq!(
        open.config.num_hidden_layers, LAYERS,
        "the whole model's config"
    );
    bench.assert_exact(&open, 2);
    let output = bench.run(&["--verify"]);
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn a_trunk_is_not_replaced_without_force() {
    let bench = Bench::new(Shape::default());
    bench.pack(&[]);
    let output = bench.run(&[]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("--force"), "{}", stderr(&output));
    bench.pack(&["--force"]);
}

#[test]
fn verify_names_a_flipped_byte_and_the_named_repair_mends_it() {
    let bench = Bench::new(Shape::default());
    let open = bench.pack(&["--tile-bytes", "8Ki"]);
    let output = bench.run(&["--verify"]);
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    assert!(stdout(&output).contains("all as recorded"));

    let in_layer = &open.trunk.layers[3].tiles[4];
    let in_head = open.trunk.output.last().unwrap();
    flip(&open.files[0], in_layer.offset + 7);
    flip(&open.files[0], in_head.offset + in_head.stored_bytes - 1);
    let output = bench.run(&["--verify"]);
    let text = stdout(&output);
    assert_eq!(code(&output), 1, "{text}");
    assert_eq!(
        text.lines().filter(|l| l.starts_with("bad: ")).count(),
        2,
        "{text}"
    );
    let number = open.trunk.tiles().position(|t| t == in_layer).unwrap();
    let place = format!(
        "bad: tile {number}, layer 3, {} rows {}..{} ",
        in_layer.tensor, in_layer.rows[0], in_layer.rows[1]
    );
    assert!(text.contains(&place), "{text}");
    assert!(
        text.contains("output, language_model.lm_head.weight"),
        "{text}"
    );

    let repairs: Vec<&str> = text
        .lines()
        .filter_map(|l| l.strip_prefix("repair with: k3-pack "))
        .collect();
    assert_eq!(repairs.len(), 2, "{text}");
    for repair in repairs {
        // As a shell would run it, quoted path and all.
        let line = format!("'{}' {repair}", env!("CARGO_BIN_EXE_k3-pack"));
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert_eq!(code(&output), 0, "{line}: {}", stderr(&output));
    }
    let output = bench.run(&["--verify"]);
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    bench.assert_exact(&Trunk::open(&bench.trunk).unwrap(), LAYERS);
}

#[test]
fn repair_writes_over_damage_where_zeros_belong() {
    let bench = Bench::new(Shape {
        holes: true,
        ..Shape::default()
    });
    let open = bench.pack(&[]);
    flip(&open.files[0], open.trunk.layers[2].tiles[1].offset + 5);
    assert_eq!(code(&bench.run(&["--verify"])), 1);
    assert_eq!(code(&bench.run(&["--repair", "2"])), 0);
    assert_eq!(code(&bench.run(&["--verify"])), 0);
}

#[test]
fn repair_refuses_bytes_that_were_not_packed() {
    let bench = Bench::new(Shape::default());
    bench.pack(&[]);
    let before = fs::read(bench.trunk.join("trunk.bin")).unwrap();
    // Deep inside the run, where the identity does not look; the dense layer is the largest.
    let shard = bench.model.shard_path(0);
    flip(&shard, fs::metadata(&shard).unwrap().len() / 2);
    let output = bench.run(&["--repair", "0"]);
    assert_eq!(code(&output), 2);
    let text = stderr(&output);
    assert!(
        text.contains("the shard itself has changed") && text.contains("k3-census --hash"),
        "{text}"
    );
    assert!(fs::read(bench.trunk.join("trunk.bin")).unwrap() == before);

    let output = bench.run(&["--repair", "5"]);
    assert!(
        stderr(&output).contains("the trunk has layers 0 to 4"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_trunk_of_another_checkpoint_is_told_apart() {
    let bench = Bench::new(Shape::default());
    bench.pack(&[]);
    fs::remove_dir_all(&bench.model.dir).unwrap();
    Model::write(
        &bench.model.dir,
        Shape {
            seed: 1,
            ..Shape::default()
        },
    );
    let output = bench.run(&["--verify"]);
    assert_eq!(code(&output), 1);
    let text = stdout(&output);
    assert!(
        text.contains("identity is") && text.contains("k3-pack --force"),
        "{text}"
    );
    let output = bench.run(&["--repair", "0"]);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("identity is"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_trunk_can_be_verified_without_its_checkpoint() {
    let bench = Bench::new(Shape::default());
    let open = bench.pack(&[]);
    fs::remove_dir_all(&bench.model.dir).unwrap();
    assert_eq!(code(&bench.run(&["--verify"])), 0);
    flip(&open.files[0], 0);
    assert_eq!(code(&bench.run(&["--verify"])), 1);
}

#[test]
fn a_cut_data_file_is_a_no() {
    let bench = Bench::new(Shape::default());
    let open = bench.pack(&[]);
    let file = fs::File::options()
        .write(true)
        .open(&open.files[0])
        .unwrap();
    file.set_len(open.trunk.files[0].bytes - 4096).unwrap();
    let output = bench.run(&["--verify"]);
    assert_eq!(code(&output), 1);
    assert!(stdout(&output).contains("trunk.bin"), "{}", stdout(&output));
    fs::remove_file(bench.trunk.join("trunk.json")).unwrap();
    assert_eq!(code(&bench.run(&["--verify"])), 2, "no trunk is no answer");
}

#[test]
fn a_truncated_shard_is_named_with_both_sizes_and_nothing_is_left() {
    let bench = Bench::new(Shape::default());
    let shard = bench.model.shard_path(LAYERS);
    let whole = fs::metadata(&shard).unwrap().len();
    let cut = whole - 200_000;
    fs::File::options()
        .write(true)
        .open(&shard)
        .unwrap()
        .set_len(cut)
        .unwrap();
    let output = bench.run(&[]);
    let text = stderr(&output);
    assert_eq!(code(&output), 2, "{text}");
    assert!(text.contains("model-00006-of-000006.safetensors"), "{text}");
    assert!(
        text.contains(&whole.to_string()) && text.contains(&cut.to_string()),
        "{text}"
    );
    assert!(!bench.trunk.exists() || bench.names().is_empty());
}

#[test]
fn a_second_packer_in_the_same_folder_is_refused() {
    let bench = Bench::new(Shape::default());
    fs::create_dir(&bench.trunk).unwrap();
    let folder = fs::File::open(&bench.trunk).unwrap();
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive).unwrap();
    for flags in [&[][..], &["--verify"], &["--repair", "0"]] {
        let output = bench.run(flags);
        assert_eq!(code(&output), 2, "{flags:?}");
        assert!(
            stderr(&output).contains("another k3-pack"),
            "{}",
            stderr(&output)
        );
    }
    drop(folder);
    bench.pack(&[]);
}

/// Start a pack of thousands of tiny tiles, send `signal` once it writes, and return whether that came in time.
fn signalled(
    bench: &Bench,
    flags: &[&str],
    signal: rustix::process::Signal,
) -> Option<std::process::ExitStatus> {
    let slow = ["--tile-bytes", "4Ki", "--threads", "1"];
    let mut child = bench
        .command(&[&slow, flags].concat())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let partial = bench.trunk.join("trunk.bin.partial");
    let deadline = Instant::now() + Duration::from_mins(1);
    // Written to, not merely made.
    while !fs::metadata(&partial).is_ok_and(|m| m.len() > 1 << 20) {
        assert!(Instant::now() < deadline, "the pack does not begin");
        if child.try_wait().unwrap().is_some() {
            return None;
        }
        std::thread::sleep(Duration::from_micros(300));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, signal).unwrap();
    let status = child.wait().unwrap();
    (!status.success()).then_some(status)
}

#[test]
fn a_killed_pack_leaves_nothing_that_is_accepted_and_an_old_trunk_whole() {
    let bench = Bench::new(Shape {
        vocab_size: 60_000,
        ..Shape::default()
    });
    signalled(&bench, &[], rustix::process::Signal::KILL).expect("killed in time");
    assert_eq!(bench.names(), ["trunk.bin.partial"]);
    assert!(Trunk::open(&bench.trunk).is_err());
    assert_eq!(code(&bench.run(&["--verify"])), 2);

    let open = bench.pack(&[]);
    assert_eq!(
        bench.names(),
        ["embedding.sha256", "trunk.bin", "trunk.json"],
        "what was left is reused"
    );
    signalled(&bench, &["--force"], rustix::process::Signal::KILL).expect("killed in time");
    let old = Trunk::open(&bench.trunk).unwrap();
    assert_eq!(old.trunk, open.trunk);
    assert_eq!(code(&bench.run(&["--verify"])), 0);
}

#[test]
fn an_interrupted_pack_cleans_up_and_says_so_by_its_exit_code() {
    use std::os::unix::process::ExitStatusExt as _;
    let bench = Bench::new(Shape {
        vocab_size: 60_000,
        ..Shape::default()
    });
    for (signal, exit) in [
        (rustix::process::Signal::INT, 130),
        (rustix::process::Signal::TERM, 143),
    ] {
        let status = signalled(&bench, &[], signal).expect("interrupted in time");
        assert_eq!((status.code(), status.signal()), (Some(exit), None));
        assert_eq!(bench.names(), Vec::<String>::new());
    }
}

#[test]
fn stripes_share_the_tiles_in_proportion_and_read_back() {
    let bench = Bench::new(Shape::default());
    let (second, third) = (bench.root.join("second"), bench.root.join("third"));
    let stripes = format!("{},{}", second.display(), third.display());
    let flags = [
        "--stripe",
        &stripes,
        "--stripe-weights",
        "1,2,1",
        "--tile-bytes",
        "8Ki",
    ];
    let open = bench.pack(&flags);
    assert_eq!(open.files.len(), 3);
    assert!(open.trunk.files[1].path.is_absolute() && open.trunk.files[0].path.is_relative());
    let total: u64 = open.trunk.files.iter().map(|f| f.bytes).sum();
    assert_eq!(total, open.trunk.stored_bytes);
    for (file, weight) in open.trunk.files.iter().zip([1, 2, 1]) {
        assert!(
            file.bytes.abs_diff(total * weight / 4) <= 32 << 10,
            "{:?}",
            open.trunk.files
        );
    }
    bench.assert_exact(&open, LAYERS);

    let bad = open.trunk.tiles().find(|t| t.file == 1).unwrap();
    flip(&open.files[1], bad.offset);
    let output = bench.run(&["--verify"]);
    assert_eq!(code(&output), 1);
    assert!(
        stdout(&output).contains("trunk-2.bin"),
        "{}",
        stdout(&output)
    );
    assert_eq!(code(&bench.run(&["--repair", "0"])), 0);
    assert_eq!(code(&bench.run(&["--verify"])), 0);

    // Packed again without the stripes, what lies there is named, not removed.
    let output = bench.run(&["--force"]);
    assert!(
        stderr(&output).contains("no longer part of the trunk: rm "),
        "{}",
        stderr(&output)
    );
    assert!(second.join("trunk-2.bin").exists());
    let other = bench.root.join("other");
    let output = Command::new(env!("CARGO_BIN_EXE_k3-pack"))
        .args([&bench.model.dir, &other])
        .arg("--stripe")
        .arg(&second)
        .output()
        .unwrap();
    assert_eq!(
        code(&output),
        2,
        "another trunk's stripe is not overwritten"
    );
    assert!(
        stderr(&output).contains("trunk-2.bin"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn stripe_flags_that_do_not_pair_are_refused() {
    let bench = Bench::new(Shape::default());
    let trunk = bench.trunk.display().to_string();
    for flags in [
        &["--stripe", trunk.as_str()][..],
        &["--stripe", "x", "--stripe-weights", "1,1,1"],
    ] {
        let output = bench.run(flags);
        assert_eq!(code(&output), 2, "{flags:?}");
        assert!(stderr(&output).contains("--stripe"), "{}", stderr(&output));
    }
}

#[test]
fn holes_of_the_checkpoint_stay_holes() {
    let holes = Bench::new(Shape {
        vocab_size: 60_000,
        holes: true,
        ..Shape::default()
    });
    let open = holes.pack(&[]);
    holes.assert_exact(&open, LAYERS);
    let metadata = fs::metadata(&open.files[0]).unwrap();
    let used = metadata.blocks() * 512;
    let head = open.trunk.head_bytes;
    assert!(
        metadata.len() > head && used < metadata.len() - head + (1 << 20),
        "{used} of {}",
        metadata.len()
    );
    assert_eq!(code(&holes.run(&["--verify"])), 0);
}

#[test]
fn a_model_folder_that_is_none_is_named() {
    let bench = Bench::new(Shape::default());
    fs::remove_file(bench.model.dir.join("config.json")).unwrap();
    let output = bench.run(&[]);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("config.json"),
        "{}",
        stderr(&output)
    );
}
