//! What a run keeps of its steps: logits, trace, dumps, scores.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use k3_shared::{
    formats::trace::{Mode, TraceHeader, TraceRecord, TraceRow, TraceWriter},
    ids::LayerIdx,
    term::AtomicFile,
};
use serde::Serialize;

use crate::{
    cli::OutputArgs,
    live::{Goal, Live, Screen},
    model::{Observer, Output, Progress, Routing},
    sampler::ScoreReducer,
};

/// The rows of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepRows<'a> {
    /// Number of the step.
    pub step: u64,
    /// What it is for.
    pub mode: Mode,
    /// Position of the first row.
    pub position: usize,
    /// Its tokens.
    pub ids: &'a [u32],
}

/// Watches the steps of a generation and keeps the logits of the last one.
pub trait StepObserver: Observer {
    /// A step begins.
    fn begin(&mut self, rows: &StepRows<'_>, output: Output);

    /// The step ended well.
    ///
    /// # Errors
    /// If something kept of it could not be written.
    fn end(&mut self) -> io::Result<()>;

    /// The token for [`Self::last_logits`] was chosen.
    ///
    /// # Errors
    /// As [`Self::end`].
    fn generated(&mut self) -> io::Result<()>;

    /// Logits of the step's last row, the vocabulary wide.
    fn last_logits(&self) -> &[f32];

    /// Itself, as the forward pass sees it.
    fn as_observer(&mut self) -> &mut dyn Observer;
}

/// The line of `--score` for one prompt position.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScoreLine {
    /// Position in the prompt, from 0; the first token has nothing before it and no line.
    pub position: usize,
    /// The token there.
    pub id: u32,
    /// The likeliest token given those before it.
    pub argmax: u32,
    /// Logit of the token.
    pub logit: f32,
    /// Its natural log-probability.
    pub logprob: f64,
    /// How many tokens are likelier.
    pub rank: usize,
}

/// See that every output file can be made, before hours are spent on what goes into it.
///
/// # Errors
/// If one names a folder, or lies where nothing can be written.
pub fn check_writable(outputs: &OutputArgs) -> anyhow::Result<()> {
    let files = [
        ("--json", &outputs.json),
        ("--trace", &outputs.trace),
        ("--dump-logits", &outputs.dump_logits),
        ("--dump-hidden", &outputs.dump_hidden),
        ("--score", &outputs.score),
    ];
    for (flag, path) in files {
        let Some(path) = path else { continue };
        if path.is_dir() {
            bail!("{flag} {}: is a folder; name a file", path.display());
        }
        AtomicFile::create(path).with_context(|| format!("{flag} {}", path.display()))?;
    }
    Ok(())
}

/// Give `values` to `take` as little-endian bytes, some thousand at a time.
pub(crate) fn each_little_endian(
    values: &[f32],
    mut take: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut bytes = [0; 16_384];
    for values in values.chunks(bytes.len() / 4) {
        for (to, value) in bytes.chunks_exact_mut(4).zip(values) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        take(&bytes[..4 * values.len()])?;
    }
    Ok(())
}

/// An output file.
struct Sink {
    file: AtomicFile,
    /// Bytes written, and how many of them belong to steps that ended.
    bytes: u64,
    whole_bytes: u64,
}

impl Sink {
    fn create(path: Option<&Path>) -> io::Result<Option<Self>> {
        let create = |path: &Path| {
            Ok(Self {
                file: AtomicFile::create(path)?,
                bytes: 0,
                whole_bytes: 0,
            })
        };
        path.map(create).transpose()
    }

    fn write_f32(&mut self, values: &[f32]) -> io::Result<()> {
        each_little_endian(values, |bytes| {
            self.file.write_all(bytes)?;
            self.bytes += bytes.len() as u64;
            Ok(())
        })
    }

    /// Put the file in its place, without what a dropped step left in it.
    fn commit(mut self) -> io::Result<()> {
        if self.whole_bytes < self.bytes {
            self.file.truncate(self.whole_bytes)?;
        }
        self.file.commit()
    }
}

