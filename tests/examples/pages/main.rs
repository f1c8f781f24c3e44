//! Write the manual pages and shell completions of the five tools: `cargo run -p k3-tests --example pages -- DIR`.
//!
//! The folder gets the layout of a prefix such as `/usr/local`: `share/man/man1`, `share/bash-completion/completions`,
//! `share/zsh/site-functions`, `share/fish/vendor_completions.d`.
#![forbid(unsafe_code)]

mod pages;

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use k3_shared::term::{self, Outcome};

/// Write manual pages and shell completions.
#[derive(Debug, Parser)]
struct Cli {
    /// The folder to write to.
    out: PathBuf,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    term::exit("pages", pages::write(&cli.out).map(|()| Outcome::Done))
}
