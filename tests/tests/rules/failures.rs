//! Steps that fail: rows 36, 43, 44 and 45.

use k3_run::{
    engine::{Engine, EngineError, EngineOptions},
    generate::GenerateError,
    model::ModelError,
    report::Finish,
};
use k3_shared::names::{LayerTensor as T, TensorRole};

use crate::{
    common::{Ask, Fixture, TINY_PROMPT, try_run},
    patch::{Place, Steps, plan_error},
};

/// A plan under which every step reads everything.
const STREAM: [&str; 6] = ["--budget", "200M", "--pin", "0", "--expert-slots", "8"];

/// Run three tokens, damage a file, and run the next: no logits may come.
fn stops(what: &str, damage: impl FnOnce(&Fixture)) {
    let fixture = Fixture::tiny("16Ki");
    let mut steps = Steps::open(&fixture.plan(&STREAM));
    steps.step(&TINY_PROMPT[..3]).unwrap();
    damage(&fixture);
    let error = steps.step(&TINY_PROMPT[3..4]).unwrap_err().to_string();
    assert!(error.contains(what) && error.contains("shorter"), "{error}");
}

#[test]
fn row_36_a_short_expert_read_stops_the_step() {
    // Expert 0 lies first, so all that layer 5 could take are cut off.
    stops("of layer 5", |fixture| Place::expert(fixture, 5, 0).cut());
}

#[test]
fn row_36_a_short_trunk_read_stops_the_step() {
    stops("trunk tile", |fixture| {
        let file = fixture.trunk.join("trunk.bin");
        let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
        let half = file.metadata().unwrap().len() / 2;
        file.set_len(half).unwrap();
    });
}

#[test]
fn row_36_a_short_embedding_read_stops_the_step() {
    stops("model-00014", |fixture| {
        // The row of token 42 is half there.
        Place::tensor(fixture, TensorRole::Embedding)
            .part(42, 576)
            .cut();
    });
}

#[test]
fn row_36_a_failed_step_prints_no_token() {
    let fixture = Fixture::tiny("16Ki");
    let mut plan = fixture.plan(&STREAM);
    plan.threads = 1;
    // What is not the header's length is refused before the first token, with both sizes.
    Place::layer(&fixture, 5, T::RouterWeight).cut();
    let error = Engine::open(plan, &EngineOptions::default())
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("model-00006-of-000016.safetensors"),
        "{error}"
    );
}

#[test]
fn row_43_fewer_slots_than_one_token_asks_for_are_refused() {
    let fixture = Fixture::tiny("16Ki");
    let flags = |slots| {
        [
            "--budget",
            "200M",
            "--queue-depth",
            "4",
            "--expert-slots",
            slots,
        ]
    };
    let error = plan_error(&fixture, &flags("3"));
    assert!(error.contains("3 expert slots are too few"), "{error}");
    // Nor can a plan be edited to that.
    let mut plan = fixture.plan(&flags("8"));
    plan.expert_slots = 3;
    let refused = Engine::open(plan, &EngineOptions::default()).err().unwrap();
    assert!(matches!(refused, EngineError::Refused { .. }), "{refused}");
    assert!(refused.to_string().contains("expert_slots"), "{refused}");
}

#[test]
fn row_44_a_sequence_that_a_failed_step_touched_is_refused() {
    let fixture = Fixture::tiny("16Ki");
    let plan = fixture.plan(&STREAM);
    let mut steps = Steps::open(&plan);
    steps.step(&TINY_PROMPT[..3]).unwrap();
    let expert = Place::expert(&fixture, 5, 0);
    let whole = std::fs::read(&expert.path).unwrap();
    expert.cut();
    steps.step(&TINY_PROMPT[3..4]).unwrap_err();
    assert_eq!(steps.state.position, 3, "a failed step advances nothing");
    std::fs::write(&expert.path, whole).unwrap();
    // Layers 0 to 4 have seen the token and the others have not: no step may go on from there.
    let error = steps.step(&TINY_PROMPT[3..4]).unwrap_err();
    assert!(matches!(error, ModelError::StateLost), "{error}");
}

#[test]
fn row_44_what_is_refused_beforehand_leaves_the_state_whole() {
    let fixture = Fixture::tiny("16Ki");
    let plan = fixture.plan(&["--budget", "200M", "--context", "12"]);
    let mut steps = Steps::open(&plan);
    steps.step(&TINY_PROMPT[..3]).unwrap();
    let before = steps.state.clone();
    assert!(matches!(
        steps.step(&[5, 576]),
        Err(ModelError::UnknownToken { id: 576, .. })
    ));
    assert!(matches!(
        steps.step(&[7; 10]),
        Err(ModelError::ContextFull {
            wanted: 13,
            context: 12
        })
    ));
    assert_eq!(steps.state, before);
    steps.step(&TINY_PROMPT[3..]).unwrap();
}

#[test]
fn row_45_a_full_context_is_an_error_and_the_last_token_needs_no_position() {
    let fixture = Fixture::tiny("16Ki");
    let plan = fixture.plan(&["--budget", "200M", "--context", "14"]);
    assert_eq!(plan.context, 14);
    let (record, generated) = try_run(&plan, &EngineOptions::default(), &Ask::new(&TINY_PROMPT, 3));
    assert_eq!((generated.finish, record.ids.len()), (Finish::Length, 3));
    let (record, generated) = try_run(&plan, &EngineOptions::default(), &Ask::new(&TINY_PROMPT, 4));
    assert_eq!((generated.finish, record.ids.len()), (Finish::Error, 0));
    let error = generated.error.unwrap();
    assert!(
        matches!(
            error,
            GenerateError::Context {
                wanted: 15,
                context: 14,
                ..
            }
        ),
        "{error}"
    );
}
