//! Writing a checkpoint: every shard under a temporary name until it is whole, the files that make it a checkpoint last.
//!
//! Weights are made in aligned blocks and written past the page cache, which on many disks is several times slower at this and
//! would evict what others hold. Each thread makes a block and writes it, so some compute while others wait for the disk.

use std::{
    fs,
    io::Write as _,
    num::NonZeroUsize,
    path::Path,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::ProgressBar;
use k3_shared::{
    direct::{ALIGN, AlignedBuf, DirectFile, Mode},
    release,
    size::Bytes,
    term::{self, AtomicFile},
};
use rayon::prelude::*;

use super::{
    SynthError, at,
    folder::{self, partial},
    layout::Shard,
    recipe::Recipe,
};
use crate::tokenizer;

/// Bytes made and written at a time. Large enough that the disk sees sequential writes, small enough to bound memory.
const CHUNK_BYTES: usize = 8 << 20;
/// Most threads wait for the disk: two a core left it idle a third of the time on a busy machine.
const THREADS_A_CORE: usize = 4;
/// With a chunk each, they hold a quarter of a gigabyte.
const MAX_THREADS: usize = 32;
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// How to write a checkpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct WriteOptions {
    /// Replace a checkpoint that k3-synth wrote into the folder earlier.
    pub force: bool,
    /// Threads; four a core, at most 32, if not given.
    pub threads: Option<NonZeroUsize>,
    /// Show no progress bar.
    pub quiet: bool,
}

impl WriteOptions {
    /// For tests: no progress bar, nothing replaced.
    pub(super) fn silent() -> Self {
        Self {
            quiet: true,
            ..Self::default()
        }
    }
}

/// What was written.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// Shards.
    pub num_shards: usize,
    /// Tensors in them.
    pub num_tensors: usize,
    /// Bytes of tensor data, the index's `total_size`.
    pub total_bytes: u64,
    /// Length of all shards together.
    pub file_bytes: u64,
    /// Of that, what went to disk rather than being holes.
    pub written_bytes: u64,
    /// Time taken.
    pub elapsed: Duration,
}

/// Sums over all shards, known before anything is written.
#[derive(Clone, Copy, Default)]
struct Totals {
    tensors: usize,
    data_bytes: u64,
    file_bytes: u64,
    written_bytes: u64,
    /// Whole blocks of the shards, and an upper bound of the index.
    disk_bytes: u64,
}

impl Totals {
    fn of(shard: &Shard, holes: bool) -> Self {
        let written_bytes = if holes {
            shard.header().len() as u64
        } else {
            shard.file_bytes()
        };
        let entry = |name: &str| (name.len() + shard.file().len() + ENTRY_PUNCTUATION) as u64;
        let index: u64 = shard.tensors().iter().map(|t| entry(t.name())).sum();
        Self {
            tensors: shard.tensors().len(),
            data_bytes: shard.data_bytes(),
            file_bytes: shard.file_bytes(),
            written_bytes,
            disk_bytes: written_bytes.saturating_add(index + ALIGN as u64),
        }
    }

    /// Saturates: a sum past 64 bits does not fit any disk either.
    fn plus(self, other: Self) -> Self {
        Self {
            tensors: self.tensors + other.tensors,
            data_bytes: self.data_bytes.saturating_add(other.data_bytes),
            file_bytes: self.file_bytes.saturating_add(other.file_bytes),
            written_bytes: self.written_bytes.saturating_add(other.written_bytes),
            disk_bytes: self.disk_bytes.saturating_add(other.disk_bytes),
        }
    }
}

/// Quotes, colon, comma and line end of an index entry.
const ENTRY_PUNCTUATION: usize = 7;
/// Room for the small files and the folder itself.
const SMALL_FILES_BYTES: u64 = 1 << 20;

impl Recipe {
    /// Write the checkpoint into `dir`, which is made if missing.
    ///
    /// Shards appear under their names when they are whole and on disk; `config.json` is the last file.
    ///
    /// # Errors
    /// If `dir` holds a checkpoint ([`WriteOptions::force`] replaces one of ours), the disk is too full, or a file cannot be
    /// written.
    pub fn write(&self, dir: &Path, options: &WriteOptions) -> Result<Written, SynthError> {
        let started = Instant::now();
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = options
            .threads
            .map_or((THREADS_A_CORE * cores).min(MAX_THREADS), NonZeroUsize::get);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("k3-synth-{i}"))
            .build()?;
        let totals = pool.install(|| self.totals())?;
        let mut files: Vec<String> = (0..self.num_shards()).map(|i| self.shard_file(i)).collect();
        files.extend([INDEX.to_owned(), CONFIG.to_owned()]);
        if self.tiny_tokenizer {
            files.push(tokenizer::VOCABULARY_FILE.to_owned());
        }
        let needed = totals.disk_bytes.saturating_add(SMALL_FILES_BYTES);
        folder::prepare(dir, self.kind, files, needed, options.force)?;
        log::debug!(
            "{}: {} tensors, {} to write, {threads} threads of {}",
            dir.display(),
            totals.tensors,
            Bytes(totals.written_bytes),
            Bytes(CHUNK_BYTES as u64),
        );
        let bar = term::byte_progress(self.kind, totals.written_bytes, options.quiet);
        let writer = Writer {
            dir,
            holes: self.holes,
            buffers: Mutex::new(Vec::new()),
            bar: &bar,
        };
        let written = pool.install(|| self.write_shards(&writer));
        bar.finish_and_clear();
        written?;
        self.write_index(dir, totals.data_bytes)?;
        if self.tiny_tokenizer {
            tokenizer::write_tiny(dir).map_err(at(dir, "write the tokenizer"))?;
        }
        write_file(dir, CONFIG, &self.config_json)?;
        Ok(Written {
            num_shards: self.num_shards(),
            num_tensors: totals.tensors,
            total_bytes: totals.data_bytes,
            file_bytes: totals.file_bytes,
            written_bytes: totals.written_bytes,
            elapsed: started.elapsed(),
        })
    }

    fn totals(&self) -> Result<Totals, SynthError> {
        (0..self.num_shards())
            .into_par_iter()
            .map(|index| {
                let shard = self.shard(index)?;
                if self.holes {
                    check_published(index, &shard)?;
                }
                Ok(Totals::of(&shard, self.holes))
            })
            .try_reduce(Totals::default, |a, b| Ok(a.plus(b)))
    }

    fn write_shards(&self, writer: &Writer<'_>) -> Result<(), SynthError> {
        (0..self.num_shards())
            .into_par_iter()
            .try_for_each(|index| writer.write(&self.shard(index)?))
    }

    /// The index, one shard's names in memory at a time.
    fn write_index(&self, dir: &Path, total_size: u64) -> Result<(), SynthError> {
        let path = dir.join(INDEX);
        let write = |file: &mut AtomicFile, text: &str| {
            file.write_all(text.as_bytes()).map_err(at(&path, "write"))
        };
        let mut file = AtomicFile::create(&path).map_err(at(&path, "write"))?;
        write(
            &mut file,
            &format!("{{\"metadata\":{{\"total_size\":{total_size}}},\"weight_map\":{{"),
        )?;
        let mut separator = "\n";
        for index in 0..self.num_shards() {
            let shard = self.shard(index)?;
            let shard_file = shard.file();
            for tensor in shard.tensors() {
                let name = tensor.name();
                write(
                    &mut file,
                    &format!("{separator}\"{name}\":\"{shard_file}\""),
                )?;
                separator = ",\n";
            }
        }
        write(&mut file, "\n}}\n")?;
        file.commit().map_err(at(&path, "write"))
    }
}

