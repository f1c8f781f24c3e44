//! AVX-512 bodies of one block of positions: sixteen lanes to a register, tiles of four by four.

#![expect(
    clippy::needless_range_loop,
    reason = "a tile is indexed by position, query and line alike"
)]

use std::arch::x86_64::{
    __m512, __m512d, _MM_HINT_T1, _mm_prefetch, _mm_shuffle_ps, _mm_storeu_ps,
    _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_storeu_ps, _mm512_add_pd, _mm512_castps512_ps256, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtpd_ps, _mm512_cvtps_pd, _mm512_extractf32x8_ps,
    _mm512_fmadd_ps, _mm512_loadu_pd, _mm512_loadu_ps, _mm512_mul_pd, _mm512_permute_pd,
    _mm512_set1_pd, _mm512_set1_ps, _mm512_setzero_pd, _mm512_setzero_ps, _mm512_shuffle_f64x2,
    _mm512_slli_epi32, _mm512_storeu_pd, _mm512_storeu_ps,
};

use super::super::activations::{BLOCK, LANES, Line};
use super::absorb::KEY_ROWS;
use super::group::{Block, Scores, Sums};
use super::{POSITIONS, QUERIES};

/// Positions of a tile of scores.
const TILE_ROWS: usize = 4;
/// Queries of a tile of scores.
const TILE_QUERIES: usize = 4;

/// The f32 sums of one run of [`DEPTH`] lines, `[rows, queries]` of a tile.
pub(super) type Tile = [[Line; TILE_QUERIES]; TILE_ROWS];

/// Tiles that the sums of one tile of scores take.
pub(super) const fn tiles(lines: usize) -> usize {
    lines.div_ceil(DEPTH)
}
/// Lines summed in f32 before the sum is carried into f64.
const DEPTH: usize = BLOCK / LANES;

/// Where a tile of scores begins.
#[derive(Clone, Copy)]
struct Place {
    position: usize,
    query: usize,
}

/// Dot products of every position of the block with every active query.
///
/// - `sums`: twice [`tiles`] of memory.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn scores(block: &Block<'_>, sums: &mut [Tile], out: &mut Scores) {
    let positions = block.positions();
    let tasks = block.active.len().div_ceil(TILE_QUERIES) * positions.div_ceil(TILE_ROWS);
    let mut next = block.next.chunks(block.next.len().div_ceil(tasks).max(1));
    let (mut sums, mut sums_before) = sums.split_at_mut(tiles(block.lines));
    let mut before = None;
    let mut query = block.active.start;
    while query < block.active.end {
        let count = TILE_QUERIES.min(block.active.end - query);
        for position in (0..positions).step_by(TILE_ROWS) {
            for run in next.next().unwrap_or_default() {
                _mm_prefetch::<_MM_HINT_T1>(run.as_ptr().cast());
            }
            let place = Place { position, query };
            let done = (before, &*sums_before);
            match count {
                1 => score_tile::<1>(block, place, sums, done, out),
                2 => score_tile::<2>(block, place, sums, done, out),
                3 => score_tile::<3>(block, place, sums, done, out),
                _ => score_tile::<4>(block, place, sums, done, out),
            }
            before = Some(place);
            std::mem::swap(&mut sums, &mut sums_before);
        }
        query += count;
    }
    if let Some(place) = before {
        for row in 0..TILE_ROWS {
            finish_row(sums_before, row, place, out);
        }
    }
}

/// Four positions by `Q` queries from a place on: their f32 sums, one tile for each run of [`DEPTH`] lines.
///
/// Between the runs the tile `before` is finished: its f64 conversions and additions use other units of the processor than the
/// multiply-adds here, and run beside them only if they are this near.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn score_tile<const Q: usize>(
    block: &Block<'_>,
    place: Place,
    sums: &mut [Tile],
    (before, sums_before): (Option<Place>, &[Tile]),
    out: &mut Scores,
) {
    let (s, q, runs) = (place.position, place.query, sums.len());
    let lines = block.lines;
    let mut queries: [&[Line]; Q] = [&[]; Q];
    for k in 0..Q {
        queries[k] = block.query(q + k);
    }
    // Past the last position the last one stands in; its scores are not used.
    let last = block.positions() - 1;
    let mut rows: [&[[f32; LANES]]; TILE_ROWS] = [&[]; TILE_ROWS];
    for p in 0..TILE_ROWS {
        rows[p] = &block.rows[(s + p).min(last) * lines..][..lines];
    }
    for (run, sums) in sums.iter_mut().enumerate() {
        let first = run * DEPTH;
        let mut tile = [[_mm512_setzero_ps(); Q]; TILE_ROWS];
        for i in first..lines.min(first + DEPTH) {
            let mut inputs = [_mm512_setzero_ps(); Q];
            for k in 0..Q {
                // SAFETY: `i` is below `lines`, the length of every query and row.
                inputs[k] = load(unsafe { &queries[k].get_unchecked(i).0 });
            }
            for p in 0..TILE_ROWS {
                // SAFETY: as above.
                let row = load(unsafe { rows[p].get_unchecked(i) });
                for k in 0..Q {
                    tile[p][k] = _mm512_fmadd_ps(inputs[k], row, tile[p][k]);
                }
            }
        }
        for p in 0..TILE_ROWS {
            for k in 0..Q {
                let sum = &mut sums[p][k].0;
                // SAFETY: sixteen f32.
                unsafe { _mm512_storeu_ps(sum.as_mut_ptr(), tile[p][k]) };
            }
        }
        if let Some(place) = before {
            for row in run * TILE_ROWS / runs..(run + 1) * TILE_ROWS / runs {
                finish_row(sums_before, row, place, out);
            }
        }
    }
}

