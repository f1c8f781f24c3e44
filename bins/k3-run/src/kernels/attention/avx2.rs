//! AVX2 bodies of one block of positions. Even and odd lanes of a line take turns, as they meet only in the final tree.

#![expect(
    clippy::needless_range_loop,
    reason = "a tile is indexed by position, query and line alike"
)]

use std::arch::x86_64::{
    __m256, __m256d, _mm_add_pd, _mm_add_sd, _mm_cvtsd_ss, _mm_cvtss_f32, _mm_loadu_si128,
    _mm_setzero_ps, _mm_storeu_ps, _mm_unpackhi_pd, _mm256_add_pd, _mm256_castpd256_pd128,
    _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_cvtpd_ps, _mm256_extractf128_pd,
    _mm256_fmadd_ps, _mm256_loadu_pd, _mm256_loadu_ps, _mm256_mul_pd, _mm256_set1_pd,
    _mm256_set1_ps, _mm256_setzero_pd, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_pd,
};

use std::ops::Range;

use super::super::activations::{BLOCK, LANES, Line};
use super::super::avx2::{high_pd, low_pd};
use super::absorb::KEY_ROWS;
use super::group::{Block, Scores, Sums};
use super::{POSITIONS, QUERIES};

/// Positions of a tile of scores: with three queries twelve sums, three inputs and one row are all sixteen registers.
const TILE_ROWS: usize = 4;
/// Lines summed in f32 before the sum is carried into f64.
const DEPTH: usize = BLOCK / LANES;

/// The f64 lanes of one score: even 0-3, even 4-7, odd 0-3, odd 4-7.
type Lanes = [__m256d; 4];

/// Dot products of every position of the block with every active query.
#[target_feature(enable = "avx2,fma")]
pub(super) fn scores(block: &Block<'_>, out: &mut Scores) {
    let mut q = block.active.start;
    while q < block.active.end {
        let left = block.active.end - q;
        for s in (0..block.positions()).step_by(TILE_ROWS) {
            match left {
                1 => score_tile::<1>(block, s, q, out),
                2 => score_tile::<2>(block, s, q, out),
                _ => score_tile::<3>(block, s, q, out),
            }
        }
        q += left.min(3);
    }
}

/// Four positions from `s` on by `Q` queries from `q` on.
#[target_feature(enable = "avx2,fma")]
fn score_tile<const Q: usize>(block: &Block<'_>, s: usize, q: usize, out: &mut Scores) {
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
    let mut sums = [[[_mm256_setzero_pd(); 4]; Q]; TILE_ROWS];
    for first in (0..lines).step_by(DEPTH) {
        let range = first..lines.min(first + DEPTH);
        half_tile::<Q, 0>(&queries, &rows, range.clone(), &mut sums);
        half_tile::<Q, 8>(&queries, &rows, range, &mut sums);
    }
    for p in 0..TILE_ROWS {
        for k in 0..Q {
            out.0[s + p][q + k] = reduce(&sums[p][k]);
        }
    }
}

/// The eight lanes from `HALF` on of the lines `range`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn half_tile<const Q: usize, const HALF: usize>(
    queries: &[&[Line]; Q],
    rows: &[&[[f32; LANES]]; TILE_ROWS],
    range: Range<usize>,
    sums: &mut [[Lanes; Q]; TILE_ROWS],
) {
    let mut tile = [[_mm256_setzero_ps(); Q]; TILE_ROWS];
    for k in 0..Q {
        assert!(range.end <= queries[k].len(), "lines of a query");
    }
    for p in 0..TILE_ROWS {
        assert!(range.end <= rows[p].len(), "lines of a row");
    }
    for i in range {
        let mut inputs = [_mm256_setzero_ps(); Q];
        for k in 0..Q {
            // SAFETY: every query has the lines of the range.
            inputs[k] = half::<HALF>(unsafe { &queries[k].get_unchecked(i).0 });
        }
        for p in 0..TILE_ROWS {
            // SAFETY: every row has the lines of the range.
            let row = half::<HALF>(unsafe { rows[p].get_unchecked(i) });
            for k in 0..Q {
                tile[p][k] = _mm256_fmadd_ps(inputs[k], row, tile[p][k]);
            }
        }
    }
    for p in 0..TILE_ROWS {
        for k in 0..Q {
            let lanes = &mut sums[p][k][HALF / 4..][..2];
            lanes[0] = _mm256_add_pd(lanes[0], low_pd(tile[p][k]));
            lanes[1] = _mm256_add_pd(lanes[1], high_pd(tile[p][k]));
        }
    }
}

/// The tree: even with odd lanes, then distance 4, 2 and 1 among these, one rounding.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn reduce(lanes: &Lanes) -> f32 {
    let [e0, e1, o0, o1] = *lanes;
    let quads = _mm256_add_pd(_mm256_add_pd(e0, o0), _mm256_add_pd(e1, o1));
    let pairs = _mm_add_pd(
        _mm256_castpd256_pd128(quads),
        _mm256_extractf128_pd::<1>(quads),
    );
    let total = _mm_add_sd(pairs, _mm_unpackhi_pd(pairs, pairs));
    _mm_cvtss_f32(_mm_cvtsd_ss(_mm_setzero_ps(), total))
}

