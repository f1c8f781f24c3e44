//! Asking memory for bytes before they are needed. Past the end of the weights that does nothing.

use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T0, _mm_prefetch};

/// How far ahead a single pass asks: rows are adjacent, so this runs into the next row.
///
/// Measured on two cores that read 75 GB/s by a plain loop (one row of bf16): 2 KiB 54, 4 KiB 63, 6 KiB 68, 8 KiB 63 GB/s.
pub(super) const STREAM_AHEAD: usize = 6144;

/// Blocks of inputs that stay in the first-level cache from row to row (32 KiB).
pub(super) const WHOLE: usize = 64;

/// Where there are more, blocks of a span (16 KiB of inputs), and rows that take it in turn.
///
/// Measured at 12,288 inputs on one thread that reads 37 GB/s: whole rows 27, 8 rows by 32 blocks 32, 2 by 48 26 GB/s.
pub(super) const SPAN: usize = 32;
pub(super) const ROWS: usize = 8;

/// Asks for the bytes [`STREAM_AHEAD`] of these, and `jump` more; each will be used once, so it need not displace what the
/// caches keep.
#[inline]
#[target_feature(enable = "sse")]
pub(super) fn stream(bytes: &[u8], jump: usize) {
    for line in bytes.chunks_exact(64) {
        _mm_prefetch::<_MM_HINT_NTA>(line.as_ptr().wrapping_add(STREAM_AHEAD + jump).cast());
    }
}

/// Asks for the bytes `AHEAD` of these, to be used more than once.
#[inline]
#[target_feature(enable = "sse")]
pub(super) fn keep<const AHEAD: usize>(bytes: &[u8]) {
    for line in bytes.chunks_exact(64) {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
    }
}
