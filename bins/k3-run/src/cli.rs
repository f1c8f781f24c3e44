//! What can be typed.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{Args, Parser, ValueEnum};

use crate::store::Verify;

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

/// The prompt: exactly one of the four.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
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
    /// 0 takes the likeliest token; the publisher recommends 1.
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "X",
        default_value_t = 0.0
    )]
    pub temperature: f64,
    /// Choose among the likeliest tokens that together have this probability.
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "X",
        default_value_t = 1.0
    )]
    pub top_p: f64,
    /// Seed of the random choice.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
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
