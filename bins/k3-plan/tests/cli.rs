//! `k3-plan` as a process: exit codes, streams, and what it writes.

#![expect(
    clippy::unwrap_used,
    reason = "a failed step of a test's own set-up is a failed test"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use k3_shared::{
    config::Config,
    formats::{
        census::{Census, TrunkException},
        plan::{Plan, Plans, ReadKind},
        trace::{Mode, TraceHeader, TraceRecord, TraceRow, TraceWriter},
        trunk::{self, DataFile, LayerRecord, TileRecord, Trunk},
    },
    ids::{ExpertIdx, LayerIdx},
    ledger::{self, LINE_NAMES, Model},
    tiles::{TileClass, TileSpec, as_released, trunk_tiles},
};

const CONFIG: &str = include_str!("tiny.config.json");
const IDENTITY: &str = "tiny-identity";

/// A checkpoint folder and its trunk: records real, payload holes.
struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        // Beside the build, on a disk rather than in memory: there are direct reads, and files have blocks.
        let fixture = Self {
            dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        };
        fs::create_dir(fixture.model()).unwrap();
        fs::create_dir(fixture.trunk()).unwrap();
        fs::write(fixture.model().join("config.json"), CONFIG).unwrap();
        fixture.pack(13);
        fixture
    }

    fn model(&self) -> PathBuf {
        self.dir.path().join("my model")
    }

    fn trunk(&self) -> PathBuf {
        self.dir.path().join("trunk")
    }

    fn pack(&self, num_layers: usize) {
        let config = Config::parse(CONFIG.as_bytes(), "c".as_ref()).unwrap();
        let tile_bytes = 16_384;
        let specs = trunk_tiles(&config, num_layers, tile_bytes, &as_released(&config));
        let mut offset = 0;
        let mut records = Vec::new();
        for spec in &specs {
            records.push(TileRecord::new(spec, 0, offset, "0".repeat(64)).unwrap());
            offset += spec.stored_bytes();
        }
        let payload = |class: TileClass| {
            let of_class = specs.iter().filter(|s| s.class() == class);
            of_class.map(TileSpec::raw_bytes).sum()
        };
        let mut layers: Vec<LayerRecord> = Vec::new();
        let mut output = Vec::new();
        for (spec, record) in specs.iter().zip(records) {
            match spec.layer() {
                None => output.push(record),
                Some(layer) => {
                    if layers.last().is_none_or(|l| l.layer != layer.0) {
                        layers.push(LayerRecord {
                            layer: layer.0,
                            tiles: Vec::new(),
                        });
                    }
                    layers.last_mut().unwrap().tiles.push(record);
                }
            }
        }
        let trunk = Trunk {
            schema: trunk::SCHEMA.into(),
            identity: IDENTITY.into(),
            config: config.to_canonical(),
            num_layers,
            tile_bytes,
            trunk_bytes: payload(TileClass::Trunk),
            head_bytes: payload(TileClass::Head),
            stored_bytes: offset,
            files: vec![DataFile {
                path: trunk::DATA_NAME.into(),
                bytes: offset,
            }],
            layers,
            output,
            embedding: None,
        };
        let json = serde_json::to_vec(&trunk).unwrap();
        fs::write(self.trunk().join(trunk::FILE_NAME), json).unwrap();
        let data = fs::File::create(self.trunk().join(trunk::DATA_NAME)).unwrap();
        data.set_len(offset).unwrap();
    }

    /// With model, trunk and the folder of measurements by environment.
    fn plan(&self, args: &[&str]) -> Output {
        command()
            .env("K3_MODEL", self.model())
            .env("K3_TRUNK", self.trunk())
            .env("XDG_CACHE_HOME", self.cache())
            .args(args)
            .output()
            .unwrap()
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    /// Fill trunk and one shard with data, so that there is something to measure.
    fn fill(&self) {
        let path = self.trunk().join(trunk::DATA_NAME);
        let len = usize::try_from(fs::metadata(&path).unwrap().len()).unwrap();
        let data: Vec<u8> = (0..=250u8).cycle().take(len).collect();
        fs::write(&path, &data).unwrap();
        fs::write(self.model().join("model-1.safetensors"), &data).unwrap();
        for path in [path, self.model().join("model-1.safetensors")] {
            fs::File::open(path).unwrap().sync_all().unwrap();
        }
    }
}

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_k3-plan"));
    command
        .env_remove("K3_MODEL")
        .env_remove("K3_TRUNK")
        // Nobody's real measurements are read, or written.
        .env("XDG_CACHE_HOME", "/nonexistent-cache");
    command
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn parsed(output: &Output) -> Plan {
    assert_eq!(code(output), 0, "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_plan_goes_to_stdout_and_the_ledger_to_stderr() {
    let fixture = Fixture::new();
    let output = fixture.plan(&["--budget", "1G", "--threads", "3"]);
    let plan = parsed(&output);
    assert_eq!(plan.schema, "k3.plan/1");
    assert_eq!(plan.budget_bytes, 1_000_000_000);
    let names: Vec<&str> = plan.ledger.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names, LINE_NAMES);
    assert_eq!(ledger::total_bytes(&plan.ledger), Ok(plan.total_bytes));
    assert!(plan.total_bytes <= plan.budget_bytes);
    assert_eq!(plan.identity, IDENTITY);
    assert_eq!((plan.threads, plan.num_layers), (3, 13));
    assert_eq!(plan.model_dir, fixture.model());
    assert_eq!(plan.trunk_files, [fixture.trunk().join("trunk.bin")]);
    assert!(plan.head_pinned && plan.streamed_trunk_bytes == 0);
    assert_eq!(plan.expert_slots, 12 * 12);
    assert_eq!(plan.probe, None);
    let text = stderr(&output);
    for name in LINE_NAMES {
        assert!(text.contains(name), "{name} is not in the table");
    }
    // Nulls are written out: scripts look for the keys.
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in ["expert_digests", "probe"] {
        assert_eq!(json.get(key), Some(&serde_json::Value::Null), "{key}");
    }
    for key in ["available_bytes", "limit_bytes", "limited_by", "cores"] {
        assert!(json["host"].get(key).is_some(), "{key}");
    }
}

