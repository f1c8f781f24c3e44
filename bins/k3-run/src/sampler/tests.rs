use proptest::prelude::*;

use super::*;

/// The rule of specification 8 written down plainly: a whole stable sort, no shortcuts.
fn plain_rule(logits: &[f32], temperature: f64, top_p: f64, draw: f64) -> u32 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |&l: &f32| libm::exp((f64::from(l) - f64::from(highest)) / temperature);
    let weights: Vec<f64> = logits.iter().map(weight).collect();
    let sum: f64 = weights.iter().sum();
    let mut order: Vec<(f64, u32)> = weights.iter().map(|w| w / sum).zip(0..).collect();
    order.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap());
    let mut kept = Vec::new();
    let mut cumulative = 0.0;
    for &(p, id) in &order {
        kept.push((p, id));
        cumulative += p;
        if cumulative >= top_p {
            break;
        }
    }
    let total: f64 = kept.iter().map(|k| k.0).sum();
    let mut cumulative = 0.0;
    for &(p, id) in &kept {
        cumulative += p / total;
        if cumulative > draw {
            return id;
        }
    }
    kept.last().unwrap().1
}

fn plain_score(target: u32, logits: &[f32]) -> (u32, f64, usize) {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let argmax = logits.iter().position(|&l| l >= highest).unwrap();
    let sum: f64 = logits
        .iter()
        .map(|&l| (f64::from(l) - f64::from(highest)).exp())
        .sum();
    let logit = logits[target as usize];
    let ahead = |(id, &l): (usize, &f32)| l > logit || (l >= logit && id < target as usize);
    let rank = logits.iter().enumerate().filter(|&x| ahead(x)).count();
    let logprob = f64::from(logit) - f64::from(highest) - sum.ln();
    (u32::try_from(argmax).unwrap(), logprob, rank)
}

/// Few distinct values, so that ties and equal probabilities are common.
fn logits(max_len: usize) -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![(-4i8..4).prop_map(f32::from), -30.0f32..30.0];
    prop::collection::vec(value, 1..max_len)
}

#[test]
fn temperature_zero_takes_the_lowest_id_of_the_highest_logit() {
    let mut sampler = Sampler::new(0.0, 1.0, 7).unwrap();
    let state = sampler.state();
    assert_eq!(sampler.sample(&[1.0, 3.0, -2.0, 3.0]), Ok(1));
    assert_eq!(sampler.sample(&[-0.0, 0.0]), Ok(0));
    assert_eq!(sampler.state(), state, "greedy choice draws nothing");
}

#[test]
fn row_46_a_logit_that_is_not_finite_is_an_error_naming_its_token() {
    for temperature in [0.0, 1.0] {
        let mut sampler = Sampler::new(temperature, 1.0, 7).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            match sampler.sample(&[0.0, 1.0, bad, 2.0]) {
                Err(SamplerError::NotFinite { id: 2, logit }) => {
                    assert_eq!(logit.to_bits(), bad.to_bits());
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(sampler.sample(&[]), Err(SamplerError::Empty));
    }
}

#[test]
fn settings_out_of_range_are_errors() {
    for temperature in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(
            Sampler::new(temperature, 1.0, 0),
            Err(SamplerError::Temperature(_))
        ));
    }
    for top_p in [-0.1, 1.1, f64::NAN] {
        assert!(matches!(
            Sampler::new(1.0, top_p, 0),
            Err(SamplerError::TopP(_))
        ));
    }
}

#[test]
fn the_generator_is_splitmix64_then_xorshift64star() {
    // First outputs of the published generators: splitmix64 from state 0, xorshift64* from state 1.
    assert_eq!(splitmix64(0), 0xe220_a839_7b1d_cdaf);
    let mut state = 1;
    let outputs = [0; 2].map(|_| xorshift64star(&mut state));
    assert_eq!(outputs, [0x47e4_ce4b_896c_dd1d, 0xabcf_a6a8_e079_651d]);
}

#[test]
fn the_seed_that_mixes_to_zero_still_moves() {
    // splitmix64 is a bijection: the seed of zero is minus the increment.
    let seed = 0u64.wrapping_sub(0x9e37_79b9_7f4a_7c15);
    assert_eq!(splitmix64(seed), 0);
    let mut sampler = Sampler::new(1.0, 1.0, seed).unwrap();
    sampler.sample(&[0.0, 0.0]).unwrap();
    assert_ne!(sampler.state(), 0);
    assert_eq!(sampler.set_state(0), Err(SamplerError::ZeroState));
}

#[test]
fn a_restored_state_repeats_the_choices() {
    let logits: Vec<f32> = (0u8..50).map(|i| f32::from(i % 7)).collect();
    let mut sampler = Sampler::new(1.0, 0.95, 42).unwrap();
    let draw = |sampler: &mut Sampler| -> Vec<u32> {
        (0..20).map(|_| sampler.sample(&logits).unwrap()).collect()
    };
    draw(&mut sampler);
    let state = sampler.state();
    let once = draw(&mut sampler);
    let mut other = Sampler::new(1.0, 0.95, 43).unwrap();
    other.set_state(state).unwrap();
    assert_eq!(draw(&mut other), once);
    assert!(once.iter().any(|id| *id != once[0]), "twenty draws differ");
}

