//! Decides what stays in memory and what streams, from one ledger.
//!
//! `k3-plan` reads the records of the trunk, the config and the limits of the host, spends a budget by the rules of [`spend`],
//! and writes the plan that `k3-run` follows. It allocates nothing of what it plans: a plan may be for another machine.
//!
//! Why a tool of its own: memory is decided before any is taken, by arithmetic that can be read and repeated. The rules of the
//! ledger are [`k3_shared::ledger`], which `k3-run` adds up again; [`probe`] measures disk and memory, [`cost`] turns bytes into
//! seconds, [`spend`] searches divisions, [`curve`] shows what more would buy. The plan is [`k3_shared::formats::plan`].
//! Next in the chain: `k3-run`.

#![forbid(unsafe_code)]

pub mod budget;
mod cli;
pub mod cost;
pub mod curve;
mod explain;
mod measurements;
mod predict;
pub mod probe;
mod report;
mod source;
mod speeds;
pub mod spend;

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::Context as _;
use k3_shared::{
    cache::PolicyKind,
    formats::plan::{LIST_SCHEMA, Plan, Plans, Predicted, Probe, SCHEMA},
    host::Host,
    ledger,
    size::Bytes,
    term::{self, Outcome},
    tiles::{TILE_ALIGN, TileSpec},
};

use budget::{Budget, auto_bytes};
pub use cli::{Cli, PinOrder};
use cost::CostModel;
use curve::Curve;
pub use predict::{Hits, Replay};
use source::Source;
use spend::{Asks, Spender, Spent};

/// Reads in flight where nothing was measured.
const DEPTH: usize = 8;
/// The most asked of one call where nothing was measured.
const READ_BYTES: u64 = 4 << 20;
/// The ring, unless the reads in flight need a longer one.
const RING_BYTES: u64 = 256 << 20;

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
    let model = source.model();
    let threads = cli.threads.map_or(host.cores, usize::from);
    let (probe, note) = speeds::of(cli, &source, threads, &host)?;
    let reading = Reading::new(cli, &source, probe.as_ref());
    let replay = match &cli.trace {
        Some(path) => Some(Replay::open(path, &source)?),
        None => None,
    };
    let most = cli
        .budget
        .iter()
        .map(|budget| budget.most_bytes(&host))
        .max();
    let most_slots = most.unwrap_or(0) / model.expert_slot_bytes().max(1);
    let curve = Curve::new(
        model,
        replay.as_ref(),
        policies(cli, replay.is_some()),
        usize::try_from(most_slots).unwrap_or(usize::MAX),
    );
    let cost = CostModel::new(&model, probe, reading.bytes);
    let asks = asks(cli, &source, threads, &reading);
    let planner = Planner {
        cli,
        host,
        note,
        source: &source,
        reading,
        spender: Spender::new(model, asks, &curve, &cost)?,
    };
    plan_all(&planner, out)
}

/// A plan for each budget, and the table where there are several.
fn plan_all(planner: &Planner<'_>, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    let cli = planner.cli;
    let mut err = io::stderr().lock();
    let mut plans = Vec::new();
    let mut rates = Vec::new();
    let mut outcome = Outcome::Done;
    for budget in &cli.budget {
        match planner.plan(*budget)? {
            Ok((plan, spent)) => {
                planner.show(&plan, &spent, &mut err)?;
                rates.push(spent.expected.hits.rate);
                plans.push(plan);
            }
            Err(refusal) => {
                writeln!(err, "k3-plan: {refusal}")?;
                outcome = Outcome::Negative;
            }
        }
    }
    if cli.budget.len() > 1 && !cli.quiet {
        let from_trace = planner.spender.curve().is_from_trace();
        write!(err, "{}", report::budgets(&plans, &rates, from_trace))?;
    }
    if !plans.is_empty() {
        write_plans(cli, plans, out)?;
    }
    Ok(outcome)
}

/// The policies to choose from. Without a trace there is nothing to choose by: the one that does best on decoded text. Static
/// pinning is left to the hand: it keeps what a run happens to begin with, and one trace cannot say how the next will begin.
fn policies(cli: &Cli, has_trace: bool) -> Vec<PolicyKind> {
    const USUAL: PolicyKind = PolicyKind::DEFAULT;
    match cli.cache_policy {
        Some(policy) => vec![policy],
        None if !has_trace => vec![USUAL],
        None => {
            let others = PolicyKind::ALL
                .into_iter()
                .filter(|&policy| policy != USUAL && policy != PolicyKind::StaticPin)
                .filter(|policy| !policy.is_replay_only());
            std::iter::once(USUAL).chain(others).collect()
        }
    }
}

fn asks(cli: &Cli, source: &Source, threads: usize, reading: &Reading) -> Asks {
    let slot = source.model().expert_slot_bytes().max(1);
    let by_size = cli
        .expert_mem
        .map(|size| usize::try_from(size.0 / slot).unwrap_or(usize::MAX));
    Asks {
        context: cli.context.get(),
        prefill_chunk: cli.prefill_chunk.get(),
        threads,
        queue_depth: reading.depth,
        depth_by_hand: cli.queue_depth.is_some(),
        ring_bytes: reading.ring_bytes,
        verify_experts: source.expert_digests.is_some(),
        pin_bytes: cli.pin.map(|size| size.0),
        expert_slots: cli.expert_slots.or(by_size),
        pin_order: cli.pin_order,
    }
}

