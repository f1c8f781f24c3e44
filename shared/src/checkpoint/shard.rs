//! One shard: found, its header read and checked against the configuration.

use std::{
    fs::{self, File},
    io::ErrorKind,
    ops::Range,
    path::{Path, PathBuf},
};

use super::{
    CheckpointError, Index, LayerExperts, Slots, TensorLocation,
    experts::Geometry,
    identity::{ShardDigest, shard_digest},
};
use crate::{
    config::Config,
    formats::{
        census::{Problem, ProblemList},
        safetensors::{self, Entry, Header, StoredDtype},
    },
    ids::{ExpertId, ExpertIdx, LayerIdx},
    names::{Dtype, ExpertTensor, TEXT_PREFIX, TensorRole},
};

/// Prefixes of the tensors that only the vision part has.
pub const VISION_PREFIXES: [&str; 2] = ["vision_tower.", "mm_projector."];

/// A shard's name and the place it was found, or should be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShardFile {
    /// File name.
    pub name: String,
    /// Its path.
    pub path: PathBuf,
}

/// A tensor as a header has it.
#[derive(Clone, Copy, Debug)]
pub struct StoredTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it is for; `None` if the text model has no such tensor.
    pub role: Option<TensorRole>,
    /// Element type.
    pub dtype: StoredDtype,
    /// Row-major shape.
    pub shape: &'a [u64],
    /// Absolute offset in the file, bytes.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What one shard holds.
#[derive(Debug)]
pub struct ShardScan {
    /// The file.
    pub file: ShardFile,
    /// Its size; 0 if it is missing.
    pub bytes: u64,
    /// Bytes before the data; 0 if the header is malformed.
    pub header_bytes: u64,
    /// Tensors.
    pub num_tensors: u64,
    /// Whether the header could be used; tensors of an unusable shard are not also called missing.
    pub usable: bool,
    /// Everything wrong with this shard alone.
    pub problems: Vec<Problem>,
    /// Its always-used tensors in file order; the shard number is filled in later.
    pub trunk: Vec<(TensorRole, TensorLocation)>,
    /// Its experts.
    pub experts: Vec<LayerExperts>,
    /// Tensors that are here but of the wrong dtype or shape.
    pub(super) refused: Vec<TensorRole>,
    pub(super) digest: Option<ShardDigest>,
}

impl ShardScan {
    fn new(file: &ShardFile) -> Self {
        Self {
            file: file.clone(),
            bytes: 0,
            header_bytes: 0,
            num_tensors: 0,
            usable: false,
            problems: Vec::new(),
            trunk: Vec::new(),
            experts: Vec::new(),
            refused: Vec::new(),
            digest: None,
        }
    }

    /// Whether it has a text tensor of the first `layers` layers or beside them.
    pub fn is_needed(&self, layers: usize) -> bool {
        let within = |role: &TensorRole| super::slots::role_is_within(*role, layers);
        self.trunk.iter().any(|(role, _)| within(role))
            || self.experts.iter().any(|e| e.layer.get() < layers)
            || self.refused.iter().any(within)
    }

    /// From the first byte of the first to the last of the last always-used tensor; empty if there is none.
    fn trunk_run(&self) -> Range<u64> {
        let begin = self.trunk.iter().map(|(_, at)| at.offset).min();
        let end = self.trunk.iter().map(|(_, at)| at.offset + at.bytes).max();
        begin.unwrap_or(0)..end.unwrap_or(0)
    }
}

