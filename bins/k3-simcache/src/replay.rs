//! The request groups to replay, and which of them count.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use k3_shared::{
    cache::{CacheError, Geometry, Key},
    formats::trace::{Mode, Pair, Trace, TraceError, TraceReader, cache_groups},
    ids::{ExpertId, LayerIdx},
};
use serde::Serialize;

use crate::{PartArgs, Pass, report::TraceFacts};

/// Why a trace cannot be replayed as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace itself.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Its header or numbers name no experts.
    #[error("{}: {source}", path.display())]
    Shape {
        /// The trace.
        path: PathBuf,
        /// What is wrong.
        source: CacheError,
    },
    /// A flag that this kind of trace has no use for.
    #[error("{}: {problem}", path.display())]
    Part {
        /// The trace.
        path: PathBuf,
        /// What was asked for, and what to ask for instead.
        problem: String,
    },
    /// A header-less trace whose tokens cannot be told apart.
    #[error("{}: byte {offset}: {problem}; give the model's --top-k, or leave out --pass and --warmup-tokens to replay it as is", path.display())]
    Tokens {
        /// The trace.
        path: PathBuf,
        /// Where a run of one layer begins.
        offset: usize,
        /// Why it is not a whole number of tokens.
        problem: String,
    },
}

/// What the counted steps were for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceMode {
    /// Prompts only.
    Prefill,
    /// Generation only.
    Decode,
    /// Both.
    Mixed,
    /// The trace does not say.
    Unknown,
}

/// One group of a replay: a run of [`Replay::keys`] up to `end`.
#[derive(Clone, Copy, Debug)]
struct Group {
    layer: LayerIdx,
    end: usize,
    counted: bool,
}

/// Requests in order, as groups.
#[derive(Debug)]
pub struct Replay {
    /// The shape of the keys.
    pub geometry: Geometry,
    /// Payload of one expert, if the trace says.
    pub expert_bytes: Option<u64>,
    /// What is counted.
    pub facts: TraceFacts,
    /// Counted requests that no cache could have held, because nobody asked before.
    pub compulsory_misses: u64,
    /// What to know before believing the result.
    pub warnings: Vec<String>,
    keys: Vec<Key>,
    groups: Vec<Group>,
}

impl Replay {
    /// The part of `trace` that `part` asks for; `path` names it in errors.
    ///
    /// # Errors
    /// If the trace is damaged, holds no such part, or nothing is left to count.
    pub fn new(trace: Trace, path: &Path, part: &PartArgs) -> Result<Self, ReplayError> {
        let replay = match trace {
            Trace::Recorded(reader) => Self::recorded(reader, path, part),
            Trace::Pairs(pairs) => Self::pairs(&pairs, path, part),
        }?;
        if replay.facts.requests == 0 {
            let problem =
                "nothing is left to count: lower --warmup-tokens, or leave out --decode-only";
            return Err(part_error(path, problem));
        }
        Ok(replay)
    }

    /// The groups in order: layer, keys, and whether they count.
    pub fn groups(&self) -> impl Iterator<Item = (LayerIdx, &[Key], bool)> + Clone {
        let starts = std::iter::once(0).chain(self.groups.iter().map(|group| group.end));
        starts
            .zip(&self.groups)
            .map(|(start, group)| (group.layer, &self.keys[start..group.end], group.counted))
    }

    fn empty(geometry: Geometry, expert_bytes: Option<u64>) -> Self {
        Self {
            geometry,
            expert_bytes,
            facts: TraceFacts::default(),
            compulsory_misses: 0,
            warnings: Vec::new(),
            keys: Vec::new(),
            groups: Vec::new(),
        }
    }

    fn push(&mut self, layer: LayerIdx, keys: &[Key], counted: bool) {
        self.keys.extend_from_slice(keys);
        let end = self.keys.len();
        self.groups.push(Group {
            layer,
            end,
            counted,
        });
    }

    /// Count requests once all groups are there.
    fn finish(mut self, tokens: Option<u64>, mode: TraceMode) -> Self {
        let mut asked = BTreeSet::new();
        let mut counted_keys = BTreeSet::new();
        let (mut requests, mut warmup_requests, mut compulsory_misses) = (0, 0, 0);
        for (_, keys, counted) in self.groups() {
            for &key in keys {
                let is_new = asked.insert(key);
                if counted {
                    requests += 1;
                    compulsory_misses += u64::from(is_new);
                    counted_keys.insert(key);
                } else {
                    warmup_requests += 1;
                }
            }
        }
        self.compulsory_misses = compulsory_misses;
        self.facts = TraceFacts {
            requests,
            distinct_experts: counted_keys.len() as u64,
            tokens,
            mode,
            warmup_requests,
        };
        self
    }

    fn recorded<R: std::io::Read>(
        mut reader: TraceReader<R>,
        path: &Path,
        part: &PartArgs,
    ) -> Result<Self, ReplayError> {
        if part.pass.is_some() {
            let problem = "--pass is for header-less traces; this one has steps: use --decode-only or --warmup-tokens";
            return Err(part_error(path, problem));
        }
        let geometry = reader
            .header()
            .geometry()
            .map_err(|source| shape_error(path, source))?;
        let mut replay = Self::empty(geometry, Some(reader.header().expert_bytes));
        let warmup = part.warmup_tokens.unwrap_or(0);
        let (mut rows_before, mut rows_counted) = (0u64, 0u64);
        let mut step = None;
        let mut modes = BTreeSet::new();
        let mut counted = false;
        for group in cache_groups(&mut reader)? {
            if step != Some(group.step) {
                step = Some(group.step);
                counted =
                    rows_before >= warmup && (group.mode == Mode::Decode || !part.decode_only);
                rows_before += group.rows as u64;
                if counted {
                    rows_counted += group.rows as u64;
                    modes.insert(group.mode == Mode::Decode);
                }
            }
            replay.push(group.layer, &group.keys, counted);
        }
        let mode = match (modes.contains(&false), modes.contains(&true)) {
            (true, true) => TraceMode::Mixed,
            (false, true) => TraceMode::Decode,
            _ => TraceMode::Prefill,
        };
        Ok(replay.finish(Some(rows_counted), mode))
    }

