//! Writing a trace.

use std::io::Write;

use sha2::{Digest, Sha256};

use super::{END, Mode, TAG, TraceError, TraceHeader, TraceRecord, header_problem, problem_of};
use crate::{formats::codec, ids::LayerIdx};

/// Writes a trace to any destination, record by record.
///
/// Give it an [`AtomicFile`](crate::term::AtomicFile) and commit that after [`Self::finish`].
#[derive(Debug)]
pub struct TraceWriter<W: Write> {
    to: W,
    header: TraceHeader,
    last: Option<(u64, LayerIdx)>,
    records: u64,
    digest: Sha256,
    buffer: Vec<u8>,
}

impl<W: Write> TraceWriter<W> {
    /// Write the header.
    ///
    /// # Errors
    /// If the header describes no mixture of experts, or `to` fails.
    pub fn new(mut to: W, header: TraceHeader) -> Result<Self, TraceError> {
        if let Some(problem) = header_problem(&header) {
            return Err(TraceError::WriteRecord {
                step: 0,
                layer: LayerIdx(0),
                problem,
            });
        }
        codec::write_framed(&mut to, TAG, "the trace header", &header)
            .map_err(|source| TraceError::WriteHeader { source })?;
        Ok(Self {
            to,
            header,
            last: None,
            records: 0,
            digest: Sha256::new(),
            buffer: Vec::new(),
        })
    }

    /// Write one record; they ascend by (step, layer).
    ///
    /// # Errors
    /// If the record does not fit the header or the order, or the destination fails.
    pub fn write(&mut self, record: &TraceRecord) -> Result<(), TraceError> {
        let TraceRecord { step, layer, .. } = *record;
        let refuse = |problem| TraceError::WriteRecord {
            step,
            layer,
            problem,
        };
        if let Some(problem) = problem_of(&self.header, self.last, record) {
            return Err(refuse(problem));
        }
        let rows = u32::try_from(record.rows.len()).map_err(|e| refuse(e.to_string()))?;
        let mode = match record.mode {
            Mode::Prefill => 0,
            Mode::Decode => 1,
        };
        self.put_head(step, layer.0, rows, mode);
        let selections = record.experts.chunks_exact(self.header.top_k as usize);
        for (row, experts) in record.rows.iter().zip(selections) {
            self.buffer.extend_from_slice(&row.sequence.to_le_bytes());
            self.buffer.extend_from_slice(&row.position.to_le_bytes());
            for expert in experts {
                let expert = u16::try_from(expert.0).map_err(|e| refuse(e.to_string()))?;
                self.buffer.extend_from_slice(&expert.to_le_bytes());
            }
        }
        self.digest.update(&self.buffer);
        self.last = Some((step, layer));
        self.records += 1;
        self.to
            .write_all(&self.buffer)
            .map_err(|source| TraceError::Write { source })
    }

    /// Write the end record and flush; returns the destination.
    ///
    /// # Errors
    /// If the destination fails.
    pub fn finish(mut self) -> Result<W, TraceError> {
        self.put_head(self.records, 0, 0, END);
        self.buffer.extend_from_slice(&self.digest.finalize());
        self.to
            .write_all(&self.buffer)
            .and_then(|()| self.to.flush())
            .map_err(|source| TraceError::Write { source })?;
        Ok(self.to)
    }

    fn put_head(&mut self, step: u64, layer: u32, rows: u32, mode: u8) {
        self.buffer.clear();
        self.buffer.extend_from_slice(&step.to_le_bytes());
        self.buffer.extend_from_slice(&layer.to_le_bytes());
        self.buffer.extend_from_slice(&rows.to_le_bytes());
        self.buffer.extend_from_slice(&[mode, 0, 0, 0]);
    }
}
