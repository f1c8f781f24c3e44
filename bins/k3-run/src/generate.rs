//! Prompt in chunks, then one token after the other.

use std::time::Instant;

use k3_shared::{formats::trace::Mode, ids::TokenId};

use crate::{
    engine::Engine,
    model::{ModelError, Output, Part, Segment, SequenceState, SourceError},
    observe::{StepObserver, StepRows},
    report::{self, BoundBy, Finish, Spent, StepReport},
    sampler::{Sampler, SamplerError},
    saved::SavedError,
};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Every token before the first to be generated, at least one.
    pub prompt_ids: Vec<u32>,
    /// Tokens to generate at most.
    pub num_tokens: usize,
    /// Tokens that end the text.
    pub stop_ids: Vec<u32>,
    /// Run the whole prefix again for every token.
    pub recompute: bool,
    /// Run the head over every prompt row.
    pub score_prompt: bool,
    /// Prompt rows at the end that are not computed: one, where a state is saved before any token is generated, so that the run
    /// that goes on has its logits.
    pub leave_rows: usize,
}

/// Why a run stopped early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A step failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The logits give no token.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// An output could not be written.
    #[error(transparent)]
    Output(#[from] std::io::Error),
    /// The state could not be saved.
    #[error(transparent)]
    Save(#[from] SavedError),
    /// A signal came; the step was finished and the state saved.
    #[error("interrupted")]
    Stopped,
    /// The prompt and the tokens do not fit the planned context.
    #[error(
        "{prompt} prompt tokens and {generated} generated ones need {wanted} positions, but the plan has {context} \
         (plan again: k3-plan --context {wanted})"
    )]
    Context {
        /// Prompt tokens.
        prompt: usize,
        /// Tokens asked for.
        generated: usize,
        /// Positions needed: the last token is not fed back.
        wanted: usize,
        /// Positions planned.
        context: usize,
    },
}

impl GenerateError {
    /// Whether a signal or a reader that has had all it wanted, not a fault, ended the run.
    pub fn is_interrupt(&self) -> bool {
        match self {
            Self::Model(ModelError::Source(SourceError::Interrupted)) | Self::Stopped => true,
            Self::Output(error) => error.kind() == std::io::ErrorKind::BrokenPipe,
            _ => false,
        }
    }
}

/// What came out, also of a run that stopped early.
#[derive(Debug)]
pub struct Generated {
    /// The tokens, the stop token included.
    pub ids: Vec<u32>,
    /// How it ended.
    pub finish: Finish,
    /// Why, when it ended early.
    pub error: Option<GenerateError>,
    /// Every step.
    pub steps: Vec<StepReport>,
}

/// Positions that a request needs: the last generated token is not fed back.
pub fn positions(prompt: usize, generated: usize) -> usize {
    prompt + generated.saturating_sub(1)
}

/// A sequence between two steps, to be saved.
#[derive(Debug)]
pub struct Boundary<'a> {
    /// What was computed.
    pub state: &'a SequenceState,
    /// Tokens computed since the last boundary.
    pub rows: usize,
    /// Tokens before the first generated one.
    pub prompt_ids: &'a [u32],
    /// Tokens generated; of all tokens, at least the last is not computed.
    pub generated_ids: &'a [u32],
    /// The generator that chose them.
    pub generator: u64,
    /// Whether no step follows.
    pub is_last: bool,
}

/// Is told of every boundary between steps: what saves states.
pub trait Save {
    /// Save if it is time to; whether the run should stop here, which is then the last boundary.
    ///
    /// # Errors
    /// If the state cannot be saved.
    fn boundary(&mut self, boundary: &Boundary<'_>) -> Result<bool, SavedError>;
}

/// A run that saves nothing and stops by itself.
#[derive(Clone, Copy, Debug)]
pub struct Unsaved;

impl Save for Unsaved {
    fn boundary(&mut self, _: &Boundary<'_>) -> Result<bool, SavedError> {
        Ok(false)
    }
}

/// Where a run begins, and who is told what.
pub struct Hooks<'a> {
    /// What watches the steps.
    pub observer: &'a mut dyn StepObserver,
    /// Is called with each token that belongs to the text.
    pub emit: &'a mut dyn FnMut(u32) -> std::io::Result<()>,
    /// Saves states.
    pub save: &'a mut dyn Save,
}

