//! Packing: plan where the tiles go, copy them, make the trunk appear.

use std::{
    io::Write as _,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use k3_shared::{
    checkpoint::hex,
    direct::DirectFile,
    formats::trunk::{DATA_NAME, DataFile, FILE_NAME, LayerRecord, SCHEMA, TileRecord, Trunk},
    size::Bytes,
    term::{self, AtomicFile, Outcome, shell},
    tiles::{TILE_ALIGN, TileClass},
};

use crate::{
    cli::Cli,
    copy::{Copier, Sink, block_bytes, data_bytes, memory_bytes},
    embedding,
    error::PackError,
    folders::{
        Demand, LockedFolder, PartialFile, Room, check_space, folder_error, lock_all, remove,
        remove_leftovers,
    },
    layout::{Placed, place},
    pool::{Ended, Pool},
    shares,
    source::Source,
    zeros::{Digest, ZeroDigests},
};

/// What a record takes in trunk.json at most, for the space check.
const RECORD_BYTES: u64 = 1024;

/// What will be written where.
#[derive(Debug)]
struct Job {
    source: Source,
    tile_bytes: u64,
    tiles: Vec<Placed>,
    files: Vec<DataFile>,
    /// The folders, the trunk's first, as many as `files`.
    folders: Vec<LockedFolder>,
}

/// Pack a trunk.
///
/// # Errors
/// If the checkpoint is unusable, a trunk is in the way, another packer is at work, or a read or write fails. The folders are
/// then as they were, except that an old trunk is gone if there was no room for both.
pub(crate) fn pack(cli: &Cli, pool: &Pool) -> Result<Outcome, PackError> {
    let source = Source::open(&cli.model_dir, cli.layers.map(NonZeroUsize::get))?;
    let shards = source.open_shards(cli.mode())?;
    let job = Job::new(cli, source)?;
    let demands = job.demands(&shards)?;
    if job.check_space(&demands)? == Room::Instead {
        log::info!("no room for both trunks: removing the old one first");
        job.remove_old()?;
    }
    let partials = demands
        .iter()
        .map(|demand| PartialFile::create(&demand.path, cli.mode()))
        .collect::<Result<Vec<_>, _>>()?;
    if let Some(note) = partials.iter().find_map(|p| p.file.fallback()) {
        log::warn!("{note}");
    }
    let data = job.announce(&demands, pool);

    let begun = Instant::now();
    let digests = match job.copy(cli, pool, &shards, &partials)? {
        Copied::Whole(digests) => digests,
        Copied::Interrupted(signal) => {
            log::warn!("interrupted; nothing was kept");
            return Ok(Outcome::Interrupted(signal));
        }
    };
    let rows = match embedding::row_digests(&job.source, &shards, pool)? {
        (Ended::Whole, rows) => rows,
        (Ended::Interrupted(signal), _) => {
            log::warn!("interrupted; nothing was kept");
            return Ok(Outcome::Interrupted(signal));
        }
    };
    let old = Trunk::open(&cli.trunk_dir).map_or_else(|_| Vec::new(), |old| old.files);
    job.publish(partials, &digests, &rows)?;
    job.report(cli, begun.elapsed(), data);
    job.note_orphans(&old);
    Ok(Outcome::Done)
}

/// How the copying ended, short of an error.
enum Copied {
    /// All tiles are written; these are their digests, in order.
    Whole(Vec<Digest>),
    /// This signal came first.
    Interrupted(u8),
}

impl Job {
    fn new(cli: &Cli, source: Source) -> Result<Self, PackError> {
        let (given, num_folders) = (cli.stripe_weights.len(), cli.stripe.len() + 1);
        if given != 0 && given != num_folders {
            return Err(PackError::Weights {
                given,
                folders: num_folders,
            });
        }
        let folders = lock_all(&cli.trunk_dir, &cli.stripe)?;
        refuse_existing(&folders, cli.force)?;
        if let Some(trunk_dir) = folders.first() {
            remove_leftovers(trunk_dir);
        }
        let weights = weights(cli, &folders)?;
        let tile_bytes = cli.tile_bytes.0;
        let (tiles, lens) = place(source.tiles(tile_bytes), &weights);
        let files = folders
            .iter()
            .zip(lens)
            .enumerate()
            .map(|(number, (folder, bytes))| DataFile {
                path: data_path(number, &folder.path),
                bytes,
            })
            .collect();
        Ok(Self {
            source,
            tile_bytes,
            tiles,
            files,
            folders,
        })
    }

    fn trunk_dir(&self) -> &Path {
        self.folders.first().map_or(Path::new("."), |f| &f.path)
    }

    fn record_path(&self) -> PathBuf {
        self.trunk_dir().join(FILE_NAME)
    }

    fn stored_bytes(&self) -> u64 {
        self.tiles.iter().map(|t| t.spec.stored_bytes()).sum()
    }

    /// The space each data file will take, found without reading: shards that end too early are noticed here.
    fn demands(&self, shards: &[DirectFile]) -> Result<Vec<Demand>, PackError> {
        let mut demands: Vec<Demand> = self
            .files
            .iter()
            .zip(&self.folders)
            .map(|(file, folder)| Demand {
                path: self.trunk_dir().join(&file.path),
                folder: folder.path.clone(),
                bytes: 0,
            })
            .collect();
        for tile in &self.tiles {
            let data = data_bytes(&self.source, shards, &tile.spec)?;
            if let Some(demand) = demands.get_mut(tile.file) {
                demand.bytes += data.next_multiple_of(TILE_ALIGN);
            }
        }
        Ok(demands)
    }

    /// As [`check_space`], with room for the records.
    fn check_space(&self, demands: &[Demand]) -> Result<Room, PackError> {
        let mut all = demands.to_vec();
        all.extend(self.folders.first().map(|folder| Demand {
            path: self.record_path(),
            folder: folder.path.clone(),
            bytes: RECORD_BYTES * self.tiles.len() as u64
                + 32 * self.source.config.vocab_size as u64,
        }));
        check_space(&all)
    }

    fn copy(
        &self,
        cli: &Cli,
        pool: &Pool,
        shards: &[DirectFile],
        partials: &[PartialFile],
    ) -> Result<Copied, PackError> {
        let mut digests = vec![Digest::default(); self.tiles.len()];
        let zeros = ZeroDigests::default();
        let step = block_bytes(pool.threads());
        let bar = term::byte_progress("packing", self.stored_bytes(), cli.quiet);
        let ended = pool.run(
            self.tiles.len(),
            || Copier::new(&self.source, shards, &zeros, step),
            |copier, number| {
                let tile = &self.tiles[number];
                let sink = Sink {
                    file: &partials[tile.file].file,
                    offset: tile.offset,
                    sparse: true,
                };
                copier.copy(&tile.spec, Some(sink))
            },
            |number, digest| {
                bar.inc(self.tiles[number].spec.stored_bytes());
                digests[number] = digest;
            },
        );
        bar.finish_and_clear();
        Ok(match ended? {
            Ended::Whole => Copied::Whole(digests),
            Ended::Interrupted(signal) => Copied::Interrupted(signal),
        })
    }

    fn remove_old(&self) -> Result<(), PackError> {
        self.remove_record()?;
        for (file, folder) in self.files.iter().zip(&self.folders) {
            remove(&self.trunk_dir().join(&file.path))?;
            folder.sync()?;
        }
        Ok(())
    }

    fn remove_record(&self) -> Result<(), PackError> {
        remove(&self.record_path())?;
        self.folders.first().map_or(Ok(()), LockedFolder::sync)
    }

    /// Make the trunk appear. The old record goes before the first data file is replaced and the new one comes after the
    /// last, each step on disk before the next: at no moment does a record stand beside data that is not its own.
    fn publish(
        &self,
        partials: Vec<PartialFile>,
        digests: &[Digest],
        rows: &[u8],
    ) -> Result<(), PackError> {
        let mut trunk = self.records(digests);
        for (partial, file) in partials.iter().zip(&self.files) {
            partial.file.set_len(file.bytes)?;
            partial.file.sync()?;
        }
        self.remove_record()?;
        for (partial, folder) in partials.into_iter().zip(&self.folders) {
            partial.publish()?;
            folder.sync()?;
        }
        trunk.embedding = Some(embedding::write(self.trunk_dir(), rows)?);
        let path = self.record_path();
        let write_error = || folder_error(&path, "write");
        let mut file = AtomicFile::create(&path).map_err(write_error())?;
        serde_json::to_writer_pretty(&mut file, &trunk)?;
        file.write_all(b"\n").map_err(write_error())?;
        file.commit().map_err(write_error())
    }

    fn records(&self, digests: &[Digest]) -> Trunk {
        let mut layers: Vec<LayerRecord> = Vec::new();
        let mut output = Vec::new();
        for (tile, digest) in self.tiles.iter().zip(digests) {
            let Some(record) = TileRecord::new(&tile.spec, tile.file, tile.offset, hex(digest))
            else {
                continue;
            };
            match (tile.spec.layer(), layers.last_mut()) {
                (None, _) => output.push(record),
                (Some(layer), Some(last)) if last.layer == layer.0 => last.tiles.push(record),
                (Some(layer), _) => layers.push(LayerRecord {
                    layer: layer.0,
                    tiles: vec![record],
                }),
            }
        }
        let sum = |class| {
            let of_class = self.tiles.iter().filter(|t| t.spec.class() == class);
            of_class.map(|t| t.spec.raw_bytes()).sum()
        };
        Trunk {
            schema: SCHEMA.into(),
            identity: self.source.identity.clone(),
            config: self.source.config.to_canonical(),
            num_layers: self.source.layers,
            tile_bytes: self.tile_bytes,
            trunk_bytes: sum(TileClass::Trunk),
            head_bytes: sum(TileClass::Head),
            stored_bytes: self.stored_bytes(),
            files: self.files.clone(),
            layers,
            output,
            embedding: None,
        }
    }

    /// Say what is about to happen; returns the bytes of data there are to copy.
    fn announce(&self, demands: &[Demand], pool: &Pool) -> u64 {
        let data: u64 = demands.iter().map(|d| d.bytes).sum();
        log::info!(
            "{} layers from {} shards: {} in {} tiles, {} of it data to read and write; {} workers hold {}",
            self.source.layers,
            self.source.shards.len(),
            Bytes(self.stored_bytes()),
            self.tiles.len(),
            Bytes(data),
            pool.threads(),
            Bytes(memory_bytes(pool.threads()) as u64),
        );
        for (file, demand) in self.files.iter().zip(demands) {
            log::debug!("{}: {}", demand.path.display(), Bytes(file.bytes));
        }
        data
    }

    fn report(&self, cli: &Cli, elapsed: Duration, data: u64) {
        let seconds = elapsed.as_secs_f64();
        log::info!(
            "packed {} in {seconds:.1} s, {:.2} GB/s of data; next: k3-plan --model {} --trunk {}",
            Bytes(self.stored_bytes()),
            data as f64 / 1e9 / seconds.max(1e-9),
            shell(&cli.model_dir),
            shell(&cli.trunk_dir),
        );
    }

    fn note_orphans(&self, old: &[PathBuf]) {
        let now: Vec<PathBuf> = self
            .files
            .iter()
            .map(|f| self.trunk_dir().join(&f.path))
            .collect();
        for path in old {
            if path.canonicalize().is_ok_and(|p| !now.contains(&p)) {
                log::warn!("no longer part of the trunk: rm {}", shell(path));
            }
        }
    }
}

/// A record in the trunk folder is a trunk, and a file of ours in another folder may belong to one; data alone in the trunk folder is
/// what a killed packer left.
fn refuse_existing(folders: &[LockedFolder], force: bool) -> Result<(), PackError> {
    let place = |(number, folder): (usize, &LockedFolder)| match number {
        0 => folder.path.join(FILE_NAME),
        _ => data_path(number, &folder.path),
    };
    match folders
        .iter()
        .enumerate()
        .map(place)
        .find(|path| path.exists())
    {
        Some(path) if !force => Err(PackError::Exists { path }),
        _ => Ok(()),
    }
}

/// The weights of the folders: by hand, else by the speed of their disks.
fn weights(cli: &Cli, folders: &[LockedFolder]) -> Result<Vec<u32>, PackError> {
    if !cli.stripe_weights.is_empty() {
        return Ok(cli.stripe_weights.clone());
    }
    let paths: Vec<&Path> = folders.iter().map(|folder| folder.path.as_path()).collect();
    let shares = shares::shares(&paths, &mut shares::measure)?;
    if paths.len() > 1 {
        shares::tell(&paths, &shares);
    }
    Ok(shares.into_iter().map(|share| share.weight).collect())
}

/// Relative inside the trunk folder, which may be moved; absolute in a stripe's folder, which stays.
fn data_path(number: usize, folder: &Path) -> PathBuf {
    if number == 0 {
        DATA_NAME.into()
    } else {
        folder.join(format!("trunk-{}.bin", number + 1))
    }
}