#[test]
fn every_plan_is_one_that_the_ledger_accepts_as_it_is() {
    let fixture = Fixture::new();
    let open = Trunk::open(&fixture.trunk()).unwrap();
    let model = Model {
        config: &open.config,
        num_layers: 13,
        tiles: &open.specs,
    };
    for args in [
        &["--budget", "floor"][..],
        &["--budget", "34M"],
        &["--budget", "1G"],
        &["--budget", "1G", "--pin", "1M", "--expert-slots", "9"],
        &["--budget", "1G", "--pin", "1M", "--pin-order", "spread"],
    ] {
        let plan = parsed(&fixture.plan(args));
        let checked = ledger::check(&plan, &model, IDENTITY).unwrap();
        assert_eq!(checked.stale, Vec::<String>::new(), "{args:?}");
        assert_eq!(checked.total_bytes, plan.total_bytes);
        assert!(ledger::check(&plan, &model, "another").is_err());
    }
}

#[test]
fn quiet_says_nothing_and_output_goes_to_the_file() {
    let fixture = Fixture::new();
    let file = fixture.dir.path().join("plan.json");
    let output = fixture.plan(&["--budget", "1G", "-q", "-o", file.to_str().unwrap()]);
    assert_eq!(code(&output), 0);
    assert!(output.stdout.is_empty());
    assert_eq!(stderr(&output), "");
    let plan: Plan = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(plan.budget_bytes, 1_000_000_000);
}

#[test]
fn what_does_not_fit_is_refused_with_the_exact_smallest_budget() {
    let fixture = Fixture::new();
    let output = fixture.plan(&["--budget", "1000000"]);
    assert_eq!(code(&output), 1);
    assert!(output.stdout.is_empty());
    let text = stderr(&output);
    let least: u64 = text
        .rsplit("--budget ")
        .next()
        .and_then(|rest| rest.trim().parse().ok())
        .unwrap_or_else(|| panic!("{text}"));
    let plan = parsed(&fixture.plan(&["--budget", &least.to_string()]));
    assert!(plan.total_bytes <= least);
    assert_eq!((plan.context, plan.prefill_chunk), (256, 1));
    let output = fixture.plan(&["--budget", &(least - 1).to_string()]);
    assert_eq!(code(&output), 1);
    assert!(stderr(&output).contains(&least.to_string()));
}

#[test]
fn several_budgets_make_a_table_and_a_list() {
    let fixture = Fixture::new();
    let output = fixture.plan(&["--budget", "floor,64M,1G"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let list: Plans = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list.schema, "k3.plans/1");
    assert_eq!(list.plans.len(), 3);
    let streamed: Vec<u64> = list.plans.iter().map(|p| p.streamed_trunk_bytes).collect();
    assert!(streamed.is_sorted_by(|a, b| a >= b), "{streamed:?}");
    assert!(streamed[0] > 0 && streamed[2] == 0);
    assert!(stderr(&output).contains("trunk/tok"));
    let output = fixture.plan(&["--budget", "1,1G"]);
    assert_eq!(code(&output), 1, "one of them does not fit");
    let list: Plans = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list.plans.len(), 1);
}

