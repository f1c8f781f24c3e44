//! Where the latents of a sequence are kept.

use k3_shared::host::back_with_memory;

use super::super::activations::{LANES, Line};

/// Cached positions of one MLA layer, each the normed latent and then the shared slice as projected, in the storage order
/// of the kernels: runs of sixteen values, even ones first, the last run filled up with zeros.
///
/// All of it is backed by memory from the start, so that no position fails to be stored for want of it.
#[derive(Debug)]
pub struct LatentCache {
    values: Vec<f32>,
    /// Values before the first position, so that it begins a cache line.
    skip: usize,
    context: usize,
    width: usize,
}

impl LatentCache {
    /// Room for `context` positions of `width` values.
    ///
    /// # Panics
    /// If `width` is zero.
    pub fn new(context: usize, width: usize) -> Self {
        assert!(width > 0, "a position holds at least one value");
        let mut values = vec![0.0; context * width.next_multiple_of(LANES) + LANES - 1];
        // A zeroed vector takes no pages until they are written.
        back_with_memory(&mut values);
        let skip = values.as_ptr().align_offset(align_of::<Line>());
        Self {
            skip: skip.min(LANES - 1),
            values,
            context,
            width,
        }
    }

    /// Values of one position.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The first `positions` positions, `[positions, width.div_ceil(16)]` runs.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn visible(&self, positions: usize) -> &[[f32; LANES]] {
        assert!(
            positions <= self.context,
            "position {positions} is past the cache"
        );
        self.values[self.skip..][..positions * self.stride()]
            .as_chunks()
            .0
    }

    /// What is stored for `position`, to be moved as a whole.
    ///
    /// # Panics
    /// If there is no such position.
    pub fn slot(&mut self, position: usize) -> &mut [f32] {
        assert!(
            position < self.context,
            "position {position} is past the cache"
        );
        let stride = self.stride();
        &mut self.values[self.skip + position * stride..][..stride]
    }

    /// Stores the `width` values of `position`.
    ///
    /// # Panics
    /// If there is no such position or the length is another.
    pub fn store(&mut self, position: usize, values: &[f32]) {
        assert_eq!(values.len(), self.width, "values of one position");
        let slot = self.slot(position);
        slot[..values.len()].copy_from_slice(values);
        slot[values.len()..].fill(0.0);
        even_first(slot.as_chunks_mut().0);
    }

    /// The values of `position` as they were given to [`store`](Self::store).
    ///
    /// # Panics
    /// If there is no such position.
    pub fn load(&self, position: usize) -> Vec<f32> {
        let mut values = vec![0.0; self.width];
        self.load_into(position, &mut values);
        values
    }

    /// As [`load`](Self::load), into `values`.
    ///
    /// # Panics
    /// As [`store`](Self::store).
    pub fn load_into(&self, position: usize, values: &mut [f32]) {
        assert_eq!(values.len(), self.width, "values of one position");
        let runs = &self.visible(position + 1)[position * self.width.div_ceil(LANES)..];
        for (i, value) in values.iter_mut().enumerate() {
            *value = runs[i / LANES][Line::position(i % LANES)];
        }
    }

    fn stride(&self) -> usize {
        self.width.next_multiple_of(LANES)
    }
}

impl Clone for LatentCache {
    fn clone(&self) -> Self {
        let mut copy = Self::new(self.context, self.width);
        let len = self.context * self.stride();
        let from = &self.values[self.skip..][..len];
        copy.values[copy.skip..][..len].copy_from_slice(from);
        copy
    }
}

impl PartialEq for LatentCache {
    fn eq(&self, other: &Self) -> bool {
        self.width == other.width && self.visible(self.context) == other.visible(other.context)
    }
}

/// Turns runs of sixteen values from their natural order into storage order.
pub(super) fn even_first(runs: &mut [[f32; LANES]]) {
    for run in runs {
        let natural = *run;
        for (i, value) in natural.into_iter().enumerate() {
            run[Line::position(i)] = value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_loaded_as_it_was_stored_and_the_filling_is_zero() {
        for width in [1, 15, 16, 17, 40, 576] {
            let mut cache = LatentCache::new(3, width);
            let values: Vec<f32> = (0..width).map(|i| i as f32 + 1.0).collect();
            cache.slot(1).fill(f32::NAN);
            cache.store(1, &values);
            assert_eq!(cache.load(1), values);
            assert!(
                cache
                    .load(0)
                    .iter()
                    .chain(&cache.load(2))
                    .all(|v| *v == 0.0)
            );
            let sum: f32 = cache.slot(1).iter().sum();
            assert!(
                (sum - values.iter().sum::<f32>()).abs() < 1.0,
                "width {width}"
            );
        }
    }

    #[test]
    fn positions_begin_a_cache_line_and_a_copy_is_equal() {
        let mut cache = LatentCache::new(5, 32);
        cache.store(4, &[1.5; 32]);
        assert_eq!(cache.visible(1).as_ptr().addr() % align_of::<Line>(), 0);
        let mut copy = cache.clone();
        assert_eq!(copy.visible(1).as_ptr().addr() % align_of::<Line>(), 0);
        assert_eq!(copy, cache);
        copy.store(0, &[1.0; 32]);
        assert_ne!(copy, cache);
    }
}
