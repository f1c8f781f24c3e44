//! `k3-run`: generates tokens from a plan, a trunk and the experts in the shards.
//!
//! From below: [`kernels`] fixes every bit of the arithmetic, [`model`] is the forward pass over it, [`store`] brings the weights
//! from disk, [`engine`] opens a plan, [`mod@generate`] runs it. Around that: [`tokenizer`] and [`sampler`] make text, [`saved`]
//! keeps a sequence for another day, [`observe`] what was asked to be kept of a run, [`live`] shows where it is, [`report`] says
//! how it went.
//!
//! Two promises shape it. Ids and logits are the same bits under every plan, thread count and instruction set, so every sum has
//! one order, written down in [`kernels`]. And memory is what the plan's ledger says, so a step allocates nothing and reads go
//! into buffers that were counted. Start with [`model::WeightSource`], the seam between arithmetic and disk.

pub mod cli;
pub mod engine;
pub mod generate;
pub mod kernels;
pub mod live;
pub mod model;
pub mod observe;
mod prompt;
pub mod report;
pub mod sampler;
pub mod saved;
mod signals;
pub mod store;
mod summary;
mod text;
pub mod tokenizer;

use std::{
    fs::File,
    io::{self, IsTerminal as _, Read as _, Write},
    path::Path,
    sync::{Arc, atomic::AtomicUsize},
};

use anyhow::{Context as _, bail};
use k3_shared::{
    direct::{Interpose, Mode},
    formats::{plan::Plan, trace::TraceHeader},
    host,
    term::{self, Outcome},
};

pub use cli::{Cli, IsaChoice};
use engine::{Engine, EngineOptions};
use generate::{GenerateError, Generated, Hooks, Request, generate_from};
use kernels::{Isa, NanScales};
use live::{Goal, Screen};
use observe::RunObserver;
use prompt::Prompt;
use report::{Finish, Report, StateReport};
use saved::{Resumed, SavedError, Saver};
use signals::Signals;
use text::TextOut;
use tokenizer::Tokenizer;

/// Run the tool: the generated text goes to `out`, all else to stderr and the files asked for.
///
/// # Errors
/// On wrong usage, and on files or a machine that cannot serve. A run that stops rather than print a wrong token, and a
/// refused plan, are [`Outcome::Negative`].
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    run_on(cli, &Interpose::default(), out)
}

/// As [`run`], with `disk` between the files and the disk: how tests make one slow.
///
/// # Errors
/// As [`run`].
pub fn run_on(cli: &Cli, disk: &Interpose, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    term::init_log(cli.quiet, cli.verbose);
    match run_plan(cli, disk, out) {
        Err(error) if is_refused_state(&error) => {
            log::error!("{error:#}");
            Ok(Outcome::Negative)
        }
        outcome => outcome,
    }
}

fn is_refused_state(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<SavedError>()
        .is_some_and(SavedError::is_refusal)
}

