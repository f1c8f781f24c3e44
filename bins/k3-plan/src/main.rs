//! Command-line entry of `k3-plan`.
#![forbid(unsafe_code)]

use std::{io, process::ExitCode};

use clap::Parser as _;

fn main() -> ExitCode {
    let cli = k3_plan::Cli::parse();
    k3_shared::term::exit("k3-plan", k3_plan::run(&cli, &mut io::stdout().lock()))
}
