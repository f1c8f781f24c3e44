//! Where the model to plan for comes from: a packed trunk beside its checkpoint, or a census alone.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use k3_shared::{
    checkpoint::hex,
    config::Config,
    formats::{
        census::{Census, TrunkException, digests::FILE_NAME as DIGESTS_NAME},
        plan::ExpertDigests,
        trunk::Trunk,
    },
    ledger::Model,
    names::{Dtype, TensorRole},
    release,
    tiles::{DEFAULT_TILE_BYTES, TileSpec, as_released, trunk_tiles},
};
use sha2::{Digest as _, Sha256};

use crate::{cli::Cli, probe::Extent};

/// A model to plan for, and where its files lie.
#[derive(Debug)]
pub(crate) struct Source {
    /// The whole model's config.
    pub(crate) config: Config,
    /// Layers planned for.
    pub(crate) num_layers: usize,
    /// Their tiles, the final vectors and the head, in order of use.
    pub(crate) tiles: Vec<TileSpec>,
    /// Identity of the checkpoint.
    pub(crate) identity: String,
    /// The checkpoint folder, absolute.
    pub(crate) model_dir: PathBuf,
    /// The trunk folder, absolute.
    pub(crate) trunk_dir: PathBuf,
    /// Data files of the trunk, absolute; empty without a trunk.
    pub(crate) trunk_files: Vec<PathBuf>,
    /// Where its tiles lie in them, in order of use; those of the layers planned for.
    pub(crate) extents: Vec<Extent>,
    /// More folders with shards, absolute.
    pub(crate) expert_dirs: Vec<PathBuf>,
    /// Digests of every expert, where the census made them.
    pub(crate) expert_digests: Option<ExpertDigests>,
}

impl Source {
    /// Open what the command line names, else the environment, else the usual folders.
    ///
    /// # Errors
    /// If a file is missing, or trunk, checkpoint and `--layers` do not belong together.
    pub(crate) fn open(cli: &Cli) -> anyhow::Result<Self> {
        let model_dir = folder(cli.model.as_deref(), "K3_MODEL", "k3model")?;
        let trunk_dir = folder(cli.trunk.as_deref(), "K3_TRUNK", "k3trunk")?;
        let mut source = match &cli.census {
            Some(census) => Self::of_census(cli, census, model_dir, trunk_dir)?,
            None => Self::of_trunk(cli, model_dir, trunk_dir)?,
        };
        for dir in &cli.experts_from {
            ensure!(
                dir.is_dir(),
                "{}: not a folder (--experts-from names folders that hold shards)",
                dir.display()
            );
            source.expert_dirs.push(std::path::absolute(dir)?);
        }
        Ok(source)
    }

    /// Folders in which shards are found, the checkpoint's first.
    pub(crate) fn shard_dirs(&self) -> Vec<PathBuf> {
        let first = std::iter::once(&self.model_dir);
        first.chain(&self.expert_dirs).cloned().collect()
    }