#[test]
fn the_built_in_census_plans_the_release_without_any_file() {
    let output = command()
        .env("HOME", "/nonexistent")
        .args([
            "--census",
            "kimi-k3",
            "--budget",
            "floor",
            "--context",
            "2048",
        ])
        .output()
        .unwrap();
    let plan = parsed(&output);
    assert!((1_000_000_000..1_300_000_000).contains(&plan.total_bytes));
    assert_eq!(plan.trunk_files, Vec::<PathBuf>::new());
    assert_eq!(plan.predicted.trunk_bytes_per_token, 108_811_877_376);
    let output = command()
        .args([
            "--census",
            "kimi-k3",
            "--budget",
            "server,max",
            "--threads",
            "16",
        ])
        .output()
        .unwrap();
    let list: Plans = serde_json::from_slice(&output.stdout).unwrap();
    for plan in list.plans {
        assert_eq!(plan.streamed_trunk_bytes, 0);
        assert!(plan.head_pinned && plan.expert_slots > 24);
        assert!(plan.budget_bytes - plan.total_bytes < 17_551_360);
    }
}

#[test]
fn a_census_file_finds_its_checkpoint() {
    let fixture = Fixture::new();
    let file = fixture.dir.path().join("census.json");
    let config = Config::parse(CONFIG.as_bytes(), "c".as_ref()).unwrap();
    let census = |ok: bool| {
        let mut census = Census::of_release();
        census.model_dir = fixture.model().display().to_string();
        census.identity = Some("from-census".into());
        census.ok = ok;
        census.config = config.to_canonical();
        census.trunk_exceptions = vec![TrunkException {
            tensor: "language_model.lm_head.weight".into(),
            dtype: "F32".into(),
            shape: vec![576, 160],
        }];
        fs::write(&file, serde_json::to_vec(&census).unwrap()).unwrap();
        command()
            .args(["--budget", "1G", "--census", file.to_str().unwrap()])
            .output()
            .unwrap()
    };
    let plan = parsed(&census(true));
    assert_eq!(plan.identity, "from-census");
    let head = plan
        .ledger
        .iter()
        .find(|l| l.name == "output_head")
        .unwrap();
    assert_eq!(head.bytes, 576 * 160 * 4, "stored as F32");
    assert_eq!(plan.model_dir, fixture.model());
    let refused = census(false);
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("k3-census"));
}

#[test]
fn given_speeds_predict_the_time_of_a_token() {
    let fixture = Fixture::new();
    let output = fixture.plan(&[
        "--budget",
        "floor",
        "--disk-speed",
        "1M",
        "--memory-speed",
        "1T",
    ]);
    let plan = parsed(&output);
    let predicted = &plan.predicted;
    let read = predicted.trunk_bytes_per_token
        + predicted.head_bytes_per_token
        + predicted.expert_bytes_per_token;
    let seconds = predicted.seconds_per_token.unwrap();
    // So little is computed that the disk's time is nearly all.
    let disk = read as f64 / 1e6;
    assert!((disk..disk * 1.001).contains(&seconds), "{seconds}");
    let probe = plan.probe.unwrap();
    assert_eq!(probe.disk_bytes_per_second, Some(1e6));
    assert_eq!(probe.memory_bytes_per_second, Some(1e12));
    assert_eq!(probe.flops_per_second, None);
}

