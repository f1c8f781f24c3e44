//! What can be typed.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{Args, Parser, ValueEnum};

use crate::{saved::Interval, store::Verify};

/// Generate tokens from a plan.
///
/// The plan comes from --plan or standard input: k3-plan --budget 32G | k3-run --prompt "..."
/// Generated text goes to standard output, everything else to standard error.
#[derive(Debug, Parser)]
#[command(name = "k3-run", version, max_term_width = 100)]
pub struct Cli {
    /// The plan; `-` is standard input, which is also the default.
    #[arg(long, value_name = "FILE|-")]
    pub plan: Option<PathBuf>,
    /// What to continue.
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// How to choose tokens.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// What to write besides the text.
    #[command(flatten)]
    pub outputs: OutputArgs,
    /// Where to go on from, and what to save.
    #[command(flatten)]
    pub state: StateArgs,
    /// How to compute; none of these changes a bit, except where said.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Errors only.
    #[arg(short, long)]
    pub quiet: bool,
    /// More to say; twice for all.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The prompt: exactly one of the four, or none with `--resume`.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct PromptArgs {
    /// The prompt as text; names of special tokens in it are plain text.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// A file whose bytes are the prompt, verbatim.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// The prompt as token ids.
    #[arg(long, value_name = "ID,...", value_delimiter = ',')]
    pub ids: Option<Vec<u32>>,
    /// A file of token ids, separated by commas or white space.
    #[arg(long, value_name = "FILE")]
    pub ids_file: Option<PathBuf>,
}

/// How tokens are chosen, and when to stop.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Tokens to generate at most.
    #[arg(long = "gen", value_name = "N", default_value_t = 64)]
    pub num_tokens: usize,
    /// Stop at this token; repeatable, and replaces the config's end of message and `[EOS]`.
    #[arg(long, value_name = "ID")]
    pub stop_id: Vec<u32>,
    /// Stop at no token.
    #[arg(long, conflicts_with = "stop_id")]
    pub no_stop: bool,
    /// 0 takes the likeliest token; the publisher recommends 1 [default: 0, or the resumed state's].
    #[arg(long, allow_negative_numbers = true, value_name = "X")]
    pub temperature: Option<f64>,
    /// Choose among the likeliest tokens that together have this probability [default: 1, or the resumed state's].
    #[arg(long, allow_negative_numbers = true, value_name = "X")]
    pub top_p: Option<f64>,
    /// Seed of the random choice [default: 0, or where the resumed state stands].
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// Saved states.
#[derive(Debug, Args)]
pub struct StateArgs {
    /// Save the sequence here at the end, so that --resume goes on from it. Ctrl-C then finishes the step in progress first.
    #[arg(long, value_name = "FILE", conflicts_with = "recompute")]
    pub state: Option<PathBuf>,
    /// Also save after every so many tokens, or so much time: 90s, 30m, 2h.
    #[arg(long, value_name = "N|TIME", requires = "state")]
    pub save_every: Option<Interval>,
    /// Go on from a saved state, bit for bit, with any plan of the same checkpoint; a prompt given as well comes after it.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["recompute", "score"])]
    pub resume: Option<PathBuf>,
    /// Replace a state that is already at --state; one that is resumed from may always be.
    #[arg(long, requires = "state")]
    pub force: bool,
}

/// Files to write besides the text; each is replaced whole or not at all.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// The report (`k3.run/1`).
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Every expert asked for, for k3-simcache.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Logits of each generated token: little-endian f32, the vocabulary wide.
    #[arg(long, value_name = "FILE")]
    pub dump_logits: Option<PathBuf>,
    /// The stream after every layer: little-endian f32, `[layer][row][hidden]` for each step.
    #[arg(long, value_name = "FILE")]
    pub dump_hidden: Option<PathBuf>,
    /// Log-probability and rank of every prompt token given those before it (`k3.score/1`).
    #[arg(long, value_name = "FILE")]
    pub score: Option<PathBuf>,
}

/// How to compute.
#[derive(Debug, Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the command line"
)]
pub struct EngineArgs {
    /// Run the whole prefix again for every token, to check the incremental path.
    #[arg(long)]
    pub recompute: bool,
    /// The first N layers only; the plan must be for as many.
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Compute threads, instead of the plan's.
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Instruction set.
    #[arg(long, value_enum, default_value_t = IsaChoice::Auto)]
    pub isa: IsaChoice,
    /// Read through the page cache.
    #[arg(long)]
    pub buffered: bool,
    /// When to check tiles and experts against their digests.
    #[arg(long, value_enum, default_value_t = Verify::First)]
    pub verify: Verify,
    /// Check no digest.
    #[arg(long, conflicts_with = "verify")]
    pub no_verify: bool,
    /// Take a scale byte of 255 as factor 0 instead of NaN; changes results, and is in the report.
    #[arg(long)]
    pub allow_nan_scales: bool,
    /// Epsilon of MLA's two low-rank norms; 1e-5 reproduces what other engines compute. Changes results.
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "X",
        default_value_t = 1e-6
    )]
    pub mla_norm_eps: f64,
    /// The folder with tiktoken.model, instead of the checkpoint's.
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
}

/// The instruction set to compute with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum IsaChoice {
    /// The best this machine has.
    #[default]
    Auto,
    /// The reference; slow.
    Scalar,
    /// AVX2 and FMA, or an error.
    Avx2,
    /// AVX-512, or an error.
    Avx512,
}

impl EngineArgs {
    /// When to check digests.
    pub fn verify(&self) -> Verify {
        if self.no_verify {
            Verify::Never
        } else {
            self.verify
        }
    }
}