/// The shards to open for the first `layers` layers, each from the first of `folders` that has it, in byte order of their names.
///
/// With an index that lists everything needed, these are the files it names, found or not; else every `*.safetensors` file.
///
/// # Errors
/// If a folder has to be listed and cannot be.
pub fn find_shards(
    folders: &[&Path],
    index: Option<&Index>,
    config: &Config,
    slots: &Slots,
    layers: usize,
) -> Result<Vec<ShardFile>, CheckpointError> {
    let mut names: Vec<String> = Vec::new();
    let mut complete = false;
    if let Some(index) = index {
        let needed = index.needed_files(slots, layers);
        let named = index.files.iter().zip(needed);
        names.extend(named.filter(|(_, n)| *n).map(|(name, _)| name.clone()));
        complete = index.is_complete(config, slots, layers);
    }
    if !complete {
        for folder in folders {
            names.extend(shards_in(folder)?);
        }
    }
    names.sort();
    names.dedup();
    Ok(names
        .into_iter()
        .map(|name| find_shard(folders, name))
        .collect())
}

/// One shard, from the first of `folders` that has it; in the first one if none has.
pub fn find_shard(folders: &[&Path], name: String) -> ShardFile {
    let paths = folders.iter().map(|folder| folder.join(&name));
    let path = paths
        .clone()
        .find(|path| path.exists())
        .or_else(|| paths.clone().find(|path| path.is_symlink()))
        .or_else(|| paths.clone().next())
        .unwrap_or_default();
    ShardFile { name, path }
}