    fn pairs(pairs: &[Pair], path: &Path, part: &PartArgs) -> Result<Self, ReplayError> {
        if part.decode_only {
            let problem = "--decode-only needs a trace with steps, as k3-run --trace writes them; for a header-less one \
                 use --pass last --warmup-tokens N";
            return Err(part_error(path, problem));
        }
        let most =
            |number: fn(&Pair) -> u32| pairs.iter().map(number).max().unwrap_or(0) as usize + 1;
        let (layers, experts) = (most(|pair| pair.layer.0), most(|pair| pair.expert.0));
        let geometry = Geometry::new(layers, experts, part.top_k.min(experts))
            .map_err(|source| shape_error(path, source))?;
        let mut replay = Self::empty(geometry, None);
        let passes = passes(pairs);
        if part.pass.is_none() && part.warmup_tokens.is_none() {
            replay.push_pairs(pairs.iter(), true);
            let tokens = passes
                .iter()
                .map(|pass| pass.tokens(pairs, path, part.top_k))
                .sum::<Result<_, _>>();
            let warning = format!(
                "no header, so no steps: {} passes over the layers are replayed as is. If each pass read the whole prompt again, \
                 reuse between passes is an artefact and the hit rates are too high: use --pass last --warmup-tokens N",
                passes.len()
            );
            replay.warnings.push(warning);
            return Ok(replay.finish(tokens.ok(), TraceMode::Unknown));
        }
        let chosen = match part.pass {
            None => &passes[..],
            Some(Pass::Last) => &passes[passes.len().saturating_sub(1)..],
            Some(Pass::Number(n)) => passes.get(n - 1..n).ok_or_else(|| {
                part_error(
                    path,
                    format!("--pass {n}: it has {} passes over the layers", passes.len()),
                )
            })?,
        };
        let warmup = part.warmup_tokens.unwrap_or(0);
        let mut tokens = 0u64;
        for pass in chosen {
            let rows = pass.tokens(pairs, path, part.top_k)?;
            for row in 0..usize::try_from(rows).unwrap_or(usize::MAX) {
                for run in &pass.runs {
                    let start = run.start + row * part.top_k;
                    let token = pairs.get(start..start + part.top_k).unwrap_or_default();
                    replay.push_pairs(token.iter(), tokens >= warmup);
                }
                tokens += 1;
            }
        }
        replay.warnings.push(format!(
            "no header, so no steps: runs of {} requests per layer are taken as one token, and replayed token by token",
            part.top_k
        ));
        Ok(replay.finish(Some(tokens.saturating_sub(warmup)), TraceMode::Unknown))
    }

    /// Each pair is a group of its own: nothing says which of them were one step.
    fn push_pairs<'a>(&mut self, pairs: impl Iterator<Item = &'a Pair>, counted: bool) {
        for &Pair { layer, expert } in pairs {
            // The shape was made from the largest numbers of these pairs.
            if let Some(key) = self.geometry.key(ExpertId { layer, expert }) {
                self.push(layer, &[key], counted);
            }
        }
    }
}

/// One walk over the layers: a run of requests for each.
#[derive(Debug, Default)]
struct PassRuns {
    runs: Vec<std::ops::Range<usize>>,
}

impl PassRuns {
    /// How many tokens went through all layers of this pass.
    fn tokens(&self, pairs: &[Pair], path: &Path, top_k: usize) -> Result<u64, ReplayError> {
        let first = self
            .runs
            .first()
            .map_or(0, std::iter::ExactSizeIterator::len);
        for run in &self.runs {
            let problem = if !run.len().is_multiple_of(top_k) {
                format!("not a multiple of {top_k}")
            } else if run.len() != first {
                format!("but the pass begins with {first}")
            } else {
                continue;
            };
            let layer = pairs.get(run.start).map_or(LayerIdx(0), |pair| pair.layer);
            return Err(ReplayError::Tokens {
                path: path.to_owned(),
                offset: run.start * size_of::<[i32; 2]>(),
                problem: format!("{} requests of layer {layer}, {problem}", run.len()),
            });
        }
        Ok((first / top_k) as u64)
    }
}

/// Cut pairs into runs of one layer, and runs into passes: a pass ends where the layers begin again.
///
/// With a single layer the passes cannot be seen, so all is one pass of many tokens.
fn passes(pairs: &[Pair]) -> Vec<PassRuns> {
    let mut passes: Vec<PassRuns> = Vec::new();
    let mut last: Option<LayerIdx> = None;
    let mut start = 0;
    for run in pairs.chunk_by(|a, b| a.layer == b.layer) {
        let layer = run.first().map(|pair| pair.layer);
        if passes.is_empty() || layer < last {
            passes.push(PassRuns::default());
        }
        if let Some(pass) = passes.last_mut() {
            pass.runs.push(start..start + run.len());
        }
        start += run.len();
        last = layer;
    }
    passes
}

fn part_error(path: &Path, problem: impl Into<String>) -> ReplayError {
    ReplayError::Part {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

fn shape_error(path: &Path, source: CacheError) -> ReplayError {
    ReplayError::Shape {
        path: path.to_owned(),
        source,
    }
}
