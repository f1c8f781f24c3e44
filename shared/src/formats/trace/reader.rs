//! Reading a trace.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{
    DIGEST_BYTES, END, Mode, RECORD_BYTES, TAG, TraceError, TraceHeader, TraceRecord, TraceRow,
    header_problem, problem_of,
};
use crate::{
    checkpoint::hex,
    formats::codec,
    ids::{ExpertIdx, LayerIdx},
};

/// Reads a trace record by record, from a source of known length.
#[derive(Debug)]
pub struct TraceReader<R: Read> {
    from: R,
    path: PathBuf,
    header: TraceHeader,
    pub(super) offset: u64,
    bytes: u64,
    last: Option<(u64, LayerIdx)>,
    records: u64,
    digest: Sha256,
    /// Set by the end record: hex of the digest of all records.
    ended: Option<String>,
}

/// The fixed part of a record.
struct Head {
    step: u64,
    layer: u32,
    rows: u32,
    mode: u8,
}

impl Head {
    /// `None` if the three last bytes are not zero.
    fn parse(bytes: [u8; RECORD_BYTES]) -> Option<Self> {
        let [
            s0,
            s1,
            s2,
            s3,
            s4,
            s5,
            s6,
            s7,
            l0,
            l1,
            l2,
            l3,
            r0,
            r1,
            r2,
            r3,
            mode,
            0,
            0,
            0,
        ] = bytes
        else {
            return None;
        };
        Some(Self {
            step: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            layer: u32::from_le_bytes([l0, l1, l2, l3]),
            rows: u32::from_le_bytes([r0, r1, r2, r3]),
            mode,
        })
    }
}

impl<R: Read> TraceReader<R> {
    /// Read the header of a trace of `bytes` bytes; `path` names it in errors.
    ///
    /// # Errors
    /// If the header is cut short, damaged, of another version, or describes no mixture of experts.
    pub fn new(mut from: R, bytes: u64, path: &Path) -> Result<Self, TraceError> {
        let (header, offset) = codec::read_framed(&mut from, bytes, TAG, "the trace header")
            .map_err(|source| TraceError::Header {
                path: path.to_owned(),
                source,
            })?;
        let reader = Self {
            from,
            path: path.to_owned(),
            header,
            offset,
            bytes,
            last: None,
            records: 0,
            digest: Sha256::new(),
            ended: None,
        };
        match header_problem(&reader.header) {
            Some(problem) => Err(reader.refuse(codec::FRAME_BYTES, problem)),
            None => Ok(reader),
        }
    }

    /// What the trace was recorded from.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// After the last record: the SHA-256 of all of them, in hex. It names what a run asked for: runs that asked for the same experts in the
    /// same steps have the same, whatever their budget.
    pub fn digest(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// The next record, or `None` after the last.
    ///
    /// # Errors
    /// If the record is cut short, damaged or cannot be; if the end record is missing, or does not match what came before it.
    pub fn next_record(&mut self) -> Result<Option<TraceRecord>, TraceError> {
        if self.ended.is_some() {
            return Ok(None);
        }
        let start = self.offset;
        if self.left() < RECORD_BYTES as u64 {
            let problem = format!(
                "cut short after {} records: the end record is missing",
                self.records
            );
            return Err(self.refuse(start, problem));
        }
        let mut raw = [0; RECORD_BYTES];
        self.fill(&mut raw)?;
        let Some(head) = Head::parse(raw) else {
            return Err(self.refuse(start + 17, "reserved bytes are not zero".to_owned()));
        };
        let mode = match head.mode {
            0 => Mode::Prefill,
            1 => Mode::Decode,
            END => return self.end(start, &head).map(|()| None),
            other => return Err(self.refuse(start + 16, format!("mode {other} is unknown"))),
        };
        self.digest.update(raw);
        let record = self.rows(start, &head, mode)?;
        if let Some(problem) = problem_of(&self.header, self.last, &record) {
            return Err(self.refuse(start, problem));
        }
        self.last = Some((record.step, record.layer));
        self.records += 1;
        Ok(Some(record))
    }

    fn rows(&mut self, start: u64, head: &Head, mode: Mode) -> Result<TraceRecord, TraceError> {
        let body = u64::from(head.rows).checked_mul(self.header.row_bytes());
        let left = self.left();
        let body = match body.map(|body| (body, usize::try_from(body))) {
            Some((bytes, Ok(body))) if bytes <= left => body,
            _ => {
                let problem = format!("{} rows, but only {left} bytes follow", head.rows);
                return Err(self.refuse(start + 12, problem));
            }
        };
        let mut raw = vec![0; body];
        self.fill(&mut raw)?;
        self.digest.update(&raw);
        let top_k = self.header.top_k as usize;
        let mut rows = Vec::with_capacity(head.rows as usize);
        let mut experts = Vec::with_capacity(head.rows as usize * top_k);
        for row in raw.chunks_exact(8 + 2 * top_k) {
            let Some((&[s0, s1, s2, s3, p0, p1, p2, p3], selected)) = row.split_first_chunk()
            else {
                continue;
            };
            rows.push(TraceRow {
                sequence: u32::from_le_bytes([s0, s1, s2, s3]),
                position: u32::from_le_bytes([p0, p1, p2, p3]),
            });
            let (selected, _) = selected.as_chunks();
            experts.extend(
                selected
                    .iter()
                    .map(|&e| ExpertIdx(u16::from_le_bytes(e).into())),
            );
        }
        Ok(TraceRecord {
            step: head.step,
            mode,
            layer: LayerIdx(head.layer),
            rows,
            experts,
        })
    }

    fn end(&mut self, start: u64, head: &Head) -> Result<(), TraceError> {
        let left = self.left();
        if left != DIGEST_BYTES as u64 || head.layer != 0 || head.rows != 0 {
            let problem =
                format!("the end record is not followed by {DIGEST_BYTES} bytes, but {left}");
            return Err(self.refuse(start, problem));
        }
        let mut digest = [0; DIGEST_BYTES];
        self.fill(&mut digest)?;
        let found = std::mem::take(&mut self.digest).finalize();
        if head.step != self.records || found[..] != digest {
            let problem = format!(
                "{} records were read, {} were written, or their digest differs",
                self.records, head.step
            );
            return Err(self.refuse(start, problem));
        }
        self.ended = Some(hex(digest));
        Ok(())
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), TraceError> {
        let (path, offset) = (&self.path, self.offset);
        self.from
            .read_exact(buffer)
            .map_err(|source| TraceError::Read {
                path: path.clone(),
                offset,
                source,
            })?;
        self.offset += buffer.len() as u64;
        Ok(())
    }

    fn left(&self) -> u64 {
        self.bytes.saturating_sub(self.offset)
    }

    pub(super) fn refuse(&self, offset: u64, problem: String) -> TraceError {
        TraceError::Record {
            path: self.path.clone(),
            offset,
            problem,
        }
    }
}
