//! All shards at once: each scanned in parallel, then compared with index and manifest.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path};

use anyhow::Context as _;
use k3_shared::{
    checkpoint::{
        self, Assembly, Index, ShardFile, ShardScan, Slots, StoredTensor, VISION_PREFIXES,
        assemble, find_shard, find_shards, scan_shard, shards_in,
    },
    config::Config,
    formats::census::{Classes, Problem, ProblemList, ShardRecord, TrunkException, params},
    ids::LayerIdx,
    names::{LayerTensor, TensorClass, TensorRole},
};
use rayon::prelude::*;

use crate::{
    listing::{Listing, check_total, compare_with_index},
    manifest::Manifest,
};

/// One shard of the survey.
#[derive(Debug)]
pub(crate) struct SurveyedShard {
    /// Where it is.
    pub(crate) file: ShardFile,
    /// What the census says of it.
    pub(crate) record: ShardRecord,
    /// Layers with experts in it.
    pub(crate) expert_layers: Vec<LayerIdx>,
}

/// What was found in a folder.
#[derive(Debug)]
pub(crate) struct Survey {
    pub(crate) first_layers: Option<usize>,
    pub(crate) assembly: Assembly,
    pub(crate) shards: Vec<SurveyedShard>,
    pub(crate) classes: Classes,
    pub(crate) trunk_exceptions: Vec<TrunkException>,
    pub(crate) problems: Vec<Problem>,
    /// Files that are said to exist but need not: shards of the index without text tensors.
    pub(crate) optional: Vec<String>,
}

impl Survey {
    /// Scan the folder in the current thread pool.
    ///
    /// # Errors
    /// If the folder cannot be listed.
    pub(crate) fn take(
        dir: &Path,
        config: Config,
        slots: &Slots,
        first_layers: Option<usize>,
        manifest: &Manifest,
    ) -> anyhow::Result<Self> {
        let layers = first_layers.unwrap_or(config.num_hidden_layers);
        let mut problems = Vec::new();
        let index = Index::open(dir, &config, slots).unwrap_or_else(|problem| {
            problems.push(problem);
            None
        });
        match &index {
            Some(index) => problems.extend(index.problems.iter().cloned()),
            None if problems.is_empty() => log::info!(
                "no {} here: the shards are checked against config.json alone",
                checkpoint::INDEX_FILE
            ),
            None => {}
        }
        let files = choose(dir, index.as_ref(), &config, slots, first_layers)?;
        let listing = Listing::new(index.as_ref(), slots);
        let mut findings: Vec<Finding> = files
            .shards
            .par_iter()
            .with_max_len(1)
            .map(|file| scan(&config, &listing, manifest, file))
            .collect();
        if first_layers.is_some() {
            findings.retain(|f| !f.scan.usable || f.scan.is_needed(layers));
        }
        if let Some(index) = index.as_ref().filter(|_| first_layers.is_none()) {
            problems.extend(check_total(index, &findings, &files.absent));
        }
        if findings.is_empty() {
            let message = "the folder has no *.safetensors files; download the shards";
            problems.push(Problem::of("*.safetensors", message));
        }
        let mut survey = Self::join(findings, problems, first_layers, |scans| {
            assemble(dir, config, slots, layers, index.as_ref(), scans)
        });
        survey.judge_gaps(&files.gaps);
        survey.optional = files.absent;
        Ok(survey)
    }

    fn join(
        findings: Vec<Finding>,
        mut problems: Vec<Problem>,
        first_layers: Option<usize>,
        assemble: impl FnOnce(Vec<ShardScan>) -> Assembly,
    ) -> Self {
        let mut classes = Classes::default();
        let mut trunk_exceptions = Vec::new();
        let mut shards = Vec::new();
        let mut scans = Vec::new();
        for finding in findings {
            problems.extend(finding.problems);
            if finding.scan.bytes > 0 {
                shards.push(SurveyedShard {
                    file: finding.scan.file.clone(),
                    record: finding.record,
                    expert_layers: finding.scan.experts.iter().map(|e| e.layer).collect(),
                });
            }
            classes.merge(&finding.classes);
            trunk_exceptions.extend(finding.exceptions);
            scans.push(finding.scan);
        }
        let mut assembly = assemble(scans);
        problems.append(&mut assembly.problems);
        Self {
            first_layers,
            assembly,
            shards,
            classes,
            trunk_exceptions,
            problems,
            optional: Vec::new(),
        }
    }

