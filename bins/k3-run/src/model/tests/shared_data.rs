//! Mixers, experts and whole layers against vectors computed by others, in the folder `K3_SHARED_DATA` names.
//!
//! All weights are dense f32 there, those of the experts too, and the low-rank norms of MLA use epsilon 1e-5.

use k3_shared::{
    config::{Config, KdaConfig, Mixer, MlaConfig, MoeConfig},
    ids::LayerIdx,
    names::{LayerTensor, LayerTensor as T, TensorRole},
};

use super::{
    super::{
        Forward, ForwardOptions, MixerState, Segment, SequenceState, StepProfile,
        kda::{self, KdaRows},
        matrix::{MatrixScratch, StepContext},
        mla::{self, MlaRows, MlaScratch},
        moe, route,
        vectors::LayerVectors,
        workspace::Workspace,
    },
    memory::MemorySource,
};
use crate::kernels::{
    Activations, Isa, NanScales, Weights, matmul,
    shared_data::{Vectors, close},
    testing::f32_bytes,
    transpose,
};

const HIDDEN: usize = 128;

/// The small tensors of `layer`, which are the next tile.
fn load_vectors(
    config: &Config,
    isa: Isa,
    layer: LayerIdx,
    source: &mut MemorySource,
) -> LayerVectors {
    let (mut matrix, mut profile) = (MatrixScratch::default(), StepProfile::default());
    let mut step = StepContext {
        config,
        isa,
        source,
        matrix: &mut matrix,
        profile: &mut profile,
        meanwhile: None,
    };
    let mut vectors = LayerVectors::default();
    vectors.load(layer, &mut step).unwrap();
    vectors
}
const KDA: LayerIdx = LayerIdx(1);
const MLA: LayerIdx = LayerIdx(3);
const EPS: f64 = 1e-5;

/// The model that `MANIFEST.json` describes.
fn config() -> Config {
    Config {
        hidden_size: HIDDEN,
        num_hidden_layers: 13,
        vocab_size: 256,
        rms_norm_eps: EPS,
        attn_res_block_size: 3,
        activation_situ_beta: 4.0,
        activation_situ_linear_beta: 25.0,
        first_k_dense_replace: 1,
        intermediate_size: 96,
        kda: KdaConfig {
            num_heads: 4,
            head_dim: 16,
            short_conv_kernel_size: 4,
            gate_lower_bound: -5.0,
        },
        mla: MlaConfig {
            num_heads: 4,
            q_lora_rank: 64,
            kv_lora_rank: 32,
            qk_nope_head_dim: 24,
            qk_rope_head_dim: 8,
            v_head_dim: 16,
        },
        moe: MoeConfig {
            num_experts: 8,
            num_experts_per_token: 2,
            num_shared_experts: 2,
            routed_expert_hidden_size: 64,
            moe_intermediate_size: 48,
            routed_scaling_factor: 1.0,
        },
        mixers: (1..=13)
            .map(|l| {
                if [4, 8, 12, 13].contains(&l) {
                    Mixer::Mla
                } else {
                    Mixer::Kda
                }
            })
            .collect(),
        eos_token_id: None,
        max_position_embeddings: None,
    }
}

/// The keys under which the files may hold a tensor: a whole layer's prefixes them by the part, an operator's does not.
fn keys(tensor: LayerTensor) -> Vec<String> {
    let flat = tensor.suffix().replace('.', "_");
    let short = |name: &str| vec![format!("mlp_{name}"), name.to_owned()];
    match tensor {
        T::RouterWeight => short("gate_weight"),
        T::RouterBias => short("e_score_correction_bias"),
        T::LatentDown => short("down_weight"),
        T::LatentUp => short("up_weight"),
        T::LatentNorm => short("norm_weight"),
        T::SharedGate => short("shared_w1_weight"),
        T::SharedUp => short("shared_w3_weight"),
        T::SharedDown => short("shared_w2_weight"),
        _ => {
            let bare = flat.trim_start_matches("self_attn_").to_owned();
            let lone = bare.trim_end_matches("_weight").to_owned();
            let part = lone.trim_end_matches("1d").to_owned();
            let half = lone.trim_end_matches("_proj").to_owned();
            vec![flat, bare, lone, part, half]
        }
    }
}

