//! Channel mixers and expert files: rows 5, 25 to 27, 29 to 31 and 34.

use crate::{
    reference::Mistake as M,
    verdict::{At, follows, shows},
};

/// Layer 0 is dense, layer 1 the first with experts.
const DENSE: At = At::Layer(0);
const MOE: At = At::Layer(1);

#[test]
fn row_05_the_bias_does_not_enter_the_weights() {
    follows(MOE, M::BiasInWeights, 0.22);
}

#[test]
fn row_05_the_bias_selects() {
    follows(MOE, M::BiasMissing, 0.66);
}

#[test]
fn row_25_the_latent_norm_is_on_the_sum_not_on_each_expert() {
    follows(MOE, M::NormPerExpert, 0.56);
}

#[test]
fn row_25_the_sum_of_the_experts_is_normed() {
    follows(MOE, M::LatentNormMissing, 0.52);
}

#[test]
fn row_26_the_shared_experts_are_not_weighted() {
    follows(MOE, M::SharedHalved, 1.03);
}

#[test]
fn row_26_the_shared_experts_are_the_sum_of_both_halves() {
    shows(MOE, M::SharedFirstOnly);
}

#[test]
fn row_26_the_shared_experts_are_added_to_the_routed_ones() {
    follows(MOE, M::SharedMissing, 1.34);
}

#[test]
fn row_27_the_linear_branch_is_capped() {
    follows(DENSE, M::UpUncapped, 0.14);
}

#[test]
fn row_27_the_sigmoid_sees_the_uncapped_gate() {
    follows(DENSE, M::SigmoidOfCapped, 0.35);
}

#[test]
fn row_27_the_caps_are_multiplied_back() {
    follows(DENSE, M::CapsNotRescaled, 1.42);
}

#[test]
fn row_27_the_activation_is_not_swiglu() {
    follows(DENSE, M::SwiGlu, 0.93);
}

#[test]
fn row_29_the_low_nibble_is_the_even_element() {
    follows(MOE, M::NibblesSwapped, 0.99);
}

#[test]
fn row_29_the_bias_of_a_scale_is_127() {
    follows(MOE, M::ScaleBiasOff, 0.29);
}

#[test]
fn row_30_w1_is_the_gate_and_w3_up() {
    follows(MOE, M::GateIsUp, 0.79);
}

#[test]
fn row_31_experts_lie_in_the_order_of_their_names_as_strings() {
    follows(MOE, M::NumericOrder, 0.84);
}

#[test]
fn row_34_f32_and_bf16_tensors_of_one_layer_are_read_by_their_types() {
    shows(MOE, M::F32AsBf16);
}
