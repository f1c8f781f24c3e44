//! `trunk.json` (`k3.trunk/1`): tile records of a packed trunk.
//!
//! The folder holds `trunk.json` and one or more data files; each tile is a record of where its bytes lie and what they are.
//! A reader refuses a file that is not what [`crate::tiles`] would cut from the recorded config.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    config::{Config, ConfigError},
    names::{Dtype, TensorRole},
    tiles::{TILE_ALIGN, TileClass, TilePart, TileSpec},
};

/// The schema tag.
pub const SCHEMA: &str = "k3.trunk/1";
/// The record file's name inside a trunk folder.
pub const FILE_NAME: &str = "trunk.json";
/// The name, inside a trunk folder, of the digests of the embedding's rows.
pub const EMBEDDING_NAME: &str = "embedding.sha256";
/// The data file's name inside a trunk folder.
pub const DATA_NAME: &str = "trunk.bin";

/// The longest row that is believed: three dimensions of a config at their most would be no file's row.
const MAX_COLS: u64 = 1 << 42;

/// How a tile's payload is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// As in the checkpoint.
    Raw,
}

/// One data file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFile {
    /// Path: relative to the trunk folder, or absolute when it lies elsewhere.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
}

/// One tensor inside a tile of several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRecord {
    /// The tensor's name.
    pub tensor: String,
    /// Element type.
    pub dtype: Dtype,
    /// Elements of the one row.
    pub cols: usize,
    /// Where it begins inside the tile, in bytes.
    pub offset: u64,
}

/// One tile: where its bytes lie and what they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileRecord {
    /// Index into [`Trunk::files`].
    pub file: usize,
    /// Where it begins in that file, a multiple of 4096.
    pub offset: u64,
    /// Bytes on disk, a multiple of 4096.
    pub stored_bytes: u64,
    /// Payload bytes; the rest is zeros.
    pub raw_bytes: u64,
    /// How the payload is stored.
    pub codec: Codec,
    /// The tensor, or the first of [`Self::parts`].
    pub tensor: String,
    /// First row held and the row after the last.
    pub rows: [usize; 2],
    /// Elements of one row.
    pub cols: usize,
    /// Element type.
    pub dtype: Dtype,
    /// SHA-256 of the stored bytes, hex.
    pub sha256: String,
    /// All tensors of a tile that holds several; empty for a matrix tile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartRecord>,
}

/// The tiles of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Zero-based layer.
    pub layer: u32,
    /// In order of use.
    pub tiles: Vec<TileRecord>,
}

/// Digests of the embedding's rows, which stay in their shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingRecord {
    /// A file of one SHA-256 a row, 32 bytes each and nothing else, beside the record.
    pub path: PathBuf,
    /// Rows.
    pub rows: usize,
}

/// A packed trunk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trunk {
    /// [`SCHEMA`].
    pub schema: String,
    /// Identity of the checkpoint it was made from.
    pub identity: String,
    /// The whole model's canonical config.
    pub config: Value,
    /// How many of the model's layers are packed.
    pub num_layers: usize,
    /// The tile size it was cut to.
    pub tile_bytes: u64,
    /// Payload of the layer tensors.
    pub trunk_bytes: u64,
    /// Payload of the output head.
    pub head_bytes: u64,
    /// Padded bytes of all tiles.
    pub stored_bytes: u64,
    /// The data files.
    pub files: Vec<DataFile>,
    /// The layers, in order.
    pub layers: Vec<LayerRecord>,
    /// The final vectors and the head, in order of use.
    pub output: Vec<TileRecord>,
    /// Digests of the embedding's rows; trunks packed before there were any have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<EmbeddingRecord>,
}

/// Why a trunk cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrunkError {
    /// The file could not be read.
    #[error("{}: {source} (make it with: k3-pack MODEL_DIR {})", path.display(), folder(path).display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not a trunk record, or contradicts itself.
    #[error("{}: {reason} (re-run: k3-pack --force MODEL_DIR {})", path.display(), folder(path).display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The field and what is wrong with it.
        reason: String,
    },
    /// The recorded config is not one.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

impl TileRecord {
    /// The record of `spec` stored at `offset` of file number `file`.
    pub fn new(spec: &TileSpec, file: usize, offset: u64, sha256: String) -> Option<Self> {
        let first = spec.parts.first()?;
        let parts = if spec.parts.len() == 1 {
            Vec::new()
        } else {
            spec.parts.iter().map(PartRecord::new).collect()
        };
        Some(Self {
            file,
            offset,
            stored_bytes: spec.stored_bytes(),
            raw_bytes: spec.raw_bytes(),
            codec: Codec::Raw,
            tensor: first.role.name(),
            rows: [first.rows.start, first.rows.end],
            cols: first.cols,
            dtype: first.dtype,
            sha256,
            parts,
        })
    }

