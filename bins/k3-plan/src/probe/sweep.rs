//! What a sweep says: which request size and depth to read with, and how fast the disk is with any.

use k3_shared::formats::plan::{ReadKind, SweepCell};

/// Speeds this close to the best are as good: more in flight takes memory and buys next to nothing.
const ENOUGH: f64 = 0.97;
/// Fewest reads in flight a sweep may choose: one while the other's buffer is being handed over.
const LEAST_DEPTH: usize = 2;

/// How to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// The most asked of one call.
    pub(crate) read_bytes: u64,
    /// Reads in flight.
    pub(crate) depth: usize,
}

/// The smallest depth at which a token's reads, of whose bytes `expert_share` are experts', take no longer than the best over
/// [`ENOUGH`], and the largest request that is fast enough at that depth. A reader more takes memory; a larger request takes none,
/// since tiles are read into their own slots, and a disk that does better at another hour is then not held back by small ones.
/// `None` of no sequential cells.
pub(crate) fn choose(cells: &[SweepCell], expert_share: f64) -> Option<Chosen> {
    let speed = |kind: ReadKind, depth: usize| {
        best_of(cells, |cell| cell.kind == kind && cell.depth == depth)
    };
    let mut depths: Vec<usize> = cells.iter().map(|cell| cell.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let has_experts = cells.iter().any(|cell| cell.kind == ReadKind::Random);
    // Seconds for one byte of the mixture; none where a part of it was not measured at this depth.
    let seconds = |depth: usize| {
        let trunk = speed(ReadKind::Sequential, depth)?;
        let experts = match speed(ReadKind::Random, depth) {
            Some(speed) => speed,
            None if has_experts => return None,
            None => trunk,
        };
        Some((1.0 - expert_share) / trunk + expert_share / experts)
    };
    let mut times: Vec<(usize, f64)> = depths
        .into_iter()
        .filter_map(|depth| Some((depth, seconds(depth)?)))
        .collect();
    if times.len() > 1 {
        times.retain(|&(depth, _)| depth >= LEAST_DEPTH);
    }
    let best = times.iter().map(|&(_, time)| time).reduce(f64::min)?;
    let (depth, _) = times.into_iter().find(|&(_, time)| time * ENOUGH <= best)?;
    let read_bytes = largest_fast_request(cells, depth)?;
    Some(Chosen { read_bytes, depth })
}

/// The largest request within [`ENOUGH`] of the best sequential cell of a depth.
fn largest_fast_request(cells: &[SweepCell], depth: usize) -> Option<u64> {
    let here = |cell: &SweepCell| cell.kind == ReadKind::Sequential && cell.depth == depth;
    let best = best_of(cells, here)?;
    cells
        .iter()
        .filter(|cell| here(cell) && cell.bytes_per_second >= ENOUGH * best)
        .map(|cell| cell.read_bytes)
        .max()
}

fn best_of(cells: &[SweepCell], which: impl Fn(&SweepCell) -> bool) -> Option<f64> {
    let speeds = cells.iter().filter(|cell| which(cell));
    speeds.map(|cell| cell.bytes_per_second).reduce(f64::max)
}

/// The speed of one kind of read with `read_bytes` and `depth`, by the nearest cell that asks for no more of the device; `None` if
/// that kind was not measured.
///
/// Up to the depth `chosen` by the sweep, fewer in flight are never taken for faster than more: a measurement that says so is noise, and
/// the chosen cell was measured longest.
pub(crate) fn speed_at(
    cells: &[SweepCell],
    chosen: usize,
    kind: ReadKind,
    read_bytes: u64,
    depth: usize,
) -> Option<f64> {
    let of_kind = || cells.iter().filter(|cell| cell.kind == kind);
    let sizes = || of_kind().map(|cell| cell.read_bytes);
    // Experts are measured with one size, their own.
    let size = sizes()
        .filter(|&size| size <= read_bytes)
        .max()
        .or_else(|| sizes().min())?;
    let row = || of_kind().filter(|cell| cell.read_bytes == size);
    let depths = || row().map(|cell| cell.depth);
    let nearest = depths()
        .filter(|&at| at <= depth)
        .max()
        .or_else(|| depths().min())?;
    row()
        .filter(|cell| cell.depth == nearest || (nearest..=chosen).contains(&cell.depth))
        .map(|cell| cell.bytes_per_second)
        .reduce(f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn cells(sequential: &[(u64, usize, f64)], random: &[(usize, f64)]) -> Vec<SweepCell> {
        let cell = |kind, read_bytes, depth, bytes_per_second| SweepCell {
            kind,
            read_bytes,
            depth,
            bytes_per_second,
        };
        let sequential = sequential
            .iter()
            .map(|&(size, depth, speed)| cell(ReadKind::Sequential, size, depth, speed));
        let random = random
            .iter()
            .map(|&(depth, speed)| cell(ReadKind::Random, 17_551_360, depth, speed));
        sequential.chain(random).collect()
    }

    fn solid_state() -> Vec<SweepCell> {
        cells(
            &[
                (256 * KIB, 1, 0.8e9),
                (256 * KIB, 4, 2.5e9),
                (256 * KIB, 16, 3.0e9),
                (4 * MIB, 1, 2.0e9),
                (4 * MIB, 4, 2.95e9),
                (4 * MIB, 16, 2.9e9),
                (16 * MIB, 1, 2.2e9),
                (16 * MIB, 4, 2.99e9),
                (16 * MIB, 16, 2.7e9),
            ],
            &[(1, 2.1e9), (4, 2.8e9), (16, 2.85e9)],
        )
    }

    #[test]
    fn the_smallest_depth_and_largest_request_within_three_percent_are_chosen() {
        let chosen = choose(&solid_state(), 0.2).unwrap();
        assert_eq!((chosen.read_bytes, chosen.depth), (16 * MIB, 4));
        let mut slower = solid_state();
        slower[7].bytes_per_second = 2.8e9;
        assert_eq!(choose(&slower, 0.2).unwrap().read_bytes, 4 * MIB);
    }

    #[test]
    fn experts_count_by_their_share_of_the_bytes() {
        let cells = cells(
            &[(MIB, 2, 100.0), (MIB, 4, 98.0), (MIB, 8, 70.0)],
            &[(2, 50.0), (4, 90.0), (8, 100.0)],
        );
        assert_eq!(choose(&cells, 0.0).unwrap().depth, 2);
        assert_eq!(choose(&cells, 0.3).unwrap().depth, 4);
        assert_eq!(choose(&cells, 1.0).unwrap().depth, 8);
    }

    #[test]
    fn a_depth_at_which_only_the_trunk_was_measured_is_not_chosen() {
        let cells = cells(&[(MIB, 2, 50.0), (MIB, 4, 100.0)], &[(1, 10.0), (2, 50.0)]);
        assert_eq!(choose(&cells, 0.2).unwrap().depth, 2);
    }

    #[test]
    fn one_read_in_flight_is_never_chosen_where_two_were_measured() {
        let flat = [(MIB, 1, 5.0), (MIB, 2, 5.0), (MIB, 4, 5.0)];
        assert_eq!(choose(&cells(&flat, &[]), 0.2).unwrap().depth, 2);
        assert_eq!(choose(&cells(&flat[..1], &[]), 0.2).unwrap().depth, 1);
        assert_eq!(choose(&[], 0.2), None);
        assert_eq!(choose(&cells(&[], &[(1, 1.0)]), 0.2), None);
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "the values are kept, not computed")]
    fn speeds_are_those_of_the_nearest_cell_that_asks_for_no_more() {
        let cells = solid_state();
        let speed = |kind, size, depth| speed_at(&cells, 4, kind, size, depth).unwrap();
        let sequential = |size, depth| speed(ReadKind::Sequential, size, depth);
        assert_eq!(sequential(4 * MIB, 4), 2.95e9);
        assert_eq!(sequential(5 * MIB, 7), 2.95e9);
        assert_eq!(sequential(4 * MIB, 3), 2.0e9);
        assert_eq!(sequential(KIB, 4), 2.5e9, "the smallest measured");
        // Deeper than what was chosen, a loss is a loss.
        assert_eq!(sequential(16 * MIB, 16), 2.7e9);
        assert_eq!(speed(ReadKind::Random, 4 * MIB, 5), 2.8e9);
        assert_eq!(speed_at(&cells[..9], 4, ReadKind::Random, MIB, 4), None);
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "the values are kept, not computed")]
    fn up_to_the_chosen_depth_fewer_in_flight_are_never_faster() {
        let noisy = cells(
            &[
                (MIB, 1, 50.0),
                (MIB, 2, 80.0),
                (MIB, 4, 78.0),
                (MIB, 8, 100.0),
            ],
            &[],
        );
        assert_eq!(choose(&noisy, 0.2).unwrap().depth, 8);
        let speeds: Vec<f64> = (1..12)
            .map(|depth| speed_at(&noisy, 8, ReadKind::Sequential, MIB, depth).unwrap())
            .collect();
        assert!(speeds.is_sorted(), "{speeds:?}");
        assert_eq!(speeds[1], 78.0);
    }
}
