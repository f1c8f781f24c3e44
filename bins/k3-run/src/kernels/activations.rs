//! Input vectors in the layout the matrix kernels read.
//!
//! Each run of 16 inputs is stored even elements first, then odd ones: `0 2 4 .. 14 1 3 .. 15`. A 32-bit word of bf16
//! weights holds elements `2j` and `2j+1`, and so does a byte of MXFP4, so with this order a kernel splits weights with
//! a shift and a mask and never shuffles. Vectors are padded with zeros to whole blocks of [`BLOCK`] inputs.

use rayon::prelude::*;

/// Inputs summed in f32 before the sum is carried into f64.
pub const BLOCK: usize = 128;

/// Partial sums kept per output: input `i` belongs to lane `i % LANES`.
pub const LANES: usize = 16;

/// Sixteen consecutive inputs, even ones first, on a cache line of their own.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [f32; LANES]);

/// One block of inputs.
pub(super) type BlockLines = [Line; BLOCK / LANES];

impl Line {
    /// Where element `i` of the sixteen is kept.
    pub(super) const fn position(i: usize) -> usize {
        i / 2 + (i % 2) * (LANES / 2)
    }

    fn set(&mut self, x: &[f32; LANES]) {
        let (even, odd) = self.0.split_at_mut(LANES / 2);
        for ((pair, e), o) in x.as_chunks::<2>().0.iter().zip(even).zip(odd) {
            *e = pair[0];
            *o = pair[1];
        }
    }
}

/// `T` vectors of `cols` f32, permuted and zero-padded for the kernels. Buffers are reused from fill to fill.
#[derive(Debug, Default)]
pub struct Activations {
    blocks: Vec<BlockLines>,
    num_rows: usize,
    cols: usize,
    in_range: bool,
}

impl Activations {
    /// No vectors; the first [`fill`](Self::fill) allocates.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the vectors by those of `x`, `[T, cols]` row-major.
    ///
    /// # Panics
    /// If `cols` is zero or does not divide the length of `x`.
    pub fn fill(&mut self, x: &[f32], cols: usize) {
        assert!(
            cols > 0 && x.len().is_multiple_of(cols),
            "{} values are not rows of {cols}",
            x.len()
        );
        self.cols = cols;
        self.num_rows = x.len() / cols;
        let per_row = self.stride();
        self.resize(per_row);
        if self.num_rows == 1 {
            self.in_range = false;
            return lay_out(x, &mut self.blocks);
        }
        self.in_range = x
            .par_chunks_exact(cols)
            .zip(self.blocks.par_chunks_exact_mut(per_row))
            .map(|(row, into)| {
                lay_out(row, into);
                are_in_range(row)
            })
            .reduce(|| true, |all, one| all && one);
    }

    /// Make room for exactly the rows there are: what the buffer takes is in the ledger.
    fn resize(&mut self, per_row: usize) {
        let len = self.num_rows * per_row;
        self.blocks
            .reserve_exact(len.saturating_sub(self.blocks.len()));
        self.blocks.resize(len, BlockLines::default());
    }

    /// Replaces the vectors by the given rows of `src`, in that order (a row may repeat).
    ///
    /// # Panics
    /// If a row is not in `src`.
    pub fn gather(&mut self, src: &Self, rows: &[u32]) {
        self.cols = src.cols;
        self.num_rows = rows.len();
        self.in_range = src.in_range;
        let per_row = self.stride();
        self.resize(per_row);
        if let [row] = rows {
            return self.blocks[..src.blocks_per_row()].copy_from_slice(src.row(*row as usize));
        }
        self.blocks
            .par_chunks_exact_mut(per_row)
            .zip(rows)
            .for_each(|(into, &row)| {
                into[..src.blocks_per_row()].copy_from_slice(src.row(row as usize));
            });
    }

    /// How many vectors there are (`T`).
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Length of each vector, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of memory the buffer holds, for the ledger.
    pub fn allocated_bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<BlockLines>()
    }

    /// Bytes needed for `num_rows` vectors of `cols`: an odd number of blocks each.
    pub fn bytes_for(num_rows: usize, cols: usize) -> usize {
        num_rows * (cols.div_ceil(BLOCK) | 1) * size_of::<BlockLines>()
    }

    /// Whether every input is known to be zero or of magnitude `2^-62` to below `2^64`, so that MXFP4 kernels may multiply factors of
    /// [`SCALES`](super::weights::SCALES) into the weights. A single vector is not asked.
    ///
    /// The factor of a group is a power of two, `h`. Multiplied into the weights it makes every product, sum and rounding of the
    /// group `h` times what it was, which is exact as long as all of them are zero or normal numbers: products are multiples of
    /// `2^-62 * 2^-23`, so after scaling nothing but zero is below `2^-125`, and nothing reaches `2^110`. Zeros keep their signs.
    pub(super) fn are_in_range(&self) -> bool {
        self.in_range
    }

    /// Blocks from a vector to the next. An odd number of them: at a distance of 4 KB the same inputs of all vectors would share
    /// an eighth of the first-level cache, which for many vectors on AVX-512 measured 33 instead of 50 % of the
    /// multiply-add rate.
    pub(super) fn stride(&self) -> usize {
        self.blocks_per_row() | 1
    }

    /// Blocks of each vector.
    pub(super) fn blocks_per_row(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }

    /// All blocks from block `b` of vector `row` on, those of the vectors after it included: [`stride`](Self::stride) apart.
    pub(super) fn blocks_after(&self, row: usize, b: usize) -> &[BlockLines] {
        &self.blocks[row * self.stride() + b..]
    }

    /// The blocks of vector `row`.
    pub(super) fn row(&self, row: usize) -> &[BlockLines] {
        &self.blocks[row * self.stride()..][..self.blocks_per_row()]
    }
}

