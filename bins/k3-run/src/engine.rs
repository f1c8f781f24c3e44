//! A plan opened for running: trunk, checkpoint and plan checked against each other, files open, threads started.

use std::{
    marker::PhantomData,
    path::PathBuf,
    sync::{Arc, atomic::AtomicUsize},
};

use k3_shared::{
    checkpoint::{Checkpoint, CheckpointError, hex},
    config::Config,
    direct::{Interpose, Mode},
    formats::{
        census::digests::ExpertDigests,
        plan::Plan,
        trunk::{FILE_NAME as TRUNK_FILE, OpenTrunk, Trunk, TrunkError},
    },
    host::{self, Host},
    ledger::{self, Checked},
    size::Bytes,
    term::shell,
};

use sha2::{Digest as _, Sha256};

use crate::{
    kernels::{self, Isa, NanScales},
    model::{
        Forward, ForwardOptions, ModelError, Observer, Output, Segment, SequenceState, SourceError,
        StepProfile, WeightSource as _,
    },
    store::{StepReads, Store, StoreOptions, Verify},
};

/// Why an engine cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The plan does not fit, or does not belong to what it names.
    #[error("the plan is refused:\n  {}\n(plan again: k3-plan --budget {} --model {} --trunk {})",
        problems.join("\n  "), budget_bytes, model_dir, trunk_dir)]
    Refused {
        /// Everything wrong with it.
        problems: Vec<String>,
        /// What it was made with.
        budget_bytes: u64,
        /// The checkpoint folder.
        model_dir: String,
        /// The trunk folder.
        trunk_dir: String,
    },
    /// The trunk cannot be used.
    #[error(transparent)]
    Trunk(#[from] TrunkError),
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A file cannot be opened.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The trunk lacks what its embedding would be checked against.
    #[error("{}: names no digests of the embedding's rows, as trunks packed by an earlier version; pack it again: k3-pack --force {} {} \
        (or go on unchecked: --no-verify)",
        trunk_dir.join(TRUNK_FILE).display(), shell(model_dir), shell(trunk_dir))]
    Unverifiable {
        /// The checkpoint folder.
        model_dir: PathBuf,
        /// The trunk folder.
        trunk_dir: PathBuf,
    },
    /// Anything of the machine.
    #[error("{0}")]
    Environment(String),
}

impl EngineError {
    /// Whether the files are there but the answer is no: the plan is refused, or they are not the whole they were planned as.
    pub fn is_mismatch(&self) -> bool {
        matches!(
            self,
            Self::Refused { .. }
                | Self::Unverifiable { .. }
                | Self::Trunk(TrunkError::Invalid { .. })
                | Self::Checkpoint(
                    CheckpointError::Problems { .. } | CheckpointError::NotABlock { .. }
                )
        )
    }
}

/// How to run a plan; nothing here changes a bit, except `mla_norm_eps` and `nan_scales`.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Compute threads, instead of the plan's.
    pub threads: Option<usize>,
    /// How many layers the caller expects.
    pub layers: Option<usize>,
    /// Instruction set.
    pub isa: Isa,
    /// Direct or buffered reads.
    pub mode: Mode,
    /// What lies between the files and the disk: nothing, but for tests.
    pub interpose: Interpose,
    /// When to check digests.
    pub verify: Verify,
    /// Epsilon of MLA's low-rank norms.
    pub mla_norm_eps: f64,
    /// What a scale byte of 255 means.
    pub nan_scales: NanScales,
    /// Set to a signal's number to end the run at the next tile.
    pub interrupt: Arc<AtomicUsize>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            layers: None,
            isa: Isa::detect(),
            mode: Mode::Auto,
            interpose: Interpose::default(),
            verify: Verify::First,
            mla_norm_eps: 1e-6,
            nan_scales: NanScales::Propagate,
            interrupt: Arc::default(),
        }
    }
}

/// A model ready to run steps.
///
/// It belongs to the thread that opened it, which is one of its compute threads.
pub struct Engine {
    forward: Forward,
    store: Store,
    pool: rayon::ThreadPool,
    plan: Plan,
    checked: Checked,
    threads: usize,
    isa: Isa,
    mla_norm_eps: f64,
    experts_verified: bool,
    /// Keeps an engine on its thread.
    not_send: PhantomData<*const ()>,
}