    /// What the tile holds, read back; the error names the field.
    fn spec(&self, config: &Config) -> Result<TileSpec, String> {
        let cols = self.parts.iter().map(|p| p.cols).chain([self.cols]);
        if let Some(cols) = cols.max().filter(|&cols| cols as u64 > MAX_COLS) {
            return Err(format!(
                "tensor {:?} has rows of {cols}, more than any model",
                self.tensor
            ));
        }
        let role = |name: &str| {
            TensorRole::parse(name, config)
                .ok_or_else(|| format!("tensor {name:?} is not of this model"))
        };
        let parts = if self.parts.is_empty() {
            vec![TilePart {
                role: role(&self.tensor)?,
                dtype: self.dtype,
                cols: self.cols,
                rows: self.rows[0]..self.rows[1],
                offset: 0,
            }]
        } else {
            let part = |p: &PartRecord| {
                Ok(TilePart {
                    role: role(&p.tensor)?,
                    dtype: p.dtype,
                    cols: p.cols,
                    rows: 0..1,
                    offset: p.offset,
                })
            };
            self.parts.iter().map(part).collect::<Result<_, String>>()?
        };
        Ok(TileSpec { parts })
    }
}

impl PartRecord {
    fn new(part: &TilePart) -> Self {
        Self {
            tensor: part.role.name(),
            dtype: part.dtype,
            cols: part.cols,
            offset: part.offset,
        }
    }
}

impl Trunk {
    /// All tiles, in order of use.
    pub fn tiles(&self) -> impl Iterator<Item = &TileRecord> {
        self.layers
            .iter()
            .flat_map(|l| &l.tiles)
            .chain(&self.output)
    }

    /// Read and check `trunk.json` in `dir`; data files are only compared by length.
    ///
    /// # Errors
    /// If it cannot be read, contradicts itself or its config, or a data file is missing or of another length.
    pub fn open(dir: &Path) -> Result<OpenTrunk, TrunkError> {
        let path = dir.join(FILE_NAME);
        let bytes = std::fs::read(&path).map_err(|source| TrunkError::Io {
            path: path.clone(),
            source,
        })?;
        let (trunk, config, specs) = Self::parse(&bytes, &path)?;
        let mut files = Vec::new();
        for file in &trunk.files {
            let path = dir.join(&file.path);
            let metadata = std::fs::metadata(&path).map_err(|source| TrunkError::Io {
                path: path.clone(),
                source,
            })?;
            if metadata.len() != file.bytes {
                let reason = format!("{} bytes instead of {}", metadata.len(), file.bytes);
                return Err(TrunkError::Invalid { path, reason });
            }
            files.push(path);
        }
        let embedding = trunk.embedding_digests(dir, &config)?;
        Ok(OpenTrunk {
            dir: dir.to_owned(),
            trunk,
            config,
            specs,
            files,
            embedding,
        })
    }