/// Generate from the start of a sequence.
///
/// Whatever ends the run, the tokens and steps so far are returned.
pub fn generate(
    engine: &mut Engine,
    request: &Request,
    sampler: &mut Sampler,
    observer: &mut dyn StepObserver,
    emit: &mut dyn FnMut(u32) -> std::io::Result<()>,
) -> Generated {
    let state = engine.new_sequence();
    let hooks = Hooks {
        observer,
        emit,
        save: &mut Unsaved,
    };
    generate_from(engine, state, request, sampler, hooks)
}

/// Generate from a state in which the first [`SequenceState::position`] tokens of the request are computed, and not all of them.
///
/// Whatever ends the run, the tokens and steps so far are returned.
pub fn generate_from(
    engine: &mut Engine,
    mut state: SequenceState,
    request: &Request,
    sampler: &mut Sampler,
    hooks: Hooks<'_>,
) -> Generated {
    let mut run = Run {
        engine,
        hooks,
        steps: Vec::new(),
        ids: Vec::new(),
        tokens: Vec::new(),
        number: 0,
    };
    let outcome = run.all(&mut state, request, sampler);
    let (finish, error) = match outcome {
        Ok(finish) => (finish, None),
        Err(error) if error.is_interrupt() => (Finish::Interrupted, Some(error)),
        Err(error) => (Finish::Error, Some(error)),
    };
    Generated {
        ids: run.ids,
        finish,
        error,
        steps: run.steps,
    }
}

struct Run<'a, 'h> {
    engine: &'a mut Engine,
    hooks: Hooks<'h>,
    steps: Vec<StepReport>,
    ids: Vec<u32>,
    /// Those of the step in progress.
    tokens: Vec<TokenId>,
    number: u64,
}

impl Run<'_, '_> {
    fn all(
        &mut self,
        state: &mut SequenceState,
        request: &Request,
        sampler: &mut Sampler,
    ) -> Result<Finish, GenerateError> {
        let prompt = &request.prompt_ids;
        let wanted = positions(prompt.len(), request.num_tokens);
        let context = self.engine.plan().context;
        if wanted > context {
            let (prompt, generated) = (prompt.len(), request.num_tokens);
            return Err(GenerateError::Context {
                prompt,
                generated,
                wanted,
                context,
            });
        }
        self.announce(state.position, request);
        let computed = state.position;
        let rows = prompt.len() - request.leave_rows.min(prompt.len());
        self.prefill(state, &prompt[..rows], request, sampler)?;
        if request.num_tokens == 0 {
            self.boundary(state, request, sampler, rows - computed.min(rows), true)?;
        }
        while self.ids.len() < request.num_tokens {
            let began = Instant::now();
            let token = sampler.sample(self.hooks.observer.last_logits())?;
            if let Some(step) = self.steps.last_mut() {
                step.spent
                    .add_part(Part::Sampling, began.elapsed().as_secs_f64());
            }
            self.hooks.observer.generated()?;
            self.ids.push(token);
            let is_stop = request.stop_ids.contains(&token);
            let emitted = if is_stop {
                Ok(())
            } else {
                (self.hooks.emit)(token)
            };
            let is_last = is_stop || emitted.is_err() || self.ids.len() == request.num_tokens;
            self.boundary(state, request, sampler, 1, is_last)?;
            emitted?;
            if is_stop {
                return Ok(Finish::Stop);
            }
            if is_last {
                break;
            }
            if request.recompute {
                *state = self.engine.new_sequence();
                let prefix: Vec<u32> = prompt.iter().chain(&self.ids).copied().collect();
                let request = Request {
                    score_prompt: false,
                    ..request.clone()
                };
                self.prefill(state, &prefix, &request, sampler)?;
            } else {
                self.step(state, Mode::Decode, &[token], Output::Last)?;
            }
        }
        Ok(Finish::Length)
    }

