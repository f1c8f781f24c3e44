//! Sweeping a disk: every request size at every depth, in short cells, in interleaved rounds.
//!
//! A first round visits every cell once, from the least in flight to the most, and leaves out those that would keep more in flight
//! than the disk reads in [`MOST_IN_FLIGHT`]. Further rounds visit the contenders only, each round in the other direction, so
//! that a drift of the disk favours none; the median counts. The best of many cells was also the luckiest, so what was chosen is
//! measured once more, for longer, and that counts.

use std::{
    cell::RefCell,
    path::PathBuf,
    time::{Duration, Instant},
};

use k3_shared::{
    direct::{AlignedBuf, HUGE_PAGE},
    formats::plan::{DeviceSpeed, ReadKind, SweepCell},
};

use super::{
    ProbeError,
    memory::median,
    reader::{Cursor, Reading, Shape, time},
    sweep::{Chosen, choose},
    target::{Doubt, Extent, Target},
};

/// Request sizes of the trunk's tiles.
const SIZES: [u64; 4] = [256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// Reads in flight.
const DEPTHS: [usize; 5] = [1, 2, 4, 8, 16];
/// What a cell of the first round counts.
const FIRST: Duration = Duration::from_millis(80);
/// What a cell of a later round counts.
const LATER: Duration = Duration::from_millis(150);
/// Rounds altogether, if they fit into [`TOTAL`].
const ROUNDS: usize = 3;
/// When the last round may begin a cell.
const TOTAL: Duration = Duration::from_secs(7);
/// What the chosen cell counts, alternating with the experts': long enough for what a device only does for a moment to be over.
const CONFIRMED: Duration = Duration::from_millis(500);
/// How often.
const CONFIRMATIONS: usize = 3;
/// A cell within this share of the best of its kind is measured again.
const CONTENDER: f64 = 0.85;
/// Reads in flight are at most what the disk reads in this many seconds.
const MOST_IN_FLIGHT: f64 = 0.35;
/// Above this share of memory's speed no disk is believed.
const NEVER_A_DISK: f64 = 0.5;
/// Above this share of memory's speed a disk is believed only if its readers wait for it.
const PERHAPS_A_DISK: f64 = 0.125;
/// Readers that compute for this share of the time are copying, not waiting.
const COPYING: f64 = 0.5;

/// What is asked of the sweep beside its own grid.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wishes {
    /// A request size given by hand.
    pub(super) read_bytes: Option<u64>,
    /// A depth given by hand.
    pub(super) depth: Option<usize>,
    /// The most memory the reads in flight may take.
    pub(super) memory_bytes: u64,
    /// How fast memory is read.
    pub(super) memory_speed: f64,
    /// The experts' share of the bytes a token reads.
    pub(super) expert_share: f64,
}

/// What was measured.
#[derive(Debug, Default)]
pub(super) struct Swept {
    pub(super) cells: Vec<SweepCell>,
    /// Made before the confirmation, which changes figures but not the choice.
    pub(super) chosen: Option<Chosen>,
    pub(super) devices: Vec<DeviceSpeed>,
    pub(super) doubts: Vec<Doubt>,
}

/// One combination and what it did so far.
struct Cell {
    kind: ReadKind,
    shape: Shape,
    speeds: Vec<f64>,
    busy: Vec<f64>,
}

impl Cell {
    fn new(kind: ReadKind, shape: Shape) -> Self {
        Self {
            kind,
            shape,
            speeds: Vec::new(),
            busy: Vec::new(),
        }
    }

    fn speed(&self) -> f64 {
        median(self.speeds.clone())
    }

    fn in_flight(&self) -> u64 {
        self.shape
            .request_bytes
            .saturating_mul(self.shape.depth as u64)
    }
}

/// Sweeps one machine's disks.
pub(super) struct Sweeper {
    trunk: Option<Target>,
    /// One a device.
    experts: Vec<Target>,
    wishes: Wishes,
    begun: Instant,
    cells: Vec<Cell>,
    /// One a reader, each for the longest extent; kept from cell to cell, as k3-run keeps its own.
    buffers: RefCell<Vec<AlignedBuf>>,
    trunk_cursor: Cursor,
    expert_cursor: Cursor,
}

impl Sweeper {
    pub(super) fn new(trunk: Option<Target>, experts: Vec<Target>, wishes: Wishes) -> Self {
        Self {
            trunk,
            experts,
            wishes,
            begun: Instant::now(),
            cells: Vec::new(),
            buffers: RefCell::default(),
            trunk_cursor: Cursor::default(),
            expert_cursor: Cursor::default(),
        }
    }

