//! Whether the engine follows a rule: it agrees with the reference, and not with the reference making the mistake.

use std::sync::LazyLock;

use k3_run::engine::EngineOptions;

use crate::{
    common::{Ask, Fixture, Record, TINY_PROMPT, run},
    reference::{Mistake, Model, Pass},
};

/// Where two forward passes are compared: as early as the rule shows.
#[derive(Clone, Copy, Debug)]
pub enum At {
    /// The stream after this layer.
    Layer(usize),
    /// The logits of all rows.
    Logits,
}

/// What the engine computes on the tiny checkpoint, in chunks of 5 so that state is carried between calls.
static ENGINE: LazyLock<(Fixture, Record)> = LazyLock::new(|| {
    let fixture = Fixture::tiny("16Ki");
    let plan = fixture.plan(&["--budget", "200M", "--prefill-chunk", "5"]);
    let ask = Ask {
        all_rows: true,
        ..Ask::new(&TINY_PROMPT, 1)
    };
    let record = run(&plan, &EngineOptions::default(), &ask);
    (fixture, record)
});

static RIGHT: LazyLock<Pass> = LazyLock::new(|| pass(None));

fn pass(mistake: Option<Mistake>) -> Pass {
    Model::open(&ENGINE.0.model).run(&TINY_PROMPT, mistake)
}

fn relative_l2(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    let error = (error / want.iter().map(|w| w * w).sum::<f64>()).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

fn values(pass: &Pass, at: At) -> &[f64] {
    match at {
        At::Layer(layer) => &pass.hidden[layer],
        At::Logits => &pass.logits,
    }
}

fn computed(at: At) -> Vec<f64> {
    let record = &ENGINE.1;
    let widen = |x: &f32| f64::from(*x);
    match at {
        At::Layer(layer) => record.hidden[layer].iter().map(widen).collect(),
        At::Logits => record.prompt_logits.iter().flatten().map(widen).collect(),
    }
}

/// The engine follows a rule: at a place where `mistake` shows, it computes what the rules give and not what the mistake gives.
///
/// The reference's logits under the mistake, for what else is asked about them.
pub fn shows(at: At, mistake: Mistake) -> Pass {
    let wrong = pass(Some(mistake));
    let engine = computed(at);
    let to_right = relative_l2(&engine, values(&RIGHT, at));
    let to_wrong = relative_l2(&engine, values(&wrong, at));
    assert!(
        to_wrong > 1e-3,
        "the engine computes what {mistake:?} gives (at {at:?}: {to_wrong:.1e})"
    );
    assert!(
        to_right < 2e-5,
        "at {at:?} the engine is {to_right:.1e} from the rules and {to_wrong:.1e} from {mistake:?}"
    );
    wrong
}

/// As [`shows`], of a mistake whose `effect` on the logits of all rows the specification states, relative L2: so the mistake is
/// the one that is meant.
pub fn follows(at: At, mistake: Mistake, effect: f64) {
    let wrong = shows(at, mistake);
    let found = relative_l2(&wrong.logits, &RIGHT.logits);
    assert!(
        (found - effect).abs() <= 0.0051 + 0.01 * effect,
        "{mistake:?} changes the logits by {found:.4}, not by {effect}"
    );
}
