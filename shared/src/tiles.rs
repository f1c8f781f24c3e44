//! How the trunk is cut into tiles, in order of use.
//!
//! The trunk is one cyclic sequence of tiles: for each layer its small tensors as one tile, then each matrix as tiles of whole
//! rows, in the order a step multiplies them; after the layers the final vectors and the output head. The engine consumes
//! tiles strictly in this order, so the next read is always known. Within a layer: mixer, router, latent down, shared
//! experts, latent up; expert reads, known right after the router, overlap with what follows (design, section 5).

use std::ops::Range;

use crate::{
    config::{Config, Mixer, Mlp},
    ids::LayerIdx,
    names::{Dtype, LayerTensor, TensorRole, layer_tensors},
};

/// Alignment of tile starts and stored lengths, for direct I/O.
pub const TILE_ALIGN: u64 = 4096;
/// The size tiles are cut to unless the packer is told otherwise: large enough for full disk speed, and small enough that a ring
/// of 64 MiB holds twice as many as the smallest plan has reads in flight. Tiles are used in order, so with as many slots as
/// reads one late read stops the others: on a disk of 3 GB/s steps took 1.2 times as long as a plain reader with tiles of 16 MiB,
/// 1.05 with these.
pub const DEFAULT_TILE_BYTES: u64 = 8 << 20;
/// Rows of a tile are a multiple of this, so that kernels work on whole row blocks.
const ROW_UNIT: usize = 16;

/// The mixer's matrices, in order of use.
const KDA_MATRICES: [LayerTensor; 8] = [
    LayerTensor::KdaQ,
    LayerTensor::KdaK,
    LayerTensor::KdaV,
    LayerTensor::KdaFA,
    LayerTensor::KdaFB,
    LayerTensor::KdaB,
    LayerTensor::AttnG,
    LayerTensor::AttnO,
];
const MLA_MATRICES: [LayerTensor; 6] = [
    LayerTensor::MlaQA,
    LayerTensor::MlaQB,
    LayerTensor::MlaKvA,
    LayerTensor::MlaKvB,
    LayerTensor::AttnG,
    LayerTensor::AttnO,
];
const DENSE_MATRICES: [LayerTensor; 3] = [
    LayerTensor::DenseGate,
    LayerTensor::DenseUp,
    LayerTensor::DenseDown,
];
const MOE_MATRICES: [LayerTensor; 6] = [
    LayerTensor::RouterWeight,
    LayerTensor::LatentDown,
    LayerTensor::SharedGate,
    LayerTensor::SharedUp,
    LayerTensor::SharedDown,
    LayerTensor::LatentUp,
];
/// The vectors used after the last layer.
pub const FINAL_VECTORS: [TensorRole; 3] = [
    TensorRole::FinalNorm,
    TensorRole::OutputAttnResNorm,
    TensorRole::OutputAttnResProj,
];

/// Rows of one tensor, as stored in a tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TilePart {
    /// The tensor.
    pub role: TensorRole,
    /// Element type as stored.
    pub dtype: Dtype,
    /// Elements of one row; a vector is one row.
    pub cols: usize,
    /// The rows held.
    pub rows: Range<usize>,
    /// Where the rows begin inside the tile, in bytes.
    pub offset: u64,
}

impl TilePart {
    /// Bytes of the rows.
    pub fn bytes(&self) -> u64 {
        self.row_bytes() * self.rows.len() as u64
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        self.cols as u64 * self.dtype.bytes() as u64
    }
}

/// A contiguous piece of the trunk that is read, pinned and verified as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileSpec {
    /// Its parts in order; a matrix tile has one, the tile of small tensors has many.
    pub parts: Vec<TilePart>,
}

/// Which sum of the report and the plan a tile's reads belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileClass {
    /// A layer's always-used tensors.
    Trunk,
    /// The output head.
    Head,
    /// The vectors after the last layer.
    Final,
}

impl TileSpec {
    /// Payload bytes.
    pub fn raw_bytes(&self) -> u64 {
        self.parts.iter().map(TilePart::bytes).sum()
    }

    /// Bytes on disk and in memory: the payload rounded up to [`TILE_ALIGN`].
    pub fn stored_bytes(&self) -> u64 {
        self.raw_bytes().next_multiple_of(TILE_ALIGN)
    }