    /// Measure everything.
    ///
    /// # Errors
    /// If a read fails.
    pub(super) fn sweep(mut self) -> Result<Swept, ProbeError> {
        self.first_round(self.sequential_cells())?;
        let request = choose(&self.results(&[]), self.wishes.expert_share)
            .map_or(SIZES[2], |chosen| chosen.read_bytes);
        self.first_round(self.random_cells(request))?;
        for round in 1..ROUNDS {
            self.later_round(round)?;
        }
        let mut doubted = self.doubts();
        let without: Vec<ReadKind> = doubted.iter().map(|(kind, _)| *kind).collect();
        let chosen = choose(&self.results(&without), self.wishes.expert_share);
        if let Some(chosen) = chosen {
            self.confirm(chosen)?;
            doubted = self.doubts();
        }
        let without: Vec<ReadKind> = doubted.iter().map(|(kind, _)| *kind).collect();
        let chosen = chosen.filter(|_| !without.contains(&ReadKind::Sequential));
        Ok(Swept {
            devices: match chosen {
                Some(chosen) => self.devices(chosen, request, &without)?,
                None => Vec::new(),
            },
            cells: match chosen {
                Some(_) => self.results(&without),
                None => Vec::new(),
            },
            chosen,
            doubts: doubted.into_iter().map(|(_, doubt)| doubt).collect(),
        })
    }

    /// The kinds whose figures are no disk's.
    fn doubts(&self) -> Vec<(ReadKind, Doubt)> {
        [ReadKind::Sequential, ReadKind::Random]
            .into_iter()
            .filter_map(|kind| Some((kind, self.doubt(kind)?)))
            .collect()
    }

    fn depths(&self) -> Vec<usize> {
        let mut depths = DEPTHS.to_vec();
        depths.extend(self.wishes.depth.filter(|depth| *depth > 0));
        depths.sort_unstable();
        depths.dedup();
        depths
    }

