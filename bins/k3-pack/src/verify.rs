//! Checking a trunk: every tile against its digest, the trunk against the checkpoint.

use std::{collections::BTreeSet, io::Write, time::Instant};

use k3_shared::{
    checkpoint::{Checkpoint, hex},
    direct::{AlignedBuf, DirectError, DirectFile},
    formats::trunk::{OpenTrunk, TileRecord, Trunk, TrunkError},
    ids::LayerIdx,
    size::Bytes,
    term::{self, Outcome, shell},
};
use sha2::{Digest as _, Sha256};

use crate::{
    cli::{Cli, RepairTarget},
    copy::block_bytes,
    embedding,
    folders::LockedFolder,
    pool::{Ended, Pool},
    source::Source,
    zeros::{Digest, ZeroDigests},
};

/// One bad tile.
struct Finding {
    tile: usize,
    /// What is wrong.
    what: String,
}

/// Check the trunk and print what is wrong, with the command that mends it.
///
/// # Errors
/// If there is no trunk to check, or it is being written.
pub(crate) fn verify(cli: &Cli, pool: &Pool, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    let _lock = LockedFolder::shared(&cli.trunk_dir)?;
    let open = match Trunk::open(&cli.trunk_dir) {
        Ok(open) => open,
        Err(error @ (TrunkError::Invalid { .. } | TrunkError::Config(_))) => {
            writeln!(out, "{error}")?;
            return Ok(Outcome::Negative);
        }
        Err(error) => return Err(error.into()),
    };
    let begun = Instant::now();
    let same = identity_holds(cli, &open, out)?;
    let (ended, findings) = check_tiles(cli, pool, &open)?;
    if let Ended::Interrupted(signal) = ended {
        return Ok(Outcome::Interrupted(signal));
    }
    let tiles: Vec<&TileRecord> = open.trunk.tiles().collect();
    let mut targets = BTreeSet::new();
    for finding in &findings {
        let (Some(record), Some(spec)) = (tiles.get(finding.tile), open.specs.get(finding.tile))
        else {
            continue;
        };
        targets.insert(RepairTarget::of(spec.layer()));
        writeln!(out, "{}", describe(&open, record, spec.layer(), finding))?;
    }
    if !same {
        return Ok(Outcome::Negative);
    }
    for target in &targets {
        let (model, trunk) = (shell(&cli.model_dir), shell(&cli.trunk_dir));
        writeln!(
            out,
            "repair with: k3-pack {model} {trunk} --repair {target}"
        )?;
    }
    let rows = check_embedding(cli, pool, &open, out)?;
    if !findings.is_empty() || rows == Rows::Differ {
        return Ok(Outcome::Negative);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let stored = open.trunk.stored_bytes;
    log::info!("{:.2} GB/s", stored as f64 / 1e9 / seconds.max(1e-9));
    writeln!(
        out,
        "{} tiles, {}{}: all as recorded",
        tiles.len(),
        Bytes(stored),
        match rows {
            Rows::Hold => ", and the embedding's rows",
            _ => "",
        }
    )?;
    Ok(Outcome::Done)
}

/// Whether the trunk was made from this checkpoint. A checkpoint that cannot be opened is no finding about the trunk.
fn identity_holds(cli: &Cli, open: &OpenTrunk, out: &mut dyn Write) -> anyhow::Result<bool> {
    let layers = packed_layers(open);
    match Checkpoint::open(&cli.model_dir, layers) {
        Err(error) => {
            log::warn!(
                "only the trunk itself is checked, for there is no checkpoint to compare: {error}"
            );
            Ok(true)
        }
        Ok(checkpoint) if checkpoint.identity() == open.trunk.identity => Ok(true),
        Ok(checkpoint) => {
            let (model, trunk) = (shell(&cli.model_dir), shell(&cli.trunk_dir));
            writeln!(
                out,
                "{trunk}: identity is {}, but {model} has {}; pack it anew: k3-pack --force {model} {trunk}",
                open.trunk.identity,
                checkpoint.identity()
            )?;
            Ok(false)
        }
    }
}

/// What is known of the embedding's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    /// They are those that were packed with.
    Hold,
    /// Some are not.
    Differ,
    /// There are no digests of them, or no checkpoint.
    Unknown,
}