impl Engine {
    /// Open everything `plan` names and check that it belongs together and fits this machine.
    ///
    /// # Errors
    /// If the plan is refused, or a file is missing or not what it should be.
    pub fn open(plan: Plan, options: &EngineOptions) -> Result<Self, EngineError> {
        let mut plan = plan;
        if let Some(threads) = options.threads {
            plan.threads = threads;
        }
        raise_open_file_limit();
        let trunk = cut(Trunk::open(&plan.trunk_dir)?, plan.num_layers);
        let checkpoint = open_checkpoint(&plan, &trunk)?;
        if trunk.embedding.is_none() && options.verify != Verify::Never {
            return Err(EngineError::Unverifiable {
                model_dir: plan.model_dir,
                trunk_dir: plan.trunk_dir,
            });
        }
        if !kernels::keeps_subnormals() {
            let problem = "this process takes numbers below 1.2e-38 for zero, which changes results: \
                something loaded into it has set the processor so (LD_PRELOAD?)";
            return Err(EngineError::Environment(problem.into()));
        }
        let checked = check(&plan, &trunk, &checkpoint, options)?;
        let digests = expert_digests(&plan)?;
        let experts_verified = digests.is_some() && options.verify != Verify::Never;
        let policy = plan
            .cache_policy
            .parse()
            .map_err(|e: k3_shared::cache::CacheError| EngineError::Environment(e.to_string()))?;
        let store_options = StoreOptions {
            model_dir: plan.model_dir.clone(),
            pinned: checked.choice.pinned.clone(),
            ring_slots: checked.stream_slots,
            ring_slot_bytes: usize::try_from(checked.stream_slot_bytes).unwrap_or(usize::MAX),
            expert_slots: plan.expert_slots,
            policy,
            queue_depth: plan.queue_depth,
            read_bytes: usize::try_from(plan.read_bytes).unwrap_or(usize::MAX),
            mode: options.mode,
            interpose: options.interpose.clone(),
            verify: options.verify,
            expert_digests: digests,
            interrupt: Arc::clone(&options.interrupt),
        };
        let store = Store::open(&trunk, &checkpoint, plan.num_layers, &store_options)?;
        let pool = compute_pool(plan.threads)
            .map_err(|e| EngineError::Environment(format!("compute threads: {e}")))?;
        let forward_options = ForwardOptions {
            isa: options.isa,
            mla_norm_eps: options.mla_norm_eps,
            nan_scales: options.nan_scales,
        };
        Ok(Self {
            forward: Forward::new(trunk.config, plan.num_layers, forward_options),
            store,
            pool,
            threads: plan.threads,
            isa: options.isa,
            mla_norm_eps: options.mla_norm_eps,
            experts_verified,
            checked,
            plan,
            not_send: PhantomData,
        })
    }

    /// The whole model's config.
    pub fn config(&self) -> &Config {
        self.forward.config()
    }

    /// The plan that is run, with the threads in effect.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The ledger, recomputed.
    pub fn checked(&self) -> &Checked {
        &self.checked
    }

    /// Compute threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Epsilon of MLA's low-rank norms.
    pub fn mla_norm_eps(&self) -> f64 {
        self.mla_norm_eps
    }

    /// Whether experts are checked against digests.
    pub fn experts_verified(&self) -> bool {
        self.experts_verified
    }

    /// The state before the first token of a sequence.
    pub fn new_sequence(&self) -> SequenceState {
        SequenceState::new(self.config(), self.plan.num_layers, self.plan.context)
    }

    /// Steps to come, each saying whether it reads the head, so that reads can run ahead.
    pub fn announce(&mut self, steps_with_head: &[bool]) {
        self.store.announce(steps_with_head);
    }

    /// Run one step on the compute threads.
    ///
    /// # Errors
    /// As [`Forward::step`].
    pub fn step(
        &mut self,
        segments: &mut [Segment<'_>],
        output: Output,
        observer: &mut dyn Observer,
    ) -> Result<(), ModelError> {
        let (forward, store) = (&mut self.forward, &mut self.store);
        self.pool
            .install(|| forward.step(store, segments, output, observer))
    }

    /// Where the time of the last step went.
    pub fn profile(&self) -> &StepProfile {
        self.forward.profile()
    }

    /// What was read since the last call.
    pub fn take_reads(&mut self) -> StepReads {
        self.store.take_reads()
    }

    /// Bytes read ahead that no step used.
    pub fn discard_readahead(&mut self) -> u64 {
        self.store.discard_readahead()
    }
}

/// `threads` compute threads, the current one among them: a step then begins without being handed over.
///
/// A thread can be in one pool only, and never leaves it; one that opened an engine before hands its steps over.
fn compute_pool(threads: usize) -> Result<rayon::ThreadPool, rayon::ThreadPoolBuildError> {
    let builder = || {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("k3-compute-{index}"))
    };
    builder()
        .use_current_thread()
        .build()
        .or_else(|_| builder().build())
}

