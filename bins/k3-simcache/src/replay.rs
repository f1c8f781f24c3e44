//! The request groups to replay, and which of them count.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use k3_shared::{
    cache::{CacheError, Geometry, GroupBuilder, Key},
    formats::trace::{Mode, Trace, TraceError, TraceReader, TraceRecord},
    ids::{ExpertId, LayerIdx},
};
use serde::Serialize;

use crate::{
    PartArgs, pairs,
    report::TraceFacts,
    reuse::{Gap, Reuse, Union},
    stack::{DepthCurve, LruStack},
};

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

/// What a counted request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Rows of a prompt.
    Prefill,
    /// Generation.
    Decode,
    /// The trace does not say.
    Unknown,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Unknown];
}

impl From<Mode> for Phase {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Prefill => Self::Prefill,
            Mode::Decode => Self::Decode,
        }
    }
}

/// One group of a replay: a run of [`Replay::keys`] up to `end`.
#[derive(Clone, Copy, Debug)]
struct Group {
    layer: LayerIdx,
    end: usize,
    phase: Option<Phase>,
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
    /// `[phases]`: requests by depth in the LRU stack.
    depths: [DepthCurve; 3],
    largest_group: usize,
    reuse: Option<Reuse>,
}

impl Replay {
    /// The part of `trace` that `part` asks for; `path` names it in errors.
    ///
    /// # Errors
    /// If the trace is damaged, holds no such part, or nothing is left to count.
    pub fn new(trace: Trace, path: &Path, part: &PartArgs) -> Result<Self, ReplayError> {
        let builder = match trace {
            Trace::Recorded(reader) => recorded(reader, path, part),
            Trace::Pairs(pairs) => pairs::replay(&pairs, path, part),
        }?;
        let replay = builder.finish();
        if replay.facts.requests == 0 {
            let problem =
                "nothing is left to count: lower --warmup-tokens, or leave out --decode-only";
            return Err(part_error(path, problem));
        }
        Ok(replay)
    }

    /// The groups in order: layer, keys, and what they count as, if they count.
    pub fn groups(&self) -> impl Iterator<Item = (LayerIdx, &[Key], Option<Phase>)> + Clone {
        let starts = std::iter::once(0).chain(self.groups.iter().map(|group| group.end));
        starts
            .zip(&self.groups)
            .map(|(start, group)| (group.layer, &self.keys[start..group.end], group.phase))
    }

    /// Requests of each phase by their depth in the LRU stack; exact for caches of at least [`Self::largest_group`] slots.
    pub(crate) fn depths(&self) -> &[DepthCurve; 3] {
        &self.depths
    }

    /// The most experts asked for at once.
    pub fn largest_group(&self) -> usize {
        self.largest_group
    }

    /// Experts that some counted tokens in a row need together; empty if tokens cannot be told apart.
    pub fn unions(&self) -> Vec<Union> {
        self.reuse.as_ref().map_or(Vec::new(), Reuse::unions)
    }

    /// How many tokens ago counted tokens' experts were needed before; empty if tokens cannot be told apart.
    pub fn gaps(&self) -> Vec<Gap> {
        self.reuse.as_ref().map_or(Vec::new(), Reuse::gaps)
    }
}

/// Adds up a replay as its requests are read.
pub(crate) struct Builder {
    replay: Replay,
    stack: LruStack,
    /// `[keys]`: asked for by a counted request.
    counted: Vec<bool>,
    /// `[layers]`: asked for anything.
    layers: Vec<bool>,
}

impl Builder {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            stack: LruStack::new(geometry),
            counted: vec![false; geometry.keys()],
            layers: vec![false; geometry.layers()],
            replay: Replay {
                geometry,
                expert_bytes: None,
                facts: TraceFacts::default(),
                compulsory_misses: 0,
                warnings: Vec::new(),
                keys: Vec::new(),
                groups: Vec::new(),
                depths: Default::default(),
                largest_group: 0,
                reuse: None,
            },
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.replay.geometry
    }

    pub(crate) fn facts(&mut self) -> &mut TraceFacts {
        &mut self.replay.facts
    }

    pub(crate) fn warn(&mut self, warning: String) {
        self.replay.warnings.push(warning);
    }

    /// One group; `phase` is what it counts as.
    pub(crate) fn push(&mut self, layer: LayerIdx, keys: &[Key], phase: Option<Phase>) {
        let depths = self.stack.request(keys);
        self.layers[layer.get()] = true;
        let replay = &mut self.replay;
        match phase {
            Some(phase) => {
                for (key, &depth) in keys.iter().zip(depths) {
                    replay.depths[phase as usize].add(depth);
                    replay.compulsory_misses += u64::from(depth == 0);
                    let first = !std::mem::replace(&mut self.counted[key.get()], true);
                    replay.facts.distinct_experts += u64::from(first);
                }
                replay.facts.requests += keys.len() as u64;
            }
            None => replay.facts.warmup_requests += keys.len() as u64,
        }
        replay.keys.extend_from_slice(keys);
        let end = replay.keys.len();
        replay.groups.push(Group { layer, end, phase });
    }

    /// Token number `token`, from 0, asks for `id`, apart from the groups that this makes.
    ///
    /// # Errors
    /// If the geometry has no such expert.
    pub(crate) fn ask(
        &mut self,
        token: u32,
        id: ExpertId,
        phase: Option<Phase>,
    ) -> Result<(), CacheError> {
        let geometry = self.replay.geometry;
        let key = geometry.key(id).ok_or(CacheError::NoSuchExpert { id })?;
        let reuse = self
            .replay
            .reuse
            .get_or_insert_with(|| Reuse::new(geometry));
        reuse.ask(token, key, phase);
        Ok(())
    }

    fn finish(mut self) -> Replay {
        self.replay.largest_group = self.stack.largest_group();
        let layers = self.layers.iter().filter(|&&asked| asked).count();
        self.replay.facts.working_set = layers * self.replay.geometry.top_k();
        self.replay
    }
}

