//! Command-line entry of `k3-census`.
#![forbid(unsafe_code)]

use std::{io, process::ExitCode};

use clap::Parser as _;
use k3_census::{Cli, run};
use k3_shared::term;

fn main() -> ExitCode {
    let cli = Cli::parse();
    term::init_log(cli.quiet, cli.verbose);
    term::exit("k3-census", run(&cli, &mut io::stdout().lock()))
}
