//! A trunk to be packed again and again, over two folders.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test binary uses its own part"
)]
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]

use std::{fs, path::PathBuf, process::Command};

use super::{
    common::{Fixture, golden},
    process::{finish, tool},
};

/// A checkpoint of one layer, and a command that packs it over two folders.
pub struct Packing {
    pub fixture: Fixture,
    pub stripe: PathBuf,
}

impl Packing {
    pub fn new() -> Self {
        let fixture = Fixture::empty();
        let config = golden("shapes/single-kda.config.json");
        k3_tests::synth::custom(&fixture.model, &config, k3_tests::synth::Options::default())
            .unwrap();
        // Both folders in the one where writes fail.
        let stripe = fixture.trunk.join("more");
        Self { fixture, stripe }
    }

    pub fn command(&self, tile_bytes: &str) -> Command {
        let mut command = tool("k3-pack");
        command.arg(&self.fixture.model).arg(&self.fixture.trunk);
        command.args([
            "-q",
            "--force",
            "--tile-bytes",
            tile_bytes,
            "--stripe-weights",
            "1,1",
            "--stripe",
        ]);
        command.arg(&self.stripe);
        command
    }

    /// All files of the trunk.
    pub fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut files = Vec::new();
        for folder in [&self.fixture.trunk, &self.stripe] {
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_file() {
                    files.push((path.clone(), fs::read(path).unwrap()));
                }
            }
        }
        files.sort_unstable();
        files
    }

    pub fn is_usable(&self) -> bool {
        let mut verify = tool("k3-pack");
        verify
            .arg(&self.fixture.model)
            .arg(&self.fixture.trunk)
            .args(["-q", "--verify"]);
        finish(&mut verify).code == Some(0)
    }
}