fn refused(plan: &Plan, problems: Vec<String>) -> EngineError {
    EngineError::Refused {
        problems,
        budget_bytes: plan.budget_bytes,
        model_dir: plan.model_dir.display().to_string(),
        trunk_dir: plan.trunk_dir.display().to_string(),
    }
}

/// The part of a trunk that holds the first `num_layers` layers, the final vectors and the head.
fn cut(mut trunk: OpenTrunk, num_layers: usize) -> OpenTrunk {
    trunk.trunk.layers.truncate(num_layers);
    trunk
        .specs
        .retain(|spec| spec.layer().is_none_or(|layer| layer.get() < num_layers));
    trunk
}

fn open_checkpoint(plan: &Plan, trunk: &OpenTrunk) -> Result<Checkpoint, EngineError> {
    let layers = Some(trunk.trunk.num_layers);
    let checkpoint = Checkpoint::open_in(&plan.model_dir, &plan.expert_dirs, layers)?;
    if checkpoint.identity() != trunk.trunk.identity {
        return Err(refused(
            plan,
            vec![format!(
                "{}: the trunk was packed from another checkpoint than {} (identity {} against {}; re-run: k3-pack --force {} {})",
                trunk.dir.display(),
                plan.model_dir.display(),
                trunk.trunk.identity,
                checkpoint.identity(),
                plan.model_dir.display(),
                trunk.dir.display(),
            )],
        ));
    }
    // The identity vouches for the checkpoint's config, and only this for the trunk's copy of it.
    if checkpoint.config != trunk.config {
        let problem = format!(
            "{}: its config is not the checkpoint's (re-run: k3-pack --force {} {})",
            trunk.dir.display(),
            plan.model_dir.display(),
            trunk.dir.display()
        );
        return Err(refused(plan, vec![problem]));
    }
    Ok(checkpoint)
}

fn check(
    plan: &Plan,
    trunk: &OpenTrunk,
    checkpoint: &Checkpoint,
    options: &EngineOptions,
) -> Result<Checked, EngineError> {
    let num_layers = options.layers.unwrap_or(plan.num_layers);
    if plan.num_layers > trunk.trunk.num_layers {
        let problem = format!(
            "num_layers: {}, but the trunk holds {}",
            plan.num_layers, trunk.trunk.num_layers
        );
        return Err(refused(plan, vec![problem]));
    }
    let model = ledger::Model {
        config: &trunk.config,
        num_layers,
        tiles: &trunk.specs,
    };
    let checked = ledger::check(plan, &model, checkpoint.identity())
        .map_err(|problems| refused(plan, problems))?;
    for stale in &checked.stale {
        log::warn!("plan: {stale}");
    }
    let host = Host::detect().map_err(|e| EngineError::Environment(e.to_string()))?;
    // What this process already takes is part of the plan, and no longer of what is left.
    let own = host::rss_bytes().map_err(|e| EngineError::Environment(e.to_string()))?;
    if checked.total_bytes > host.limit_bytes.saturating_add(own) {
        return Err(refused(
            plan,
            vec![format!(
                "it takes {}, but {} leaves {} on this machine",
                Bytes(checked.total_bytes),
                host.limited_by,
                Bytes(host.limit_bytes)
            )],
        ));
    }
    Ok(checked)
}

/// The expert digests the plan names, if it names any; they must be of this checkpoint, unchanged.
fn expert_digests(plan: &Plan) -> Result<Option<Arc<ExpertDigests>>, EngineError> {
    let Some(named) = &plan.expert_digests else {
        return Ok(None);
    };
    let path = named.path.display();
    let refuse = |problem: String| refused(plan, vec![problem]);
    let bytes = std::fs::read(&named.path).map_err(|e| refuse(format!("{path}: {e}")))?;
    if hex(Sha256::digest(&bytes)) != named.sha256 {
        return Err(refuse(format!("{path}: changed since the plan was made")));
    }
    let digests = ExpertDigests::open(&named.path).map_err(|e| refuse(e.to_string()))?;
    if digests.identity != plan.identity {
        return Err(refuse(format!(
            "{path}: of another checkpoint (make it again: k3-census {} --hash --experts)",
            plan.model_dir.display()
        )));
    }
    Ok(Some(Arc::new(digests)))
}

/// A shard takes two descriptors, and the release has 94 of them; the soft limit may be raised to the hard one.
fn raise_open_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            log::debug!("open-file limit: {error}");
        }
    }
}
