//! The token mixers: rows 1, 4 and 7 to 20.

use crate::{
    reference::Mistake as M,
    verdict::{At, follows, shows},
};

/// Layer 0 is KDA with nothing mixed in before it, layer 3 the first MLA layer.
const KDA: At = At::Layer(0);
const MLA: At = At::Layer(3);

#[test]
fn row_01_a_log_is_per_head() {
    follows(KDA, M::ALogPerChannel, 0.75);
}

#[test]
fn row_04_the_nope_slots_take_part_in_the_score() {
    follows(MLA, M::RopeDropped, 0.32);
}

#[test]
fn row_04_the_nope_slots_are_never_rotated() {
    follows(MLA, M::RopeRotated, 0.36);
}

#[test]
fn row_07_the_low_rank_norms_have_an_eps_of_their_own() {
    follows(MLA, M::LowRankEps, 0.073);
}

#[test]
fn row_08_the_slice_after_the_latent_is_not_normed() {
    shows(MLA, M::RopeNormed);
}

#[test]
fn row_08_the_latent_is_normed() {
    follows(MLA, M::LatentRaw, 0.44);
}

#[test]
fn row_09_the_score_is_scaled_by_both_widths_of_a_key() {
    follows(MLA, M::ScaleOfNopeOnly, 0.09);
}

#[test]
fn row_10_a_query_head_is_nope_then_rope() {
    follows(MLA, M::QueryRopeFirst, 0.56);
}

#[test]
fn row_10_kv_b_interleaves_keys_and_values_head_by_head() {
    follows(MLA, M::KeysThenValues, 0.56);
}

#[test]
fn row_11_mla_has_an_output_gate() {
    follows(MLA, M::MlaGateMissing, 0.54);
}

#[test]
fn row_11_the_output_gate_of_mla_is_a_sigmoid() {
    shows(MLA, M::MlaGateSilu);
}

#[test]
fn row_11_the_heads_of_mla_are_not_normed() {
    shows(MLA, M::MlaOutputNormed);
}

#[test]
fn row_12_kda_norms_first_and_gates_then() {
    follows(KDA, M::GateThenNorm, 1.04);
}

#[test]
fn row_12_the_output_gate_of_kda_is_a_sigmoid() {
    follows(KDA, M::KdaGateSilu, 1.26);
}

#[test]
fn row_13_queries_and_keys_are_divided_by_the_root_of_the_sum() {
    follows(KDA, M::L2OfMean, 1.22);
}

#[test]
fn row_13_values_are_not_normalised() {
    follows(KDA, M::ValuesNormalised, 0.92);
}

#[test]
fn row_13_queries_are_scaled_too() {
    follows(KDA, M::QueryUnscaled, 0.78);
}

#[test]
fn row_15_eps_of_the_heads_norm_is_inside_the_root() {
    shows(KDA, M::EpsOutsideRoot);
}

#[test]
fn row_16_the_bias_is_inside_the_product_with_the_rate() {
    follows(KDA, M::DecayBiasOutside, 0.79);
}

#[test]
fn row_16_the_decay_is_bounded_not_a_softplus() {
    follows(KDA, M::DecaySoftplus, 0.99);
}

#[test]
fn row_17_the_decay_applies_to_key_rows() {
    follows(KDA, M::DecayOfColumns, 1.18);
}

#[test]
fn row_18_the_decayed_state_is_read() {
    follows(KDA, M::ReadBeforeDecay, 0.67);
}

#[test]
fn row_18_the_output_is_that_of_the_written_state() {
    follows(KDA, M::OutputBeforeWrite, 1.28);
}

#[test]
fn row_18_the_difference_is_written() {
    follows(KDA, M::NoDifference, 0.67);
}

#[test]
fn row_19_beta_is_a_sigmoid() {
    follows(KDA, M::BetaRaw, 1.33);
}

#[test]
fn row_19_beta_is_not_doubled() {
    follows(KDA, M::BetaDoubled, 0.69);
}

#[test]
fn row_20_the_last_tap_meets_the_current_input() {
    follows(KDA, M::TapsReversed, 1.32);
}

#[test]
fn row_20_silu_follows_the_convolution() {
    follows(KDA, M::ConvWithoutSilu, 1.21);
}

#[test]
fn row_20_history_is_carried_within_and_across_calls() {
    shows(KDA, M::HistoryLost);
}
