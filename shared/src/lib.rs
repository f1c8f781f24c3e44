//! What two or more k3 tools share: formats, configuration, names, cache policies, host limits, terminal habits.
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