/// Names of the `*.safetensors` files in a folder, links included, hidden files not; unsorted.
///
/// # Errors
/// If the folder cannot be listed.
pub fn shards_in(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let failed = |source| CheckpointError::Folder {
        path: folder.into(),
        source,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if let Some(name) = name.to_str()
            && name.ends_with(".safetensors")
            && !name.starts_with('.')
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// What to say of a link whose target is not there.
pub(super) fn dangling(target: &Path) -> String {
    format!(
        "is a link to {}, which does not exist; finish the download",
        target.display()
    )
}

/// Read and check one shard, telling `on_tensor` of each tensor in file order. Nothing outside the file is looked at.
pub fn scan_shard(
    config: &Config,
    file: &ShardFile,
    on_tensor: &mut dyn FnMut(&StoredTensor<'_>),
) -> ShardScan {
    let mut scan = ShardScan::new(file);
    if let Err(problems) = fill(&mut scan, config, on_tensor) {
        scan.problems.extend(problems);
    }
    scan
}

fn fill(
    scan: &mut ShardScan,
    config: &Config,
    on_tensor: &mut dyn FnMut(&StoredTensor<'_>),
) -> Result<(), Vec<Problem>> {
    let name = scan.file.name.clone();
    let (file, bytes) = open(&scan.file).map_err(|message| vec![Problem::of(&name, message)])?;
    scan.bytes = bytes;
    let start = safetensors::map_header(&file, bytes, &name).map_err(|problem| vec![problem])?;
    let header = Header::parse(&start, bytes, &name)?;
    scan.header_bytes = header.header_bytes;
    scan.num_tensors = header.entries.len() as u64;
    scan.usable = true;
    let mut sorter = Sorter {
        config,
        specs: ExpertSpecs::new(config),
        problems: ProblemList::new(&name),
        scan,
    };
    for entry in &header.entries {
        sorter.take(&header, entry, on_tensor);
    }
    let problems = sorter.problems.into_vec();
    let geometry = Geometry::new(config);
    for experts in &mut scan.experts {
        experts.compress(&geometry);
    }
    if scan.is_needed(usize::MAX) {
        let digest = shard_digest(&start, &file, &scan.trunk_run());
        scan.digest = Some(digest.map_err(|e| {
            vec![Problem::of(
                &name,
                format!("its tensors cannot be read: {e}"),
            )]
        })?);
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems)
    }
}

/// Open a shard and get its size, or say why not.
fn open(file: &ShardFile) -> Result<(File, u64), String> {
    let opened = File::open(&file.path).map_err(|e| match fs::read_link(&file.path) {
        Ok(target) if e.kind() == ErrorKind::NotFound => dangling(&target),
        _ if e.kind() == ErrorKind::NotFound => "is missing; download it".into(),
        _ => format!("cannot be opened: {e}"),
    })?;
    let metadata = opened
        .metadata()
        .map_err(|e| format!("cannot be read: {e}"))?;
    if metadata.is_file() {
        Ok((opened, metadata.len()))
    } else {
        Err("is not a file".into())
    }
}

/// The six shapes of an expert, looked up half a million times.
struct ExpertSpecs([Vec<usize>; 6]);

impl ExpertSpecs {
    fn new(config: &Config) -> Self {
        let id = ExpertId {
            layer: LayerIdx(0),
            expert: ExpertIdx(0),
        };
        Self(ExpertTensor::ALL.map(|t| TensorRole::Expert(id, t).spec(config).shape))
    }

    fn accepts(&self, tensor: ExpertTensor, dtype: StoredDtype, shape: &[u64]) -> bool {
        let spec = &self.0[tensor as usize];
        dtype == StoredDtype::U8
            && spec.len() == shape.len()
            && spec.iter().zip(shape).all(|(&a, &b)| a as u64 == b)
    }
}

/// Puts the entries of one header where they belong.
struct Sorter<'s, 'c> {
    config: &'c Config,
    specs: ExpertSpecs,
    problems: ProblemList<'s>,
    scan: &'s mut ShardScan,
}

impl Sorter<'_, '_> {
    fn take(
        &mut self,
        header: &Header<'_>,
        entry: &Entry<'_>,
        on_tensor: &mut dyn FnMut(&StoredTensor<'_>),
    ) {
        let tensor = StoredTensor {
            name: &entry.name,
            role: TensorRole::parse(&entry.name, self.config),
            dtype: entry.dtype,
            shape: header.shape(entry),
            // The header has been checked against the file's size.
            offset: header.header_bytes + entry.begin,
            bytes: entry.end - entry.begin,
        };
        on_tensor(&tensor);
        match tensor.role {
            Some(TensorRole::Expert(id, part))
                if self.specs.accepts(part, tensor.dtype, tensor.shape) =>
            {
                self.layer(id.layer).insert(id.expert, part, tensor.offset);
            }
            Some(role @ TensorRole::Expert(..)) => self.refuse(&tensor, role),
            Some(role) => self.always_used(&tensor, role),
            None if tensor.name.starts_with(TEXT_PREFIX) => {
                let message = "is no tensor of the model that config.json describes";
                self.problems.tensor(tensor.name, tensor.offset, message);
            }
            None => {}
        }
    }

    fn layer(&mut self, layer: LayerIdx) -> &mut LayerExperts {
        let experts = &mut self.scan.experts;
        // In file order, nearly always the last.
        let known = experts.iter().rposition(|e| e.layer == layer);
        let at = known.unwrap_or_else(|| {
            experts.push(LayerExperts::new(self.config, layer));
            experts.len() - 1
        });
        &mut experts[at]
    }

    fn always_used(&mut self, tensor: &StoredTensor<'_>, role: TensorRole) {
        let dtype = match tensor.dtype {
            StoredDtype::F32 => Some(Dtype::F32),
            StoredDtype::Bf16 => Some(Dtype::Bf16),
            _ => None,
        };
        let shape: Option<Vec<usize>> = tensor
            .shape
            .iter()
            .map(|&dim| usize::try_from(dim).ok())
            .collect();
        match (dtype, shape) {
            (Some(dtype), Some(shape)) if role.accepts(self.config, dtype, &shape) => {
                let location = TensorLocation {
                    shard: super::ShardIdx(0),
                    dtype,
                    shape,
                    offset: tensor.offset,
                    bytes: tensor.bytes,
                };
                self.scan.trunk.push((role, location));
            }
            _ => self.refuse(tensor, role),
        }
    }

    fn refuse(&mut self, tensor: &StoredTensor<'_>, role: TensorRole) {
        let spec = role.spec(self.config);
        let message = format!(
            "is {} {:?}, but config.json calls for {} {:?}",
            tensor.dtype.name(),
            tensor.shape,
            spec.dtype.name(),
            spec.shape
        );
        self.problems.tensor(tensor.name, tensor.offset, message);
        self.scan.refused.push(role);
    }
}