fn run_plan(cli: &Cli, disk: &Interpose, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    let signals = Signals::catch(cli.state.state.is_some())?;
    let plan = read_plan(cli.plan.as_deref())?;
    let prompt = Prompt::open(cli, &plan.model_dir)?;
    let options = engine_options(cli, disk, Arc::clone(&signals.interrupt))?;
    observe::check_writable(&cli.outputs)?;
    let mut engine = match Engine::open(plan, &options) {
        Ok(engine) => engine,
        Err(error) if error.is_mismatch() => {
            log::error!("{error}");
            return Ok(Outcome::Negative);
        }
        Err(error) => return Err(error.into()),
    };
    let resumed = Resumed::open(cli, &engine)?;
    let before = resumed.as_ref().map(Resumed::header);
    let request = request(cli, &engine, &prompt, before)?;
    let (mut sampler, sampling) = saved::sampler(&cli.sampling, before.map(|h| &h.sampling))?;
    // What was generated before goes on only if no prompt comes in between.
    let said = match before {
        Some(header) if prompt.ids.is_empty() => {
            let generated = usize::try_from(header.generated)?;
            header.ids[header.ids.len() - generated..].to_vec()
        }
        _ => Vec::new(),
    };
    let stop = Arc::clone(&signals.stop);
    let mut saver = Saver::open(cli, &engine, sampling, said.len(), stop)?;
    let config = engine.config();
    let header = TraceHeader {
        identity: engine.plan().identity.clone(),
        layers: u32::try_from(config.num_hidden_layers)?,
        experts: u32::try_from(config.moe.num_experts)?,
        top_k: u32::try_from(config.moe.num_experts_per_token)?,
        expert_bytes: config.moe.expert_bytes(),
    };
    let screen = Screen::detect(cli.quiet);
    let goal = Goal {
        prompt_tokens: request.prompt_ids.len(),
        computed_tokens: before
            .map(|h| usize::try_from(h.position))
            .transpose()?
            .unwrap_or(0),
        num_tokens: request.num_tokens,
        num_layers: engine.plan().num_layers,
        seconds_per_token: engine.plan().predicted.seconds_per_token,
    };
    let mut observer = RunObserver::open(
        &cli.outputs,
        &request.prompt_ids,
        config.vocab_size,
        header,
        (screen.clone(), goal),
    )?;
    let writing = Arc::clone(&signals.writing);
    let text_to = (screen, writing);
    let mut text = TextOut::new(out, text_to, prompt.tokenizer.as_ref(), &said);
    let mut state = engine.new_sequence();
    let mut from = None;
    if let Some(resumed) = resumed {
        from = Some(resumed.report.clone());
        state = resumed.read(state)?;
    }
    let hooks = Hooks {
        observer: &mut observer,
        emit: &mut |id| text.push(id),
        save: &mut saver,
    };
    let generated = generate_from(&mut engine, state, &request, &mut sampler, hooks);
    observer.finish()?;
    let text = text.finish(saver.report.is_some())?;
    let states = (from, saver.report);
    finish(
        cli,
        engine,
        request,
        generated,
        text,
        states,
        signals.number(),
    )
}

/// Read the plan from a file or standard input.
fn read_plan(path: Option<&Path>) -> anyhow::Result<Plan> {
    const HOW: &str = "k3-plan --budget 32G | k3-run --prompt \"...\"";
    let from_stdin = path.is_none_or(|path| path == Path::new("-"));
    let mut text = Vec::new();
    let name = if from_stdin {
        let mut stdin = io::stdin().lock();
        if stdin.is_terminal() {
            bail!("no plan: give --plan FILE, or pipe one in: {HOW}");
        }
        stdin.read_to_end(&mut text).context("standard input")?;
        "standard input".to_owned()
    } else {
        let path = path.unwrap_or(Path::new("-"));
        let mut file = File::open(path).with_context(|| path.display().to_string())?;
        file.read_to_end(&mut text)
            .with_context(|| path.display().to_string())?;
        path.display().to_string()
    };
    Plan::parse(&text).with_context(|| format!("{name}: no plan to run; make one: {HOW}"))
}

fn isa_named(name: &str) -> Option<Isa> {
    Isa::available().into_iter().find(|isa| isa.name() == name)
}

fn engine_options(
    cli: &Cli,
    disk: &Interpose,
    interrupt: Arc<AtomicUsize>,
) -> anyhow::Result<EngineOptions> {
    let engine = &cli.engine;
    if !(engine.mla_norm_eps > 0.0 && engine.mla_norm_eps.is_finite()) {
        bail!(
            "--mla-norm-eps {}: not a number above zero",
            engine.mla_norm_eps
        );
    }
    let isa = match engine.isa {
        IsaChoice::Auto => Isa::detect(),
        IsaChoice::Scalar => Isa::Scalar,
        IsaChoice::Avx2 => isa_named("avx2")
            .context("--isa avx2: this processor lacks AVX2 or FMA; use --isa auto")?,
        IsaChoice::Avx512 => isa_named("avx512").context(
            "--isa avx512: this processor lacks AVX-512 (F, BW, DQ, VL); use --isa auto",
        )?,
    };
    Ok(EngineOptions {
        threads: engine.threads.map(usize::from),
        layers: engine.layers,
        isa,
        mode: if engine.buffered {
            Mode::Buffered
        } else {
            Mode::Auto
        },
        interpose: disk.clone(),
        verify: engine.verify(),
        mla_norm_eps: engine.mla_norm_eps,
        nan_scales: if engine.allow_nan_scales {
            NanScales::Zero
        } else {
            NanScales::Propagate
        },
        interrupt,
    })
}

