//! The plainest reader there is.

use std::{
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use k3_shared::direct::{AlignedBuf, DirectError, DirectFile, Mode};

/// Bytes of one measurement.
pub(crate) const SAMPLE_BYTES: u64 = 3 << 30;

/// Reads files in turn, front to back and again, with a fixed request size and number of requests in flight.
pub(crate) struct Reader {
    files: Vec<DirectFile>,
    /// File and offset of every request, in order.
    requests: Vec<(usize, u64)>,
    buffers: Vec<AlignedBuf>,
    next: usize,
}

impl Reader {
    pub(crate) fn open(
        paths: &[&Path],
        read_bytes: u64,
        depth: usize,
    ) -> Result<Self, DirectError> {
        let length = usize::try_from(read_bytes).unwrap_or(usize::MAX);
        let (mut files, mut requests) = (Vec::new(), Vec::new());
        for path in paths {
            let file = DirectFile::open(path, Mode::Direct)?;
            let starts = (0..file.len()? / read_bytes).map(|at| at * read_bytes);
            requests.extend(starts.map(|offset| (files.len(), offset)));
            files.push(file);
        }
        // Requests of several folders alternate, as those of the tiles do.
        requests.sort_unstable_by_key(|&(file, offset)| (offset, file));
        Ok(Self {
            files,
            requests,
            buffers: (0..depth).map(|_| AlignedBuf::zeroed(length)).collect(),
            next: 0,
        })
    }

    /// Read at least so many bytes, going on where the last call ended.
    pub(crate) fn bytes_per_second(&mut self, bytes: u64) -> f64 {
        let (files, requests) = (&self.files, &self.requests);
        let length = self.buffers.first().map_or(1, |buffer| buffer.len());
        let first = self.next;
        let count = usize::try_from(bytes)
            .unwrap_or(usize::MAX)
            .div_ceil(length);
        let taken = AtomicUsize::new(0);
        let began = Instant::now();
        thread::scope(|scope| {
            for buffer in &mut self.buffers {
                scope.spawn(|| {
                    loop {
                        let at = taken.fetch_add(1, Ordering::Relaxed);
                        if at >= count {
                            return;
                        }
                        let (file, offset) = requests[(first + at) % requests.len()];
                        files[file]
                            .read_exact_at(buffer, offset)
                            .unwrap_or_else(|e| panic!("{e}"));
                    }
                });
            }
        });
        self.next = (first + count) % requests.len();
        (count * length) as f64 / began.elapsed().as_secs_f64()
    }
}