fn check_published(index: usize, shard: &Shard) -> Result<(), SynthError> {
    let made = shard.file_bytes();
    match release::shard_sizes().get(index) {
        Some(&(file, published)) if file == shard.file() && published == made => Ok(()),
        other => Err(SynthError::NotAsPublished {
            file: shard.file().to_owned(),
            made,
            published: other.map_or(0, |&(_, published)| published),
        }),
    }
}

fn write_file(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), SynthError> {
    let path = dir.join(name);
    term::write_atomic(&path, bytes).map_err(at(&path, "write"))
}

/// What all shards share while they are written.
struct Writer<'a> {
    dir: &'a Path,
    holes: bool,
    /// Buffers not in use: at most one a thread is ever made.
    buffers: Mutex<Vec<AlignedBuf>>,
    bar: &'a ProgressBar,
}

impl Writer<'_> {
    /// Write one shard whole, or leave nothing under its name.
    fn write(&self, shard: &Shard) -> Result<(), SynthError> {
        let target = self.dir.join(shard.file());
        let temporary = partial(&target);
        let result = if self.holes {
            self.write_header(shard, &temporary)
        } else {
            self.write_payload(shard, &temporary)
        };
        let result = result
            .and_then(|()| fs::rename(&temporary, &target).map_err(at(&target, "put in place")));
        if result.is_err() {
            // The first error is the one to report.
            let _ = fs::remove_file(&temporary);
        }
        result
    }

    fn write_header(&self, shard: &Shard, path: &Path) -> Result<(), SynthError> {
        let mut file = fs::File::create(path).map_err(at(path, "create"))?;
        file.write_all(shard.header()).map_err(at(path, "write"))?;
        file.set_len(shard.file_bytes())
            .map_err(at(path, "set the length"))?;
        file.sync_all().map_err(at(path, "sync"))?;
        self.bar.inc(shard.header().len() as u64);
        Ok(())
    }

    fn write_payload(&self, shard: &Shard, path: &Path) -> Result<(), SynthError> {
        allocate(path, shard.file_bytes())?;
        let file = DirectFile::open_write(path, Mode::Auto)?;
        if let Some(line) = file.fallback() {
            log::debug!("{line}");
        }
        let num_chunks = shard.file_bytes().div_ceil(CHUNK_BYTES as u64);
        (0..num_chunks)
            .into_par_iter()
            .try_for_each(|chunk| self.write_chunk(shard, &file, chunk * CHUNK_BYTES as u64))?;
        // The last block was written whole.
        file.set_len(shard.file_bytes())?;
        file.sync()?;
        Ok(())
    }

    fn write_chunk(&self, shard: &Shard, file: &DirectFile, at: u64) -> Result<(), SynthError> {
        let left = shard.file_bytes() - at;
        let len = usize::try_from(left).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
        let mut buffer = self
            .pooled()
            .pop()
            .unwrap_or_else(|| AlignedBuf::with_capacity(CHUNK_BYTES));
        buffer.set_len(len.next_multiple_of(ALIGN));
        shard.fill(at, &mut buffer);
        file.write_all_at(&buffer, at)?;
        self.pooled().push(buffer);
        self.bar.inc(len as u64);
        Ok(())
    }

    fn pooled(&self) -> std::sync::MutexGuard<'_, Vec<AlignedBuf>> {
        // A thread that panicked elsewhere left the list whole.
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Make an empty file with blocks for `bytes`, so that threads writing into its middle neither wait for each other nor scatter it.
fn allocate(path: &Path, bytes: u64) -> Result<(), SynthError> {
    use rustix::{
        fs::{FallocateFlags, fallocate},
        io::Errno,
    };
    let file = fs::File::create(path).map_err(at(path, "create"))?;
    match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            file.set_len(bytes).map_err(at(path, "set the length"))
        }
        Err(e) => Err(at(path, "allocate")(e.into())),
    }
}
