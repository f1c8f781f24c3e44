//! Write the manual pages and shell completions of the five tools: `cargo run -p k3-tests --example pages -- DIR`; with
//! `--readme README.md`, the blocks of the README that programs write.
//!
//! The folder gets the layout of a prefix such as `/usr/local`: `share/man/man1`, `share/bash-completion/completions`,
//! `share/zsh/site-functions`, `share/fish/vendor_completions.d`.
#![forbid(unsafe_code)]

mod pages;
mod readme;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Parser;
use k3_shared::term::{self, Outcome};

/// Write manual pages and shell completions, or the README's tables.
#[derive(Debug, Parser)]
#[command(arg_required_else_help = true)]
struct Cli {
    /// The folder to write to.
    out: Option<PathBuf>,
    /// A README whose blocks are written again in place.
    #[arg(long, value_name = "FILE")]
    readme: Option<PathBuf>,
}

fn main() -> ExitCode {
    term::exit("pages", write(&Cli::parse()).map(|()| Outcome::Done))
}

fn write(cli: &Cli) -> anyhow::Result<()> {
    if let Some(out) = &cli.out {
        pages::write(out)?;
    }
    if let Some(path) = &cli.readme {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let (text, _) = readme::update(&text, &root)?;
        term::write_atomic(path, text.as_bytes())?;
    }
    Ok(())
}
