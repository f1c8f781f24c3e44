//! Where the model to plan for comes from: a packed trunk beside its checkpoint, or a census alone.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use k3_shared::{
    config::Config,
    formats::{plan::ExpertDigests, trunk::Trunk},
    ledger::Model,
    release,
    tiles::{DEFAULT_TILE_BYTES, TileSpec, as_released, trunk_tiles},
};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::cli::Cli;

/// Where k3-census writes expert digests.
const DIGESTS_NAME: &str = "k3-experts.sha256";

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
    /// More folders with shards, absolute.
    pub(crate) expert_dirs: Vec<PathBuf>,
    /// Digests of every expert, where the census made them.
    pub(crate) expert_digests: Option<ExpertDigests>,
}

/// What is needed of `census.json`.
#[derive(Debug, Deserialize)]
struct CensusHead {
    schema: String,
    model_dir: PathBuf,
    identity: String,
    ok: bool,
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
        tiles.retain(|tile| tile.layer().is_none_or(|layer| layer.get() < num_layers));
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
            expert_dirs: Vec::new(),
            expert_digests,
        })
    }

    fn of_census(
        cli: &Cli,
        census: &Path,
        model_dir: PathBuf,
        trunk_dir: PathBuf,
    ) -> anyhow::Result<Self> {
        let (config, identity, model_dir, expert_digests) = if census == Path::new(release::NAME) {
            let config = Config::parse(release::CONFIG_JSON.as_bytes(), census)?;
            (config, release::NAME.to_owned(), model_dir, None)
        } else {
            let head = CensusHead::open(census)?;
            // A folder named on the command line is where the checkpoint is now.
            let model_dir = match &cli.model {
                Some(_) => model_dir,
                None => std::path::absolute(head.model_dir)?,
            };
            let config = Config::open(&model_dir)?;
            let expert_digests = digests(&model_dir)?;
            (config, head.identity, model_dir, expert_digests)
        };
        let num_layers = cli.layers.map_or(config.num_hidden_layers, usize::from);
        ensure!(
            num_layers <= config.num_hidden_layers,
            "--layers {num_layers}: the model has {}",
            config.num_hidden_layers
        );
        let tiles = trunk_tiles(
            &config,
            num_layers,
            DEFAULT_TILE_BYTES,
            &as_released(&config),
        );
        Ok(Self {
            config,
            num_layers,
            tiles,
            identity,
            model_dir,
            trunk_dir,
            trunk_files: Vec::new(),
            expert_dirs: Vec::new(),
            expert_digests,
        })
    }
}

impl CensusHead {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let again = || format!("re-run: k3-census MODEL_DIR > {}", path.display());
        let bytes = fs::read(path).with_context(|| format!("{}: ({})", path.display(), again()))?;
        let head: Self = serde_json::from_slice(&bytes)
            .with_context(|| format!("{}: no census ({})", path.display(), again()))?;
        if head.schema != "k3.census/1" {
            bail!(
                "{}: schema is {:?}, not \"k3.census/1\" ({})",
                path.display(),
                head.schema,
                again()
            );
        }
        ensure!(
            head.ok,
            "{}: ok is false, the checkpoint has problems (see its problems[], mend them, then {})",
            path.display(),
            again()
        );
        Ok(head)
    }
}

/// The digest file of the experts, where there is one.
fn digests(model_dir: &Path) -> anyhow::Result<Option<ExpertDigests>> {
    let path = model_dir.join(DIGESTS_NAME);
    match fs::read(&path) {
        Ok(bytes) => Ok(Some(ExpertDigests {
            sha256: hex(&Sha256::digest(&bytes)),
            path,
        })),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
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
