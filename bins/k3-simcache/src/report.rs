//! The result as table, JSON and CSV.

use std::io::{self, Write};

use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use k3_shared::{
    cache::{Counters, PolicyKind},
    size::Bytes,
};
use serde::Serialize;

use crate::{CacheSize, Replay, TraceMode};

/// What was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TraceFacts {
    /// Counted requests: distinct (step, layer, expert), or pairs of a header-less trace.
    pub requests: u64,
    /// Distinct experts among them.
    pub distinct_experts: u64,
    /// Rows they were asked for by; `None` if the trace does not say.
    pub tokens: Option<u64>,
    /// What the counted steps were for.
    pub mode: TraceMode,
    /// Requests replayed before or between, to fill the cache, and not counted.
    pub warmup_requests: u64,
}

impl Default for TraceFacts {
    fn default() -> Self {
        Self {
            requests: 0,
            distinct_experts: 0,
            tokens: None,
            mode: TraceMode::Unknown,
            warmup_requests: 0,
        }
    }
}

/// One cache: a policy at a size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The policy.
    pub policy: PolicyKind,
    /// Bytes the cache was to fit in.
    pub capacity_bytes: u64,
    /// Experts it holds.
    pub slots: usize,
    /// Counted requests.
    pub requests: u64,
    /// Of these, resident.
    pub hits: u64,
    /// `hits / requests`.
    pub hit_rate: f64,
    /// Payload of the misses.
    pub bytes_read: u64,
    /// `bytes_read` at the speed given by `--disk-speed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_seconds: Option<f64>,
}

impl Row {
    /// What one cache counted; [`Report::new`] adds the bytes.
    pub(crate) fn new(policy: PolicyKind, size: CacheSize, counted: Counters) -> Self {
        Self {
            policy,
            capacity_bytes: size.capacity_bytes,
            slots: size.slots,
            requests: counted.requests,
            hits: counted.hits,
            hit_rate: counted.hits as f64 / counted.requests as f64,
            bytes_read: 0,
            read_seconds: None,
        }
    }
}

/// A whole result, `k3.simcache/1`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `k3.simcache/1`.
    pub schema: &'static str,
    /// What was counted.
    pub trace: TraceFacts,
    /// Payload of one expert.
    pub expert_bytes: u64,
    /// By policy, then by size.
    pub rows: Vec<Row>,
    /// Counted requests that nobody had made before: no cache hits them.
    pub compulsory_misses: u64,
    /// The highest hit rate there can be.
    pub ceiling: f64,
}

impl Report {
    /// Put bytes, and seconds if there is a speed, to counted rows.
    pub fn new(
        replay: &Replay,
        mut rows: Vec<Row>,
        expert_bytes: u64,
        disk_speed: Option<Bytes>,
    ) -> Self {
        for row in &mut rows {
            row.bytes_read = (row.requests - row.hits).saturating_mul(expert_bytes);
            row.read_seconds = disk_speed.map(|speed| row.bytes_read as f64 / speed.0 as f64);
        }
        let facts = replay.facts;
        Self {
            schema: "k3.simcache/1",
            trace: facts,
            expert_bytes,
            rows,
            compulsory_misses: replay.compulsory_misses,
            ceiling: (facts.requests - replay.compulsory_misses) as f64 / facts.requests as f64,
        }
    }

    /// One JSON object and a line end.
    ///
    /// # Errors
    /// If `out` fails.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut *out, self)?;
        writeln!(out)
    }

    /// A header line, then a line for each policy and size.
    ///
    /// # Errors
    /// If `out` fails.
    pub fn write_csv(&self, out: &mut dyn Write) -> io::Result<()> {
        let timed = self.rows.iter().any(|row| row.read_seconds.is_some());
        write!(
            out,
            "policy,capacity_bytes,slots,requests,hits,hit_rate,bytes_read"
        )?;
        writeln!(out, "{}", if timed { ",read_seconds" } else { "" })?;
        for row in &self.rows {
            write!(
                out,
                "{},{},{},{},{},{},{}",
                row.policy,
                row.capacity_bytes,
                row.slots,
                row.requests,
                row.hits,
                row.hit_rate,
                row.bytes_read
            )?;
            match row.read_seconds {
                Some(seconds) => writeln!(out, ",{seconds}")?,
                None => writeln!(out)?,
            }
        }
        Ok(())
    }

    /// Hit rates, then bytes read (and seconds): a row a size, a column a policy.
    ///
    /// # Errors
    /// If `out` fails.
    pub fn write_table(
        &self,
        policies: &[PolicyKind],
        sizes: &[CacheSize],
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let facts = &self.trace;
        let tokens = facts
            .tokens
            .map_or(String::new(), |tokens| format!(" by {tokens} tokens"));
        writeln!(
            out,
            "{} requests{tokens} for {} distinct experts of {} bytes; {} are the first of their expert, so no policy hits more \
             than {:.2} %.",
            facts.requests,
            facts.distinct_experts,
            self.expert_bytes,
            self.compulsory_misses,
            100.0 * self.ceiling
        )?;
        if facts.warmup_requests > 0 {
            writeln!(
                out,
                "{} more requests filled the cache and are not counted.",
                facts.warmup_requests
            )?;
        }
        let table = |cell: &dyn Fn(&Row) -> String| self.table(policies, sizes, cell);
        writeln!(
            out,
            "\nHit rate, %\n{}",
            table(&|row| format!("{:.2}", 100.0 * row.hit_rate))
        )?;
        writeln!(
            out,
            "\nRead, GB\n{}",
            table(&|row| format!("{:.2}", row.bytes_read as f64 / 1e9))
        )?;
        if self.rows.iter().any(|row| row.read_seconds.is_some()) {
            let seconds = |row: &Row| {
                row.read_seconds
                    .map_or(String::new(), |s| format!("{s:.2}"))
            };
            writeln!(out, "\nRead, seconds\n{}", table(&seconds))?;
        }
        Ok(())
    }

    fn table(
        &self,
        policies: &[PolicyKind],
        sizes: &[CacheSize],
        cell: &dyn Fn(&Row) -> String,
    ) -> String {
        let mut table = Table::new();
        table.load_style(ASCII_MARKDOWN);
        let names = policies.iter().map(ToString::to_string);
        table.set_header(
            ["cache GB".to_owned(), "slots".to_owned()]
                .into_iter()
                .chain(names),
        );
        for (i, size) in sizes.iter().enumerate() {
            let of_size = self.rows.iter().skip(i).step_by(sizes.len()).map(cell);
            let head = [gigabytes(size.capacity_bytes), size.slots.to_string()];
            table.add_row(head.into_iter().chain(of_size));
        }
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
    }
}

/// Whole gigabytes without decimals, others with as many as there are, at most three.
fn gigabytes(bytes: u64) -> String {
    let text = format!("{:.3}", bytes as f64 / 1e9);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