#[test]
fn top_p_of_zero_and_a_tiny_temperature_keep_one_token() {
    let logits = [0.0, 5.0, 5.0, 4.9];
    for (temperature, top_p) in [(1.0, 0.0), (100.0, 0.0)] {
        let mut sampler = Sampler::new(temperature, top_p, 1).unwrap();
        assert!((0..50).all(|_| sampler.sample(&logits) == Ok(1)));
    }
    let mut sampler = Sampler::new(1e-300, 1.0, 1).unwrap();
    assert!((0..50).all(|_| matches!(sampler.sample(&logits), Ok(1 | 2))));
}

#[test]
fn choices_are_as_frequent_as_their_probabilities() {
    // Odds 1 : 2 : 5.
    let logits = [0.0, 2f32.ln(), 5f32.ln()];
    let mut sampler = Sampler::new(1.0, 1.0, 3).unwrap();
    let mut counts = [0u32; 3];
    for _ in 0..8000 {
        counts[sampler.sample(&logits).unwrap() as usize] += 1;
    }
    for (count, expected) in counts.into_iter().zip([1000, 2000, 5000]) {
        assert!(count.abs_diff(expected) < 150, "{counts:?}");
    }
}

#[test]
fn an_empty_reducer_a_gap_and_a_missing_target_are_errors() {
    assert_eq!(ScoreReducer::new(0).finish(), Err(SamplerError::Empty));
    let mut gap = ScoreReducer::new(0);
    gap.push(0, &[1.0, 2.0]);
    gap.push(3, &[1.0]);
    assert_eq!(
        gap.finish(),
        Err(SamplerError::OutOfOrder {
            expected: 2,
            found: 3
        })
    );
    let mut short = ScoreReducer::new(5);
    short.push(0, &[1.0, 2.0]);
    assert_eq!(
        short.finish(),
        Err(SamplerError::NoTarget { id: 5, seen: 2 })
    );
    let mut bad = ScoreReducer::new(0);
    bad.push(0, &[1.0]);
    bad.push(1, &[1.0, f32::INFINITY]);
    let error = SamplerError::NotFinite {
        id: 2,
        logit: f32::INFINITY,
    };
    assert_eq!(bad.finish(), Err(error));
}

#[test]
fn a_reducer_keeps_nothing_once_the_target_is_known() {
    let mut reducer = ScoreReducer::new(5);
    reducer.push(0, &[0.0; 4]);
    assert_eq!(reducer.earlier.len(), 4);
    reducer.push(4, &[0.0; 4]);
    reducer.push(8, &[0.0; 4]);
    assert_eq!(reducer.earlier.capacity(), 0);
}

proptest! {
    #[test]
    fn a_choice_is_that_of_the_plain_rule(
        logits in logits(1200),
        temperature in prop_oneof![Just(1.0), 0.05f64..20.0],
        top_p in prop_oneof![Just(1.0), Just(0.95), 0.0f64..=1.0],
        seed: u64,
    ) {
        let mut sampler = Sampler::new(temperature, top_p, seed).unwrap();
        for _ in 0..4 {
            let mut state = sampler.state();
            let draw = uniform(&mut state);
            prop_assert!((0.0..1.0).contains(&draw));
            let expected = plain_rule(&logits, temperature, top_p, draw);
            prop_assert_eq!(sampler.sample(&logits), Ok(expected));
            prop_assert_eq!(sampler.state(), state, "one draw a token");
        }
    }

    #[test]
    fn a_score_is_that_of_the_whole_row_and_the_same_bits_for_every_tiling(
        logits in logits(300),
        target: prop::sample::Index,
        mut cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let target = u32::try_from(target.index(logits.len())).unwrap();
        let mut whole = ScoreReducer::new(target);
        whole.push(0, &logits);
        let whole = whole.finish().unwrap();

        let mut ends: Vec<usize> = cuts.drain(..).map(|c| c.index(logits.len())).collect();
        ends.push(logits.len());
        ends.sort_unstable();
        let mut tiled = ScoreReducer::new(target);
        let mut start = 0;
        for end in ends {
            tiled.push(start, &logits[start..end]);
            start = end;
        }
        let tiled = tiled.finish().unwrap();
        prop_assert_eq!(tiled, whole);
        prop_assert_eq!(tiled.logprob.to_bits(), whole.logprob.to_bits());

        let (argmax, logprob, rank) = plain_score(target, &logits);
        prop_assert_eq!((whole.id, whole.argmax, whole.rank), (target, argmax, rank));
        prop_assert_eq!(whole.logit.to_bits(), logits[target as usize].to_bits());
        prop_assert!((whole.logprob - logprob).abs() < 1e-9, "{} {}", whole.logprob, logprob);
        prop_assert_eq!(rank == 0, argmax == target);
    }
}
