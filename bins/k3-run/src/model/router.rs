//! The router: which experts a row takes, and with what weights (specification 3.6 steps 1 to 3).

use k3_shared::{config::MoeConfig, ids::ExpertIdx};

use crate::kernels::{Isa, math::sigmoid_slice};

/// The experts of one row in selection order, and their weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routing {
    /// `[num_experts_per_token]`, best first.
    pub experts: Vec<ExpertIdx>,
    /// `[num_experts_per_token]`, of the unbiased scores.
    pub weights: Vec<f32>,
}

/// Route one row.
///
/// Scores are sigmoids of `logits`; the bias takes part in the selection only; ties go to the lowest expert. Weights are the
/// unbiased scores over their sum plus 1e-20, times `routed_scaling_factor`; the sum runs in selection order, in f64.
///
/// - `logits`: `[num_experts]`, overwritten by the scores. `bias`: `[num_experts]`.
///
/// - `routing`: receives the choice; its memory is used again.
///
/// False if a score is not finite, and `routing` is then of no use.
#[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
pub fn route_into(
    isa: Isa,
    moe: &MoeConfig,
    logits: &mut [f32],
    bias: &[f32],
    routing: &mut Routing,
) -> bool {
    let top_k = moe.num_experts_per_token;
    let Routing {
        experts,
        weights: best,
    } = routing;
    experts.clear();
    experts.reserve_exact(top_k);
    best.clear();
    best.reserve_exact(top_k);
    sigmoid_slice(isa, logits);
    // Best first; an insertion keeps equal scores in ascending expert order. `best` holds the biased scores until the end.
    for (expert, (score, bias)) in (0u32..).zip(logits.iter().zip(bias)) {
        let score = score + bias;
        if !score.is_finite() {
            return false;
        }
        if best.len() == top_k {
            if best.last().is_none_or(|&worst| worst >= score) {
                continue;
            }
            best.pop();
            experts.pop();
        }
        let place = best.partition_point(|&s| s >= score);
        best.insert(place, score);
        experts.insert(place, ExpertIdx(expert));
    }
    let score = |expert: &ExpertIdx| f64::from(logits[expert.get()]);
    let sum: f64 = experts.iter().fold(0.0, |sum, e| sum + score(e)) + 1e-20;
    for (weight, expert) in best.iter_mut().zip(&*experts) {
        *weight = (score(expert) / sum * moe.routed_scaling_factor) as f32;
    }
    true
}

/// [`route_into`] a routing of its own.
pub fn route(isa: Isa, moe: &MoeConfig, logits: &mut [f32], bias: &[f32]) -> Option<Routing> {
    let mut routing = Routing::default();
    route_into(isa, moe, logits, bias, &mut routing).then_some(routing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moe(num_experts: usize, top_k: usize, scale: f64) -> MoeConfig {
        MoeConfig {
            num_experts,
            num_experts_per_token: top_k,
            num_shared_experts: 1,
            routed_expert_hidden_size: 32,
            moe_intermediate_size: 32,
            routed_scaling_factor: scale,
        }
    }

    #[test]
    fn row_05_the_bias_selects_only() {
        let mut logits = [0.2, -1.0, 0.5, 2.0, 0.0];
        let bias = [0.5, 0.9, 0.0, -0.8, 0.1];
        let routing = route(Isa::detect(), &moe(5, 2, 1.0), &mut logits, &bias).unwrap();
        assert_eq!(routing.experts, [ExpertIdx(1), ExpertIdx(0)]);
        let want = [0.328_467_874_4, 0.671_532_125_6];
        for (got, want) in routing.weights.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-7, "{got} {want}");
        }
        for (got, want) in logits
            .iter()
            .zip([0.549_834, 0.268_941_42, 0.622_459_3, 0.880_797, 0.5])
        {
            assert!((got - want).abs() < 1e-6);
        }
    }

    #[test]
    fn row_28_weights_are_renormalised_and_a_sum_of_nothing_divides() {
        let routing = route(
            Isa::detect(),
            &moe(4, 3, 1.0),
            &mut [-3.0, 0.5, 2.0, 1.0],
            &[0.0; 4],
        )
        .unwrap();
        assert!((routing.weights.iter().sum::<f32>() - 1.0).abs() < 1e-7);
        // Scores that underflow: 1e-20 keeps 0 / 0 away.
        let routing = route(Isa::detect(), &moe(4, 3, 1.0), &mut [-1e4; 4], &[0.0; 4]).unwrap();
        assert_eq!(routing.weights, [0.0; 3]);
    }

    #[test]
    fn row_28_the_scaling_factor_multiplies_the_weights() {
        let routing = route(Isa::detect(), &moe(3, 2, 2.5), &mut [0.0; 3], &[0.0; 3]).unwrap();
        assert_eq!(routing.weights, [1.25, 1.25]);
    }

    #[test]
    fn ties_go_to_the_lowest_expert() {
        let routing = route(
            Isa::detect(),
            &moe(6, 3, 1.0),
            &mut [1.0, 2.0, 1.0, 2.0, 1.0, 2.0],
            &[0.0; 6],
        )
        .unwrap();
        assert_eq!(routing.experts, [ExpertIdx(1), ExpertIdx(3), ExpertIdx(5)]);
        let routing = route(Isa::detect(), &moe(6, 4, 1.0), &mut [0.0; 6], &[0.0; 6]).unwrap();
        assert_eq!(routing.experts, [0, 1, 2, 3].map(ExpertIdx));
    }

    #[test]
    fn a_nan_routes_nowhere() {
        assert_eq!(
            route(
                Isa::detect(),
                &moe(2, 1, 1.0),
                &mut [0.0, f32::NAN],
                &[0.0; 2]
            ),
            None
        );
    }
}