    /// Sizes up to the longest tile, and that itself.
    fn sizes(&self) -> Vec<u64> {
        let Some(trunk) = &self.trunk else {
            return Vec::new();
        };
        let lens = trunk.extents.iter().map(|extent| extent.len);
        let longest = lens.max().unwrap_or(0);
        let mut sizes: Vec<u64> = SIZES.into_iter().filter(|&size| size < longest).collect();
        sizes.push(longest.min(SIZES[SIZES.len() - 1]));
        sizes.extend(self.wishes.read_bytes);
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    fn sequential_cells(&self) -> Vec<Cell> {
        let of_size = |request_bytes: u64| {
            let cell = move |depth| {
                let shape = Shape {
                    request_bytes,
                    depth,
                };
                Cell::new(ReadKind::Sequential, shape)
            };
            self.depths().into_iter().map(cell)
        };
        self.sizes().into_iter().flat_map(of_size).collect()
    }

    fn random_cells(&self, request_bytes: u64) -> Vec<Cell> {
        if self.experts.is_empty() {
            return Vec::new();
        }
        let cell = |depth| {
            let shape = Shape {
                request_bytes,
                depth,
            };
            Cell::new(ReadKind::Random, shape)
        };
        self.depths().into_iter().map(cell).collect()
    }

    fn first_round(&mut self, mut cells: Vec<Cell>) -> Result<(), ProbeError> {
        cells.sort_by_key(Cell::in_flight);
        let longest = self.longest();
        let mut best = 0.0_f64;
        for mut cell in cells {
            let in_flight = cell.in_flight();
            let wished = Some(cell.shape.depth) == self.wishes.depth
                && self
                    .wishes
                    .read_bytes
                    .is_none_or(|size| size == cell.shape.request_bytes);
            let too_much = best > 0.0 && in_flight as f64 > best * MOST_IN_FLIGHT && !wished;
            let memory = longest.saturating_mul(cell.shape.depth as u64);
            if too_much || memory > self.wishes.memory_bytes {
                continue;
            }
            self.measure(&mut cell, FIRST)?;
            best = best.max(cell.speed());
            self.cells.push(cell);
        }
        Ok(())
    }

    fn later_round(&mut self, round: usize) -> Result<(), ProbeError> {
        let mut cells = std::mem::take(&mut self.cells);
        let best = [ReadKind::Sequential, ReadKind::Random].map(|kind| {
            let of_kind = cells.iter().filter(|cell| cell.kind == kind);
            of_kind.map(Cell::speed).fold(0.0, f64::max)
        });
        let mut order: Vec<usize> = (0..cells.len()).collect();
        if !round.is_multiple_of(2) {
            order.reverse();
        }
        for at in order {
            let Some(cell) = cells.get_mut(at) else {
                continue;
            };
            let best = best[usize::from(cell.kind == ReadKind::Random)];
            if cell.speed() >= CONTENDER * best && self.begun.elapsed() < TOTAL {
                self.measure(cell, LATER)?;
            }
        }
        self.cells = cells;
        Ok(())
    }

    /// Measure what would be chosen once more; for it, only that counts.
    fn confirm(&mut self, chosen: Chosen) -> Result<(), ProbeError> {
        let is_chosen = |cell: &Cell| {
            cell.shape.depth == chosen.depth
                && (cell.kind == ReadKind::Random || cell.shape.request_bytes == chosen.read_bytes)
        };
        let mut cells = std::mem::take(&mut self.cells);
        for round in 0..CONFIRMATIONS {
            for cell in cells.iter_mut().filter(|cell| is_chosen(cell)) {
                if round == 0 {
                    cell.speeds.clear();
                    cell.busy.clear();
                }
                self.measure(cell, CONFIRMED)?;
            }
        }
        self.cells = cells;
        Ok(())
    }

    /// One sample of a cell. Experts on several devices are met one layer after the other, so their times add up.
    fn measure(&self, cell: &mut Cell, measured: Duration) -> Result<(), ProbeError> {
        let reading = match (cell.kind, &self.trunk) {
            (ReadKind::Sequential, Some(trunk)) => {
                let cursor = &self.trunk_cursor;
                self.time(trunk, &trunk.extents, cell.shape, measured, cursor)?
            }
            (ReadKind::Sequential, None) => return Ok(()),
            (ReadKind::Random, _) => {
                let parts: Vec<(f64, Reading)> = self
                    .experts
                    .iter()
                    .map(|target| {
                        let cursor = &self.expert_cursor;
                        let part =
                            self.time(target, &target.extents, cell.shape, measured, cursor)?;
                        Ok((target.extents.len() as f64, part))
                    })
                    .collect::<Result<_, ProbeError>>()?;
                one_after_the_other(&parts)
            }
        };
        cell.speeds.push(reading.bytes_per_second);
        cell.busy.push(reading.busy);
        Ok(())
    }

    fn time(
        &self,
        target: &Target,
        extents: &[Extent],
        shape: Shape,
        measured: Duration,
        cursor: &Cursor,
    ) -> Result<Reading, ProbeError> {
        let mut buffers = self.buffers.borrow_mut();
        // Whole huge pages, in which all of it then lies: reads into small pages are slower, and k3-run makes none.
        let length = self.longest().next_multiple_of(HUGE_PAGE as u64);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        while buffers.len() < shape.depth {
            let mut buffer = AlignedBuf::zeroed(length);
            buffer.back_with_memory();
            buffers.push(buffer);
        }
        let buffers = buffers.get_mut(..shape.depth).unwrap_or_default();
        time(target, extents, shape, buffers, measured, cursor)
    }

    /// The longest extent of all targets.
    fn longest(&self) -> u64 {
        let targets = self.trunk.iter().chain(&self.experts);
        let lens = targets
            .flat_map(|target| &target.extents)
            .map(|extent| extent.len);
        lens.max().unwrap_or(0)
    }

    fn results(&self, without: &[ReadKind]) -> Vec<SweepCell> {
        let expert_bytes = self.experts.iter().flat_map(|target| &target.extents);
        let expert_bytes = expert_bytes.map(|extent| extent.len).max().unwrap_or(0);
        let mut cells: Vec<SweepCell> = self
            .cells
            .iter()
            .filter(|cell| !without.contains(&cell.kind))
            .map(|cell| SweepCell {
                kind: cell.kind,
                read_bytes: match cell.kind {
                    ReadKind::Sequential => cell.shape.request_bytes,
                    ReadKind::Random => expert_bytes,
                },
                depth: cell.shape.depth,
                bytes_per_second: cell.speed().round(),
            })
            .collect();
        cells.sort_by_key(|cell| (cell.kind, cell.read_bytes, cell.depth));
        cells
    }

    /// Whether the fastest cell of a kind can be a disk's.
    fn doubt(&self, kind: ReadKind) -> Option<Doubt> {
        let fastest = self
            .cells
            .iter()
            .filter(|cell| cell.kind == kind)
            .max_by(|a, b| a.speed().total_cmp(&b.speed()))?;
        let memory = self.wishes.memory_speed;
        let busy = median(fastest.busy.clone());
        is_memory(fastest.speed(), memory, busy).then(|| Doubt::MemorySpeed {
            path: self.path(kind),
            speed: fastest.speed(),
            memory,
        })
    }

    fn speed_of(&self, kind: ReadKind, shape: Shape) -> Option<f64> {
        let cell = |cell: &&Cell| cell.kind == kind && cell.shape == shape;
        self.cells.iter().find(cell).map(Cell::speed)
    }

    fn path(&self, kind: ReadKind) -> PathBuf {
        let target = match kind {
            ReadKind::Sequential => self.trunk.as_ref(),
            ReadKind::Random => self.experts.first(),
        };
        target.map(Target::path).unwrap_or_default()
    }

    /// Each device alone: measured where there are several, else what the sweep says.
    fn devices(
        &self,
        chosen: Chosen,
        expert_request: u64,
        without: &[ReadKind],
    ) -> Result<Vec<DeviceSpeed>, ProbeError> {
        let mut speeds = Vec::new();
        for target in self.trunk.iter().chain(&self.experts) {
            if without.contains(&target.kind) {
                continue;
            }
            let (cursor, request_bytes) = match target.kind {
                ReadKind::Sequential => (&self.trunk_cursor, chosen.read_bytes),
                ReadKind::Random => (&self.expert_cursor, expert_request),
            };
            let shape = Shape {
                request_bytes,
                depth: chosen.depth,
            };
            let devices = target.devices();
            let measured_alone = devices.len() == 1
                && (target.kind == ReadKind::Sequential || self.experts.len() == 1);
            for (device, folder) in devices {
                if measured_alone && let Some(speed) = self.speed_of(target.kind, shape) {
                    speeds.push(DeviceSpeed {
                        folder,
                        device,
                        kind: target.kind,
                        bytes_per_second: speed.round(),
                    });
                    continue;
                }
                let extents = target.on_device(device);
                let sample = |_| self.time(target, &extents, shape, LATER, cursor);
                let samples = (0..2).map(sample).collect::<Result<Vec<_>, ProbeError>>()?;
                let samples = samples.into_iter().map(|reading| reading.bytes_per_second);
                speeds.push(DeviceSpeed {
                    folder,
                    device,
                    kind: target.kind,
                    bytes_per_second: median(samples.collect()).round(),
                });
            }
        }
        Ok(speeds)
    }
}

/// The speed of several targets visited in turn, each with its share of the bytes.
fn one_after_the_other(parts: &[(f64, Reading)]) -> Reading {
    let whole: f64 = parts.iter().map(|(share, _)| share).sum();
    let seconds: f64 = parts
        .iter()
        .map(|(share, reading)| share / reading.bytes_per_second.max(1.0))
        .sum();
    Reading {
        bytes_per_second: whole / seconds.max(f64::MIN_POSITIVE),
        busy: parts.iter().map(|(share, r)| share * r.busy).sum::<f64>() / whole.max(1.0),
    }
}

/// Whether a speed is memory's rather than a disk's.
fn is_memory(speed: f64, memory: f64, busy: f64) -> bool {
    speed > NEVER_A_DISK * memory || (speed > PERHAPS_A_DISK * memory && busy > COPYING)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_as_fast_as_memory_is_no_disk() {
        let memory = 40e9;
        // One disk of 1 GB/s, one of 14 GB/s whose readers wait, four of them.
        assert!(!is_memory(1e9, memory, 0.9));
        assert!(!is_memory(14e9, memory, 0.2));
        assert!(!is_memory(56e9, 300e9, 0.3));
        // The page cache, copied by two threads; a disk in the host's memory.
        assert!(is_memory(12e9, memory, 0.95));
        assert!(is_memory(25e9, memory, 0.1));
    }

    #[test]
    fn times_of_devices_met_in_turn_add_up() {
        let reading = |bytes_per_second| Reading {
            bytes_per_second,
            busy: 0.0,
        };
        let both = one_after_the_other(&[(30.0, reading(3.0)), (10.0, reading(1.0))]);
        assert!((both.bytes_per_second - 2.0).abs() < 1e-12);
        let one = one_after_the_other(&[(7.0, reading(3.0))]);
        assert!((one.bytes_per_second - 3.0).abs() < 1e-12);
    }
}