/// The observer of the command line.
pub struct RunObserver {
    logits: Vec<f32>,
    vocab_size: usize,
    output: Output,
    mode: Mode,
    step: u64,
    position: usize,
    num_rows: usize,
    trace: Option<TraceWriter<AtomicFile>>,
    /// Records of the step in progress: a dropped step leaves none.
    routed: Vec<TraceRecord>,
    dump_logits: Option<Sink>,
    dump_hidden: Option<Sink>,
    score: Option<Scores>,
    failed: Option<io::Error>,
    live: Live,
}

/// Scores of the prompt, and the rows of the step that are being scored.
struct Scores {
    path: PathBuf,
    prompt: Vec<u32>,
    /// Reducer of the token after each row of the step; `None` for the prompt's last row.
    rows: Vec<Option<ScoreReducer>>,
    lines: Vec<ScoreLine>,
}

impl RunObserver {
    /// Create the output files that were asked for.
    ///
    /// # Errors
    /// If one cannot be created.
    pub fn open(
        outputs: &OutputArgs,
        prompt_ids: &[u32],
        vocab_size: usize,
        trace_header: TraceHeader,
        (screen, goal): (Screen, Goal),
    ) -> anyhow::Result<Self> {
        let trace = match &outputs.trace {
            Some(path) => Some(TraceWriter::new(AtomicFile::create(path)?, trace_header)?),
            None => None,
        };
        Ok(Self {
            logits: vec![0.0; vocab_size],
            vocab_size,
            output: Output::None,
            mode: Mode::Prefill,
            step: 0,
            position: 0,
            num_rows: 0,
            trace,
            routed: Vec::new(),
            dump_logits: Sink::create(outputs.dump_logits.as_deref())?,
            dump_hidden: Sink::create(outputs.dump_hidden.as_deref())?,
            score: outputs.score.as_ref().map(|path| Scores {
                path: path.clone(),
                prompt: prompt_ids.to_vec(),
                rows: Vec::new(),
                lines: Vec::new(),
            }),
            failed: None,
            live: Live::new(screen, goal),
        })
    }

    /// Put every output file in its place.
    ///
    /// # Errors
    /// If one cannot be completed; the others are still attempted before the first error is returned.
    pub fn finish(self) -> anyhow::Result<()> {
        self.live.finish();
        let mut outcome = Ok(());
        let mut keep = |result: anyhow::Result<()>| {
            if outcome.is_ok() {
                outcome = result;
            }
        };
        if let Some(trace) = self.trace {
            keep(
                trace
                    .finish()
                    .map_err(Into::into)
                    .and_then(|file| Ok(file.commit()?)),
            );
        }
        for sink in [self.dump_logits, self.dump_hidden].into_iter().flatten() {
            keep(sink.commit().map_err(Into::into));
        }
        if let Some(score) = self.score {
            keep(score.write());
        }
        outcome
    }

    /// Write the records of the step. A trace that lacks some is of no use and does not appear.
    fn keep_trace(&mut self) -> io::Result<()> {
        let Some(trace) = &mut self.trace else {
            return Ok(());
        };
        let mut records = self.routed.drain(..);
        let written = records.try_for_each(|record| trace.write(&record));
        if written.is_err() {
            self.trace = None;
        }
        written.map_err(io::Error::other)
    }

    fn note(&mut self, result: Result<(), io::Error>) {
        if let Err(error) = result
            && self.failed.is_none()
        {
            self.failed = Some(error);
        }
    }
}

impl Scores {
    fn begin(&mut self, position: usize, num_rows: usize) {
        let next = |row: usize| self.prompt.get(position + row + 1).copied();
        self.rows = (0..num_rows)
            .map(|row| next(row).map(ScoreReducer::new))
            .collect();
    }