/// A layer's weights as a file has them; what it does not have is zero.
fn source(file: &Vectors, config: &Config, layer: LayerIdx) -> MemorySource {
    let mut values = |role: TensorRole| match role {
        TensorRole::Layer(l, tensor) if l == layer => {
            let found = keys(tensor).into_iter().find(|key| file.has(key));
            // A_log is stored past the heads in checkpoints, and not here.
            let len = if tensor == T::KdaALog {
                config.kda.num_heads
            } else {
                role.spec(config).shape.iter().product()
            };
            found.map_or_else(Vec::new, |key| file.array(&key, len))
        }
        _ => Vec::new(),
    };
    let mut source = MemorySource::new(config, 4, 1 << 12, &mut values);
    let (latent, inner) = (
        config.moe.routed_expert_hidden_size,
        config.moe.moe_intermediate_size,
    );
    for expert in 0..8 {
        let key = |matrix: &str| {
            let key = format!("experts_{expert}_{matrix}_weight");
            if file.has(&key) {
                key
            } else {
                format!("mlp_{key}")
            }
        };
        if file.has(&key("w1")) {
            let dense = |matrix: &str| f32_bytes(&file.array(&key(matrix), latent * inner));
            let none = Vec::new;
            let six = [
                dense("w1"),
                none(),
                dense("w2"),
                none(),
                dense("w3"),
                none(),
            ];
            source.add_expert(layer.0, expert, &six);
        }
    }
    source.seek_layer(layer);
    source
}

fn activations(x: &[f32]) -> Activations {
    let mut activations = Activations::new();
    activations.fill(x, HIDDEN);
    activations
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_router() {
    let file = Vectors::open("router");
    let gate = f32_bytes(&file.array("gate_weight", 8 * HIDDEN));
    let (bias, x) = (
        file.array("bias", 8),
        activations(&file.array("in", 6 * HIDDEN)),
    );
    let (want_ids, want) = (file.array("topk_idx", 12), file.array("topk_weight", 12));
    for isa in Isa::available() {
        let (mut raw, mut logits) = (vec![0.0; 48], vec![0.0; 48]);
        matmul(isa, Weights::F32(&gate), &x, &mut raw);
        transpose(&raw, 6, &mut logits);
        for (row, logits) in logits.chunks_mut(8).enumerate() {
            let routing = route(isa, &config().moe, logits, &bias).unwrap();
            // The file's order within a row is not specified: weights are compared by expert.
            let sorted = |ids: &mut dyn Iterator<Item = u32>, weights: &[f32]| {
                let mut pairs: Vec<(u32, f32)> = ids.zip(weights.iter().copied()).collect();
                pairs.sort_by_key(|pair| pair.0);
                pairs.into_iter().unzip::<u32, f32, Vec<u32>, Vec<f32>>()
            };
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "expert numbers"
            )]
            let mut ids = want_ids[row * 2..][..2].iter().map(|id| *id as u32);
            let want = sorted(&mut ids, &want[row * 2..][..2]);
            let got = sorted(&mut routing.experts.iter().map(|e| e.0), &routing.weights);
            assert_eq!(got.0, want.0, "row {row}");
            close(&got.1, &want.1, "weights");
        }
    }
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_mla() {
    let (file, config) = (Vectors::open("mla"), config());
    let x = activations(&file.array("in", 6 * HIDDEN));
    let (latent, rope) = (file.array("kv_latent", 6 * 32), file.array("k_rope", 6 * 8));
    for isa in Isa::available() {
        let mut source = source(&file, &config, MLA);
        let vectors = load_vectors(&config, isa, MLA, &mut source);
        let mut state = SequenceState::new(&config, 4, 6);
        let MixerState::Mla(cache) = &mut state.mixers[3] else {
            unreachable!("layer 3 is MLA")
        };
        let (mut matrix, mut profile) = (MatrixScratch::default(), StepProfile::default());
        let mut step = StepContext {
            config: &config,
            isa,
            source: &mut source,
            matrix: &mut matrix,
            profile: &mut profile,
            meanwhile: None,
        };
        let mut rows = [MlaRows {
            rows: 0..6,
            position: 0,
            cache,
        }];
        let (mut scratch, mut out) = (MlaScratch::default(), Vec::new());
        mla::run(
            &mut step,
            MLA,
            EPS,
            &vectors,
            &mut scratch,
            &mut rows,
            &x,
            &mut out,
        )
        .unwrap();
        close(&out[..6 * HIDDEN], &file.array("out", 6 * HIDDEN), "out");
        for (position, (latent, rope)) in latent.chunks(32).zip(rope.chunks(8)).enumerate() {
            let slot = rows[0].cache.load(position);
            close(&slot[..32], latent, "kv_latent");
            close(&slot[32..], rope, "k_rope");
        }
    }
}

