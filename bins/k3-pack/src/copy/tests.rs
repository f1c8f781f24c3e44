use std::{io, sync::Mutex};

use k3_shared::{
    direct::{Device, Mode},
    tiles::DEFAULT_TILE_BYTES,
};

use super::*;
use crate::fixture::{LAYERS, Model, Shape};

/// A disk that is full after so many bytes, and remembers which pages were written.
#[derive(Debug)]
struct Disk {
    room: usize,
    written: Mutex<Vec<Range<u64>>>,
}

impl Disk {
    fn with_room(room: usize) -> &'static Self {
        let written = Mutex::default();
        Box::leak(Box::new(Self { room, written }))
    }

    fn used(&self) -> usize {
        let written = self.written.lock().unwrap();
        let bytes: u64 = written.iter().map(|r| r.end - r.start).sum();
        usize::try_from(bytes).unwrap()
    }

    fn file(&'static self) -> DirectFile {
        DirectFile::with_device("/trunk/trunk.bin.partial".into(), Box::new(self), true)
    }
}

impl Device for &'static Disk {
    fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
        unreachable!("a sink is not read")
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let left = self.room - self.used();
        if left == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let n = left.min(bytes.len());
        self.written.lock().unwrap().push(offset..offset + n as u64);
        Ok(n)
    }
    fn len(&self) -> io::Result<u64> {
        Ok(0)
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn next_data(&self, _: u64) -> io::Result<Option<Range<u64>>> {
        Ok(None)
    }
    fn forget(&self, _: u64, _: u64) {}
}

struct Bench {
    _dir: tempfile::TempDir,
    source: Source,
    shards: Vec<DirectFile>,
    zeros: ZeroDigests,
}

impl Bench {
    fn new(shape: Shape) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = Model::write(dir.path(), shape);
        let source = Source::open(&model.dir, None).unwrap();
        Self {
            shards: source.open_shards(Mode::Auto).unwrap(),
            _dir: dir,
            source,
            zeros: ZeroDigests::default(),
        }
    }

    fn copier(&self, step: usize) -> Copier<'_> {
        Copier::new(&self.source, &self.shards, &self.zeros, step)
    }
}

#[test]
fn a_full_disk_stops_the_copy_with_path_and_bytes() {
    let bench = Bench::new(Shape::default());
    let tiles = bench.source.tiles(DEFAULT_TILE_BYTES);
    let head = tiles.last().unwrap();
    let disk = Disk::with_room(64 << 10);
    let sink = Sink {
        file: &disk.file(),
        offset: 8192,
        sparse: true,
    };
    let error = bench.copier(128 << 10).copy(head, Some(sink)).unwrap_err();
    assert!(matches!(error, DirectError::Full { .. }), "{error}");
    let text = error.to_string();
    let want =
        "/trunk/trunk.bin.partial: no space left: 65536 of 131072 bytes written at byte 8192";
    assert!(text.starts_with(want), "{text}");
}

#[test]
fn the_digest_does_not_depend_on_the_step_or_the_sink() {
    let bench = Bench::new(Shape::default());
    for spec in bench.source.tiles(64 << 10) {
        let want = bench.copier(1 << 20).copy(&spec, None).unwrap();
        for step in [ALIGN, 5 * ALIGN] {
            let disk = Disk::with_room(usize::MAX);
            let sink = Sink {
                file: &disk.file(),
                offset: 0,
                sparse: false,
            };
            let digest = bench.copier(step).copy(&spec, Some(sink)).unwrap();
            assert_eq!(digest, want, "{spec:?}");
            assert_eq!(disk.used() as u64, spec.stored_bytes());
        }
    }
}

#[test]
fn holes_are_neither_read_nor_written_and_hash_as_zeros() {
    let bench = Bench::new(Shape {
        vocab_size: 20_000,
        holes: true,
        ..Shape::default()
    });
    let tiles = bench.source.tiles(1 << 20);
    let requested =
        |shards: &[DirectFile]| -> u64 { shards.iter().map(DirectFile::bytes_requested).sum() };
    let mut heads = 0;
    let mut all_hole = 0;
    for spec in tiles.iter().rev().take_while(|s| s.parts.len() == 1) {
        let disk = Disk::with_room(usize::MAX);
        let sink = Sink {
            file: &disk.file(),
            offset: 0,
            sparse: true,
        };
        let before = requested(&bench.shards);
        let data = data_bytes(&bench.source, &bench.shards, spec).unwrap();
        let digest = bench.copier(256 << 10).copy(spec, Some(sink)).unwrap();
        let zeros: [u8; 32] =
            Sha256::digest(vec![0; usize::try_from(spec.stored_bytes()).unwrap()]).into();
        assert_eq!(digest, zeros);
        assert_eq!(disk.used(), 0);
        if data == 0 {
            assert_eq!(requested(&bench.shards), before);
            all_hole += 1;
        }
        heads += 1;
    }
    // Only the tiles beside the header and the embedding share a block with data.
    assert!(heads >= 7 && all_hole >= heads - 2, "{all_hole} of {heads}");
}

#[test]
fn the_workers_buffers_stay_within_the_bound() {
    for threads in 1..=64 {
        assert!(memory_bytes(threads) < 256 << 20, "{threads}");
    }
    assert_eq!(block_bytes(4), BLOCK_BYTES);
    assert_eq!(LAYERS, 5, "the fixture has a layer of every kind");
}
