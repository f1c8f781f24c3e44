//! Zeros that need neither be read, hashed nor written.

use std::{collections::BTreeMap, ops::Range, sync::Mutex};

use k3_shared::direct::ALIGN;
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest.
pub(crate) type Digest = [u8; 32];

const ZERO_PAGE: [u8; ALIGN] = [0; ALIGN];

/// Digests of runs of zeros, computed once a length: a sparse checkpoint has thousands of tiles and a dozen lengths.
#[derive(Debug, Default)]
pub(crate) struct ZeroDigests {
    known: Mutex<BTreeMap<u64, Digest>>,
}

impl ZeroDigests {
    /// The digest of `bytes` zeros.
    pub(crate) fn of(&self, bytes: u64) -> Digest {
        let mut known = self.known.lock().expect("no holder of this lock panics");
        *known.entry(bytes).or_insert_with(|| {
            let mut hash = Sha256::new();
            let mut left = bytes;
            while left > 0 {
                let step = left.min(ALIGN as u64);
                hash.update(&ZERO_PAGE[..usize::try_from(step).unwrap_or(ALIGN)]);
                left -= step;
            }
            hash.finalize().into()
        })
    }
}

/// The runs of whole pages in `bytes` that hold anything but zeros, ascending. `bytes` is a multiple of a page.
pub(crate) fn data_runs(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (number, page) in bytes.chunks(ALIGN).enumerate() {
        if *page == ZERO_PAGE[..page.len()] {
            continue;
        }
        let start = number * ALIGN;
        let end = start + page.len();
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_shared::checkpoint::hex;

    #[test]
    fn the_digest_of_zeros_is_that_of_the_zeros() {
        let zeros = ZeroDigests::default();
        for bytes in [0, 1, 4096, 12_345, 1 << 20] {
            let want: Digest = Sha256::digest(vec![0; bytes]).into();
            assert_eq!(zeros.of(bytes as u64), want);
            assert_eq!(zeros.of(bytes as u64), want, "remembered");
        }
        assert_eq!(
            hex(zeros.of(0)),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
    }

    #[test]
    fn only_pages_of_nothing_but_zeros_are_left_out() {
        let mut bytes = vec![0; 6 * ALIGN];
        assert_eq!(data_runs(&bytes), []);
        bytes[ALIGN] = 1;
        bytes[3 * ALIGN - 1] = 1;
        bytes[5 * ALIGN + 7] = 1;
        assert_eq!(data_runs(&bytes), [ALIGN..3 * ALIGN, 5 * ALIGN..6 * ALIGN]);
    }
}