/// Adds the weighted latents of the block to the sums of every active query.
#[target_feature(enable = "avx2,fma")]
pub(super) fn values(block: &Block<'_>, weights: &Scores, shrink: &[f64], sums: &mut [Sums]) {
    for line in 0..block.value_lines {
        let mut q = block.active.start;
        while q < block.active.end {
            let part = (block, weights, shrink);
            q += match block.alike(q, 6) {
                6 => value_tile::<6>(part, q, line, sums),
                4 | 5 => value_tile::<4>(part, q, line, sums),
                2 | 3 => value_tile::<2>(part, q, line, sums),
                _ => value_tile::<1>(part, q, line, sums),
            };
        }
    }
}

/// `Q` queries from `q` on, which see equally much, by one line; returns `Q`.
#[target_feature(enable = "avx2,fma")]
fn value_tile<const Q: usize>(
    (block, weights, shrink): (&Block<'_>, &Scores, &[f64]),
    q: usize,
    line: usize,
    sums: &mut [Sums],
) -> usize {
    let mut tile = [[_mm256_setzero_ps(); 2]; Q];
    let (rows, lines, count) = (block.rows, block.lines, block.counts[q]);
    assert!(
        line < lines && count * lines <= rows.len() && count <= POSITIONS && q + Q <= QUERIES,
        "a tile within its block"
    );
    for s in 0..count {
        // SAFETY: row `s` of the block has `lines` lines.
        let row = unsafe { rows.get_unchecked(s * lines + line) };
        let row = [half::<0>(row), half::<8>(row)];
        for k in 0..Q {
            // SAFETY: `s` is a position of a block, `q + k` a query of a group.
            let weight = unsafe { *weights.0.get_unchecked(s).get_unchecked(q + k) };
            for c in 0..2 {
                tile[k][c] = _mm256_fmadd_ps(_mm256_set1_ps(weight), row[c], tile[k][c]);
            }
        }
    }
    for k in 0..Q {
        let shrink = _mm256_set1_pd(shrink[q + k]);
        let sums = sums[(q + k) * block.value_lines + line]
            .0
            .as_chunks_mut::<4>()
            .0;
        let [even, odd] = tile[k];
        let added = [low_pd(even), high_pd(even), low_pd(odd), high_pd(odd)];
        for (sums, sum) in sums.iter_mut().zip(added) {
            // SAFETY: four f64.
            unsafe {
                let total = _mm256_mul_pd(_mm256_loadu_pd(sums.as_ptr()), shrink);
                _mm256_storeu_pd(sums.as_mut_ptr(), _mm256_add_pd(total, sum));
            }
        }
    }
    Q
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn half<const HALF: usize>(run: &[f32; LANES]) -> __m256 {
    const { assert!(HALF == 0 || HALF == LANES / 2) };
    let eight: &[f32] = &run[HALF..HALF + 8];
    // SAFETY: eight readable f32.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

/// Columns of one strip of keys: two registers.
const STRIP: usize = LANES;

/// Absorbs the whole strips of keys into `T` queries; returns how many columns that are. See
/// [`absorb`](super::absorb()).
#[target_feature(enable = "avx2,fma")]
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
        let mut sums = [[_mm256_setzero_pd(); 4]; T];
        for begin in (0..rows).step_by(KEY_ROWS) {
            let mut tile = [[_mm256_setzero_ps(); 2]; T];
            for i in begin..rows.min(begin + KEY_ROWS) {
                let row = &k[i * r + first..][..STRIP];
                let keys = [widen(&row[..8]), widen(&row[8..])];
                for t in 0..T {
                    let query = _mm256_set1_ps(q[t][i]);
                    for c in 0..2 {
                        tile[t][c] = _mm256_fmadd_ps(query, keys[c], tile[t][c]);
                    }
                }
            }
            for t in 0..T {
                let [a, b] = tile[t];
                for (sum, part) in
                    sums[t]
                        .iter_mut()
                        .zip([low_pd(a), high_pd(a), low_pd(b), high_pd(b)])
                {
                    *sum = _mm256_add_pd(*sum, part);
                }
            }
        }
        for t in 0..T {
            let out = &mut out[t * stride + first..][..STRIP];
            for (out, sum) in out.chunks_exact_mut(4).zip(sums[t]) {
                // SAFETY: four f32.
                unsafe { _mm_storeu_ps(out.as_mut_ptr(), _mm256_cvtpd_ps(sum)) };
            }
        }
    }
    whole
}

/// Eight stored keys, bf16 or f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen<const BYTES: usize>(keys: &[[u8; BYTES]]) -> __m256 {
    assert!(
        keys.len() == LANES / 2 && (BYTES == 2 || BYTES == 4),
        "eight keys"
    );
    let bytes = keys.as_ptr();
    // SAFETY: eight keys of two or four bytes, and the loads allow any alignment.
    unsafe {
        if BYTES == 2 {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(bytes.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        } else {
            _mm256_loadu_ps(bytes.cast())
        }
    }
}
