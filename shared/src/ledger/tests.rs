//! The ledger of the release, of a small model, and of edited plans.

use super::*;
use crate::{
    formats::plan::{HostRecord, Plan, Predicted, SCHEMA},
    release,
    tiles::{DEFAULT_TILE_BYTES, as_released, trunk_tiles},
};

fn release_model() -> (Config, Vec<TileSpec>) {
    let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
    let tiles = trunk_tiles(&config, 93, DEFAULT_TILE_BYTES, &as_released(&config));
    (config, tiles)
}

fn least(model: &Model<'_>, context: usize) -> Choice {
    let pinned = model.always_pinned();
    let (slot, _) = stream_slot_bytes(model, &pinned);
    Choice {
        context,
        prefill_chunk: 1,
        threads: 8,
        queue_depth: 4,
        stream_buffer_bytes: slot * 4,
        expert_slots: model.min_expert_slots(4),
        pinned,
        verify_experts: false,
    }
}

fn bytes_of(ledger: &[LedgerLine], name: &str) -> u64 {
    ledger.iter().find(|l| l.name == name).unwrap().bytes
}

#[test]
fn the_release_runs_in_little_more_than_a_gigabyte() {
    let (config, tiles) = release_model();
    let model = Model {
        config: &config,
        num_layers: 93,
        tiles: &tiles,
    };
    let ledger = lines(&model, &least(&model, 2048)).unwrap();
    let names: Vec<&str> = ledger.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names, LINE_NAMES);
    assert_eq!(bytes_of(&ledger, "recurrent_state"), 464_633_856);
    assert_eq!(bytes_of(&ledger, "mla_cache"), 55_296 * 2048);
    assert_eq!(bytes_of(&ledger, "expert_slots"), 20 * 17_551_360);
    assert_eq!(bytes_of(&ledger, "output_head"), 0);
    let index = bytes_of(&ledger, "index");
    assert!((500_000..5_000_000).contains(&index), "{index}");
    let total = total_bytes(&ledger).unwrap();
    assert!((1_000_000_000..1_300_000_000).contains(&total), "{total}");
}

#[test]
fn a_prompt_row_of_the_release_takes_little_more_than_a_megabyte() {
    let (config, tiles) = release_model();
    let bytes = |rows| activation_bytes(&config, &tiles, rows, 1).unwrap();
    let row = bytes(65) - bytes(64);
    assert!((1_000_000..1_500_000).contains(&row), "{row}");
}

#[test]
fn a_thread_of_the_release_attends_in_little_more_than_half_a_megabyte() {
    let (config, tiles) = release_model();
    let bytes = |rows, threads| activation_bytes(&config, &tiles, rows, threads).unwrap();
    let thread = |rows| bytes(rows, 2) - bytes(rows, 1);
    assert!((250_000..450_000).contains(&thread(1)), "{}", thread(1));
    assert!((600_000..900_000).contains(&thread(64)), "{}", thread(64));
    assert_eq!(thread(64), thread(512));
}

#[test]
fn a_widened_read_covers_an_expert_wherever_it_begins() {
    assert_eq!(widened(17_547_264), 17_551_360);
    for bytes in [1, 2, 4095, 4096, 4097, 9792] {
        let worst = (0..4096u64)
            .map(|start| (start + bytes).next_multiple_of(4096))
            .max();
        assert_eq!(Some(widened(bytes)), worst, "{bytes}");
    }
}

#[test]
fn sizes_past_64_bits_are_an_error() {
    let (config, tiles) = release_model();
    let model = Model {
        config: &config,
        num_layers: 93,
        tiles: &tiles,
    };
    for edit in [
        |c: &mut Choice| c.context = usize::MAX,
        |c: &mut Choice| c.prefill_chunk = usize::MAX,
        |c: &mut Choice| c.expert_slots = usize::MAX,
        |c: &mut Choice| c.threads = usize::MAX,
        |c: &mut Choice| c.queue_depth = usize::MAX,
    ] {
        let mut choice = least(&model, 1);
        edit(&mut choice);
        assert!(matches!(
            lines(&model, &choice),
            Err(LedgerError::Overflow { .. })
        ));
    }
    let mut choice = least(&model, 1);
    choice.stream_buffer_bytes = u64::MAX;
    let ledger = lines(&model, &choice).unwrap();
    assert_eq!(
        total_bytes(&ledger),
        Err(LedgerError::Overflow { line: "total" })
    );
}