/// Adds the f32 sums of one position of a tile in f64 and goes the tree over the lanes, for four queries at once.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn finish_row(sums: &[Tile], row: usize, place: Place, out: &mut Scores) {
    let mut even = [_mm512_setzero_pd(); TILE_QUERIES];
    let mut odd = [_mm512_setzero_pd(); TILE_QUERIES];
    for tile in sums {
        for k in 0..TILE_QUERIES {
            let (low, high) = tile[row][k].0.split_at(LANES / 2);
            // SAFETY: each half is eight f32.
            let (low, high) = unsafe {
                (
                    _mm256_loadu_ps(low.as_ptr()),
                    _mm256_loadu_ps(high.as_ptr()),
                )
            };
            even[k] = _mm512_add_pd(even[k], _mm512_cvtps_pd(low));
            odd[k] = _mm512_add_pd(odd[k], _mm512_cvtps_pd(high));
        }
    }
    // Even with odd lanes; then, among these, lanes at distance 4, 2 and 1.
    let mut pairs = [_mm512_setzero_pd(); TILE_QUERIES];
    for k in 0..TILE_QUERIES {
        pairs[k] = _mm512_add_pd(even[k], odd[k]);
    }
    let a = quads(pairs[0], pairs[1]);
    let b = quads(pairs[2], pairs[3]);
    let halves = _mm512_add_pd(
        _mm512_shuffle_f64x2::<0b10_00_10_00>(a, b),
        _mm512_shuffle_f64x2::<0b11_01_11_01>(a, b),
    );
    let swapped = _mm512_permute_pd::<0b0101_0101>(halves);
    let twice = _mm512_cvtpd_ps(_mm512_add_pd(halves, swapped));
    let low = _mm256_castps256_ps128(twice);
    let high = _mm256_extractf128_ps::<1>(twice);
    let four = _mm_shuffle_ps::<0b10_00_10_00>(low, high);
    let scores = &mut out.0[place.position + row][place.query..];
    if scores.len() >= TILE_QUERIES {
        // SAFETY: four f32. Those of queries past the last are not used.
        unsafe { _mm_storeu_ps(scores.as_mut_ptr(), four) };
    } else {
        let mut all = [0f32; TILE_QUERIES];
        // SAFETY: four f32.
        unsafe { _mm_storeu_ps(all.as_mut_ptr(), four) };
        scores.copy_from_slice(&all[..scores.len()]);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn quads(a: __m512d, b: __m512d) -> __m512d {
    _mm512_add_pd(
        _mm512_shuffle_f64x2::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f64x2::<0b11_10_11_10>(a, b),
    )
}

/// Adds the weighted latents of the block to the sums of every active query.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn values(block: &Block<'_>, weights: &Scores, shrink: &[f64], sums: &mut [Sums]) {
    let mut line = 0;
    while line < block.value_lines {
        let wide = block.value_lines - line >= 4;
        let mut q = block.active.start;
        while q < block.active.end {
            let alike = block.alike(q, 4);
            let part = (block, weights, shrink);
            let done = match (alike, wide) {
                (4, true) => value_tile::<4, 4>(part, q, line, sums),
                (2.., true) => value_tile::<2, 4>(part, q, line, sums),
                (_, true) => value_tile::<1, 4>(part, q, line, sums),
                (4, false) => value_tile::<4, 1>(part, q, line, sums),
                (_, false) => value_tile::<1, 1>(part, q, line, sums),
            };
            q += done;
        }
        line += if wide { 4 } else { 1 };
    }
}

