//! Rewriting one layer's tiles from the checkpoint they were packed from.

use k3_shared::{
    checkpoint::hex,
    direct::DirectFile,
    formats::trunk::{OpenTrunk, TileRecord, Trunk},
    size::Bytes,
    term::{self, Outcome},
    tiles::TileSpec,
};

use crate::{
    cli::{Cli, RepairTarget},
    copy::{Copier, Sink, block_bytes},
    error::PackError,
    folders::LockedFolder,
    pool::{Ended, Pool},
    source::Source,
    verify::packed_layers,
    zeros::ZeroDigests,
};

/// Rewrite the target's tiles. The records stay as they are, so a repair cut short leaves tiles that still fail their check.
///
/// # Errors
/// If the trunk is another checkpoint's, the shards no longer hold what was packed, or a read or write fails. A tile is
/// written only after the shard's bytes have been found to be the recorded ones.
pub(crate) fn repair(cli: &Cli, target: RepairTarget, pool: &Pool) -> Result<Outcome, PackError> {
    let _lock = LockedFolder::exclusive(&cli.trunk_dir)?;
    let open = Trunk::open(&cli.trunk_dir)?;
    let source = Source::open(&cli.model_dir, packed_layers(&open))?;
    if source.identity != open.trunk.identity {
        return Err(PackError::OtherCheckpoint {
            trunk: cli.trunk_dir.clone(),
            model: cli.model_dir.clone(),
            recorded: open.trunk.identity.clone(),
            found: source.identity,
        });
    }
    let tiles = tiles_of(&open, target)?;
    let shards = source.open_shards(cli.mode())?;
    let files = open
        .files
        .iter()
        .map(|path| DirectFile::open_write(path, cli.mode()))
        .collect::<Result<Vec<_>, _>>()?;
    let total = tiles.iter().map(|t| t.1.stored_bytes).sum();
    let zeros = ZeroDigests::default();
    let step = block_bytes(pool.threads());
    let bar = term::byte_progress("repairing", total, cli.quiet);
    let ended = pool.run(
        tiles.len(),
        || Copier::new(&source, &shards, &zeros, step),
        |copier, job| rewrite(copier, &source, &files, tiles[job]),
        |job, ()| bar.inc(tiles[job].1.stored_bytes),
    );
    bar.finish_and_clear();
    let ended = ended?;
    for file in &files {
        file.sync()?;
    }
    if let Ended::Interrupted(signal) = ended {
        return Ok(Outcome::Interrupted(signal));
    }
    log::info!("rewrote {} tiles, {}", tiles.len(), Bytes(total));
    Ok(Outcome::Done)
}

/// A tile's number, record and contents.
type Numbered<'a> = (usize, &'a TileRecord, &'a TileSpec);

fn tiles_of(open: &OpenTrunk, target: RepairTarget) -> Result<Vec<Numbered<'_>>, PackError> {
    let tiles: Vec<Numbered<'_>> = open
        .trunk
        .tiles()
        .zip(&open.specs)
        .enumerate()
        .map(|(number, (record, spec))| (number, record, spec))
        .filter(|(_, _, spec)| RepairTarget::of(spec.layer()) == target)
        .collect();
    match target {
        RepairTarget::Layer(layer) if tiles.is_empty() => Err(PackError::NoLayer {
            layer: layer.0,
            last: open.trunk.num_layers.saturating_sub(1),
        }),
        _ => Ok(tiles),
    }
}

fn rewrite(
    copier: &mut Copier<'_>,
    source: &Source,
    files: &[DirectFile],
    (number, record, spec): Numbered<'_>,
) -> Result<(), PackError> {
    let found = hex(copier.copy(spec, None)?);
    if !found.eq_ignore_ascii_case(&record.sha256) {
        let shard = spec
            .parts
            .first()
            .and_then(|part| source.tensors.get(&part.role))
            .and_then(|located| source.shards.get(located.shard));
        return Err(PackError::SourceChanged {
            shard: shard.cloned().unwrap_or_default(),
            tile: number,
            tensor: record.tensor.clone(),
            found,
            recorded: record.sha256.clone(),
        });
    }
    let sink = Sink {
        // `Trunk::open` has checked that every tile names one of the files.
        file: &files[record.file],
        offset: record.offset,
        sparse: false,
    };
    copier.copy(spec, Some(sink))?;
    Ok(())
}
