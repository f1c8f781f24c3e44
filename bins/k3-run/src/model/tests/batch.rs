//! Rows of several sequences in one step.

use k3_shared::{
    config::{Config, KdaConfig, Mixer, MlaConfig, MoeConfig},
    ids::{LayerIdx, TokenId},
    ledger::scratch_bytes,
    names::{LayerTensor as T, TensorRole},
};

use super::{
    super::{Forward, ForwardOptions, Observer, Output, Routing, Segment, SequenceState},
    memory::MemorySource,
};
use crate::kernels::{Isa, NanScales, testing::Rng};

const VOCAB: usize = 40;

/// Both mixers, a dense layer, experts, two snapshot periods.
fn config() -> Config {
    Config {
        hidden_size: 48,
        num_hidden_layers: 4,
        vocab_size: VOCAB,
        rms_norm_eps: 1e-5,
        attn_res_block_size: 2,
        activation_situ_beta: 4.0,
        activation_situ_linear_beta: 25.0,
        first_k_dense_replace: 1,
        intermediate_size: 72,
        kda: KdaConfig {
            num_heads: 3,
            head_dim: 8,
            short_conv_kernel_size: 4,
            gate_lower_bound: -5.0,
        },
        mla: MlaConfig {
            num_heads: 2,
            q_lora_rank: 24,
            kv_lora_rank: 16,
            qk_nope_head_dim: 12,
            qk_rope_head_dim: 4,
            v_head_dim: 10,
        },
        moe: MoeConfig {
            num_experts: 11,
            num_experts_per_token: 3,
            num_shared_experts: 2,
            routed_expert_hidden_size: 32,
            moe_intermediate_size: 64,
            routed_scaling_factor: 1.0,
        },
        mixers: vec![Mixer::Kda, Mixer::Mla, Mixer::Kda, Mixer::Mla],
        eos_token_id: None,
        max_position_embeddings: None,
    }
}

fn source(config: &Config) -> MemorySource {
    let mut rng = Rng(61);
    let mut values = |role: TensorRole| {
        let shape = role.spec(config).shape;
        let len = shape.iter().product();
        let centre = match role {
            TensorRole::Layer(
                _,
                T::InputNorm
                | T::PostNorm
                | T::KdaONorm
                | T::LatentNorm
                | T::MlaQANorm
                | T::MlaKvANorm,
            )
            | TensorRole::FinalNorm => 1.0,
            _ => 0.0,
        };
        let cols = *shape.last().unwrap() as f32;
        let width = if shape.len() == 2 {
            1.7 / cols.sqrt()
        } else {
            0.5
        };
        (0..len).map(|_| centre + width * rng.unit()).collect()
    };
    let mut source = MemorySource::new(config, 4, 1 << 10, &mut values);
    let (latent, inner) = (
        config.moe.routed_expert_hidden_size,
        config.moe.moe_intermediate_size,
    );
    for layer in 1..4 {
        for expert in 0..11 {
            let mut tensor = |len: usize, scale: bool| -> Vec<u8> {
                (0..len)
                    .map(|_| {
                        if scale {
                            122 + rng.byte() % 2
                        } else {
                            rng.byte()
                        }
                    })
                    .collect()
            };
            let mut pair = || {
                [
                    tensor(latent * inner / 2, false),
                    tensor(latent * inner / 32, true),
                ]
            };
            let ([a, b], [c, d], [e, f]) = (pair(), pair(), pair());
            source.add_expert(layer, expert, &[a, b, c, d, e, f]);
        }
    }
    source
}

/// Hidden values by layer, routing by layer, logits: each by row.
type Taken = (Vec<Vec<Vec<u32>>>, Vec<Vec<Routing>>, Vec<Vec<u32>>);

/// Everything a step shows, by row, as bits.
#[derive(Default)]
struct Rows {
    hidden: Vec<Vec<Vec<u32>>>,
    routed: Vec<Vec<Routing>>,
    logits: Vec<Vec<u32>>,
    count: usize,
}

impl Observer for Rows {
    fn routed(&mut self, _: LayerIdx, routings: &[Routing]) {
        self.routed.push(routings.to_vec());
    }

    fn hidden(&mut self, _: LayerIdx, stream: &[f32]) {
        let rows = stream.chunks(stream.len() / self.count);
        self.hidden.push(
            rows.map(|row| row.iter().map(|x| x.to_bits()).collect())
                .collect(),
        );
    }

    fn logits(&mut self, _: usize, logits: &[f32]) {
        self.logits.resize(self.count, Vec::new());
        let rows = logits.chunks(logits.len() / self.count);
        for (all, row) in self.logits.iter_mut().zip(rows) {
            all.extend(row.iter().map(|x| x.to_bits()));
        }
    }
}

impl Rows {
    /// The first `count` rows, taken out.
    fn take(&mut self, count: usize) -> Taken {
        let hidden = self
            .hidden
            .iter_mut()
            .map(|layer| layer.drain(..count).collect());
        let routed = self
            .routed
            .iter_mut()
            .map(|layer| layer.drain(..count).collect());
        (
            hidden.collect(),
            routed.collect(),
            self.logits.drain(..count).collect(),
        )
    }
}

