//! Published file sizes.

use std::{collections::HashMap, fs};

use anyhow::{Context as _, bail};
use k3_shared::{config::Config, release};

/// File sizes to compare with, by name.
#[derive(Debug, Default)]
pub(crate) struct Manifest {
    sizes: HashMap<String, u64>,
    /// What to call it in messages.
    name: String,
}

impl Manifest {
    /// The manifest that `--manifest` asks for.
    ///
    /// # Errors
    /// If a file was named and it is no list of sizes.
    pub(crate) fn choose(argument: &str, config: &Config) -> anyhow::Result<Self> {
        match argument {
            "none" => Ok(Self::default()),
            "auto" if config.to_canonical() != released_config()?.to_canonical() => {
                Ok(Self::default())
            }
            "auto" | release::NAME => {
                let sizes = release::shard_sizes().into_iter();
                Ok(Self {
                    sizes: sizes.map(|(name, size)| (name.into(), size)).collect(),
                    name: format!("the published size ({})", release::NAME),
                })
            }
            file => Self::open(file),
        }
    }

    fn open(file: &str) -> anyhow::Result<Self> {
        let text = fs::read_to_string(file).with_context(|| {
            format!("{file}: cannot be read (--manifest is auto, none or a file)")
        })?;
        let mut sizes = HashMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            let (name, size) = (words.next(), words.next().map(str::parse::<u64>));
            let (Some(name), Some(Ok(size)), None) = (name, size, words.next()) else {
                bail!("{file}: line {number}: {line:?} is not `NAME SIZE`");
            };
            if sizes.insert(name.to_owned(), size).is_some() {
                bail!("{file}: line {number}: {name} is there twice");
            }
        }
        if sizes.is_empty() {
            bail!("{file}: names no file; a manifest has lines of `NAME SIZE`");
        }
        Ok(Self {
            sizes,
            name: format!("the size in {file}"),
        })
    }

    /// The published size of a file.
    pub(crate) fn size(&self, file: &str) -> Option<u64> {
        self.sizes.get(file).copied()
    }

    /// What to call the source in messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

fn released_config() -> anyhow::Result<Config> {
    Ok(Config::parse(
        release::CONFIG_JSON.as_bytes(),
        release::NAME.as_ref(),
    )?)
}