/// Compare the rows of the embedding, which lie in their shard, with their digests in the trunk folder.
fn check_embedding(
    cli: &Cli,
    pool: &Pool,
    open: &OpenTrunk,
    out: &mut dyn Write,
) -> anyhow::Result<Rows> {
    let Some(path) = &open.embedding else {
        return Ok(Rows::Unknown);
    };
    let Ok(source) = Source::open(&cli.model_dir, packed_layers(open)) else {
        return Ok(Rows::Unknown);
    };
    let shards = source.open_shards(cli.mode())?;
    let (Ended::Whole, found) = embedding::row_digests(&source, &shards, pool)? else {
        return Ok(Rows::Unknown);
    };
    let recorded = std::fs::read(path)?;
    let rows = found.chunks(32).zip(recorded.chunks(32));
    let wrong: Vec<usize> = rows
        .enumerate()
        .filter(|(_, (found, recorded))| found != recorded)
        .map(|(row, _)| row)
        .collect();
    let Some(first) = wrong.first() else {
        return Ok(Rows::Hold);
    };
    let shard = source.shards.get(source.embedding.shard);
    writeln!(
        out,
        "bad: {} rows of the embedding, the first of token {first}: not those of {}; download {} again, or if it is right: k3-pack --force {} {}",
        wrong.len(),
        path.display(),
        shard.map_or(String::new(), |shard| shard.display().to_string()),
        shell(&cli.model_dir),
        shell(&cli.trunk_dir)
    )?;
    Ok(Rows::Differ)
}

/// The `--layers` a trunk was packed with; `None` for the whole model.
pub(crate) fn packed_layers(open: &OpenTrunk) -> Option<usize> {
    let packed = open.trunk.num_layers;
    (packed < open.config.num_hidden_layers).then_some(packed)
}

fn check_tiles(
    cli: &Cli,
    pool: &Pool,
    open: &OpenTrunk,
) -> Result<(Ended, Vec<Finding>), DirectError> {
    let files = open
        .files
        .iter()
        .map(|path| DirectFile::open(path, cli.mode()))
        .collect::<Result<Vec<_>, _>>()?;
    if let Some(note) = files.iter().find_map(DirectFile::fallback) {
        log::warn!("{note}");
    }
    let tiles: Vec<&TileRecord> = open.trunk.tiles().collect();
    let zeros = ZeroDigests::default();
    let step = block_bytes(pool.threads());
    let bar = term::byte_progress("checking", open.trunk.stored_bytes, cli.quiet);
    let mut findings = Vec::new();
    let ended = pool.run(
        tiles.len(),
        || AlignedBuf::with_capacity(step),
        |buf, number| {
            let record = tiles[number];
            let digest = hash_tile(&files[record.file], record, buf, &zeros);
            Ok::<_, DirectError>(match digest {
                Ok(digest) if hex(digest).eq_ignore_ascii_case(&record.sha256) => None,
                Ok(digest) => Some(format!(
                    "sha256 is {}, recorded {}",
                    hex(digest),
                    record.sha256
                )),
                Err(error) => Some(error.to_string()),
            })
        },
        |number, wrong| {
            bar.inc(tiles[number].stored_bytes);
            if let Some(what) = wrong {
                findings.push(Finding { tile: number, what });
            }
        },
    );
    bar.finish_and_clear();
    findings.sort_by_key(|finding| finding.tile);
    Ok((ended?, findings))
}

fn hash_tile(
    file: &DirectFile,
    record: &TileRecord,
    buf: &mut AlignedBuf,
    zeros: &ZeroDigests,
) -> Result<Digest, DirectError> {
    // `Trunk::open` has checked that the tile lies within its file.
    let range = record.offset..record.offset + record.stored_bytes;
    if file.data_ranges(range.clone())?.is_empty() {
        return Ok(zeros.of(record.stored_bytes));
    }
    let mut hash = Sha256::new();
    let mut at = range.start;
    while at < range.end {
        let left = usize::try_from(range.end - at).unwrap_or(usize::MAX);
        buf.set_len(left.min(buf.capacity()));
        file.read_exact_at(buf, at)?;
        hash.update(&**buf);
        at += buf.len() as u64;
    }
    Ok(hash.finalize().into())
}

fn describe(
    open: &OpenTrunk,
    record: &TileRecord,
    layer: Option<LayerIdx>,
    finding: &Finding,
) -> String {
    let place = layer.map_or("output".to_owned(), |layer| format!("layer {layer}"));
    let what = match record.parts.len() {
        0 => format!(
            "{} rows {}..{}",
            record.tensor, record.rows[0], record.rows[1]
        ),
        parts => format!("{} and {} more tensors", record.tensor, parts - 1),
    };
    let file = open.files.get(record.file).map(|f| f.display().to_string());
    format!(
        "bad: tile {}, {place}, {what} ({} bytes {}..{}): {}",
        finding.tile,
        file.unwrap_or_default(),
        record.offset,
        record.offset + record.stored_bytes,
        finding.what
    )
}