/// How the disk is read: by hand, else as the probe found best, else as suits most disks.
#[derive(Clone, Copy, Debug)]
struct Reading {
    /// The most asked of one call, aligned.
    bytes: u64,
    /// Reads in flight.
    depth: usize,
    /// The ring, at most.
    ring_bytes: u64,
}

impl Reading {
    fn new(cli: &Cli, source: &Source, probe: Option<&Probe>) -> Self {
        let measured = probe.and_then(|probe| probe.read_bytes);
        let bytes = cli.read_size.map(|size| size.0).or(measured);
        let measured = probe.and_then(|probe| probe.queue_depth);
        let depth = cli
            .queue_depth
            .map(usize::from)
            .or(measured)
            .unwrap_or(DEPTH);
        let tiles = source.tiles.iter().map(TileSpec::stored_bytes);
        let tile = tiles.max().unwrap_or(0);
        let enough = tile.saturating_mul((depth as u64).saturating_add(2));
        Self {
            bytes: aligned(bytes.unwrap_or(READ_BYTES)),
            depth,
            ring_bytes: cli
                .stream_buffers
                .map_or_else(|| enough.max(RING_BYTES), |size| size.0),
        }
    }
}

/// A request size that direct reads accept.
fn aligned(bytes: u64) -> u64 {
    bytes
        .clamp(TILE_ALIGN, 1 << 30)
        .next_multiple_of(TILE_ALIGN)
}

/// Everything that is the same for all budgets.
struct Planner<'a> {
    cli: &'a Cli,
    host: Host,
    /// Where the machine's speeds come from.
    note: String,
    source: &'a Source,
    reading: Reading,
    spender: Spender<'a>,
}

impl Planner<'_> {
    /// The plan for a budget, or why there is none.
    fn plan(&self, budget: Budget) -> anyhow::Result<Result<(Plan, Spent), String>> {
        let bytes = match budget {
            Budget::Size(bytes) => bytes,
            Budget::Auto => auto_bytes(&self.host),
            Budget::Floor => match self.spender.floor() {
                Some(bytes) => bytes,
                None => return Ok(Err(self.refusal(budget, u64::MAX))),
            },
        };
        match self.spender.spend(bytes) {
            Some(spent) => Ok(Ok((self.fill(bytes, &spent)?, spent))),
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
    fn fill(&self, budget_bytes: u64, spent: &Spent) -> anyhow::Result<Plan> {
        let (model, choice) = (self.spender.model(), &spent.choice);
        let lines = ledger::lines(model, choice)?;
        let total_bytes = ledger::total_bytes(&lines)?;
        let (trunk, head) = model.streamed_payload(&choice.pinned);
        let expert_bytes =
            spent.expected.hits.missed_per_token() * model.config.moe.expert_bytes() as f64;
        let source = self.source;
        let pinned_trunk_bytes = lines.last().map_or(0, |line| line.bytes);
        Ok(Plan {
            schema: SCHEMA.to_owned(),
            budget_bytes,
            total_bytes,
            ledger: lines,
            pinned_trunk_bytes,
            streamed_trunk_bytes: trunk,
            pinned_tiles: choice.pinned.to_ranges(),
            head_pinned: model.head_is_pinned(&choice.pinned),
            expert_slots: choice.expert_slots,
            cache_policy: spent.expected.policy.name().to_owned(),
            context: choice.context,
            prefill_chunk: choice.prefill_chunk,
            threads: choice.threads,
            stream_buffer_bytes: choice.stream_buffer_bytes,
            read_bytes: self.reading.bytes,
            queue_depth: choice.queue_depth,
            model_dir: source.model_dir.clone(),
            trunk_dir: source.trunk_dir.clone(),
            trunk_files: source.trunk_files.clone(),
            expert_dirs: source.expert_dirs.clone(),
            expert_digests: source.expert_digests.clone(),
            experts_verified: source.expert_digests.is_some(),
            identity: source.identity.clone(),
            num_layers: source.num_layers,
            predicted: Predicted {
                trunk_bytes_per_token: trunk,
                head_bytes_per_token: head,
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a non-negative number of bytes far below 2^53"
                )]
                expert_bytes_per_token: expert_bytes.round() as u64,
                seconds_per_token: spent.cost.seconds,
            },
            probe: self.spender.cost().probe_at(spent.depth),
            host: self.host.record(),
        })
    }

    /// Ledger, explanation and warnings of one plan.
    fn show(&self, plan: &Plan, spent: &Spent, err: &mut dyn Write) -> io::Result<()> {
        let one = self.cli.budget.len() == 1;
        if !self.cli.quiet && (one || self.cli.verbose > 0) {
            write!(err, "{}", report::ledger(plan, spent, &self.note))?;
        }
        if self.cli.explain {
            write!(err, "{}", explain::explain(&self.spender, plan, spent))?;
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
        if spent.expected.policy == PolicyKind::Lru && plan.expert_slots < working_set {
            log::warn!(
                "lru hits nothing below one token's {working_set} experts, and there are {} slots: try --cache-policy {}",
                plan.expert_slots,
                PolicyKind::DEFAULT
            );
        }
        if let Some(warning) = report::host_warning(plan, &self.host) {
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