/// What to generate: after the tokens of a state, if there is one, and then those of the prompt.
fn request(
    cli: &Cli,
    engine: &Engine,
    prompt: &Prompt,
    before: Option<&saved::Header>,
) -> anyhow::Result<Request> {
    let vocab_size = engine.config().vocab_size;
    let unknown = |ids: &[u32]| ids.iter().copied().find(|&id| id as usize >= vocab_size);
    if let Some(id) = unknown(&prompt.ids) {
        bail!("prompt token {id} is not below the vocabulary size {vocab_size}");
    }
    if let Some(id) = unknown(&cli.sampling.stop_id) {
        bail!("--stop-id {id} is not below the vocabulary size {vocab_size}");
    }
    let before = before.map_or(&[][..], |header| &header.ids);
    let prompt_ids = [before, &prompt.ids].concat();
    let num_tokens = cli.sampling.num_tokens;
    let wanted = generate::positions(prompt_ids.len(), num_tokens);
    let context = engine.plan().context;
    if wanted > context {
        bail!(
            "{} prompt tokens and {num_tokens} generated ones need {wanted} positions, but the plan has {context}; \
             plan again: k3-plan --context {wanted}",
            prompt_ids.len()
        );
    }
    let saves_prompt_alone = cli.state.state.is_some() && num_tokens == 0;
    Ok(Request {
        prompt_ids,
        num_tokens,
        stop_ids: stop_ids(cli, engine, prompt.tokenizer.as_ref()),
        recompute: cli.engine.recompute,
        score_prompt: cli.outputs.score.is_some(),
        leave_rows: usize::from(saves_prompt_alone && cli.outputs.score.is_none()),
    })
}

/// The tokens that end the text: those asked for, else the config's end of message and the vocabulary's end of sequence.
fn stop_ids(cli: &Cli, engine: &Engine, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
    if cli.sampling.no_stop {
        return Vec::new();
    }
    if !cli.sampling.stop_id.is_empty() {
        return cli.sampling.stop_id.clone();
    }
    let eos = tokenizer.and_then(|t| t.special_id("[EOS]"));
    engine
        .config()
        .eos_token_id
        .into_iter()
        .chain(eos)
        .collect()
}

/// Write the report and say how it went.
fn finish(
    cli: &Cli,
    mut engine: Engine,
    request: Request,
    generated: Generated,
    text: Option<String>,
    (resumed, saved): (Option<StateReport>, Option<StateReport>),
    signal: usize,
) -> anyhow::Result<Outcome> {
    let discarded = engine.discard_readahead();
    let checked = engine.checked();
    let plan = engine.plan();
    let report = Report {
        schema: report::SCHEMA,
        prompt_ids: request.prompt_ids,
        generated_ids: generated.ids,
        text,
        finish: generated.finish,
        error: generated.error.as_ref().map(ToString::to_string),
        resumed,
        saved,
        identity: plan.identity.clone(),
        num_layers: plan.num_layers,
        experts_verified: engine.experts_verified(),
        mla_norm_eps: engine.mla_norm_eps(),
        allow_nan_scales: cli.engine.allow_nan_scales,
        isa: engine.isa().name(),
        threads: engine.threads(),
        cache_policy: plan.cache_policy.clone(),
        expert_slots: plan.expert_slots,
        planned_peak_bytes: checked.total_bytes,
        peak_rss_bytes: host::peak_rss_bytes()?,
        totals: report::totals(&generated.steps, discarded, plan.probe.as_ref()),
        limit: report::limit(plan, &generated.steps),
        steps: generated.steps,
    };
    if let Some(path) = &cli.outputs.json {
        let mut text = serde_json::to_vec_pretty(&report)?;
        text.push(b'\n');
        term::write_atomic(path, &text)?;
    }
    log::info!("{}", summary::summary(&report, plan));
    if let Some(state) = &report.saved {
        log::info!(
            "saved {} of {} tokens; go on with: k3-run --resume {}",
            state.position,
            state.tokens,
            term::shell(&state.path)
        );
    }
    match (generated.finish, generated.error) {
        (Finish::Error, Some(GenerateError::Output(error))) => Err(error.into()),
        (Finish::Error, Some(GenerateError::Save(error))) => Err(error.into()),
        (Finish::Error, error) => {
            if let Some(error) = error {
                log::error!("{error}");
            }
            Ok(Outcome::Negative)
        }
        // A reader that closed the pipe has had all it wanted.
        (Finish::Length | Finish::Stop, _)
        | (Finish::Interrupted, Some(GenerateError::Output(_))) => Ok(Outcome::Done),
        (Finish::Interrupted, _) => Ok(Outcome::Interrupted(u8::try_from(signal).unwrap_or(2))),
    }
}
