//! Prompt in chunks, then one token after the other.

use std::time::Instant;

use k3_shared::{formats::trace::Mode, ids::TokenId};

use crate::{
    engine::Engine,
    model::{ModelError, Output, Part, Segment, SequenceState, SourceError},
    observe::{StepObserver, StepRows},
    report::{self, BoundBy, Finish, Spent, StepReport},
    sampler::{Sampler, SamplerError},
};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, at least one id.
    pub prompt_ids: Vec<u32>,
    /// Tokens to generate at most.
    pub num_tokens: usize,
    /// Tokens that end the text.
    pub stop_ids: Vec<u32>,
    /// Run the whole prefix again for every token.
    pub recompute: bool,
    /// Run the head over every prompt row.
    pub score_prompt: bool,
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
            Self::Model(ModelError::Source(SourceError::Interrupted)) => true,
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

/// Generate, calling `emit` with each token that belongs to the text.
///
/// Whatever ends the run, the tokens and steps so far are returned.
pub fn generate(
    engine: &mut Engine,
    request: &Request,
    sampler: &mut Sampler,
    observer: &mut dyn StepObserver,
    emit: &mut dyn FnMut(u32) -> std::io::Result<()>,
) -> Generated {
    let mut run = Run {
        engine,
        observer,
        steps: Vec::new(),
        ids: Vec::new(),
        tokens: Vec::new(),
        number: 0,
    };
    let outcome = run.all(request, sampler, emit);
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

struct Run<'a> {
    engine: &'a mut Engine,
    observer: &'a mut dyn StepObserver,
    steps: Vec<StepReport>,
    ids: Vec<u32>,
    /// Those of the step in progress.
    tokens: Vec<TokenId>,
    number: u64,
}

impl Run<'_> {
    fn all(
        &mut self,
        request: &Request,
        sampler: &mut Sampler,
        emit: &mut dyn FnMut(u32) -> std::io::Result<()>,
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
        self.announce(request);
        let mut state = self.engine.new_sequence();
        self.prefill(&mut state, prompt, request, request.num_tokens > 0)?;
        while self.ids.len() < request.num_tokens {
            let began = Instant::now();
            let token = sampler.sample(self.observer.last_logits())?;
            if let Some(step) = self.steps.last_mut() {
                step.spent
                    .add_part(Part::Sampling, began.elapsed().as_secs_f64());
            }
            self.observer.generated()?;
            self.ids.push(token);
            if request.stop_ids.contains(&token) {
                return Ok(Finish::Stop);
            }
            emit(token)?;
            if self.ids.len() == request.num_tokens {
                break;
            }
            if request.recompute {
                state = self.engine.new_sequence();
                let prefix: Vec<u32> = prompt.iter().chain(&self.ids).copied().collect();
                self.prefill(
                    &mut state,
                    &prefix,
                    &Request {
                        score_prompt: false,
                        ..request.clone()
                    },
                    true,
                )?;
            } else {
                self.step(&mut state, Mode::Decode, &[token], Output::Last)?;
            }
        }
        Ok(Finish::Length)
    }

    /// Tell the store which steps are to come, so that it reads ahead across their boundaries and never past the last.
    fn announce(&mut self, request: &Request) {
        let chunk = self.engine.plan().prefill_chunk.max(1);
        let chunks = |rows: usize, head: bool, score: bool| {
            let count = rows.div_ceil(chunk);
            (0..count).map(move |index| score || (head && index + 1 == count))
        };
        let prompt = request.prompt_ids.len();
        let mut steps: Vec<bool> =
            chunks(prompt, request.num_tokens > 0, request.score_prompt).collect();
        for more in 1..request.num_tokens {
            if request.recompute {
                steps.extend(chunks(prompt + more, true, false));
            } else {
                steps.push(true);
            }
        }
        self.engine.announce(&steps);
    }

    fn prefill(
        &mut self,
        state: &mut SequenceState,
        ids: &[u32],
        request: &Request,
        needs_logits: bool,
    ) -> Result<(), GenerateError> {
        let chunk = self.engine.plan().prefill_chunk.max(1);
        let count = ids.len().div_ceil(chunk);
        for (index, tokens) in ids.chunks(chunk).enumerate() {
            let output = if request.score_prompt {
                Output::All
            } else if needs_logits && index + 1 == count {
                Output::Last
            } else {
                Output::None
            };
            self.step(state, Mode::Prefill, tokens, output)?;
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
        self.observer.begin(&rows, output);
        self.tokens.clear();
        self.tokens.extend(ids.iter().copied().map(TokenId));
        let mut segments = [Segment {
            state,
            tokens: &self.tokens,
        }];
        self.engine
            .step(&mut segments, output, self.observer.as_observer())?;
        self.observer.end()?;
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