    /// Between two steps: what was computed may be saved, and the run may have to stop.
    fn boundary(
        &mut self,
        state: &SequenceState,
        request: &Request,
        sampler: &Sampler,
        rows: usize,
        is_last: bool,
    ) -> Result<(), GenerateError> {
        let boundary = Boundary {
            state,
            rows,
            prompt_ids: &request.prompt_ids,
            generated_ids: &self.ids,
            generator: sampler.state(),
            is_last,
        };
        let stop = self.hooks.save.boundary(&boundary)?;
        if stop && !is_last {
            return Err(GenerateError::Stopped);
        }
        Ok(())
    }

    /// Tell the store which steps are to come, so that it reads ahead across their boundaries and never past the last.
    fn announce(&mut self, computed: usize, request: &Request) {
        let chunk = self.engine.plan().prefill_chunk.max(1);
        let chunks = |rows: usize, head: bool, score: bool| {
            let count = rows.div_ceil(chunk);
            (0..count).map(move |index| score || (head && index + 1 == count))
        };
        let rows = request.prompt_ids.len();
        let rows = rows.saturating_sub(computed + request.leave_rows);
        let mut steps: Vec<bool> =
            chunks(rows, request.num_tokens > 0, request.score_prompt).collect();
        for more in 1..request.num_tokens {
            if request.recompute {
                steps.extend(chunks(request.prompt_ids.len() + more, true, false));
            } else {
                steps.push(true);
            }
        }
        self.engine.announce(&steps);
    }

    /// Compute those of `ids` that are not yet; the last row's logits are wanted if tokens are.
    fn prefill(
        &mut self,
        state: &mut SequenceState,
        ids: &[u32],
        request: &Request,
        sampler: &Sampler,
    ) -> Result<(), GenerateError> {
        let chunk = self.engine.plan().prefill_chunk.max(1);
        let rest = ids.get(state.position..).unwrap_or_default();
        // The one token that a saved state left to be computed is as any other generated one.
        let mode = if rest.len() == 1 && state.position > 0 {
            Mode::Decode
        } else {
            Mode::Prefill
        };
        let count = rest.len().div_ceil(chunk);
        for (index, tokens) in rest.chunks(chunk).enumerate() {
            let is_last = index + 1 == count;
            let output = if request.score_prompt {
                Output::All
            } else if request.num_tokens > 0 && is_last {
                Output::Last
            } else {
                Output::None
            };
            self.step(state, mode, tokens, output)?;
            if !is_last {
                self.boundary(state, request, sampler, tokens.len(), false)?;
            }
        }
        Ok(())
    }

    fn step(
        &mut self,
        state: &mut SequenceState,
        mode: Mode,
        ids: &[u32],
        output: Output,
    ) -> Result<(), GenerateError> {
        let began = Instant::now();
        let rows = StepRows {
            step: self.number,
            mode,
            position: state.position,
            ids,
        };
        self.hooks.observer.begin(&rows, output);
        self.tokens.clear();
        self.tokens.extend(ids.iter().copied().map(TokenId));
        let mut segments = [Segment {
            state,
            tokens: &self.tokens,
        }];
        let observer = self.hooks.observer.as_observer();
        self.engine.step(&mut segments, output, observer)?;
        self.hooks.observer.end()?;
        self.number += 1;
        let reads = self.engine.take_reads();
        let seconds = began.elapsed().as_secs_f64();
        let head_rows = match output {
            Output::None => 0,
            Output::Last => 1,
            Output::All => ids.len(),
        };
        let num_layers = self.engine.plan().num_layers;
        let flops = report::flops(self.engine.config(), num_layers, ids.len(), head_rows);
        let spent = Spent::new(seconds, &reads, self.engine.profile());
        let probe = self.engine.plan().probe.as_ref();
        self.steps.push(StepReport {
            mode,
            rows: ids.len(),
            flops,
            bound_by: BoundBy::of(&spent, flops, probe),
            spent,
        });
        Ok(())
    }
}
