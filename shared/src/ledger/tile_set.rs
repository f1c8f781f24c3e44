//! A set of tiles of the trunk, written in plans as inclusive ranges.

/// Which tiles of a sequence are in the set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileSet {
    member: Vec<bool>,
}

impl TileSet {
    /// The empty set over a sequence of `num_tiles` tiles.
    pub fn none(num_tiles: usize) -> Self {
        Self {
            member: vec![false; num_tiles],
        }
    }

    /// The set of inclusive ranges as plans write them.
    ///
    /// # Errors
    /// If a range ends before it begins, is not after the one before it, or is past the sequence; the text names the range.
    pub fn from_ranges(ranges: &[[usize; 2]], num_tiles: usize) -> Result<Self, String> {
        let mut set = Self::none(num_tiles);
        let mut next = 0;
        for (at, &[first, last]) in ranges.iter().enumerate() {
            let fail = |what: &str| Err(format!("pinned_tiles[{at}] = [{first}, {last}]: {what}"));
            if last < first {
                return fail("ends before it begins");
            }
            if first < next {
                return fail("overlaps or precedes the range before it");
            }
            let Some(range) = set.member.get_mut(first..=last) else {
                return fail(&format!("the trunk has only {num_tiles} tiles"));
            };
            range.fill(true);
            next = last + 1;
        }
        Ok(set)
    }

    /// The fewest inclusive ranges that hold exactly this set, ascending.
    pub fn to_ranges(&self) -> Vec<[usize; 2]> {
        let mut ranges: Vec<[usize; 2]> = Vec::new();
        for (at, _) in self.member.iter().enumerate().filter(|(_, m)| **m) {
            match ranges.last_mut() {
                Some(range) if range[1] + 1 == at => range[1] = at,
                _ => ranges.push([at, at]),
            }
        }
        ranges
    }

    /// Add a tile.
    ///
    /// # Panics
    /// If it is past the sequence.
    pub fn insert(&mut self, tile: usize) {
        self.member[tile] = true;
    }

    /// Whether a tile is in the set; tiles past the sequence are not.
    pub fn contains(&self, tile: usize) -> bool {
        self.member.get(tile).copied().unwrap_or(false)
    }

    /// How many tiles are in the set.
    pub fn count(&self) -> usize {
        self.member.iter().filter(|m| **m).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_and_sets_are_inverse(member in prop::collection::vec(any::<bool>(), 0..40)) {
            let set = TileSet { member };
            let back = TileSet::from_ranges(&set.to_ranges(), set.member.len());
            prop_assert_eq!(back, Ok(set));
        }
    }

    #[test]
    fn ranges_that_are_no_set_are_refused() {
        for ranges in [
            &[[3, 2]][..],
            &[[0, 4], [4, 5]],
            &[[5, 6], [0, 1]],
            &[[9, 10]],
        ] {
            let error = TileSet::from_ranges(ranges, 10).unwrap_err();
            assert!(error.contains("pinned_tiles["), "{error}");
        }
        assert!(TileSet::from_ranges(&[[0, usize::MAX]], 10).is_err());
    }
}
