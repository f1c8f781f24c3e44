//! Shards to a checkpoint: every tensor exactly once, in whichever shard it lies.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    path::Path,
};

use super::{
    Checkpoint, INDEX_FILE, Index, Shard, ShardIdx, ShardScan, Slots, TensorLocation,
    experts::{Experts, Refused},
    identity::identity,
    slots::role_is_within,
};
use crate::{
    config::{Config, Mlp},
    formats::census::{Problem, ProblemList},
    ids::{ExpertId, LayerIdx},
    names::{ExpertTensor, TOP_TENSORS, TensorRole, layer_tensors},
};

/// What the shards make together.
#[derive(Debug)]
pub struct Assembly {
    /// The checkpoint; with problems, whatever part of it there is.
    pub checkpoint: Checkpoint,
    /// Its identity, if every needed tensor was found.
    pub identity: Option<String>,
    /// Problems of the shards, then those between them.
    pub problems: Vec<Problem>,
}

/// Put scanned shards together as the first `layers` layers of the checkpoint in `dir`.
///
/// A tensor that the index puts into an unusable shard is not also reported missing.
pub fn assemble(
    dir: &Path,
    config: Config,
    slots: &Slots,
    layers: usize,
    index: Option<&Index>,
    mut scans: Vec<ShardScan>,
) -> Assembly {
    let mut problems: Vec<Problem> = Vec::new();
    for scan in &mut scans {
        problems.append(&mut scan.problems);
    }
    let unusable: HashSet<String> = scans
        .iter()
        .filter(|scan| !scan.usable)
        .map(|scan| scan.file.name.clone())
        .collect();
    scans.retain(|scan| scan.is_needed(layers));
    scans.sort_by(|a, b| a.file.cmp(&b.file));

    let names: Vec<String> = scans.iter().map(|scan| scan.file.name.clone()).collect();
    let mut joiner = Joiner {
        names: &names,
        tensors: BTreeMap::new(),
        experts: Experts::new(&config, layers),
        problems: Vec::new(),
        refused: BTreeSet::new(),
    };
    for (shard, scan) in (0..).map(ShardIdx).zip(&mut scans) {
        joiner.take(shard, scan, layers);
    }
    problems.append(&mut joiner.problems);
    joiner.experts.settle();

    let gaps = Gaps {
        config: &config,
        slots,
        index,
        unusable: &unusable,
        joiner: &joiner,
    };
    let missing = gaps.problems(layers);
    let Joiner {
        tensors,
        experts,
        refused,
        ..
    } = joiner;
    let identity = if missing.is_none() && refused.is_empty() {
        identity(&config, &scans)
    } else {
        None
    };
    problems.extend(missing.unwrap_or_default());
    let checkpoint = Checkpoint {
        dir: dir.into(),
        layers,
        shards: scans
            .into_iter()
            .map(|scan| Shard {
                name: scan.file.name,
                path: scan.file.path,
                bytes: scan.bytes,
            })
            .collect(),
        tensors,
        experts,
        identity: identity.clone().unwrap_or_default(),
        config,
    };
    Assembly {
        checkpoint,
        identity,
        problems,
    }
}

struct Joiner<'n> {
    /// Names of the needed shards, by number.
    names: &'n [String],
    tensors: BTreeMap<TensorRole, TensorLocation>,
    experts: Experts,
    problems: Vec<Problem>,
    refused: BTreeSet<TensorRole>,
}

impl Joiner<'_> {
    fn take(&mut self, shard: ShardIdx, scan: &mut ShardScan, layers: usize) {
        let names = self.names;
        let twice = |other: ShardIdx| {
            let other = names.get(other.0 as usize).map_or("", String::as_str);
            format!("is also in {other}; remove one of the two")
        };
        let mut problems = ProblemList::new(&scan.file.name);
        for (role, location) in &mut scan.trunk {
            location.shard = shard;
            if !role_is_within(*role, layers) {
                continue;
            }
            if let Some(other) = self.tensors.get(role) {
                let message = twice(other.shard);
                problems.tensor(&role.name(), location.offset, message);
            } else {
                self.tensors.insert(*role, location.clone());
            }
        }
        for experts in &scan.experts {
            self.experts.insert(shard, experts, |role, offset, why| {
                let message = match why {
                    Refused::Twice(other) => twice(other),
                    Refused::TooFar => "lies past 2^48 bytes or in a shard past 65,534".into(),
                };
                problems.tensor(&role.name(), offset, message);
            });
        }
        self.refused.extend(scan.refused.iter().copied());
        self.problems.append(&mut problems.into_vec());
    }
}

