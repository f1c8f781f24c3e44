//! Decides what stays in memory and what streams, from one ledger.
//!
//! `k3-plan` reads the records of the trunk, the config and the limits of the host, spends a budget by the rules of [`spend`],
//! and writes the plan that `k3-run` follows. It allocates nothing of what it plans: a plan may be for another machine.

#![forbid(unsafe_code)]

pub mod budget;
mod cli;
mod predict;
pub mod probe;
mod report;
mod source;
pub mod spend;

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::Context as _;
use k3_shared::{
    cache::PolicyKind,
    formats::plan::{LIST_SCHEMA, Plan, Plans, Probe, SCHEMA},
    host::Host,
    ledger::{self, Choice},
    size::Bytes,
    term::{self, Outcome},
    tiles::TILE_ALIGN,
};

use budget::{Budget, auto_bytes};
pub use cli::{Cli, PinOrder};
use predict::{Hits, Replay};
use source::Source;
use spend::{Asks, Spender};

/// Run the tool: the plan, or the list of plans, goes to `out` or the file asked for, all else to stderr.
///
/// # Errors
/// On wrong usage, files that are missing or do not belong together, and output that cannot be written.
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    term::init_log(cli.quiet, cli.verbose);
    if cli.list_presets {
        write!(out, "{}", report::presets())?;
        return Ok(Outcome::Done);
    }
    let host = Host::detect()?;
    let source = Source::open(cli)?;
    let threads = cli.threads.map_or(host.cores, usize::from);
    let spender = Spender::new(source.model(), asks(cli, &source, threads))?;
    let planner = Planner {
        cli,
        probe: probe_of(cli, &source, threads, &host)?,
        replay: match &cli.trace {
            Some(path) => Some(Replay::open(path, &source)?),
            None => None,
        },
        host,
        source: &source,
        spender,
    };
    let mut err = io::stderr().lock();
    let mut plans = Vec::new();
    let mut outcome = Outcome::Done;
    for budget in &cli.budget {
        match planner.plan(*budget)? {
            Ok((plan, hits)) => {
                planner.show(&plan, hits, &mut err)?;
                plans.push(plan);
            }
            Err(refusal) => {
                writeln!(err, "k3-plan: {refusal}")?;
                outcome = Outcome::Negative;
            }
        }
    }
    if cli.budget.len() > 1 && !cli.quiet {
        write!(err, "{}", report::budgets(&plans))?;
    }
    if !plans.is_empty() {
        write_plans(cli, plans, out)?;
    }
    Ok(outcome)
}

fn asks(cli: &Cli, source: &Source, threads: usize) -> Asks {
    let slot = source.model().expert_slot_bytes().max(1);
    let by_size = cli
        .expert_mem
        .map(|size| usize::try_from(size.0 / slot).unwrap_or(usize::MAX));
    Asks {
        context: cli.context.get(),
        prefill_chunk: cli.prefill_chunk.get(),
        threads,
        queue_depth: cli.queue_depth.get(),
        ring_bytes: cli.stream_buffers.0,
        verify_experts: source.expert_digests.is_some(),
        pin_bytes: cli.pin.map(|size| size.0),
        expert_slots: cli.expert_slots.or(by_size),
        pin_order: cli.pin_order,
    }
}

/// What is known of the machine's speed: measured, or given, which counts more.
fn probe_of(
    cli: &Cli,
    source: &Source,
    threads: usize,
    host: &Host,
) -> anyhow::Result<Option<Probe>> {
    let mut measured = None;
    if cli.probe {
        let disk = probe::DiskProbe {
            read_bytes: read_bytes(cli),
            queue_depth: cli.queue_depth.get(),
        };
        let file = source.trunk_files.first().map(std::path::PathBuf::as_path);
        if file.is_none() && cli.disk_speed.is_none() {
            log::warn!("there is no trunk to read from: give --disk-speed, or pack first");
        }
        let file = file.filter(|_| cli.disk_speed.is_none());
        measured = Some(probe::measure(file, disk, threads, host)?);
    }
    if cli.disk_speed.is_none() && cli.memory_speed.is_none() {
        return Ok(measured);
    }
    let mut probe = measured.unwrap_or_else(|| Probe {
        disk_bytes_per_second: None,
        memory_bytes_per_second: None,
        flops_per_second: None,
        date: probe::today(),
    });
    let given = |size: Option<Bytes>| size.map(|size| size.0.max(1) as f64);
    probe.disk_bytes_per_second = given(cli.disk_speed).or(probe.disk_bytes_per_second);
    probe.memory_bytes_per_second = given(cli.memory_speed).or(probe.memory_bytes_per_second);
    Ok(Some(probe))
}

/// The request size, aligned.
fn read_bytes(cli: &Cli) -> u64 {
    cli.read_size
        .0
        .clamp(TILE_ALIGN, 1 << 30)
        .next_multiple_of(TILE_ALIGN)
}

/// Everything that is the same for all budgets.
struct Planner<'a> {
    cli: &'a Cli,
    host: Host,
    source: &'a Source,
    spender: Spender<'a>,
    probe: Option<Probe>,
    replay: Option<Replay>,
}