/// The replay of a trace with steps.
fn recorded<R: std::io::Read>(
    mut reader: TraceReader<R>,
    path: &Path,
    part: &PartArgs,
) -> Result<Builder, ReplayError> {
    if part.pass.is_some() || part.grouped {
        let flag = if part.grouped { "--grouped" } else { "--pass" };
        let problem = format!(
            "{flag} is for header-less traces; this one has steps: use --decode-only or --warmup-tokens"
        );
        return Err(part_error(path, problem));
    }
    let shape = |source| shape_error(path, source);
    let geometry = reader.header().geometry().map_err(shape)?;
    let mut builder = Builder::new(geometry);
    builder.replay.expert_bytes = Some(reader.header().expert_bytes);
    builder.facts().identity = Some(reader.header().identity.clone());
    let mut groups = GroupBuilder::new(geometry);
    let mut steps = Steps::new(part);
    while let Some(record) = reader.next_record()? {
        let (token, phase) = steps.take(&record);
        let selections = record.experts.chunks_exact(geometry.top_k());
        for (token, selection) in (token..).zip(selections) {
            for &expert in selection {
                let id = ExpertId {
                    layer: record.layer,
                    expert,
                };
                builder.ask(token, id, phase).map_err(shape)?;
            }
        }
        let group = groups.group(record.layer, record.experts).map_err(shape)?;
        builder.push(record.layer, group, phase);
    }
    builder.facts().digest = reader.digest().map(str::to_owned);
    steps.tell(&mut builder);
    Ok(builder)
}

/// What the steps of a trace say of it, a record at a time.
struct Steps {
    decode_only: bool,
    warmup_tokens: u64,
    step: Option<u64>,
    phase: Option<Phase>,
    /// Rows of the steps before this one, and of this one.
    rows: (u64, u64),
    /// `[phases]`: counted rows.
    counted: [u64; 3],
    /// The highest position of each sequence so far.
    positions: BTreeMap<u32, u32>,
    repeated: u64,
}

impl Steps {
    fn new(part: &PartArgs) -> Self {
        Self {
            decode_only: part.decode_only,
            warmup_tokens: part.warmup_tokens.unwrap_or(0),
            step: None,
            phase: None,
            rows: (0, 0),
            counted: [0; 3],
            positions: BTreeMap::new(),
            repeated: 0,
        }
    }

    /// The number of the record's first row among all rows, and what its step counts as.
    fn take(&mut self, record: &TraceRecord) -> (u32, Option<Phase>) {
        if self.step != Some(record.step) {
            self.step = Some(record.step);
            let rows = record.rows.len() as u64;
            self.rows = (self.rows.0 + self.rows.1, rows);
            let counts = self.rows.0 >= self.warmup_tokens
                && (record.mode == Mode::Decode || !self.decode_only);
            self.phase = counts.then(|| Phase::from(record.mode));
            if let Some(phase) = self.phase {
                self.counted[phase as usize] += rows;
            }
            for row in &record.rows {
                let highest = self.positions.entry(row.sequence).or_insert(row.position);
                // The first row of a sequence is its own highest.
                self.repeated += u64::from(row.position < *highest);
                *highest = (*highest).max(row.position);
            }
        }
        // More rows than a u32 counts would fill a disk with trace first.
        (u32::try_from(self.rows.0).unwrap_or(u32::MAX), self.phase)
    }

    fn tell(self, builder: &mut Builder) {
        let [prefill, decode, _] = self.counted;
        let facts = builder.facts();
        facts.tokens = Some(prefill + decode);
        facts.prefill_tokens = Some(prefill);
        facts.decode_tokens = Some(decode);
        facts.mode = match (prefill > 0, decode > 0) {
            (true, true) => TraceMode::Mixed,
            (false, true) => TraceMode::Decode,
            _ => TraceMode::Prefill,
        };
        facts.repeated_tokens = Some(self.repeated);
        if self.repeated > 0 {
            builder.warn(format!(
                "{} rows are of positions that had passed before: prefixes were computed again (as k3-run --recompute does), so \
                 their reuse is an artefact and the hit rates are too high; record a run without it",
                self.repeated
            ));
        }
    }
}

pub(crate) fn part_error(path: &Path, problem: impl Into<String>) -> ReplayError {
    ReplayError::Part {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

pub(crate) fn shape_error(path: &Path, source: CacheError) -> ReplayError {
    ReplayError::Shape {
        path: path.to_owned(),
        source,
    }
}
