//! Where each tile goes.

use k3_shared::tiles::TileSpec;

/// A tile and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    /// What it holds.
    pub(crate) spec: TileSpec,
    /// The data file, by number.
    pub(crate) file: usize,
    /// Where it begins there.
    pub(crate) offset: u64,
}

/// Spread tiles over files in proportion to `weights`, without gaps; also returns the files' lengths.
///
/// Each tile goes to the file that is then the least full for its weight, so that neighbours in order of use lie on different
/// disks and all disks are done at the same time, from any point of the trunk to any other.
pub(crate) fn place(specs: Vec<TileSpec>, weights: &[u32]) -> (Vec<Placed>, Vec<u64>) {
    let mut ends = vec![0_u64; weights.len()];
    let place = |spec: TileSpec| {
        let stored = spec.stored_bytes();
        // Bytes per weight, compared as fractions, so that rounding plays no part.
        let scaled = |a: usize, b: usize| u128::from(ends[a] + stored) * u128::from(weights[b]);
        let file = (0..weights.len())
            .min_by(|&a, &b| scaled(a, b).cmp(&scaled(b, a)))
            .unwrap_or(0);
        let offset = ends[file];
        ends[file] += stored;
        Placed { spec, file, offset }
    };
    let tiles = specs.into_iter().map(place).collect();
    (tiles, ends)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_shared::{
        config::Config,
        release,
        tiles::{DEFAULT_TILE_BYTES, as_released, trunk_tiles},
    };

    fn specs() -> Vec<TileSpec> {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        trunk_tiles(&config, 93, DEFAULT_TILE_BYTES, &as_released(&config))
    }

    #[test]
    fn tiles_of_a_file_follow_each_other_without_gaps() {
        let (tiles, lens) = place(specs(), &[1, 3, 2]);
        let mut ends = [0; 3];
        for tile in &tiles {
            assert_eq!(tile.offset, ends[tile.file]);
            ends[tile.file] += tile.spec.stored_bytes();
        }
        assert_eq!(lens, ends);
        assert_eq!(
            tiles.iter().map(|t| t.spec.clone()).collect::<Vec<_>>(),
            specs()
        );
    }

    #[test]
    fn files_fill_in_proportion_to_their_weights_throughout() {
        let weights = [1, 3, 2];
        let (tiles, _) = place(specs(), &weights);
        let mut filled = [0_u64; 3];
        for tile in &tiles {
            filled[tile.file] += tile.spec.stored_bytes();
            let total: u64 = filled.iter().sum();
            for (bytes, weight) in filled.iter().zip(weights) {
                let fair = total * u64::from(weight) / 6;
                assert!(bytes.abs_diff(fair) <= 2 * DEFAULT_TILE_BYTES, "{filled:?}");
            }
        }
    }

    #[test]
    fn one_file_takes_all() {
        let (tiles, lens) = place(specs(), &[1]);
        assert!(tiles.iter().all(|t| t.file == 0));
        assert_eq!(
            lens,
            [tiles.iter().map(|t| t.spec.stored_bytes()).sum::<u64>()]
        );
    }
}
