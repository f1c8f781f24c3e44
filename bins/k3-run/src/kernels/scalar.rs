//! The reference bodies: they define every bit that the other instruction sets must reproduce.

use super::activations::{Activations, BLOCK, BlockLines, LANES, Line};
use super::weights::{GROUP, Weights, bf16_lines, f32_lines, half_factors, mxfp4_lines};

/// Vectors that share one unpacking of a weight block.
const TOKENS: usize = 16;

/// One block of a row, unpacked, with the factor of each of its groups when it is MXFP4.
#[derive(Default)]
struct Unpacked {
    lines: BlockLines,
    factors: Option<[f32; BLOCK / GROUP]>,
}

/// `out[row][t] = w[row] . x[t]` on this thread.
pub(super) fn matmul(w: Weights<'_>, x: &Activations, out: &mut [f32]) {
    let (cols, num_tokens) = (x.cols(), x.num_rows());
    let mut block = Unpacked::default();
    for (row, out) in out.chunks_exact_mut(num_tokens).enumerate() {
        for (chunk, out) in out.chunks_mut(TOKENS).enumerate() {
            let mut sums = [[0.0; LANES]; TOKENS];
            for b in 0..x.blocks_per_row() {
                block.unpack(w, row, b, cols);
                for (t, sum) in (chunk * TOKENS..).zip(&mut sums[..out.len()]) {
                    carry(sum, &block.dot(&x.row(t)[b]));
                }
            }
            for (value, sum) in out.iter_mut().zip(&sums) {
                *value = reduce(sum);
            }
        }
    }
}

impl Unpacked {
    /// Loads block `b` of `row`; inputs past `cols` become zero weights.
    fn unpack(&mut self, w: Weights<'_>, row: usize, b: usize, cols: usize) {
        let (from, to) = (
            row * cols + b * BLOCK,
            row * cols + cols.min((b + 1) * BLOCK),
        );
        self.factors = None;
        match w {
            Weights::Bf16(bytes) => {
                bf16_lines(&bytes[from * 2..to * 2], &mut self.lines);
            }
            Weights::F32(bytes) => {
                f32_lines(&bytes[from * 4..to * 4], &mut self.lines);
            }
            Weights::Mxfp4 {
                packed,
                scale,
                nan_scales,
            } => {
                let table = half_factors(nan_scales);
                mxfp4_lines(&packed[from / 2..to / 2], &mut self.lines);
                let mut factors = [0.0; BLOCK / GROUP];
                for (factor, byte) in factors.iter_mut().zip(&scale[from / GROUP..to / GROUP]) {
                    *factor = table[usize::from(*byte)];
                }
                self.factors = Some(factors);
            }
        }
    }

    /// The f32 lane sums of this block, in storage order.
    fn dot(&self, x: &BlockLines) -> Line {
        let mut sum = Line::default();
        match self.factors {
            None => {
                for (w, x) in self.lines.iter().zip(x) {
                    for lane in 0..LANES {
                        sum.0[lane] = w.0[lane].mul_add(x.0[lane], sum.0[lane]);
                    }
                }
            }
            Some(factors) => {
                for ((w, x), factor) in self
                    .lines
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .zip(x.as_chunks::<2>().0)
                    .zip(factors)
                {
                    for lane in 0..LANES {
                        let first = w[0].0[lane] * x[0].0[lane];
                        let group = w[1].0[lane].mul_add(x[1].0[lane], first);
                        sum.0[lane] = factor.mul_add(group, sum.0[lane]);
                    }
                }
            }
        }
        sum
    }
}

/// Adds the f32 sums of a block to the f64 lanes.
pub(super) fn carry(sum: &mut [f64; LANES], block: &Line) {
    for (total, part) in sum.iter_mut().zip(block.0) {
        *total += f64::from(part);
    }
}

/// The tree over the lanes, from storage order (even lanes first): neighbours, then distance 4, 2 and 1 among the pairs,
/// and one rounding to f32.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the one rounding of the contract"
)]
pub(super) fn reduce(sum: &[f64; LANES]) -> f32 {
    let pair = |j: usize| sum[j] + sum[j + 8];
    let quad = |j: usize| pair(j) + pair(j + 4);
    ((quad(0) + quad(2)) + (quad(1) + quad(3))) as f32
}