    /// The class of its tensors.
    pub fn class(&self) -> TileClass {
        match self.parts.first().map(|p| p.role) {
            Some(TensorRole::OutputHead) => TileClass::Head,
            Some(TensorRole::Layer(..)) => TileClass::Trunk,
            _ => TileClass::Final,
        }
    }

    /// The layer it belongs to; `None` after the layers.
    pub fn layer(&self) -> Option<LayerIdx> {
        match self.parts.first().map(|p| p.role) {
            Some(TensorRole::Layer(layer, _)) => Some(layer),
            _ => None,
        }
    }
}

/// The dtype and shape each tensor is stored with, where it differs from the release's rule.
pub type StoredAs<'a> = &'a dyn Fn(TensorRole) -> (Dtype, Vec<usize>);

/// The matrices of a layer, in order of use.
pub fn layer_matrices(config: &Config, layer: LayerIdx) -> Vec<LayerTensor> {
    let mixer: &[LayerTensor] = match config.mixers.get(layer.get()) {
        Some(Mixer::Mla) => &MLA_MATRICES,
        _ => &KDA_MATRICES,
    };
    let mlp: &[LayerTensor] = match config.mlp(layer) {
        Mlp::Dense => &DENSE_MATRICES,
        Mlp::Moe => &MOE_MATRICES,
    };
    mixer.iter().chain(mlp).copied().collect()
}

/// The small tensors of a layer: everything that is not one of its matrices.
pub fn layer_vectors(config: &Config, layer: LayerIdx) -> Vec<LayerTensor> {
    let matrices = layer_matrices(config, layer);
    layer_tensors(config, layer)
        .filter(|t| !matrices.contains(t))
        .collect()
}

/// The tiles of the first `layers` layers, the final vectors and the head, in order of use.
///
/// `tile_bytes` is what tiles are cut to; a row, or a head's rows of `kv_b_proj`, is never cut.
pub fn trunk_tiles(
    config: &Config,
    layers: usize,
    tile_bytes: u64,
    stored_as: StoredAs<'_>,
) -> Vec<TileSpec> {
    let mut tiles = Vec::new();
    for layer in config.layers().take(layers) {
        let vectors = layer_vectors(config, layer);
        tiles.push(group(
            vectors.into_iter().map(|t| TensorRole::Layer(layer, t)),
            stored_as,
        ));
        for tensor in layer_matrices(config, layer) {
            cut(
                TensorRole::Layer(layer, tensor),
                row_unit(config, tensor),
                tile_bytes,
                stored_as,
                &mut tiles,
            );
        }
    }
    tiles.push(group(FINAL_VECTORS.into_iter(), stored_as));
    cut(
        TensorRole::OutputHead,
        ROW_UNIT,
        tile_bytes,
        stored_as,
        &mut tiles,
    );
    tiles
}

/// The release's rule for [`trunk_tiles`].
pub fn as_released(config: &Config) -> impl Fn(TensorRole) -> (Dtype, Vec<usize>) + '_ {
    |role| {
        let spec = role.spec(config);
        (spec.dtype, spec.shape)
    }
}

fn group(roles: impl Iterator<Item = TensorRole>, stored_as: StoredAs<'_>) -> TileSpec {
    let mut offset = 0;
    let mut parts = Vec::new();
    for role in roles {
        let (dtype, shape) = stored_as(role);
        let part = TilePart {
            role,
            dtype,
            cols: shape.iter().product(),
            rows: 0..1,
            offset,
        };
        offset += part.bytes();
        parts.push(part);
    }
    TileSpec { parts }
}

/// How many tiles [`trunk_tiles`] cuts, told without cutting them: a record may claim sizes that no memory holds the tiles of.
pub fn count_trunk_tiles(
    config: &Config,
    layers: usize,
    tile_bytes: u64,
    stored_as: StoredAs<'_>,
) -> usize {
    let matrix = |role: TensorRole, unit: usize| {
        let cut = Cut::of(role, unit, tile_bytes, stored_as);
        cut.rows.div_ceil(cut.share)
    };
    let layer = |layer: LayerIdx| {
        let matrices = layer_matrices(config, layer);
        let tiles = matrices
            .iter()
            .map(|&tensor| matrix(TensorRole::Layer(layer, tensor), row_unit(config, tensor)));
        1 + tiles.sum::<usize>()
    };
    config.layers().take(layers).map(layer).sum::<usize>()
        + 1
        + matrix(TensorRole::OutputHead, ROW_UNIT)
}

