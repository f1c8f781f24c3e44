//! How the values of each tensor are made from its stream (test-checkpoint specification 1.3).

use k3_shared::{
    config::Config,
    names::{Dtype, ExpertTensor, LayerTensor, TensorRole},
};

use super::stream::{Stream, lanes};

/// Values of a tensor, by element; `v` is the element's lane of the stream, in [-1, 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// `v` times a factor.
    Scaled(f32),
    /// `1 + v / 4`: weights of norms.
    Norm,
    /// `v` times `before` for elements below `at`, times `after` from there on; a factor of zero stores positive zeros.
    Split {
        /// The first element of the second part.
        at: u64,
        /// Factor of the first part.
        before: f32,
        /// Factor of the second part.
        after: f32,
    },
    /// Stream bytes as they are: two 4-bit weights each.
    Packed,
    /// E8M0 scales: the base plus the low bit of a stream byte.
    Scale(u8),
}

impl Rule {
    /// The rule of a tensor of the text model.
    pub fn of(role: TensorRole, config: &Config) -> Self {
        let spec = role.spec(config);
        let columns = spec.shape.last().copied().unwrap_or(1);
        match role {
            TensorRole::Embedding => Self::Scaled(1.0),
            TensorRole::OutputHead => lin(columns, 2.0),
            TensorRole::FinalNorm | TensorRole::OutputAttnResNorm => Self::Norm,
            TensorRole::OutputAttnResProj => lin(columns, 1.0),
            TensorRole::Layer(_, tensor) => Self::of_layer_tensor(tensor, config, columns),
            TensorRole::Expert(_, tensor) => match tensor {
                ExpertTensor::W1Packed | ExpertTensor::W2Packed | ExpertTensor::W3Packed => {
                    Self::Packed
                }
                ExpertTensor::W1Scale | ExpertTensor::W2Scale | ExpertTensor::W3Scale => {
                    Self::Scale(scale_base(32 * columns))
                }
            },
        }
    }

    fn of_layer_tensor(tensor: LayerTensor, config: &Config, columns: usize) -> Self {
        use LayerTensor as T;
        match tensor {
            T::InputNorm
            | T::PostNorm
            | T::AttnResNorm
            | T::MlpResNorm
            | T::KdaONorm
            | T::MlaQANorm
            | T::MlaKvANorm
            | T::LatentNorm => Self::Norm,
            // Tiny projections before the low-rank norms make their epsilon matter, so that a wrong one shows.
            T::MlaQA => lin(columns, 0.01),
            T::MlaKvA => Self::Split {
                at: config.mla.kv_lora_rank as u64 * columns as u64,
                before: lin_factor(columns, 0.01),
                after: lin_factor(columns, 2.0),
            },
            T::MlaQB | T::MlaKvB | T::KdaFB | T::KdaB => lin(columns, 2.0),
            T::DenseGate | T::DenseUp | T::SharedGate | T::SharedUp => lin(columns, 3.0),
            T::KdaConvQ | T::KdaConvK | T::KdaConvV => Self::Scaled(0.8),
            T::KdaDtBias => Self::Scaled(3.0),
            T::RouterBias => Self::Scaled(0.25),
            T::KdaALog => Self::Split {
                at: config.kda.num_heads as u64,
                before: 0.7,
                after: 0.0,
            },
            T::AttnResProj
            | T::MlpResProj
            | T::KdaQ
            | T::KdaK
            | T::KdaV
            | T::KdaFA
            | T::AttnG
            | T::AttnO
            | T::DenseDown
            | T::RouterWeight
            | T::LatentDown
            | T::LatentUp
            | T::SharedDown => lin(columns, 1.0),
        }
    }

    /// Fill `out` with the stored bytes of the elements from `first` on.
    pub(super) fn fill(self, stream: Stream, dtype: Dtype, first: u64, out: &mut [u8]) {
        match self {
            Self::Scaled(factor) => scaled(stream, dtype, first, out, factor),
            Self::Norm => floats(stream, dtype, first, out, |v| 1.0 + 0.25 * v),
            Self::Split { at, before, after } => {
                let width = dtype.bytes();
                let left = usize::try_from(at.saturating_sub(first)).unwrap_or(usize::MAX);
                let cut = left.saturating_mul(width).min(out.len());
                let (head, tail) = out.split_at_mut(cut);
                scaled(stream, dtype, first, head, before);
                scaled(stream, dtype, first + (cut / width) as u64, tail, after);
            }
            Self::Packed => stream.blocks(first, 1, out, |bytes, out| out.copy_from_slice(bytes)),
            Self::Scale(base) => stream.blocks(first, 1, out, |bytes, out| {
                for (out, byte) in out.iter_mut().zip(bytes) {
                    *out = base + (byte & 1);
                }
            }),
        }
    }
}

fn lin(columns: usize, gain: f64) -> Rule {
    Rule::Scaled(lin_factor(columns, gain))
}

/// The factor that gives rows of `columns` weights the output variance `gain` squared.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the rule takes root and product in f64 and rounds once to f32"
)]
fn lin_factor(columns: usize, gain: f64) -> f32 {
    ((3.0 / columns as f64).sqrt() * gain) as f32
}

/// The lower of the two E8M0 bytes of an expert matrix with rows of `columns` weights: `127 - round(log2(2.926 sqrt(columns)))`.
fn scale_base(columns: usize) -> u8 {
    // Squared, the nearest power of two is found by comparisons, without a logarithm that platforms may round differently.
    let squared = 2.926 * 2.926 * columns as f64;
    let mut log2 = 0;
    let mut upper = 2.0;
    while squared >= upper {
        log2 += 1;
        upper *= 4.0;
    }
    127 - log2
}

