//! Command-line entry of `k3-rows`.
#![forbid(unsafe_code)]

use std::{io, process::ExitCode};

use clap::Parser as _;
use k3_shared::term;
use k3_tests::rows::{Cli, run};

fn main() -> ExitCode {
    let cli = Cli::parse();
    term::init_log(false, 0);
    term::exit("k3-rows", run(&cli, &mut io::stdout().lock()))
}
