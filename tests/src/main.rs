//! Command-line entry of `k3-synth`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use k3_shared::term;
use k3_tests::{Cli, run};

fn main() -> ExitCode {
    let cli = Cli::parse();
    term::init_log(cli.quiet, cli.verbose);
    term::exit("k3-synth", run(&cli))
}