fn scaled(stream: Stream, dtype: Dtype, first: u64, out: &mut [u8], factor: f32) {
    if factor == 0.0 {
        // The product would be a negative zero for half of the lanes.
        out.fill(0);
    } else {
        floats(stream, dtype, first, out, |v| v * factor);
    }
}

/// Elements from `first` on, as F32 or rounded to BF16.
fn floats(stream: Stream, dtype: Dtype, first: u64, out: &mut [u8], value: impl Fn(f32) -> f32) {
    if dtype == Dtype::F32 {
        stream.blocks(2 * first, 2, out, |bytes, out| {
            for (out, v) in out.chunks_exact_mut(4).zip(lanes(bytes)) {
                out.copy_from_slice(&value(v).to_le_bytes());
            }
        });
    } else {
        stream.blocks(2 * first, 1, out, |bytes, out| {
            for (out, v) in out.chunks_exact_mut(2).zip(lanes(bytes)) {
                out.copy_from_slice(&round_to_bf16(value(v)).to_le_bytes());
            }
        });
    }
}

/// The BF16 nearest to a finite value, ties to even.
#[inline]
fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::{Recipe, layout::Tensor};

    fn tensor(shard: usize, name: &str) -> Tensor {
        let shard = Recipe::tiny().unwrap().shard(shard).unwrap();
        let found = shard.tensors().iter().find(|t| t.name() == name);
        found.cloned().unwrap()
    }

    fn bytes(shard: usize, name: &str) -> Vec<u8> {
        let tensor = tensor(shard, name);
        let mut out = vec![0; usize::try_from(tensor.bytes()).unwrap()];
        tensor.fill(0, &mut out);
        out
    }

    fn bf16(bytes: &[u8]) -> Vec<u16> {
        let pairs = bytes.chunks_exact(2);
        pairs.map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    fn f32s(bytes: &[u8]) -> Vec<f32> {
        let fours = bytes.as_chunks::<4>().0;
        fours.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    #[test]
    fn norms_and_projections_are_the_published_ones() {
        assert_eq!(
            bf16(&bytes(13, "language_model.model.norm.weight"))[..6],
            [0x3f68, 0x3f67, 0x3f8d, 0x3f69, 0x3f82, 0x3f6f]
        );
        assert_eq!(lin_factor(160, 1.0).to_bits(), 0.136_930_65_f32.to_bits());
        let q = bytes(0, "language_model.model.layers.0.self_attn.q_proj.weight");
        assert_eq!(
            bf16(&q)[..6],
            [0xbdf1, 0x3e07, 0x3c4c, 0xbd1b, 0x3d71, 0xbdd5]
        );
    }

    #[test]
    fn a_log_is_padded_with_positive_zeros() {
        let a_log = f32s(&bytes(0, "language_model.model.layers.0.self_attn.A_log"));
        for (found, want) in a_log.iter().zip([
            -0.350_640_9,
            0.517_971_8,
            0.086_474_6,
            -0.308_065_8,
            0.484_860_2,
        ]) {
            assert!((found - want).abs() < 1e-7, "{found} is not {want}");
        }
        assert_eq!(a_log.len(), 16);
        assert!(a_log[5..].iter().all(|x| x.to_bits() == 0));
    }

    #[test]
    fn decay_biases_are_the_published_ones() {
        let bias = f32s(&bytes(0, "language_model.model.layers.0.self_attn.dt_bias"));
        for (found, want) in bias.iter().zip([-2.739_349, -2.066_162, -0.349_182_1]) {
            assert!((found - want).abs() < 1e-6, "{found} is not {want}");
        }
    }

    #[test]
    fn expert_bytes_are_the_published_ones() {
        let w1 = "language_model.model.layers.1.block_sparse_moe.experts.0.w1";
        assert_eq!(
            bytes(1, &format!("{w1}.weight_packed"))[..8],
            [207, 55, 249, 198, 235, 56, 69, 147]
        );
        assert_eq!(
            bytes(1, &format!("{w1}.weight_scale"))[..8],
            [123, 122, 123, 122, 122, 122, 122, 122]
        );
    }

    #[test]
    fn the_scale_base_follows_the_row_length() {
        for (columns, base) in [(64, 122), (96, 122), (3072, 120), (3584, 120)] {
            assert_eq!(scale_base(columns), base, "{columns}");
        }
        for columns in (32..=1 << 20).step_by(32) {
            // `round` as the rule has it; the difference is a small whole number.
            let exponent = (2.926 * (columns as f64).sqrt()).log2().round();
            let found = 127.0 - f64::from(scale_base(columns));
            assert!((found - exponent).abs() < 0.5, "{columns}");
        }
    }

    #[test]
    fn row_33_rounding_to_bf16_takes_ties_to_even() {
        for (bits, want) in [
            (0x3f80_0000, 0x3f80),
            (0x3f80_8000, 0x3f80),
            (0x3f80_8001, 0x3f81),
            (0x3f81_8000, 0x3f82),
            (0xbf81_7fff, 0xbf81),
            (0x8000_0000, 0x8000),
        ] {
            assert_eq!(round_to_bf16(f32::from_bits(bits)), want, "{bits:08x}");
        }
    }
}