    /// Without an index, numbers missing from the files' names are a problem only if tensors are missing too.
    fn judge_gaps(&mut self, gaps: &[String]) {
        if self.assembly.identity.is_some() && !gaps.is_empty() {
            self.problems.retain(|p| !gaps.contains(&p.file));
            log::info!(
                "{} are not here; no text tensor is missing, so they hold none",
                gaps.join(", ")
            );
        }
    }
}

/// The files to look at.
struct Choice {
    shards: Vec<ShardFile>,
    /// Named by the index, not here, and without text tensors.
    absent: Vec<String>,
    /// Missing from the numbered names, where there is no index to tell what they hold; also in `shards`.
    gaps: Vec<String>,
}

fn choose(
    dir: &Path,
    index: Option<&Index>,
    config: &Config,
    slots: &Slots,
    first_layers: Option<usize>,
) -> anyhow::Result<Choice> {
    let folders = [dir];
    let mut choice = Choice {
        shards: Vec::new(),
        absent: Vec::new(),
        gaps: Vec::new(),
    };
    if let Some(layers) = first_layers {
        choice.shards = find_shards(&folders, index, config, slots, layers)?;
        return Ok(choice);
    }
    let mut names = shards_in(dir).context("the folder cannot be listed")?;
    if let Some(index) = index {
        let needed = index.needed_files(slots, config.num_hidden_layers);
        for (name, needed) in index.files.iter().zip(needed) {
            let path = dir.join(name);
            if needed || path.exists() || path.is_symlink() {
                names.push(name.clone());
            } else {
                choice.absent.push(name.clone());
            }
        }
    } else {
        choice.gaps = gaps(&names);
        names.extend(choice.gaps.iter().cloned());
    }
    if !choice.absent.is_empty() {
        let absent = choice.absent.join(", ");
        log::info!("{absent} are not here; they hold no text tensor and are not needed");
    }
    names.sort();
    names.dedup();
    choice.shards = names
        .into_iter()
        .map(|name| find_shard(&folders, name))
        .collect();
    Ok(choice)
}

/// Most numbers that a file name is believed to count.
const MAX_NUMBERED: usize = 10_000;

