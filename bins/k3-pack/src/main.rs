//! Command-line entry of `k3-pack`.

#![forbid(unsafe_code)]

use std::{io, process::ExitCode};

use clap::Parser as _;
use k3_pack::{Cli, run};

fn main() -> ExitCode {
    k3_shared::term::exit("k3-pack", run(&Cli::parse(), &mut io::stdout().lock()))
}