impl Planner<'_> {
    /// The plan for a budget, or why there is none.
    fn plan(&self, budget: Budget) -> anyhow::Result<Result<(Plan, Hits), String>> {
        let bytes = match budget {
            Budget::Size(bytes) => bytes,
            Budget::Auto => auto_bytes(&self.host),
            Budget::Floor => match self.spender.floor() {
                Some(bytes) => bytes,
                None => return Ok(Err(self.refusal(budget, u64::MAX))),
            },
        };
        match self.spender.spend(bytes) {
            Some(choice) => Ok(Ok(self.fill(bytes, &choice)?)),
            None => Ok(Err(self.refusal(budget, bytes))),
        }
    }

    fn refusal(&self, budget: Budget, bytes: u64) -> String {
        let asked = match budget {
            Budget::Auto => format!(
                "auto, {bytes} bytes of the {} that {} leaves,",
                self.host.limit_bytes, self.host.limited_by
            ),
            Budget::Size(_) => format!("a budget of {bytes} bytes"),
            Budget::Floor => "what was asked for".to_owned(),
        };
        match self.spender.smallest() {
            Some(least) => format!(
                "{asked} does not fit: the smallest budget that works is {least} ({}); try: k3-plan --budget {least}",
                Bytes(least)
            ),
            None => format!(
                "{asked} does not fit in 64 bits; lower --context, --prefill-chunk, --threads or --queue-depth"
            ),
        }
    }

    /// Every field of the plan of a choice.
    fn fill(&self, budget_bytes: u64, choice: &Choice) -> anyhow::Result<(Plan, Hits)> {
        let model = self.spender.model();
        let lines = ledger::lines(model, choice)?;
        let total_bytes = ledger::total_bytes(&lines)?;
        let policy = self.cli.cache_policy;
        let hits = match &self.replay {
            Some(replay) if choice.expert_slots > 0 => replay.hits(choice.expert_slots, policy)?,
            _ => predict::uniform_hits(model, choice.expert_slots, policy),
        };
        let predicted = predict::predict(model, choice, hits, self.probe.as_ref());
        let source = self.source;
        let pinned_trunk_bytes = lines.last().map_or(0, |line| line.bytes);
        let plan = Plan {
            schema: SCHEMA.to_owned(),
            budget_bytes,
            total_bytes,
            ledger: lines,
            pinned_trunk_bytes,
            streamed_trunk_bytes: predicted.trunk_bytes_per_token,
            pinned_tiles: choice.pinned.to_ranges(),
            head_pinned: model.head_is_pinned(&choice.pinned),
            expert_slots: choice.expert_slots,
            cache_policy: policy.name().to_owned(),
            context: choice.context,
            prefill_chunk: choice.prefill_chunk,
            threads: choice.threads,
            stream_buffer_bytes: choice.stream_buffer_bytes,
            read_bytes: read_bytes(self.cli),
            queue_depth: choice.queue_depth,
            model_dir: source.model_dir.clone(),
            trunk_dir: source.trunk_dir.clone(),
            trunk_files: source.trunk_files.clone(),
            expert_dirs: source.expert_dirs.clone(),
            expert_digests: source.expert_digests.clone(),
            identity: source.identity.clone(),
            num_layers: source.num_layers,
            predicted,
            probe: self.probe.clone(),
            host: self.host.record(),
        };
        Ok((plan, hits))
    }

    /// Ledger, explanation and warnings of one plan.
    fn show(&self, plan: &Plan, hits: Hits, err: &mut dyn Write) -> io::Result<()> {
        let one = self.cli.budget.len() == 1;
        if !self.cli.quiet && (one || self.cli.verbose > 0) {
            write!(err, "{}", report::ledger(plan, hits))?;
        }
        if self.cli.explain {
            write!(err, "{}", report::explain(&self.spender, plan))?;
        }
        let asks = self.spender.asks();
        if plan.context < asks.context {
            log::warn!(
                "context lowered from {} to {} to fit {}",
                asks.context,
                plan.context,
                Bytes(plan.budget_bytes)
            );
        }
        if plan.prefill_chunk < asks.prefill_chunk {
            log::info!(
                "prefill chunk lowered from {} to {} to fit {}",
                asks.prefill_chunk,
                plan.prefill_chunk,
                Bytes(plan.budget_bytes)
            );
        }
        let working_set = self.spender.model().experts_per_token();
        if self.cli.cache_policy == PolicyKind::Lru && plan.expert_slots < working_set {
            log::warn!(
                "lru hits nothing below one token's {working_set} experts, and there are {} slots: try --cache-policy {}",
                plan.expert_slots,
                PolicyKind::DEFAULT
            );
        }
        if let Some(warning) = report::host_warning(plan.total_bytes, &plan.host) {
            log::warn!("{warning}");
        }
        Ok(())
    }
}

/// One plan as itself, several as a list.
fn write_plans(cli: &Cli, mut plans: Vec<Plan>, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut text = if cli.budget.len() == 1 {
        plans.pop().map_or_else(
            || Ok(String::new()),
            |plan| serde_json::to_string_pretty(&plan),
        )?
    } else {
        serde_json::to_string_pretty(&Plans {
            schema: LIST_SCHEMA.to_owned(),
            plans,
        })?
    };
    text.push('\n');
    match cli.output.as_deref() {
        Some(path) if path != Path::new("-") => term::write_atomic(path, text.as_bytes())
            .with_context(|| format!("{}: the plan could not be written", path.display())),
        _ => {
            out.write_all(text.as_bytes())?;
            out.flush()?;
            Ok(())
        }
    }
}