/// `Q` queries from `q` on, which see equally much, by `C` lines from `line` on; returns `Q`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn value_tile<const Q: usize, const C: usize>(
    (block, weights, shrink): (&Block<'_>, &Scores, &[f64]),
    q: usize,
    line: usize,
    sums: &mut [Sums],
) -> usize {
    let mut tile = [[_mm512_setzero_ps(); C]; Q];
    let (rows, lines, count) = (block.rows, block.lines, block.counts[q]);
    assert!(
        line + C <= lines && count * lines <= rows.len() && count <= POSITIONS && q + Q <= QUERIES,
        "a tile within its block"
    );
    for s in 0..count {
        let mut values = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: row `s` of the block has `lines` lines, and `line + C` is no more.
            values[c] = load(unsafe { rows.get_unchecked(s * lines + line + c) });
        }
        for k in 0..Q {
            // SAFETY: `s` is a position of a block, `q + k` a query of a group.
            let weight = unsafe { *weights.0.get_unchecked(s).get_unchecked(q + k) };
            for c in 0..C {
                tile[k][c] = _mm512_fmadd_ps(_mm512_set1_ps(weight), values[c], tile[k][c]);
            }
        }
    }
    for k in 0..Q {
        let shrink = _mm512_set1_pd(shrink[q + k]);
        let sums = &mut sums[(q + k) * block.value_lines + line..][..C];
        for c in 0..C {
            let [even, odd] = load_lanes(&sums[c]);
            let even = _mm512_add_pd(_mm512_mul_pd(even, shrink), low_pd(tile[k][c]));
            let odd = _mm512_add_pd(_mm512_mul_pd(odd, shrink), high_pd(tile[k][c]));
            store_lanes(&mut sums[c], even, odd);
        }
    }
    Q
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn load(run: &[f32; LANES]) -> __m512 {
    // SAFETY: sixteen readable f32, and the load allows any alignment.
    unsafe { _mm512_loadu_ps(run.as_ptr()) }
}

/// Even lanes, odd lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn load_lanes(lanes: &Sums) -> [__m512d; 2] {
    let (even, odd) = lanes.0.split_at(LANES / 2);
    // SAFETY: each half is eight f64.
    unsafe {
        [
            _mm512_loadu_pd(even.as_ptr()),
            _mm512_loadu_pd(odd.as_ptr()),
        ]
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn store_lanes(lanes: &mut Sums, even: __m512d, odd: __m512d) {
    let (to_even, to_odd) = lanes.0.split_at_mut(LANES / 2);
    // SAFETY: each half is eight f64.
    unsafe {
        _mm512_storeu_pd(to_even.as_mut_ptr(), even);
        _mm512_storeu_pd(to_odd.as_mut_ptr(), odd);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn low_pd(v: __m512) -> __m512d {
    _mm512_cvtps_pd(_mm512_castps512_ps256(v))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn high_pd(v: __m512) -> __m512d {
    _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(v))
}

/// Columns of one strip of keys: four registers.
const STRIP: usize = 4 * LANES;

/// Absorbs the whole strips of keys into `T` queries; returns how many columns that are. See
/// [`absorb`](super::absorb()).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn absorb<const T: usize, const BYTES: usize>(
    k: &[[u8; BYTES]],
    r: usize,
    q: &[&[f32]; T],
    out: &mut [f32],
    stride: usize,
) -> usize {
    let rows = q[0].len();
    let whole = r - r % STRIP;
    for first in (0..whole).step_by(STRIP) {
        let mut sums = [[[_mm512_setzero_pd(); 2]; 4]; T];
        for begin in (0..rows).step_by(KEY_ROWS) {
            let mut tile = [[_mm512_setzero_ps(); 4]; T];
            for i in begin..rows.min(begin + KEY_ROWS) {
                let row = &k[i * r + first..][..STRIP];
                let mut keys = [_mm512_setzero_ps(); 4];
                for c in 0..4 {
                    keys[c] = widen(&row[c * LANES..(c + 1) * LANES]);
                }
                for t in 0..T {
                    let query = _mm512_set1_ps(q[t][i]);
                    for c in 0..4 {
                        tile[t][c] = _mm512_fmadd_ps(query, keys[c], tile[t][c]);
                    }
                }
            }
            for t in 0..T {
                for c in 0..4 {
                    let [low, high] = &mut sums[t][c];
                    *low = _mm512_add_pd(*low, low_pd(tile[t][c]));
                    *high = _mm512_add_pd(*high, high_pd(tile[t][c]));
                }
            }
        }
        for t in 0..T {
            let out = &mut out[t * stride + first..][..STRIP];
            for c in 0..4 {
                let [low, high] = sums[t][c];
                let out = &mut out[c * LANES..(c + 1) * LANES];
                // SAFETY: sixteen f32, eight for each half.
                unsafe {
                    _mm256_storeu_ps(out.as_mut_ptr(), _mm512_cvtpd_ps(low));
                    _mm256_storeu_ps(out.as_mut_ptr().add(LANES / 2), _mm512_cvtpd_ps(high));
                }
            }
        }
    }
    whole
}

/// Sixteen stored keys, bf16 or f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn widen<const BYTES: usize>(keys: &[[u8; BYTES]]) -> __m512 {
    assert!(
        keys.len() == LANES && (BYTES == 2 || BYTES == 4),
        "sixteen keys"
    );
    let bytes = keys.as_ptr();
    // SAFETY: sixteen keys of two or four bytes, and the loads allow any alignment.
    unsafe {
        if BYTES == 2 {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bytes.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        } else {
            _mm512_loadu_ps(bytes.cast())
        }
    }
}