fn plan_of(model: &Model<'_>, choice: &Choice) -> Plan {
    let ledger = lines(model, choice).unwrap();
    let total = total_bytes(&ledger).unwrap();
    let (trunk, head) = model.streamed_payload(&choice.pinned);
    Plan {
        schema: SCHEMA.into(),
        budget_bytes: total + 1000,
        total_bytes: total,
        pinned_trunk_bytes: bytes_of(&ledger, "pinned_trunk"),
        ledger,
        streamed_trunk_bytes: trunk,
        pinned_tiles: choice.pinned.to_ranges(),
        head_pinned: false,
        expert_slots: choice.expert_slots,
        cache_policy: "lru".into(),
        context: choice.context,
        prefill_chunk: choice.prefill_chunk,
        threads: choice.threads,
        stream_buffer_bytes: choice.stream_buffer_bytes,
        read_bytes: 1 << 22,
        queue_depth: choice.queue_depth,
        model_dir: "/m".into(),
        trunk_dir: "/t".into(),
        trunk_files: Vec::new(),
        expert_dirs: Vec::new(),
        expert_digests: None,
        experts_verified: false,
        identity: "id".into(),
        num_layers: model.num_layers,
        predicted: Predicted {
            trunk_bytes_per_token: trunk,
            head_bytes_per_token: head,
            expert_bytes_per_token: 0,
            seconds_per_token: None,
        },
        probe: None,
        host: HostRecord {
            available_bytes: 0,
            limit_bytes: 0,
            limited_by: String::new(),
            cores: 1,
        },
    }
}

#[test]
fn a_plan_as_made_is_accepted_and_nothing_in_it_is_stale() {
    let (config, tiles) = release_model();
    let model = Model {
        config: &config,
        num_layers: 93,
        tiles: &tiles,
    };
    let choice = least(&model, 2048);
    let plan = plan_of(&model, &choice);
    let checked = check(&plan, &model, "id").unwrap();
    assert_eq!(checked.choice, choice);
    assert_eq!(checked.total_bytes, plan.total_bytes);
    assert_eq!(checked.stream_slots, 4);
    assert_eq!(checked.stale, Vec::<String>::new());
}

#[test]
fn an_edited_choice_is_recomputed_and_named() {
    let (config, tiles) = release_model();
    let model = Model {
        config: &config,
        num_layers: 93,
        tiles: &tiles,
    };
    let mut plan = plan_of(&model, &least(&model, 2048));
    plan.context -= 1;
    let checked = check(&plan, &model, "id").unwrap();
    assert_eq!(checked.total_bytes, plan.total_bytes - 55_296);
    assert_eq!(checked.stale.len(), 1);
    assert!(
        checked.stale[0].contains("mla_cache"),
        "{:?}",
        checked.stale
    );
}

type Edit = fn(&mut Plan);

#[test]
fn plans_that_do_not_fit_or_do_not_belong_are_refused_by_field() {
    let (config, tiles) = release_model();
    let model = Model {
        config: &config,
        num_layers: 93,
        tiles: &tiles,
    };
    let edits: [(&str, Edit); 19] = [
        ("schema", |p| p.schema = "k3.plan/2".into()),
        ("identity", |p| p.identity = "other".into()),
        ("num_layers", |p| p.num_layers = 92),
        ("ledger", |p| p.ledger.swap(0, 1)),
        ("ledger", |p| p.ledger[3].name = "slots".into()),
        ("total_bytes", |p| p.total_bytes += 1),
        ("total_bytes", |p| p.ledger[2].bytes -= 1),
        ("total", |p| p.ledger[0].bytes = u64::MAX),
        ("budget_bytes", |p| p.budget_bytes = p.total_bytes - 1),
        ("budget_bytes", |p| p.context += 1),
        ("expert_slots", |p| p.expert_slots = 19),
        ("expert_slots", |p| p.expert_slots = 82_433),
        ("stream_buffer_bytes", |p| p.stream_buffer_bytes = 4096),
        ("pinned_tiles", |p| p.pinned_tiles = vec![[5, 4]]),
        ("pinned_tiles", |p| p.pinned_tiles = Vec::new()),
        ("head_pinned", |p| p.head_pinned = true),
        ("cache_policy", |p| p.cache_policy = "mru".into()),
        ("cache_policy", |p| p.cache_policy = "belady".into()),
        ("read_bytes", |p| p.read_bytes = 5),
    ];
    for (field, edit) in edits {
        let mut plan = plan_of(&model, &least(&model, 2048));
        edit(&mut plan);
        let problems = check(&plan, &model, "id").unwrap_err();
        assert!(
            problems.iter().any(|p| p.contains(field)),
            "{field}: {problems:?}"
        );
    }
}