/// [`Activations::are_in_range`] of one vector.
fn are_in_range(row: &[f32]) -> bool {
    const LEAST: u32 = (127 - 62) << 23;
    const PAST: u32 = (127 + 64) << 23;
    // Magnitudes order as integers. No early end, so that many are compared at once.
    let outside = row.iter().fold(0, |outside, value| {
        let magnitude = value.to_bits() & (u32::MAX >> 1);
        outside | u32::from(magnitude != 0 && !(LEAST..PAST).contains(&magnitude))
    });
    outside == 0
}

/// One vector, permuted and padded.
fn lay_out(row: &[f32], into: &mut [BlockLines]) {
    let mut lines = into.as_flattened_mut().iter_mut();
    let (whole, rest) = row.as_chunks::<LANES>();
    for (sixteen, line) in whole.iter().zip(lines.by_ref()) {
        line.set(sixteen);
    }
    if !rest.is_empty()
        && let Some(line) = lines.next()
    {
        let mut padded = [0.0; LANES];
        padded[..rest.len()].copy_from_slice(rest);
        line.set(&padded);
    }
    lines.for_each(|line| *line = Line::default());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restored(x: &Activations, row: usize) -> Vec<f32> {
        let lines = x.row(row).as_flattened();
        (0..x.blocks_per_row() * BLOCK)
            .map(|i| lines[i / LANES].0[Line::position(i % LANES)])
            .collect()
    }

    #[test]
    fn every_element_is_found_at_its_position_and_the_rest_is_zero() {
        let mut x = Activations::new();
        for cols in [300, 1, 16, 17, 127, 128, 129, 257] {
            let values: Vec<f32> = (0..cols * 3).map(|i| i as f32 + 1.0).collect();
            x.fill(&values, cols);
            assert_eq!((x.num_rows(), x.cols()), (3, cols));
            for row in 0..3 {
                let all = restored(&x, row);
                assert_eq!(all[..cols], values[row * cols..][..cols], "cols {cols}");
                assert!(all[cols..].iter().all(|v| v.to_bits() == 0), "cols {cols}");
            }
            assert!(x.allocated_bytes() >= Activations::bytes_for(3, cols));
        }
    }

    #[test]
    fn gather_takes_rows_in_the_order_asked_for() {
        let (mut x, mut y) = (Activations::new(), Activations::new());
        x.fill(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2);
        y.gather(&x, &[2, 0, 2]);
        assert_eq!(y.num_rows(), 3);
        assert_eq!(restored(&y, 0)[..2], [5.0, 6.0]);
        assert_eq!(restored(&y, 1)[..2], [1.0, 2.0]);
        assert_eq!(restored(&y, 2)[..2], [5.0, 6.0]);
    }

    /// Whether two vectors are, of which the second has these values and `gather` took both.
    fn known_in_range(values: &[f32]) -> bool {
        let (mut x, mut y) = (Activations::new(), Activations::new());
        let both = [vec![1.0; values.len()], values.to_vec()].concat();
        x.fill(&both, values.len());
        y.gather(&x, &[1, 0, 1]);
        assert_eq!(x.are_in_range(), y.are_in_range());
        x.are_in_range()
    }

    #[test]
    fn the_range_is_zero_or_two_to_the_minus_62_to_below_two_to_the_64() {
        let (least, past) = (2f32.powi(-62), 2f32.powi(64));
        for good in [
            0.0,
            -0.0,
            least,
            -least,
            1.0,
            past.next_down(),
            -past.next_down(),
        ] {
            assert!(known_in_range(&[1.0, good, 0.0]), "{good:e}");
        }
        let bad = [
            least.next_down(),
            past,
            f32::from_bits(1),
            f32::INFINITY,
            f32::NAN,
        ];
        for bad in bad.into_iter().flat_map(|bad| [bad, -bad]) {
            for at in 0..40 {
                let mut values = [1.0; 40];
                values[at] = bad;
                assert!(!known_in_range(&values), "{bad:e} at {at}");
            }
        }
    }

    #[test]
    fn what_was_known_of_earlier_vectors_is_forgotten() {
        let mut x = Activations::new();
        for (value, known) in [(1.0, true), (f32::MAX, false), (2.0, true)] {
            x.fill(&[value; 6], 3);
            assert_eq!(x.are_in_range(), known, "{value:e}");
        }
    }
}
