//! Command-line entry of `k3-run`.
use std::{io, process::ExitCode};

use clap::Parser as _;
use k3_run::{Cli, run};
use k3_shared::term;

fn main() -> ExitCode {
    term::exit("k3-run", run(&Cli::parse(), &mut io::stdout().lock()))
}
