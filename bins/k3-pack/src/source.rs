//! Where the trunk's tensors lie in the shards.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use k3_shared::{
    checkpoint::Checkpoint,
    config::Config,
    direct::{DirectError, DirectFile, Mode},
    ids::LayerIdx,
    names::{Dtype, TensorRole, layer_tensors},
    tiles::{FINAL_VECTORS, TilePart, TileSpec, trunk_tiles},
};

use crate::error::PackError;

/// One tensor in its shard.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    /// The shard, by its number in [`Source::shards`].
    pub(crate) shard: usize,
    /// Element type as stored.
    pub(crate) dtype: Dtype,
    /// Shape as stored.
    pub(crate) shape: Vec<usize>,
    /// First byte in the file.
    pub(crate) offset: u64,
}

/// The trunk's tensors of the first layers of a checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// The whole model's config.
    pub(crate) config: Config,
    /// How many layers are packed.
    pub(crate) layers: usize,
    /// The checkpoint's identity.
    pub(crate) identity: String,
    /// The shards needed.
    pub(crate) shards: Vec<PathBuf>,
    /// Every tensor of the trunk.
    pub(crate) tensors: BTreeMap<TensorRole, Located>,
    /// The embedding, which is not part of it.
    pub(crate) embedding: Located,
}

/// Every tensor of the trunk of the first `layers` layers.
pub(crate) fn trunk_roles(config: &Config, layers: usize) -> impl Iterator<Item = TensorRole> {
    let of_layer = |layer: LayerIdx| {
        layer_tensors(config, layer).map(move |tensor| TensorRole::Layer(layer, tensor))
    };
    config
        .layers()
        .take(layers)
        .flat_map(of_layer)
        .chain(FINAL_VECTORS)
        .chain([TensorRole::OutputHead])
}

impl Source {
    /// Open the checkpoint in `model_dir`, its first `layers` layers or all.
    ///
    /// # Errors
    /// If the checkpoint is not one, or lacks a tensor.
    pub(crate) fn open(model_dir: &Path, layers: Option<usize>) -> Result<Self, PackError> {
        let checkpoint = Checkpoint::open(model_dir, layers)?;
        let mut numbers = BTreeMap::new();
        let mut shards = Vec::new();
        let mut locate = |role| -> Result<Located, PackError> {
            let found = checkpoint.tensor(role)?;
            let shard = *numbers.entry(found.shard).or_insert_with(|| {
                shards.push(checkpoint.shard_path(found.shard).to_owned());
                shards.len() - 1
            });
            Ok(Located {
                shard,
                dtype: found.dtype,
                shape: found.shape,
                offset: found.offset,
            })
        };
        let tensors = trunk_roles(&checkpoint.config, checkpoint.layers)
            .map(|role| Ok((role, locate(role)?)))
            .collect::<Result<_, PackError>>()?;
        let embedding = locate(TensorRole::Embedding)?;
        Ok(Self {
            identity: checkpoint.identity().to_owned(),
            config: checkpoint.config,
            layers: checkpoint.layers,
            shards,
            tensors,
            embedding,
        })
    }

    /// The tiles, in order of use.
    pub(crate) fn tiles(&self, tile_bytes: u64) -> Vec<TileSpec> {
        let stored_as = |role: TensorRole| {
            let stored = self.tensors.get(&role);
            stored.map_or_else(
                || {
                    let spec = role.spec(&self.config);
                    (spec.dtype, spec.shape)
                },
                |located| (located.dtype, located.shape.clone()),
            )
        };
        trunk_tiles(&self.config, self.layers, tile_bytes, &stored_as)
    }

    /// Open every shard for reading.
    ///
    /// # Errors
    /// If one cannot be opened.
    pub(crate) fn open_shards(&self, mode: Mode) -> Result<Vec<DirectFile>, DirectError> {
        let files = self
            .shards
            .iter()
            .map(|path| DirectFile::open(path, mode))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(note) = files.iter().find_map(DirectFile::fallback) {
            log::warn!("{note}");
        }
        Ok(files)
    }

    /// The shard and the byte range of what `part` stores in `within` (counted from the start of the tile).
    pub(crate) fn locate(
        &self,
        part: &TilePart,
        within: &Range<u64>,
    ) -> Option<(usize, Range<u64>)> {
        let located = self.tensors.get(&part.role)?;
        let start = (part.rows.start as u64)
            .checked_mul(part.row_bytes())?
            .checked_add(located.offset)?
            .checked_add(within.start.checked_sub(part.offset)?)?;
        let len = within.end.checked_sub(within.start)?;
        Some((located.shard, start..start.checked_add(len)?))
    }
}

/// What `part` stores inside `range`, both counted from the start of the tile; `None` if nothing.
pub(crate) fn overlap(part: &TilePart, range: &Range<u64>) -> Option<Range<u64>> {
    let start = part.offset.max(range.start);
    let end = (part.offset + part.bytes()).min(range.end);
    (start < end).then_some(start..end)
}
