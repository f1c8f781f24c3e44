//! Checkpoints changed on disk: rows 1, 4, 31, 32, 38, 39, 46 and 47.

use k3_run::{engine::EngineOptions, kernels::NanScales, model::MixerState, report::Finish};
use k3_shared::{
    direct::{ALIGN, Mode},
    names::{LayerTensor as T, TensorRole},
};

use crate::{
    common::{Ask, Fixture, TINY_PROMPT, run, try_run},
    patch::{Place, Steps, changed, difference, rename_shards},
};

/// Swapping the rates of two heads changes the states of these two and of no other.
#[test]
fn row_01_each_head_decays_at_the_rate_of_its_own_a_log() {
    let states = |fixture: &Fixture| {
        let mut steps = Steps::open(&fixture.plan(&["--budget", "200M"]));
        steps.step(&TINY_PROMPT).unwrap();
        match &steps.state.mixers[0] {
            MixerState::Kda(kda) => kda
                .matrix
                .chunks(16 * 16)
                .map(<[f32]>::to_vec)
                .collect::<Vec<_>>(),
            MixerState::Mla(_) => panic!("layer 0 is KDA"),
        }
    };
    let want = states(&Fixture::tiny("16Ki"));
    let got = states(&changed(|fixture| {
        let rates = Place::layer(fixture, 0, T::KdaALog);
        rates.part(1, 16).swap(&rates.part(4, 16));
    }));
    let same: Vec<bool> = want.iter().zip(&got).map(|(a, b)| a == b).collect();
    assert_eq!(same, [true, false, true, true, false]);
}

/// Nothing but causality orders the cached positions: the last token sees them as a set.
#[test]
fn row_04_earlier_positions_of_a_cache_may_be_permuted() {
    let fixture = Fixture::tiny("16Ki");
    let plan = fixture.plan(&["--budget", "200M"]);
    let logits = |permute: bool| {
        let mut steps = Steps::open(&plan);
        steps.step(&TINY_PROMPT[..11]).unwrap();
        let caches = steps
            .state
            .mixers
            .iter_mut()
            .filter_map(|mixer| match mixer {
                MixerState::Mla(cache) => Some(cache),
                MixerState::Kda(_) => None,
            });
        for cache in caches.filter(|_| permute) {
            let rows: Vec<Vec<f32>> = (0..11).map(|p| cache.slot(p).to_vec()).collect();
            for (position, row) in rows.iter().rev().enumerate() {
                cache.slot(position).copy_from_slice(row);
            }
        }
        steps.step(&TINY_PROMPT[11..]).unwrap()
    };
    assert!(difference(&logits(false), &logits(true)) < 1e-4);
}

/// Experts 2 and 10 trade blocks, router rows and biases: the same function, whatever their numbers.
#[test]
fn row_31_experts_moved_with_their_router_rows_are_the_same_experts() {
    let all = |fixture: &Fixture| {
        let ask = Ask {
            all_rows: true,
            ..Ask::new(&TINY_PROMPT, 1)
        };
        run(
            &fixture.plan(&["--budget", "200M"]),
            &EngineOptions::default(),
            &ask,
        )
    };
    let want = all(&Fixture::tiny("16Ki"));
    let moved = |with_router: bool| {
        changed(|fixture| {
            for layer in 1..13 {
                Place::expert(fixture, layer, 2).swap(&Place::expert(fixture, layer, 10));
                for tensor in [T::RouterWeight, T::RouterBias]
                    .into_iter()
                    .filter(|_| with_router)
                {
                    let rows = Place::layer(fixture, layer, tensor);
                    rows.part(2, 12).swap(&rows.part(10, 12));
                }
            }
        })
    };
    let got = all(&moved(true));
    assert!(difference(&got.prompt_logits.concat(), &want.prompt_logits.concat()) < 1e-4);
    let torn = all(&moved(false));
    assert!(difference(&torn.prompt_logits.concat(), &want.prompt_logits.concat()) > 0.1);
}

/// Scale byte 255 in the first group of an expert that layer 2 takes.
fn nan_scale() -> Fixture {
    changed(|fixture| {
        let block = Place::expert(fixture, 2, 7);
        let mut bytes = block.read();
        // w1 packed is [96, 32], its scales follow.
        bytes[96 * 32] = 255;
        block.write(&bytes);
    })
}