fn kda_layer(name: &str) {
    let (file, config) = (Vectors::open(name), config());
    let t = file.count("T");
    let x = activations(&file.array("in", t * HIDDEN));
    for isa in Isa::available() {
        let mut source = source(&file, &config, KDA);
        let vectors = load_vectors(&config, isa, KDA, &mut source);
        let mut state = SequenceState::new(&config, 4, t);
        let MixerState::Kda(kda) = &mut state.mixers[1] else {
            unreachable!("layer 1 is KDA")
        };
        let (mut matrix, mut profile) = (MatrixScratch::default(), StepProfile::default());
        let mut step = StepContext {
            config: &config,
            isa,
            source: &mut source,
            matrix: &mut matrix,
            profile: &mut profile,
            meanwhile: None,
        };
        let mut rows = [KdaRows {
            rows: 0..t,
            state: kda,
        }];
        let (mut scratch, mut out) = (Workspace::default(), Vec::new());
        kda::run(
            &mut step,
            KDA,
            &vectors,
            &mut scratch,
            &mut rows,
            &x,
            &mut out,
        )
        .unwrap();
        close(&out[..t * HIDDEN], &file.array("out", t * HIDDEN), "out");
        close(
            &rows[0].state.matrix,
            &file.array("state_out", 4 * 16 * 16),
            "state_out",
        );
    }
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_kda_layer1() {
    kda_layer("kda_layer1");
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_kda_layer8() {
    kda_layer("kda_layer8");
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_moe() {
    let (file, config) = (Vectors::open("moe"), config());
    let x = activations(&file.array("in", 3 * HIDDEN));
    let want = file.array("out", 3 * HIDDEN);
    for isa in Isa::available() {
        let mut source = source(&file, &config, KDA);
        let vectors = load_vectors(&config, isa, KDA, &mut source);
        source.seek(KDA, T::RouterWeight);
        let (mut matrix, mut profile) = (MatrixScratch::default(), StepProfile::default());
        let mut step = StepContext {
            config: &config,
            isa,
            source: &mut source,
            matrix: &mut matrix,
            profile: &mut profile,
            meanwhile: None,
        };
        let (mut scratch, mut out) = (Workspace::default(), Vec::new());
        moe::run(
            &mut step,
            KDA,
            NanScales::Propagate,
            &vectors,
            &mut scratch,
            &x,
            &mut out,
        )
        .unwrap();
        for (row, (got, want)) in out.chunks(HIDDEN).zip(want.chunks(HIDDEN)).enumerate() {
            // Element (2, 116) is -0.022, left of 2.018 and -2.040, which are sums of terms up to 43: exact arithmetic is
            // 1.40e-5 away from what the file says, against 1.22e-5 allowed. One f32 step at the row's largest value covers it.
            let largest = want.iter().fold(0f32, |max, w| max.max(w.abs()));
            let step = f32::from_bits(largest.to_bits() + 1) - largest;
            for (i, (g, w)) in got.iter().zip(want).enumerate() {
                let allowed = 1e-5 + 1e-4 * w.abs() + step;
                assert!(
                    (g - w).abs() <= allowed,
                    "element ({row}, {i}) is {g}, not {w}"
                );
            }
        }
    }
}

/// A whole layer, with the two snapshots taken before it.
fn layer(name: &str, layer: LayerIdx, num_after: usize) {
    let (file, config) = (Vectors::open(name), config());
    let by_row = |key: &str, count: usize| -> Vec<Vec<f32>> {
        let values = file.array(key, 4 * count * HIDDEN);
        let at =
            |row: usize, snapshot: usize| &values[(row * count + snapshot) * HIDDEN..][..HIDDEN];
        (0..count)
            .map(|s| (0..4).flat_map(|row| at(row, s).to_vec()).collect())
            .collect()
    };
    let (before, after) = (
        by_row("block_residual_in", 2),
        by_row("block_residual_out", num_after),
    );
    for isa in Isa::available() {
        let options = ForwardOptions {
            isa,
            mla_norm_eps: EPS,
            nan_scales: NanScales::Propagate,
        };
        let mut forward = Forward::new(config.clone(), 4, options);
        let mut source = source(&file, &config, layer);
        let mut state = SequenceState::new(&config, 4, 4);
        let tokens = [k3_shared::ids::TokenId(0); 4];
        let mut segments = [Segment {
            state: &mut state,
            tokens: &tokens,
        }];
        let stream = file.array("in", 4 * HIDDEN);
        let (out, snapshots) = forward
            .lone_layer(layer, &mut source, &mut segments, &before, &stream)
            .unwrap();
        close(&out, &file.array("out", 4 * HIDDEN), "out");
        assert_eq!(snapshots.len(), num_after);
        for (got, want) in snapshots.iter().zip(&after) {
            close(got, want, "block_residual_out");
        }
    }
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_layer_kda() {
    layer("layer_kda", KDA, 2);
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_layer_mla() {
    layer("layer_mla", MLA, 3);
}
