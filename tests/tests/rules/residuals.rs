//! Attention residuals: rows 22 to 24.

use crate::{
    reference::Mistake as M,
    verdict::{At, follows, shows},
};

/// The first mixture is before the channel mixer of layer 0, the first before a mixer at layer 1, the second boundary at 3.
const MLP: At = At::Layer(0);
const MIXER: At = At::Layer(1);
const BOUNDARY: At = At::Layer(3);

#[test]
fn row_22_raw_vectors_are_mixed() {
    follows(MLP, M::MixNormalised, 1.20);
}

#[test]
fn row_22_normalised_vectors_are_scored() {
    follows(MLP, M::ScoreRaw, 1.13);
}

#[test]
fn row_22_the_norm_weight_enters_the_score() {
    follows(MLP, M::ScoreUnweighted, 0.54);
}

#[test]
fn row_23_the_mixers_input_is_a_mixture() {
    follows(MIXER, M::NoMixBeforeMixer, 0.71);
}

#[test]
fn row_23_the_channel_mixers_input_is_a_mixture() {
    follows(MLP, M::NoMixBeforeMlp, 1.36);
}

#[test]
fn row_23_the_heads_input_is_a_mixture() {
    follows(At::Logits, M::NoMixBeforeHead, 1.17);
}

#[test]
fn row_23_the_channel_mixers_input_is_a_mixture_at_boundaries_too() {
    follows(MLP, M::NoMlpMixAtBoundary, 1.34);
}

#[test]
fn row_24_the_snapshot_is_the_stream_before_the_mixture() {
    follows(BOUNDARY, M::SnapshotOfMix, 1.02);
}

#[test]
fn row_24_the_running_sum_restarts_at_a_boundary() {
    follows(MLP, M::NoRestart, 1.12);
}

#[test]
fn row_24_boundaries_are_found_by_counting_layers_from_zero() {
    shows(BOUNDARY, M::BoundaryLate);
}
