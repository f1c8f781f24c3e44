//! Command-line entry of `k3-simcache`.
#![forbid(unsafe_code)]

use std::{io, process::ExitCode};

use clap::Parser as _;
use k3_shared::term;
use k3_simcache::{Cli, run};

fn main() -> ExitCode {
    let cli = Cli::parse();
    term::init_log(cli.quiet, cli.verbose);
    term::exit("k3-simcache", run(&cli, &mut io::stdout().lock()))
}
