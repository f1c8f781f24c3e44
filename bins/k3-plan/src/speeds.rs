//! What is known of the machine's speed: given by hand, measured now, or measured earlier, in this order.

use std::path::PathBuf;

use k3_shared::{formats::plan::Probe, host::Host, size::Bytes};

use crate::{
    cli::Cli,
    measurements::{self, Key},
    probe::{self, Subject},
    source::Source,
};

/// The speeds to plan with, and where they come from, for people; `None` if nothing is known.
///
/// # Errors
/// If a measurement was asked for and fails.
pub(crate) fn of(
    cli: &Cli,
    source: &Source,
    threads: usize,
    host: &Host,
) -> anyhow::Result<(Option<Probe>, String)> {
    let (known, mut note) = if cli.probe {
        (
            Some(measure(cli, source, threads, host)?),
            "measured now".to_owned(),
        )
    } else {
        let known = earlier(cli, source, threads, host);
        let note = known.as_ref().map_or_else(String::new, |probe| {
            format!("measured {}; --probe measures again", probe.date)
        });
        (known, note)
    };
    if cli.disk_speed.is_none() && cli.memory_speed.is_none() {
        return Ok((known, note));
    }
    let mut probe = known.unwrap_or_else(|| Probe {
        date: probe::today(),
        ..Probe::default()
    });
    let given = |size: Bytes| Some(size.0.max(1) as f64);
    let mut by_hand = Vec::new();
    if let Some(speed) = cli.disk_speed {
        // The sweep's choice of size and depth stands; its figures do not.
        probe.disk_bytes_per_second = given(speed);
        probe.random_bytes_per_second = given(speed);
        probe.sweep.clear();
        probe.devices.clear();
        by_hand.push("disk");
    }
    if let Some(speed) = cli.memory_speed {
        probe.memory_bytes_per_second = given(speed);
        probe.weights_bytes_per_second = None;
        by_hand.push("memory");
    }
    let separator = if note.is_empty() { "" } else { "; " };
    note = format!("{} given{separator}{note}", by_hand.join(" and "));
    Ok((Some(probe), note))
}

fn key(source: &Source, threads: usize, host: &Host) -> Key {
    let mut trunk: Vec<PathBuf> = Vec::new();
    for file in &source.trunk_files {
        let folder = file.parent().map(PathBuf::from).unwrap_or_default();
        if !trunk.contains(&folder) {
            trunk.push(folder);
        }
    }
    let expert_bytes = source.model().expert_slot_bytes();
    Key::new(
        host.cores,
        threads,
        &trunk,
        &source.shard_dirs(),
        expert_bytes,
    )
}

/// What was measured earlier on this machine and these disks.
fn earlier(cli: &Cli, source: &Source, threads: usize, host: &Host) -> Option<Probe> {
    let folder = measurements::folder(cli.probe_cache.as_deref())?;
    measurements::load(&folder, &key(source, threads, host))
}

fn measure(cli: &Cli, source: &Source, threads: usize, host: &Host) -> anyhow::Result<Probe> {
    let model = source.model();
    let trunk: f64 = source
        .tiles
        .iter()
        .map(|tile| tile.stored_bytes() as f64)
        .sum();
    let experts = model.experts_per_token() as f64 * model.expert_slot_bytes() as f64;
    let subject = Subject {
        trunk_files: &source.trunk_files,
        tiles: &source.extents,
        shard_dirs: source.shard_dirs(),
        expert_bytes: if model.num_experts() > 0 {
            model.expert_slot_bytes()
        } else {
            0
        },
        expert_share: experts / (trunk + experts).max(1.0),
        threads,
        read_bytes: cli.read_size.map(|size| crate::aligned(size.0)),
        queue_depth: cli.queue_depth.map(usize::from),
        disk: cli.disk_speed.is_none(),
    };
    let probe = probe::measure(&subject, host)?;
    if !probe.sweep.is_empty() && !cli.quiet {
        log::info!("{}", probe::sweep_table(&probe));
    }
    // A measurement without the disk must not take the place of one with it.
    if let Some(folder) = measurements::folder(cli.probe_cache.as_deref()).filter(|_| subject.disk)
    {
        match measurements::store(&folder, key(source, threads, host), &probe) {
            Ok(path) => log::debug!("kept in {}", path.display()),
            Err(error) => log::warn!("the measurement is not kept: {error:#}"),
        }
    }
    Ok(probe)
}