/// The names that `model-00001-of-000096.safetensors` and its like lack to be complete.
fn gaps(names: &[String]) -> Vec<String> {
    let parse = |name: &str| -> Option<(String, usize, String, usize)> {
        let (rest, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let count = total.parse().ok()?;
        number.parse::<usize>().ok()?;
        Some((stem.into(), number.len(), total.into(), count))
    };
    let Some((stem, width, total, count)) = names.iter().find_map(|name| parse(name)) else {
        return Vec::new();
    };
    (1..=count.min(MAX_NUMBERED))
        .map(|number| format!("{stem}-{number:0width$}-of-{total}.safetensors"))
        .filter(|name| !names.contains(name))
        .collect()
}

/// What one shard adds to the survey.
pub(crate) struct Finding {
    pub(crate) scan: ShardScan,
    record: ShardRecord,
    pub(crate) classes: Classes,
    exceptions: Vec<TrunkException>,
    problems: Vec<Problem>,
}

fn scan(config: &Config, listing: &Listing<'_>, manifest: &Manifest, file: &ShardFile) -> Finding {
    let mut problems = ProblemList::new(&file.name);
    let mut classes = Classes::default();
    let mut exceptions = Vec::new();
    let mut padding = Vec::new();
    let mut foreign = 0;
    let number = listing.index.and_then(|index| index.number(&file.name));
    let scan = scan_shard(config, file, &mut |tensor| {
        let elements = tensor.shape.iter().copied().fold(1, u64::saturating_mul);
        if let Some(class) = class_of(config, tensor) {
            let totals = classes.get_mut(class);
            totals.add(params(tensor.role, elements), tensor.bytes);
        } else {
            foreign += 1;
            if !tensor.name.starts_with(k3_shared::names::TEXT_PREFIX) {
                let message = "is neither a text nor a vision tensor of the model";
                problems.tensor(tensor.name, tensor.offset, message);
            }
        }
        exceptions.extend(exception(config, tensor));
        if let Some(TensorRole::Layer(_, LayerTensor::KdaALog)) = tensor.role {
            padding.extend(Padding::of(config, tensor));
        }
        if let (Some(index), Some(number)) = (listing.index, number) {
            compare_with_index(listing, index, number, tensor, &mut problems);
        }
    });
    if scan.usable && listing.index.is_some() && number.is_none() {
        let message = "is not named by the index; remove it, or fetch the index it belongs to";
        problems.file(message);
    }
    for padding in &padding {
        padding.check(file, &mut problems);
    }
    let expected_bytes = manifest.size(&file.name);
    if let Some(expected) = expected_bytes.filter(|&e| scan.bytes > 0 && e != scan.bytes) {
        let (found, name) = (scan.bytes, manifest.name());
        problems.file(format!(
            "has {found} bytes, but {name} is {expected}; download it again"
        ));
    }
    log::debug!(
        "{}: {} tensors, {foreign} of them foreign",
        file.name,
        scan.num_tensors
    );
    let record = ShardRecord {
        file: file.name.clone(),
        bytes: scan.bytes,
        expected_bytes,
        tensors: scan.num_tensors,
        header_bytes: scan.header_bytes,
        sha256: None,
    };
    Finding {
        scan,
        record,
        classes,
        exceptions,
        problems: problems.into_vec(),
    }
}

fn class_of(config: &Config, tensor: &StoredTensor<'_>) -> Option<TensorClass> {
    let is_vision = || VISION_PREFIXES.iter().any(|p| tensor.name.starts_with(p));
    match tensor.role {
        Some(role) => Some(role.class(config)),
        None => is_vision().then_some(TensorClass::Vision),
    }
}

/// An always-used tensor that the model accepts but the release stores otherwise.
fn exception(config: &Config, tensor: &StoredTensor<'_>) -> Option<TrunkException> {
    let role = tensor
        .role
        .filter(|role| !matches!(role, TensorRole::Expert(..)))?;
    let spec = role.spec(config);
    let same_shape = spec.shape.len() == tensor.shape.len()
        && spec
            .shape
            .iter()
            .zip(tensor.shape)
            .all(|(&a, &b)| a as u64 == b);
    let same = spec.dtype.name() == tensor.dtype.name() && same_shape;
    (!same).then(|| TrunkException {
        tensor: tensor.name.into(),
        dtype: tensor.dtype.name().into(),
        shape: tensor.shape.to_vec(),
    })
}

/// Entries of an `A_log` past the heads.
struct Padding {
    tensor: String,
    offset: u64,
    bytes: usize,
}

impl Padding {
    fn of(config: &Config, tensor: &StoredTensor<'_>) -> Option<Self> {
        let element = tensor.dtype.bits() / 8;
        let used = (config.kda.num_heads as u64).checked_mul(element)?;
        let bytes = usize::try_from(tensor.bytes.checked_sub(used)?).ok()?;
        // A list far longer than the model is wide is no padding; its shape is for others to judge.
        (bytes > 0 && bytes <= 1 << 20).then(|| Self {
            tensor: tensor.name.into(),
            offset: tensor.offset + used,
            bytes,
        })
    }

    /// Entries that nothing reads must be zero: anything else means that the list is something other than per-head values.
    fn check(&self, file: &ShardFile, problems: &mut ProblemList<'_>) {
        let mut bytes = vec![0; self.bytes];
        let read = File::open(&file.path).and_then(|f| f.read_exact_at(&mut bytes, self.offset));
        match (read, bytes.iter().position(|&b| b != 0)) {
            (Ok(()), None) => {}
            (Ok(()), Some(at)) => {
                let message = "an entry past num_heads is not zero; is this one value per head?";
                problems.tensor(&self.tensor, self.offset + at as u64, message);
            }
            (Err(e), _) => {
                let message = format!("cannot be read: {e}");
                problems.tensor(&self.tensor, self.offset, message);
            }
        }
    }
}
