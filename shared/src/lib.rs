//! What two or more k3 tools share: formats, configuration, names, cache policies, host limits, terminal habits.
//!
//! The tools meet only in files, so what they must agree on is here and nowhere twice: [`checkpoint`] and [`formats`] are the files,
//! [`config`], [`names`] and [`tiles`] what is in them, [`ledger`] how much memory a plan takes, [`cache`] which experts stay,
//! [`direct`] how disks are read, [`host`] what the machine allows, [`term`] how tools talk. Start with [`formats`] to read a
//! file of k3, with [`ledger`] to see where memory goes.
//!
//! Nothing here depends on a tool, starts a thread, or prints outside [`term`].

pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod direct;
pub mod formats;
pub mod host;
pub mod ids;
pub mod ledger;
pub mod mapping;
pub mod names;
pub mod release;
pub mod size;
pub mod term;
pub mod tiles;