#[test]
fn the_probe_measures_every_speed_and_keeps_it() {
    let fixture = Fixture::new();
    fixture.fill();
    assert_eq!(parsed(&fixture.plan(&["--budget", "floor"])).probe, None);
    // A small file is read again and again, perhaps from the device's own cache: what counts is that figures are consistent.
    let output = fixture.plan(&["--budget", "floor", "--probe", "--threads", "1"]);
    let plan = parsed(&output);
    let probe = plan.probe.clone().unwrap();
    assert!(probe.memory_bytes_per_second.unwrap() > 1e6, "{probe:?}");
    assert!(probe.flops_per_second.unwrap() > 1e6, "{probe:?}");
    let says_so = |line: &str| line.contains("trunk.bin") && line.contains("not taken");
    let refused = stderr(&output).lines().any(says_so);
    assert_ne!(refused, probe.disk_bytes_per_second.is_some(), "{probe:?}");
    if let Some(depth) = probe.queue_depth {
        assert_eq!(plan.queue_depth, depth.min(plan.queue_depth));
        assert_eq!(Some(plan.read_bytes), probe.read_bytes);
        let depths = probe.sweep.iter().map(|cell| cell.depth);
        assert!(depths.clone().max() > depths.min());
        assert!(probe.sweep.iter().any(|cell| cell.kind == ReadKind::Random));
        assert!(plan.predicted.seconds_per_token.unwrap() > 0.0);
    }

    let output = fixture.plan(&["--budget", "floor", "--threads", "1"]);
    let later = parsed(&output);
    assert_eq!(later.probe, plan.probe);
    assert_eq!(later.read_bytes, plan.read_bytes);
    let line = format!("measured {}; --probe measures again", probe.date);
    assert!(stderr(&output).contains(&line), "{}", stderr(&output));
    let by_hand = ["--queue-depth", "3", "--read-size", "8Ki", "--threads", "1"];
    let by_hand = parsed(&fixture.plan(&by_hand));
    assert_eq!((by_hand.queue_depth, by_hand.read_bytes), (3, 8192));
    // Other threads, another folder: another measurement.
    assert_eq!(parsed(&fixture.plan(&["--threads", "2"])).probe, None);
    assert_eq!(
        parsed(&fixture.plan(&["--threads", "1", "--probe-cache", "none"])).probe,
        None
    );
}

