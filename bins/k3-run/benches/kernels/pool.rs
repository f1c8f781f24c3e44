//! Memory full of weights, larger than any cache.

use k3_run::kernels::{NanScales, Weights};
use k3_shared::direct::AlignedBuf;
use rayon::prelude::*;

/// The output head, the largest matrix of the model, fits.
const POOL_BYTES: usize = 163_840 * 7168 * 2;

/// Latent width and inner width of a routed expert.
pub(crate) const LATENT: usize = 3584;
pub(crate) const INNER: usize = 3072;

/// Elements of each of an expert's three matrices.
const EXPERT_WEIGHTS: usize = LATENT * INNER;

/// Bytes of one expert: three matrices, packed weights and scales.
pub(crate) const EXPERT_BYTES: usize = 3 * (EXPERT_WEIGHTS / 2 + EXPERT_WEIGHTS / 32);

/// Bytes read as bf16 or as experts; filled anew when the kind changes.
pub(crate) struct Pool {
    memory: AlignedBuf,
}

/// One step of a generator whose high bits are good enough for bytes.
pub(crate) fn next(seed: &mut u64) -> u64 {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    *seed >> 33
}

impl Pool {
    /// bf16 weights of about 0.02.
    pub(crate) fn new() -> Self {
        let mut memory = AlignedBuf::zeroed(POOL_BYTES);
        memory
            .par_chunks_mut(1 << 20)
            .enumerate()
            .for_each(|(i, part)| {
                let mut seed = i as u64;
                for pair in part.as_chunks_mut().0 {
                    let [low, high, ..] = next(&mut seed).to_le_bytes();
                    *pair = [low, 0x3c | (high & 0x80)];
                }
            });
        Self { memory }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory
    }

    /// Copy `i`, counted round, of a bf16 matrix of so many weights.
    pub(crate) fn bf16(&self, weights: usize, i: usize) -> Weights<'_> {
        let bytes = weights * 2;
        let at = i % (self.memory.len() / bytes) * bytes;
        Weights::Bf16(&self.memory[at..at + bytes])
    }

    /// Turn the bytes into experts: random nibbles, scales near those of the model.
    pub(crate) fn fill_with_experts(&mut self) {
        self.memory
            .par_chunks_exact_mut(EXPERT_BYTES)
            .enumerate()
            .for_each(|(i, expert)| {
                let mut seed = i as u64;
                for matrix in expert.chunks_exact_mut(EXPERT_BYTES / 3) {
                    let (packed, scale) = matrix.split_at_mut(EXPERT_WEIGHTS / 2);
                    for four in packed.as_chunks_mut().0 {
                        let [a, b, c, d, ..] = next(&mut seed).to_le_bytes();
                        *four = [a, b, c, d];
                    }
                    for byte in scale {
                        *byte = 118 + next(&mut seed).to_le_bytes()[0] % 4;
                    }
                }
            });
    }

    pub(crate) fn num_experts(&self) -> usize {
        self.memory.len() / EXPERT_BYTES
    }

    /// Gate, up or down of an expert, as 0, 1, 2.
    pub(crate) fn expert(&self, expert: usize, matrix: usize) -> Weights<'_> {
        let at = expert * EXPERT_BYTES + matrix * (EXPERT_BYTES / 3);
        let (packed, scale) = self.memory[at..at + EXPERT_BYTES / 3].split_at(EXPERT_WEIGHTS / 2);
        Weights::Mxfp4 {
            packed,
            scale,
            nan_scales: NanScales::Zero,
        }
    }
}