/// Rows that are never cut apart.
fn row_unit(config: &Config, tensor: LayerTensor) -> usize {
    match tensor {
        LayerTensor::MlaKvB => config.mla.kv_b_rows_per_head(),
        _ => ROW_UNIT,
    }
}

/// How the rows of a matrix are cut.
struct Cut {
    dtype: Dtype,
    rows: usize,
    cols: usize,
    /// Rows of every tile but perhaps the last.
    share: usize,
}

impl Cut {
    fn of(role: TensorRole, unit: usize, tile_bytes: u64, stored_as: StoredAs<'_>) -> Self {
        let (dtype, shape) = stored_as(role);
        let rows = shape.first().copied().unwrap_or(0);
        let cols = shape.get(1..).unwrap_or(&[]).iter().product::<usize>();
        let row_bytes = cols as u64 * dtype.bytes() as u64;
        let fit = usize::try_from(tile_bytes / row_bytes.max(1))
            .unwrap_or(rows)
            .min(rows);
        let most = (fit / unit * unit).max(unit);
        // Equal shares, so that no tile is a sliver; whole units, so that no head is torn.
        let share = rows
            .div_ceil(rows.div_ceil(most).max(1))
            .max(1)
            .next_multiple_of(unit);
        Self {
            dtype,
            rows,
            cols,
            share,
        }
    }
}

fn cut(
    role: TensorRole,
    unit: usize,
    tile_bytes: u64,
    stored_as: StoredAs<'_>,
    tiles: &mut Vec<TileSpec>,
) {
    let Cut {
        dtype,
        rows,
        cols,
        share,
    } = Cut::of(role, unit, tile_bytes, stored_as);
    let mut first = 0;
    while first < rows {
        let end = rows.min(first + share);
        let part = TilePart {
            role,
            dtype,
            cols,
            rows: first..end,
            offset: 0,
        };
        tiles.push(TileSpec { parts: vec![part] });
        first = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release;
    use std::collections::BTreeMap;

    fn release_tiles(tile_bytes: u64) -> (Config, Vec<TileSpec>) {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        let tiles = trunk_tiles(&config, 93, tile_bytes, &as_released(&config));
        (config, tiles)
    }

    fn sum(tiles: &[TileSpec], class: TileClass) -> u64 {
        tiles
            .iter()
            .filter(|t| t.class() == class)
            .map(TileSpec::raw_bytes)
            .sum()
    }

    #[test]
    fn tiles_are_counted_as_they_are_cut() {
        for tile_bytes in [1, 4096, 1 << 20, DEFAULT_TILE_BYTES, u64::MAX] {
            let (config, tiles) = release_tiles(tile_bytes);
            let count = count_trunk_tiles(&config, 93, tile_bytes, &as_released(&config));
            assert_eq!(count, tiles.len());
        }
    }

    #[test]
    fn the_release_is_placed_whole() {
        let (_, tiles) = release_tiles(DEFAULT_TILE_BYTES);
        assert_eq!(sum(&tiles, TileClass::Trunk), 108_811_877_376);
        assert_eq!(sum(&tiles, TileClass::Head), 2_348_810_240);
        assert_eq!(sum(&tiles, TileClass::Final), 43_008);
        let largest = tiles.iter().map(TileSpec::stored_bytes).max().unwrap();
        assert!(largest <= DEFAULT_TILE_BYTES, "{largest}");
    }

    #[test]
    fn every_row_is_in_exactly_one_tile_and_heads_are_whole() {
        for tile_bytes in [1, 1 << 20, DEFAULT_TILE_BYTES, u64::MAX] {
            let (config, tiles) = release_tiles(tile_bytes);
            let mut next: BTreeMap<TensorRole, usize> = BTreeMap::new();
            for part in tiles.iter().flat_map(|t| &t.parts) {
                let seen = next.entry(part.role).or_default();
                assert_eq!(*seen, part.rows.start, "{:?}", part.role);
                *seen = part.rows.end;
                if let TensorRole::Layer(_, LayerTensor::MlaKvB) = part.role {
                    assert_eq!(part.rows.len() % config.mla.kv_b_rows_per_head(), 0);
                }
            }
            for (role, rows) in next {
                let shape = role.spec(&config).shape;
                let want = if shape.len() == 2 && shape[0] > 1 {
                    shape[0]
                } else {
                    1
                };
                assert_eq!(rows, want, "{role:?}");
            }
        }
    }
}