#[test]
fn a_damaged_measurement_is_ignored_with_a_warning() {
    let fixture = Fixture::new();
    let args = ["--budget", "floor", "--threads", "1"];
    let probe = [&args[..], &["--probe"]].concat();
    parsed(&fixture.plan(&probe));
    let kept: Vec<PathBuf> = fs::read_dir(fixture.cache().join("k3"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(kept.len(), 1);
    assert!(parsed(&fixture.plan(&args)).probe.is_some());
    fs::write(&kept[0], "{").unwrap();
    let output = fixture.plan(&args);
    assert_eq!(parsed(&output).probe, None);
    assert!(stderr(&output).contains("ignored"), "{}", stderr(&output));
}

#[test]
fn holes_are_not_taken_for_a_disk() {
    let fixture = Fixture::new();
    let args = ["--budget", "floor", "--probe", "--threads", "1"];
    let output = fixture.plan(&args);
    let plan = parsed(&output);
    let probe = plan.probe.unwrap();
    assert_eq!(probe.disk_bytes_per_second, None);
    assert!(probe.sweep.is_empty());
    assert_eq!(plan.predicted.seconds_per_token, None);
    let text = stderr(&output);
    assert!(
        text.contains("trunk.bin") && text.contains("--disk-speed"),
        "{text}"
    );
    let given = [&args[..], &["--disk-speed", "1G"]].concat();
    let plan = parsed(&fixture.plan(&given));
    assert_eq!(plan.probe.unwrap().disk_bytes_per_second, Some(1e9));
    assert!(plan.predicted.seconds_per_token.is_some());
}

fn write_trace(path: &Path, experts: u32) {
    let header = TraceHeader {
        identity: IDENTITY.into(),
        layers: 13,
        experts,
        top_k: 4,
        expert_bytes: 9792,
    };
    let mut writer = TraceWriter::new(fs::File::create(path).unwrap(), header).unwrap();
    for step in 0..4u32 {
        for layer in 1..13 {
            writer
                .write(&TraceRecord {
                    step: u64::from(step),
                    mode: Mode::Decode,
                    layer: LayerIdx(layer),
                    rows: vec![TraceRow {
                        sequence: 0,
                        position: step,
                    }],
                    experts: (0..4).map(ExpertIdx).collect(),
                })
                .unwrap();
        }
    }
    writer.finish().unwrap();
}

#[test]
fn a_trace_gives_the_expected_hits_with_the_planned_slots() {
    let fixture = Fixture::new();
    let trace = fixture.dir.path().join("run.trace");
    write_trace(&trace, 12);
    let trace_arg = trace.to_str().unwrap();
    // Three of four tokens find all their 48 experts in slots.
    let args = [
        "--budget",
        "1G",
        "--expert-slots",
        "48",
        "--trace",
        trace_arg,
    ];
    let plan = parsed(&fixture.plan(&args));
    assert_eq!(plan.predicted.expert_bytes_per_token, 48 * 9792 / 4);
    let args = [
        "--budget",
        "1G",
        "--expert-slots",
        "20",
        "--cache-policy",
        "lru",
        "--trace",
        trace_arg,
    ];
    let output = fixture.plan(&args);
    let plan = parsed(&output);
    assert_eq!(plan.predicted.expert_bytes_per_token, 48 * 9792);
    assert!(stderr(&output).contains("lru hits nothing"));
    write_trace(&trace, 13);
    let output = fixture.plan(&["--budget", "1G", "--trace", trace_arg]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("run.trace"));
}

#[test]
fn a_split_by_hand_is_planned_as_given() {
    let fixture = Fixture::new();
    let args = ["--budget", "1G", "--pin", "0", "--expert-mem", "1M"];
    let plan = parsed(&fixture.plan(&args));
    assert_eq!(plan.expert_slots, 1_000_000 / 16_384);
    assert_eq!(plan.pinned_tiles.len(), 1);
    assert!(plan.stream_buffer_bytes > 0);
    let output = fixture.plan(&["--budget", "1G", "--expert-slots", "5"]);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("--expert-slots 8"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn fewer_layers_are_planned_from_the_same_trunk_but_never_more() {
    let fixture = Fixture::new();
    let all = parsed(&fixture.plan(&["--budget", "floor"]));
    let some = parsed(&fixture.plan(&["--budget", "floor", "--layers", "4"]));
    assert_eq!(some.num_layers, 4);
    assert!(some.streamed_trunk_bytes < all.streamed_trunk_bytes);
    fixture.pack(4);
    let packed = parsed(&fixture.plan(&["--budget", "floor"]));
    assert_eq!(packed.num_layers, 4);
    assert_eq!(packed.ledger, some.ledger);
    let output = fixture.plan(&["--layers", "5"]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("k3-pack --force --layers 5"));
}

#[test]
fn digests_beside_the_shards_are_recorded_and_counted() {
    let fixture = Fixture::new();
    fs::write(fixture.model().join("k3-experts.sha256"), "abc").unwrap();
    let plan = parsed(&fixture.plan(&["--budget", "1G"]));
    let digests = plan.expert_digests.unwrap();
    assert_eq!(
        digests.sha256,
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );
    let line = plan.ledger.iter().find(|l| l.name == "digests").unwrap();
    assert_eq!(line.bytes, 32 * 144);
}

#[test]
fn files_that_do_not_belong_together_are_refused_with_the_next_command() {
    let fixture = Fixture::new();
    let other = CONFIG.replacen(
        "\"moe_intermediate_size\": 96",
        "\"moe_intermediate_size\": 128",
        1,
    );
    assert_ne!(other, CONFIG);
    fs::write(fixture.model().join("config.json"), other).unwrap();
    let output = fixture.plan(&[]);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("k3-pack --force"),
        "{}",
        stderr(&output)
    );

    fs::remove_file(fixture.trunk().join("trunk.json")).unwrap();
    let output = fixture.plan(&[]);
    assert_eq!(code(&output), 2);
    assert!(
        stderr(&output).contains("trunk.json"),
        "{}",
        stderr(&output)
    );
    assert!(output.stdout.is_empty());
}

#[test]
fn wrong_usage_is_two() {
    let fixture = Fixture::new();
    for args in [
        &["--budget", "huge"][..],
        &["--context", "0"],
        &["--cache-policy", "mru"],
        &["--cache-policy", "belady"],
        &["--experts-from", "/nonexistent-folder"],
        &["--expert-slots", "9", "--expert-mem", "1G"],
        &["--trace", "/nonexistent-trace"],
        &["--no-such-flag"],
    ] {
        let output = fixture.plan(args);
        assert_eq!(code(&output), 2, "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn presets_are_listed_and_explanations_given() {
    let output = command().arg("--list-presets").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for name in [
        "floor",
        "laptop",
        "desktop",
        "workstation",
        "server",
        "max",
        "auto",
    ] {
        assert!(text.contains(name), "{name}");
    }
    let fixture = Fixture::new();
    let output = fixture.plan(&["--budget", "1G", "--explain"]);
    parsed(&output);
    assert!(stderr(&output).contains("everything is resident"));
}

#[test]
fn auto_stays_below_what_the_host_can_give() {
    let fixture = Fixture::new();
    let plan = parsed(&fixture.plan(&[]));
    assert!(plan.budget_bytes < plan.host.limit_bytes);
    assert!(plan.threads >= 1 && plan.threads == plan.host.cores);
    assert_eq!((plan.context, plan.prefill_chunk), (4096, 64));
}

#[test]
fn a_plan_larger_than_the_host_is_made_with_a_warning() {
    let output = command()
        .args(["--census", "kimi-k3", "--budget", "1.6T"])
        .output()
        .unwrap();
    assert!(parsed(&output).total_bytes > 1_500_000_000_000);
    assert!(stderr(&output).contains("k3-run will refuse"));
}
