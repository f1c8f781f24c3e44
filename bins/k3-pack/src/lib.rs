//! `k3-pack`: copies the always-used weights of a checkpoint into a trunk, tile by tile in order of use.
//!
//! The shards already hold each layer's trunk tensors in one run, but neither aligned nor in order of use. The trunk is that
//! data cut into 4 KiB-aligned tiles with a digest each, so that the engine's reads are whole, direct, and checked.
//!
//! A packed trunk appears whole or not at all: tiles go to `*.partial` files, which are synced and renamed, and `trunk.json`,
//! without which no tool accepts a trunk, is written last.
//!
//! Next in the chain: `k3-plan`, which divides memory over the tiles of [`k3_shared::formats::trunk`].

#![forbid(unsafe_code)]

mod cli;
mod copy;
mod embedding;
mod error;
#[cfg(test)]
#[path = "../tests/fixture/mod.rs"]
mod fixture;
mod folders;
mod layout;
mod pack;
mod pool;
mod repair;
mod shares;
mod source;
mod verify;
mod zeros;

use std::io::Write;

use k3_shared::term::{self, Outcome};

pub use cli::{Cli, RepairTarget};

/// Do what the command line asks; the findings of `--verify` go to `out`.
///
/// # Errors
/// Whatever keeps the work from being done: an unreadable checkpoint, a trunk that is in the way or in use, a full disk.
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    term::init_log(cli.quiet, cli.verbose);
    let pool = pool::Pool::new(cli.threads)?;
    if cli.verify {
        verify::verify(cli, &pool, out)
    } else if let Some(target) = cli.repair {
        Ok(repair::repair(cli, target, &pool)?)
    } else {
        Ok(pack::pack(cli, &pool)?)
    }
}