    /// Read and check the bytes of a `trunk.json`; `path` names it in errors. Also returns the config it records, and what each tile
    /// holds.
    ///
    /// # Errors
    /// If it is no trunk record, or contradicts itself or its config.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<(Self, Config, Vec<TileSpec>), TrunkError> {
        let invalid = |reason: String| TrunkError::Invalid {
            path: path.to_owned(),
            reason,
        };
        let trunk: Self = serde_json::from_slice(bytes).map_err(|e| invalid(e.to_string()))?;
        if trunk.schema != SCHEMA {
            return Err(invalid(format!(
                "schema is {:?}, not {SCHEMA:?}",
                trunk.schema
            )));
        }
        let config = Config::from_value(&trunk.config, path)?;
        let specs = trunk.check(&config).map_err(invalid)?;
        Ok((trunk, config, specs))
    }

    fn embedding_digests(
        &self,
        dir: &Path,
        config: &Config,
    ) -> Result<Option<PathBuf>, TrunkError> {
        let Some(record) = &self.embedding else {
            return Ok(None);
        };
        let path = dir.join(&record.path);
        let metadata = std::fs::metadata(&path).map_err(|source| TrunkError::Io {
            path: path.clone(),
            source,
        })?;
        // The rows are compared first: they come from the file, and their product may not be one.
        if record.rows != config.vocab_size || metadata.len() != record.rows as u64 * 32 {
            let reason = format!(
                "{} bytes for {} rows of the embedding, not 32 for each of {}",
                metadata.len(),
                record.rows,
                config.vocab_size
            );
            return Err(TrunkError::Invalid { path, reason });
        }
        Ok(Some(path))
    }

    fn check(&self, config: &Config) -> Result<Vec<TileSpec>, String> {
        if self.layers.is_empty() {
            return Err("layers: empty".into());
        }
        if self.layers.len() != self.num_layers || self.num_layers > config.num_hidden_layers {
            return Err(format!(
                "layers: {} of num_layers = {}, model has {}",
                self.layers.len(),
                self.num_layers,
                config.num_hidden_layers
            ));
        }
        let specs: Vec<TileSpec> = self
            .tiles()
            .map(|tile| tile.spec(config))
            .collect::<Result<_, _>>()?;
        self.check_cut(config, &specs)?;
        let mut ends = vec![0; self.files.len()];
        for (number, (tile, spec)) in self.tiles().zip(&specs).enumerate() {
            let fail = |what: &str| Err(format!("tile {number} ({}): {what}", tile.tensor));
            if tile.raw_bytes != spec.raw_bytes() || tile.stored_bytes != spec.stored_bytes() {
                return fail("sizes do not match its rows");
            }
            if tile.offset % TILE_ALIGN != 0 {
                return fail("offset is not a multiple of 4096");
            }
            if tile.sha256.len() != 64 || !tile.sha256.bytes().all(|b| b.is_ascii_hexdigit()) {
                return fail("sha256 is not a digest");
            }
            let (Some(end), Some(file)) = (ends.get_mut(tile.file), self.files.get(tile.file))
            else {
                return fail("names no data file");
            };
            if tile.offset < *end {
                return fail("overlaps the tile before it");
            }
            match tile.offset.checked_add(tile.stored_bytes) {
                Some(tile_end) if tile_end <= file.bytes => *end = tile_end,
                _ => return fail("ends past its data file"),
            }
        }
        // Each is inside a file of less than 2^64 bytes; all of them, in many files, need not be.
        let stored = specs
            .iter()
            .try_fold(0u64, |sum, spec| sum.checked_add(spec.stored_bytes()))
            .ok_or("files: the tiles are more bytes than 64 bits count")?;
        // Parts of that sum, which cannot overflow where it does not.
        let sum = |class| {
            let of_class = specs.iter().filter(|s| s.class() == class);
            of_class.map(TileSpec::raw_bytes).sum::<u64>()
        };
        for (name, recorded, found) in [
            ("trunk_bytes", self.trunk_bytes, sum(TileClass::Trunk)),
            ("head_bytes", self.head_bytes, sum(TileClass::Head)),
            ("stored_bytes", self.stored_bytes, stored),
        ] {
            if recorded != found {
                return Err(format!("{name}: {recorded}, but the tiles hold {found}"));
            }
        }
        Ok(specs)
    }

    /// The records must be the cut of the config at `tile_bytes`, given the dtypes and shapes they claim.
    fn check_cut(&self, config: &Config, specs: &[TileSpec]) -> Result<(), String> {
        let mut stored: std::collections::BTreeMap<TensorRole, (Dtype, usize)> =
            std::collections::BTreeMap::new();
        for part in specs.iter().flat_map(|s| &s.parts) {
            stored.entry(part.role).or_insert((part.dtype, part.cols));
        }
        let stored_as = |role: TensorRole| {
            let spec = role.spec(config);
            match (role, stored.get(&role)) {
                (
                    TensorRole::Layer(_, crate::names::LayerTensor::KdaALog),
                    Some(&(dtype, cols)),
                ) => (dtype, vec![cols.max(config.kda.num_heads)]),
                (_, Some(&(dtype, _))) if dtype != Dtype::U8 => (dtype, spec.shape),
                _ => (spec.dtype, spec.shape),
            }
        };
        // Counted first: a hostile size would cut into more tiles than memory holds.
        let tile_bytes = self.tile_bytes.max(1);
        let wanted =
            crate::tiles::count_trunk_tiles(config, self.num_layers, tile_bytes, &stored_as);
        if wanted != specs.len() {
            return Err(format!(
                "layers: {} tiles, but this config cuts into {wanted}",
                specs.len()
            ));
        }
        let want = crate::tiles::trunk_tiles(config, self.num_layers, tile_bytes, &stored_as);
        match want.iter().zip(specs).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(tile) => Err(format!("tile {tile}: not what this config cuts there")),
        }
    }
}

/// A checked trunk, ready to read tiles from.
#[derive(Clone, Debug)]
pub struct OpenTrunk {
    /// The trunk folder.
    pub dir: PathBuf,
    /// The records.
    pub trunk: Trunk,
    /// The whole model's config.
    pub config: Config,
    /// What each tile holds, in order of use.
    pub specs: Vec<TileSpec>,
    /// Paths of the data files.
    pub files: Vec<PathBuf>,
    /// The digests of the embedding's rows, 32 bytes each, if the trunk has them.
    pub embedding: Option<PathBuf>,
}