#[test]
fn row_32_a_scale_byte_of_255_stops_the_step_and_names_the_layer() {
    let fixture = nan_scale();
    let plan = fixture.plan(&["--budget", "200M"]);
    let (record, generated) = try_run(&plan, &EngineOptions::default(), &Ask::new(&TINY_PROMPT, 3));
    assert_eq!((generated.finish, record.ids.len()), (Finish::Error, 0));
    let error = generated.error.unwrap().to_string();
    assert!(
        error.contains("layer 2") && error.contains("--allow-nan-scales"),
        "{error}"
    );
}

#[test]
fn row_32_a_scale_byte_of_255_is_factor_0_where_allowed() {
    let options = EngineOptions {
        nan_scales: NanScales::Zero,
        ..EngineOptions::default()
    };
    let fixture = nan_scale();
    let got = run(
        &fixture.plan(&["--budget", "200M"]),
        &options,
        &Ask::new(&TINY_PROMPT, 3),
    );
    // The same as weights of zero in that group.
    let zeroed = changed(|fixture| {
        let block = Place::expert(fixture, 2, 7);
        let mut bytes = block.read();
        bytes[..16].fill(0);
        block.write(&bytes);
    });
    let want = run(
        &zeroed.plan(&["--budget", "200M"]),
        &EngineOptions::default(),
        &Ask::new(&TINY_PROMPT, 3),
    );
    assert_eq!((got.ids, got.logits), (want.ids, want.logits));
}

#[test]
fn row_38_unaligned_experts_and_rows_are_read_directly() {
    let fixture = Fixture::tiny("16Ki");
    let align = ALIGN as u64;
    assert!(!Place::expert(&fixture, 1, 3).offset.is_multiple_of(align));
    assert!(
        !Place::tensor(&fixture, TensorRole::Embedding)
            .offset
            .is_multiple_of(align)
    );
    let plan = fixture.plan(&["--budget", "200M", "--pin", "0"]);
    let [direct, buffered] = [Mode::Direct, Mode::Buffered].map(|mode| {
        run(
            &plan,
            &EngineOptions {
                mode,
                ..EngineOptions::default()
            },
            &Ask::new(&TINY_PROMPT, 2),
        )
    });
    assert_eq!(direct, buffered);
}

/// The last expert of a layer ends the file, so its widened window reaches past the end.
#[test]
fn row_38_a_window_may_cross_the_end_of_the_file() {
    let fixture = Fixture::tiny("16Ki");
    let last = Place::expert(&fixture, 1, 9);
    let end = last.offset + last.bytes as u64;
    assert_eq!(end, std::fs::metadata(&last.path).unwrap().len());
    assert!(!end.is_multiple_of(ALIGN as u64));
    let plan = fixture.plan(&["--budget", "200M"]);
    let options = EngineOptions {
        mode: Mode::Direct,
        ..EngineOptions::default()
    };
    let record = run(&plan, &options, &Ask::new(&TINY_PROMPT, 1));
    assert!(
        record.routed[1]
            .iter()
            .any(|(experts, _)| experts.iter().any(|e| e.0 == 9))
    );
}

#[test]
fn row_46_a_nan_logit_stops_generation() {
    let fixture = changed(|fixture| {
        Place::tensor(fixture, TensorRole::OutputHead)
            .part(571, 576)
            .write(&[0xff, 0x7f]);
    });
    let plan = fixture.plan(&["--budget", "200M"]);
    let (record, generated) = try_run(&plan, &EngineOptions::default(), &Ask::new(&TINY_PROMPT, 3));
    assert_eq!((generated.finish, record.ids.len()), (Finish::Error, 0));
    let error = generated.error.unwrap().to_string();
    assert!(error.contains("571"), "{error}");
}

#[test]
fn row_47_shards_are_found_by_the_names_in_the_index() {
    let want = Fixture::tiny("16Ki");
    // In the opposite order, so that no name can be guessed from a layer.
    let got = changed(|fixture| {
        rename_shards(fixture, |number| {
            format!("part-{:03}.safetensors", 99 - number)
        });
    });
    let [got, want] = [got, want].map(|fixture| {
        run(
            &fixture.plan(&["--budget", "200M"]),
            &EngineOptions::default(),
            &Ask::new(&TINY_PROMPT, 3),
        )
    });
    assert_eq!(got, want);
}