    /// What the ledger is computed from.
    pub(crate) fn model(&self) -> Model<'_> {
        Model {
            config: &self.config,
            num_layers: self.num_layers,
            tiles: &self.tiles,
        }
    }

    fn of_trunk(cli: &Cli, model_dir: PathBuf, trunk_dir: PathBuf) -> anyhow::Result<Self> {
        let open = Trunk::open(&trunk_dir)?;
        let config = Config::open(&model_dir)?;
        ensure!(
            config.to_canonical() == open.config.to_canonical(),
            "{}: packed from another checkpoint than {} (re-run: k3-pack --force {} {})",
            trunk_dir.display(),
            model_dir.display(),
            model_dir.display(),
            trunk_dir.display()
        );
        let packed = open.trunk.num_layers;
        let num_layers = cli.layers.map_or(packed, usize::from);
        ensure!(
            num_layers <= packed.min(config.num_hidden_layers),
            "{}: holds {packed} layers, fewer than --layers {num_layers} (re-run: k3-pack --force --layers {num_layers} {} {})",
            trunk_dir.display(),
            model_dir.display(),
            trunk_dir.display()
        );
        let mut tiles = open.specs;
        let runs = |tile: &TileSpec| tile.layer().is_none_or(|layer| layer.get() < num_layers);
        let records = open.trunk.tiles().zip(&tiles);
        let extents = records
            .filter(|(_, tile)| runs(tile))
            .map(|(record, _)| Extent {
                file: record.file,
                offset: record.offset,
                len: record.stored_bytes,
            })
            .collect();
        tiles.retain(runs);
        let expert_digests = digests(&model_dir)?;
        Ok(Self {
            config,
            num_layers,
            tiles,
            identity: open.trunk.identity,
            model_dir,
            trunk_dir,
            trunk_files: open
                .files
                .iter()
                .map(std::path::absolute)
                .collect::<Result<_, _>>()?,
            extents,
            expert_dirs: Vec::new(),
            expert_digests,
        })
    }

    fn of_census(
        cli: &Cli,
        path: &Path,
        model_dir: PathBuf,
        trunk_dir: PathBuf,
    ) -> anyhow::Result<Self> {
        let built_in = path == Path::new(release::NAME);
        let census = if built_in {
            Census::of_release()
        } else {
            Census::open(path)?
        };
        ensure!(
            census.ok,
            "{}: ok is false, the checkpoint has {} problem(s) (mend them, then re-run: k3-census {} -o {})",
            path.display(),
            census.problems.len(),
            census.model_dir,
            path.display()
        );
        // A folder named on the command line is where the checkpoint is now; of the release, it is where it will be.
        let model_dir = if built_in || cli.model.is_some() {
            model_dir
        } else {
            std::path::absolute(&census.model_dir)?
        };
        let config = Config::from_value(&census.config, path)?;
        let known = census.first_layers.unwrap_or(config.num_hidden_layers);
        let num_layers = cli.layers.map_or(known, usize::from);
        ensure!(
            num_layers <= known,
            "{}: of {known} layers, fewer than --layers {num_layers}",
            path.display()
        );
        let stored = exceptions(&census, &config);
        let tiles = trunk_tiles(&config, num_layers, DEFAULT_TILE_BYTES, &|role| {
            stored
                .get(&role)
                .cloned()
                .unwrap_or_else(|| as_released(&config)(role))
        });
        let expert_digests = digests(&model_dir)?;
        Ok(Self {
            config,
            num_layers,
            tiles,
            identity: census.identity.unwrap_or_else(|| release::NAME.to_owned()),
            model_dir,
            trunk_dir,
            trunk_files: Vec::new(),
            extents: Vec::new(),
            expert_dirs: Vec::new(),
            expert_digests,
        })
    }
}

/// Always-used tensors stored otherwise than the release stores them.
fn exceptions(census: &Census, config: &Config) -> BTreeMap<TensorRole, (Dtype, Vec<usize>)> {
    let exception = |found: &TrunkException| {
        let role = TensorRole::parse(&found.tensor, config)?;
        let dtype = [Dtype::F32, Dtype::Bf16]
            .into_iter()
            .find(|dtype| dtype.name() == found.dtype)?;
        let shape = found.shape.iter().map(|&n| usize::try_from(n).ok());
        Some((role, (dtype, shape.collect::<Option<_>>()?)))
    };
    census
        .trunk_exceptions
        .iter()
        .filter_map(exception)
        .collect()
}

/// The digest file of the experts, where there is one.
fn digests(model_dir: &Path) -> anyhow::Result<Option<ExpertDigests>> {
    let path = model_dir.join(DIGESTS_NAME);
    match fs::read(&path) {
        Ok(bytes) => Ok(Some(ExpertDigests {
            sha256: hex(Sha256::digest(&bytes)),
            path,
        })),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// A folder by flag, else by environment, else in the home folder; absolute.
fn folder(flag: Option<&Path>, variable: &str, usual: &str) -> anyhow::Result<PathBuf> {
    let path = match (flag, env::var_os(variable), env::var_os("HOME")) {
        (Some(flag), ..) => flag.to_owned(),
        (_, Some(value), _) if !value.is_empty() => PathBuf::from(value),
        (_, _, Some(home)) => Path::new(&home).join(usual),
        _ => bail!("no folder is named, and neither {variable} nor HOME is set"),
    };
    std::path::absolute(&path).with_context(|| path.display().to_string())
}