struct Bench {
    config: Config,
    forward: Forward,
    source: MemorySource,
}

impl Bench {
    fn new(isa: Isa) -> Self {
        Self::with(config(), isa)
    }

    fn with(config: Config, isa: Isa) -> Self {
        let options = ForwardOptions {
            isa,
            mla_norm_eps: 1e-6,
            nan_scales: NanScales::Propagate,
        };
        let forward = Forward::new(config.clone(), 4, options);
        Self {
            source: source(&config),
            forward,
            config,
        }
    }

    fn step(&mut self, segments: &mut [(&mut SequenceState, &[u32])]) -> Rows {
        let tokens: Vec<Vec<TokenId>> = segments
            .iter()
            .map(|(_, ids)| ids.iter().copied().map(TokenId).collect())
            .collect();
        let mut rows = Rows {
            count: tokens.iter().map(Vec::len).sum(),
            ..Rows::default()
        };
        let mut segments: Vec<Segment<'_>> = segments
            .iter_mut()
            .zip(&tokens)
            .map(|((state, _), tokens)| Segment { state, tokens })
            .collect();
        self.forward
            .step(&mut self.source, &mut segments, Output::All, &mut rows)
            .unwrap();
        rows
    }

    fn state(&self) -> SequenceState {
        SequenceState::new(&self.config, 4, 16)
    }
}

/// At every number of rows the buffers hold what the ledger says, to the byte: here every row takes every expert, so that
/// no buffer's size depends on the router. A step with fewer rows than one before it takes nothing more.
#[test]
fn the_buffers_of_a_step_are_the_ledger_s_activations() {
    let mut config = config();
    config.moe.num_experts_per_token = config.moe.num_experts;
    let ids: Vec<u32> = (0..13).collect();
    for rows in [1, 2, 3, 7, 13] {
        let mut bench = Bench::with(config.clone(), Isa::detect());
        let tiles = bench.source.specs();
        let want = scratch_bytes(&config, &tiles, rows).unwrap();
        let mut state = bench.state();
        bench.step(&mut [(&mut state, &ids[..rows])]);
        assert_eq!(bench.forward.scratch_bytes() as u64, want, "{rows} rows");
        let mut state = bench.state();
        bench.step(&mut [(&mut state, &ids[..1])]);
        assert_eq!(
            bench.forward.scratch_bytes() as u64,
            want,
            "1 row after {rows}"
        );
    }
}

/// Three sequences at positions 4, 0 and 7 with 3, 5 and 1 rows to go: each row, and each state after it, has the bits it has
/// when its sequence runs alone.
#[test]
fn a_row_of_a_batch_is_computed_exactly_as_it_would_be_alone() {
    let before: [&[u32]; 3] = [&[1, 2, 3, 4], &[], &[9, 8, 7, 6, 5, 4, 3]];
    let now: [&[u32]; 3] = [&[11, 12, 13], &[21, 22, 23, 24, 25], &[31]];
    for isa in Isa::available() {
        let mut bench = Bench::new(isa);
        let mut states: Vec<SequenceState> = Vec::new();
        for ids in before {
            let mut state = bench.state();
            if !ids.is_empty() {
                bench.step(&mut [(&mut state, ids)]);
            }
            states.push(state);
        }
        let mut alone = states.clone();
        let mut want = Vec::new();
        for (state, ids) in alone.iter_mut().zip(now) {
            want.push(bench.step(&mut [(state, ids)]).take(ids.len()));
        }
        let [a, b, c] = states.as_mut_slice() else {
            unreachable!()
        };
        let mut got = bench.step(&mut [(a, now[0]), (b, now[1]), (c, now[2])]);
        for ((ids, want), (state, alone)) in now.iter().zip(&want).zip(states.iter().zip(&alone)) {
            assert!(got.take(ids.len()) == *want, "rows {ids:?}, {}", isa.name());
            assert!(state == alone, "state after {ids:?}, {}", isa.name());
        }
    }
}

/// In whatever order sequences share steps, and with a row each.
#[test]
fn sequences_decoded_together_give_the_bits_of_sequences_decoded_apart() {
    let ids: [&[u32]; 2] = [&[3, 1, 4, 1, 5, 9], &[2, 7, 1, 8, 2, 8]];
    let mut bench = Bench::new(Isa::detect());
    let want: Vec<Vec<u32>> = ids
        .iter()
        .map(|ids| {
            let mut state = bench.state();
            bench.step(&mut [(&mut state, ids)]).logits.concat()
        })
        .collect();
    let (mut a, mut b) = (bench.state(), bench.state());
    let mut got: Vec<Vec<u32>> = vec![Vec::new(); 2];
    for at in 0..6 {
        let (x, y) = (&ids[0][at..=at], &ids[1][at..=at]);
        let swapped = at % 2 == 1;
        let rows = if swapped {
            bench.step(&mut [(&mut b, y), (&mut a, x)])
        } else {
            bench.step(&mut [(&mut a, x), (&mut b, y)])
        };
        got[usize::from(swapped)].extend(&rows.logits[0]);
        got[usize::from(!swapped)].extend(&rows.logits[1]);
    }
    assert!(got == want);
}