/// Looks for tensors that no shard has.
struct Gaps<'a> {
    config: &'a Config,
    slots: &'a Slots,
    index: Option<&'a Index>,
    unusable: &'a HashSet<String>,
    joiner: &'a Joiner<'a>,
}

impl Gaps<'_> {
    /// Everything missing; `None` if nothing is, an empty list if all that is lies in unusable shards.
    fn problems(&self, layers: usize) -> Option<Vec<Problem>> {
        let mut missing = Missing::default();
        let top: Vec<TensorRole> = self.absent(TOP_TENSORS).collect();
        for role in top {
            self.report(&mut missing, role, role.name());
        }
        for layer in self.config.layers().take(layers) {
            self.layer(&mut missing, layer);
        }
        missing.any.then_some(missing.problems)
    }

    fn layer(&self, missing: &mut Missing, layer: LayerIdx) {
        let all: Vec<TensorRole> = layer_tensors(self.config, layer)
            .map(|tensor| TensorRole::Layer(layer, tensor))
            .collect();
        let trunk: Vec<TensorRole> = self.absent(all.iter().copied()).collect();
        let experts: Vec<TensorRole> = match self.config.mlp(layer) {
            Mlp::Dense => Vec::new(),
            Mlp::Moe => self.joiner.experts.missing(layer),
        };
        let experts: Vec<TensorRole> = self.not_refused(experts).collect();
        let whole_layer = all.len() == trunk.len()
            && (self.config.mlp(layer) == Mlp::Dense
                || experts.len() == self.config.moe.num_experts * ExpertTensor::ALL.len());
        if whole_layer && let Some(&first) = trunk.first() {
            self.report(missing, first, format!("every tensor of layer {layer}"));
            return;
        }
        for role in trunk {
            self.report(missing, role, role.name());
        }
        // All six of an expert are one problem.
        for group in experts.chunk_by(|a, b| expert_of(*a) == expert_of(*b)) {
            match (group, group.first()) {
                (group, Some(&first)) if group.len() == ExpertTensor::ALL.len() => {
                    let name = first.name();
                    let prefix = name.trim_end_matches(ExpertTensor::W1Packed.suffix());
                    self.report(missing, first, format!("{prefix}*"));
                }
                _ => group
                    .iter()
                    .for_each(|role| self.report(missing, *role, role.name())),
            }
        }
    }

    fn absent(
        &self,
        roles: impl IntoIterator<Item = TensorRole>,
    ) -> impl Iterator<Item = TensorRole> {
        let absent = roles
            .into_iter()
            .filter(|role| !self.joiner.tensors.contains_key(role));
        self.not_refused(absent)
    }

    fn not_refused(
        &self,
        roles: impl IntoIterator<Item = TensorRole>,
    ) -> impl Iterator<Item = TensorRole> {
        let refused = &self.joiner.refused;
        roles
            .into_iter()
            .filter(move |role| !refused.contains(role))
    }

    /// Report a tensor, unless an unusable shard that has been reported accounts for it.
    fn report(&self, missing: &mut Missing, role: TensorRole, name: String) {
        missing.any = true;
        let (file, message) = match self.index {
            None if self.unusable.is_empty() => {
                ("config.json", "calls for it, but no shard has it")
            }
            None => return,
            Some(index) => {
                let number = index.file_of(self.slots.of(role));
                match number.and_then(|number| index.file_name(number)) {
                    Some(file) if self.unusable.contains(file) => return,
                    Some(file) => (file, "is not in it, although the index says so"),
                    None => (INDEX_FILE, "is in no shard, and the index does not list it"),
                }
            }
        };
        if missing.problems.len() < MAX_MISSING {
            missing
                .problems
                .push(Problem::in_tensor(file, name, None, message));
        } else if missing.problems.len() == MAX_MISSING {
            let message = format!("over {MAX_MISSING} tensors are missing");
            missing.problems.push(Problem::of(file, message));
        }
    }
}

/// Missing tensors named one by one.
const MAX_MISSING: usize = 1000;

#[derive(Default)]
struct Missing {
    any: bool,
    problems: Vec<Problem>,
}

fn expert_of(role: TensorRole) -> Option<ExpertId> {
    match role {
        TensorRole::Expert(id, _) => Some(id),
        _ => None,
    }
}