    fn push(&mut self, first_id: usize, logits: &[f32]) {
        let width = logits.len() / self.rows.len().max(1);
        for (row, logits) in self.rows.iter_mut().zip(logits.chunks_exact(width)) {
            if let Some(row) = row {
                row.push(first_id, logits);
            }
        }
    }

    fn end(&mut self, position: usize) -> io::Result<()> {
        for (row, reducer) in self.rows.drain(..).enumerate() {
            let Some(reducer) = reducer else { continue };
            let score = reducer.finish().map_err(io::Error::other)?;
            self.lines.push(ScoreLine {
                position: position + row + 1,
                id: score.id,
                argmax: score.argmax,
                logit: score.logit,
                logprob: score.logprob,
                rank: score.rank,
            });
        }
        Ok(())
    }

    fn write(self) -> anyhow::Result<()> {
        #[derive(Serialize)]
        struct File {
            schema: &'static str,
            scores: Vec<ScoreLine>,
        }
        let file = File {
            schema: "k3.score/1",
            scores: self.lines,
        };
        let mut text = serde_json::to_vec_pretty(&file)?;
        text.push(b'\n');
        k3_shared::term::write_atomic(&self.path, &text)?;
        Ok(())
    }
}

impl Observer for RunObserver {
    fn layer(&mut self, layer: LayerIdx, progress: Progress) {
        self.live.layer(layer.get(), progress);
    }

    fn routed(&mut self, layer: LayerIdx, routings: &[Routing]) {
        if self.trace.is_none() {
            return;
        }
        let position = |row: usize| u32::try_from(self.position + row).unwrap_or(u32::MAX);
        let record = TraceRecord {
            step: self.step,
            mode: self.mode,
            layer,
            rows: (0..routings.len())
                .map(|row| TraceRow {
                    sequence: 0,
                    position: position(row),
                })
                .collect(),
            experts: routings.iter().flat_map(|r| &r.experts).copied().collect(),
        };
        self.routed.push(record);
    }

    fn hidden(&mut self, _: LayerIdx, stream: &[f32]) {
        if let Some(sink) = &mut self.dump_hidden {
            let written = sink.write_f32(stream);
            self.note(written);
        }
    }

    fn logits(&mut self, first_id: usize, logits: &[f32]) {
        let rows = match self.output {
            Output::All => self.num_rows,
            Output::Last | Output::None => 1,
        };
        let width = logits.len() / rows;
        let last = &logits[(rows - 1) * width..];
        self.logits[first_id..first_id + width].copy_from_slice(last);
        if self.output == Output::All
            && let Some(score) = &mut self.score
        {
            score.push(first_id, logits);
        }
    }
}

impl StepObserver for RunObserver {
    fn begin(&mut self, rows: &StepRows<'_>, output: Output) {
        self.mode = rows.mode;
        self.step = rows.step;
        self.position = rows.position;
        self.num_rows = rows.ids.len();
        self.output = output;
        self.live.begin(rows.position, rows.ids.len());
        self.routed.clear();
        debug_assert_eq!(self.logits.len(), self.vocab_size);
        if output == Output::All
            && let Some(score) = &mut self.score
        {
            score.begin(rows.position, rows.ids.len());
        }
    }

    fn end(&mut self) -> io::Result<()> {
        self.live.end();
        if self.output == Output::All
            && let Some(score) = &mut self.score
        {
            score.end(self.position)?;
        }
        self.keep_trace()?;
        // A step of which something could not be written is not whole.
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if let Some(sink) = &mut self.dump_hidden {
            sink.whole_bytes = sink.bytes;
        }
        Ok(())
    }

    fn generated(&mut self) -> io::Result<()> {
        match &mut self.dump_logits {
            Some(sink) => {
                sink.write_f32(&self.logits)?;
                sink.whole_bytes = sink.bytes;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn last_logits(&self) -> &[f32] {
        &self.logits
    }

    fn as_observer(&mut self) -> &mut dyn Observer {
        self
    }
}
