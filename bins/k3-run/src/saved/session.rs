//! What a run of the command line does with saved states.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::Context as _;

use super::{Header, Keeper, Origin, Reader, Sampling, SavedError, size_of_state};
use crate::{
    cli::{Cli, SamplingArgs, StateArgs},
    engine::Engine,
    generate::{Boundary, Save},
    model::SequenceState,
    report::StateReport,
    sampler::Sampler,
};

/// A state to go on from, and what was read of it.
pub(crate) struct Resumed {
    reader: Reader,
    pub(crate) report: StateReport,
}

impl Resumed {
    /// Open the state of `--resume`, which must belong to this engine.
    pub(crate) fn open(cli: &Cli, engine: &Engine) -> anyhow::Result<Option<Self>> {
        let Some(path) = &cli.state.resume else {
            return Ok(None);
        };
        let reader = Reader::open(path).context("--resume")?;
        let origin = origin(cli, engine);
        reader
            .belongs(&origin, &engine.plan().model_dir)
            .context("--resume")?;
        let report = report(path, &reader.header);
        Ok(Some(Self { reader, report }))
    }

    pub(crate) fn header(&self) -> &Header {
        &self.reader.header
    }

    /// The sequence, read and checked.
    pub(crate) fn read(self, mut state: SequenceState) -> anyhow::Result<SequenceState> {
        self.reader.read_into(&mut state).context("--resume")?;
        Ok(state)
    }
}

fn report(path: &Path, header: &Header) -> StateReport {
    StateReport {
        path: path.to_owned(),
        position: header.position,
        tokens: header.ids.len() as u64,
    }
}

fn origin(cli: &Cli, engine: &Engine) -> Origin {
    Origin {
        identity: engine.plan().identity.clone(),
        num_layers: engine.plan().num_layers as u64,
        mla_norm_eps: engine.mla_norm_eps(),
        allow_nan_scales: cli.engine.allow_nan_scales,
    }
}

/// The sampler of the flags, and where they are silent of the state.
pub(crate) fn sampler(
    args: &SamplingArgs,
    from: Option<&Sampling>,
) -> anyhow::Result<(Sampler, Sampling)> {
    let temperature = args.temperature.or(from.map(|s| s.temperature));
    let top_p = args.top_p.or(from.map(|s| s.top_p));
    let (temperature, top_p) = (temperature.unwrap_or(0.0), top_p.unwrap_or(1.0));
    let mut sampler = Sampler::new(temperature, top_p, args.seed.unwrap_or(0))?;
    if let (None, Some(from)) = (args.seed, from) {
        sampler.set_state(from.generator).context("--resume")?;
    }
    let sampling = Sampling {
        temperature,
        top_p,
        generator: sampler.state(),
    };
    Ok((sampler, sampling))
}

/// Saves the states of a run.
pub(crate) struct Saver {
    /// Absent where nothing is to be saved.
    keeper: Option<Keeper>,
    origin: Origin,
    sampling: Sampling,
    /// Tokens at the end of the first prompt that were generated in an earlier run and belong to the same text.
    earlier: usize,
    /// Set to a signal's number to stop at the next boundary.
    stop: Arc<AtomicUsize>,
    pub(crate) report: Option<StateReport>,
}

impl Saver {
    /// Prepare what `--state` asks for.
    pub(crate) fn open(
        cli: &Cli,
        engine: &Engine,
        sampling: Sampling,
        earlier: usize,
        stop: Arc<AtomicUsize>,
    ) -> anyhow::Result<Self> {
        let StateArgs {
            state,
            save_every,
            resume,
            force,
        } = &cli.state;
        let keeper = match state {
            None => None,
            Some(path) => {
                let replace = *force || resume.as_ref() == Some(path);
                let plan = engine.plan();
                let bytes = size_of_state(engine.config(), plan.num_layers, plan.context);
                Some(Keeper::open(path, *save_every, replace, bytes).context("--state")?)
            }
        };
        Ok(Self {
            keeper,
            origin: origin(cli, engine),
            sampling,
            earlier,
            stop,
            report: None,
        })
    }
}

impl Save for Saver {
    fn boundary(&mut self, boundary: &Boundary<'_>) -> Result<bool, SavedError> {
        let Some(keeper) = &mut self.keeper else {
            return Ok(false);
        };
        let stop = self.stop.load(Ordering::Relaxed) != 0;
        if keeper.is_due(boundary.rows as u64) || boundary.is_last || stop {
            let generated = boundary.generated_ids;
            let header = Header {
                origin: self.origin.clone(),
                ids: [boundary.prompt_ids, generated].concat(),
                generated: (self.earlier + generated.len()) as u64,
                position: boundary.state.position as u64,
                sampling: Sampling {
                    generator: boundary.generator,
                    ..self.sampling
                },
            };
            keeper.save(&header, boundary.state)?;
            self.report = Some(report(keeper.path(), &header));
        }
        Ok(stop)
    }
}
