//! The result, as JSON and CSV.

use std::io::{self, Write};

use k3_shared::{
    cache::{Counters, PolicyKind},
    size::Bytes,
};
use serde::Serialize;

use crate::{CacheSize, Gap, Phase, Replay, TraceMode, Union};

/// What was counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TraceFacts {
    /// Counted requests: distinct (step, layer, expert), or pairs of a header-less trace.
    pub requests: u64,
    /// Distinct experts among them.
    pub distinct_experts: u64,
    /// Rows they were asked for by; `None` if the trace does not say.
    pub tokens: Option<u64>,
    /// Rows of prompts among them.
    pub prefill_tokens: Option<u64>,
    /// Generated rows among them.
    pub decode_tokens: Option<u64>,
    /// What the counted steps were for.
    pub mode: TraceMode,
    /// Requests replayed before or between, to fill the cache, and not counted.
    pub warmup_requests: u64,
    /// Rows of positions that had been computed before: their reuse is an artefact. `None` if the trace does not say.
    pub repeated_tokens: Option<u64>,
    /// Experts that one token asks for, of all layers: the size below which LRU hits nothing.
    pub working_set: usize,
    /// Identity of the checkpoint the trace was recorded from, if it says.
    pub identity: Option<String>,
    /// SHA-256 of the trace's records: the run's identity, the same for every run that asked for the same experts in the same steps.
    pub digest: Option<String>,
}

impl Default for TraceFacts {
    fn default() -> Self {
        Self {
            requests: 0,
            distinct_experts: 0,
            tokens: None,
            prefill_tokens: None,
            decode_tokens: None,
            mode: TraceMode::Unknown,
            warmup_requests: 0,
            repeated_tokens: None,
            working_set: 0,
            identity: None,
            digest: None,
        }
    }
}

/// What one cache counted of one phase, or of all.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Counted {
    /// Counted requests.
    pub requests: u64,
    /// Of these, resident.
    pub hits: u64,
    /// `hits / requests`.
    pub hit_rate: f64,
    /// Payload of the misses.
    pub bytes_read: u64,
    /// `bytes_read` by the tokens of the phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_token: Option<f64>,
    /// `bytes_read` at the speed given by `--disk-speed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_seconds: Option<f64>,
    /// `read_seconds` by the tokens of the phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_per_token: Option<f64>,
}

impl Counted {
    fn new(counters: Counters) -> Self {
        Self {
            requests: counters.requests,
            hits: counters.hits,
            hit_rate: counters.hits as f64 / counters.requests as f64,
            bytes_read: 0,
            bytes_per_token: None,
            read_seconds: None,
            seconds_per_token: None,
        }
    }

    fn price(&mut self, expert_bytes: u64, tokens: Option<u64>, disk_speed: Option<Bytes>) {
        let tokens = tokens
            .filter(|&tokens| tokens > 0)
            .map(|tokens| tokens as f64);
        self.bytes_read = (self.requests - self.hits).saturating_mul(expert_bytes);
        self.bytes_per_token = tokens.map(|tokens| self.bytes_read as f64 / tokens);
        self.read_seconds = disk_speed.map(|speed| self.bytes_read as f64 / speed.0 as f64);
        self.seconds_per_token = tokens.and_then(|tokens| Some(self.read_seconds? / tokens));
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
    /// All counted requests.
    #[serde(flatten)]
    pub all: Counted,
    /// Those of prefill steps, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Counted>,
    /// Those of decode steps, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode: Option<Counted>,
}

impl Row {
    /// What one cache counted in each phase; [`Report::new`] adds the bytes.
    pub(crate) fn new(policy: PolicyKind, size: CacheSize, counted: [Counters; 3]) -> Self {
        let sum = |of: fn(&Counters) -> u64| counted.iter().map(of).sum();
        let all = Counters {
            requests: sum(|counters| counters.requests),
            hits: sum(|counters| counters.hits),
        };
        let phase = |phase: Phase| Some(counted[phase as usize]).filter(|c| c.requests > 0);
        Self {
            policy,
            capacity_bytes: size.capacity_bytes,
            slots: size.slots,
            all: Counted::new(all),
            prefill: phase(Phase::Prefill).map(Counted::new),
            decode: phase(Phase::Decode).map(Counted::new),
        }
    }
}

/// How far back requests reach, in distinct experts: the size of LRU cache that would have hit them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReuseDistance {
    /// What the requests were for.
    pub phase: Phase,
    /// Requests of the phase.
    pub requests: u64,
    /// The highest hit rate there can be in it: the part that is not the first request of its expert.
    pub ceiling: f64,
    /// Half of the repeated requests reach no further back.
    pub median: Option<u64>,
    /// Nine tenths do not.
    pub p90: Option<u64>,
    /// 99 of 100 do not.
    pub p99: Option<u64>,
}

/// A whole result, `k3.simcache/1`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `k3.simcache/1`.
    pub schema: &'static str,
    /// What was counted.
    pub trace: TraceFacts,
    /// What to know before believing the rest.
    pub warnings: Vec<String>,
    /// Payload of one expert.
    pub expert_bytes: u64,
    /// By policy, then by size.
    pub rows: Vec<Row>,
    /// Counted requests that nobody had made before: no cache hits them.
    pub compulsory_misses: u64,
    /// The highest hit rate there can be.
    pub ceiling: f64,
    /// By phase, how far back requests reach.
    pub reuse_distances: Vec<ReuseDistance>,
    /// By phase, how many tokens ago experts were needed before.
    pub reuse_tokens: Vec<Gap>,
    /// By phase, what several tokens need together.
    pub unions: Vec<Union>,
}

impl Report {
    /// Put bytes, and seconds if there is a speed, to counted rows.
    pub fn new(
        replay: &Replay,
        mut rows: Vec<Row>,
        expert_bytes: u64,
        disk_speed: Option<Bytes>,
    ) -> Self {
        let facts = replay.facts.clone();
        for row in &mut rows {
            row.all.price(expert_bytes, facts.tokens, disk_speed);
            if let Some(prefill) = &mut row.prefill {
                prefill.price(expert_bytes, facts.prefill_tokens, disk_speed);
            }
            if let Some(decode) = &mut row.decode {
                decode.price(expert_bytes, facts.decode_tokens, disk_speed);
            }
        }
        let distances = Phase::ALL.into_iter().zip(replay.depths());
        let distances = distances.filter_map(|(phase, curve)| {
            let Counters { requests, hits } = curve.counters(usize::MAX);
            (requests > 0).then(|| ReuseDistance {
                phase,
                requests,
                ceiling: hits as f64 / requests as f64,
                median: curve.quantile(0.5),
                p90: curve.quantile(0.9),
                p99: curve.quantile(0.99),
            })
        });
        Self {
            schema: "k3.simcache/1",
            expert_bytes,
            rows,
            compulsory_misses: replay.compulsory_misses,
            ceiling: (facts.requests - replay.compulsory_misses) as f64 / facts.requests as f64,
            warnings: replay.warnings.clone(),
            reuse_distances: distances.collect(),
            reuse_tokens: replay.gaps(),
            unions: replay.unions(),
            trace: facts,
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

    /// A header line, then a line for each policy and size. What the trace does not tell is left empty.
    ///
    /// # Errors
    /// If `out` fails.
    pub fn write_csv(&self, out: &mut dyn Write) -> io::Result<()> {
        let timed = self.rows.iter().any(|row| row.all.read_seconds.is_some());
        let times = if timed {
            ",read_seconds,seconds_per_token,decode_seconds_per_token"
        } else {
            ""
        };
        writeln!(
            out,
            "policy,capacity_bytes,slots,requests,hits,hit_rate,bytes_read,bytes_per_token,prefill_requests,prefill_hits,\
             decode_requests,decode_hits{times}"
        )?;
        let number = |number: Option<f64>| number.map_or(String::new(), |n| n.to_string());
        for row in &self.rows {
            let Counted {
                requests,
                hits,
                hit_rate,
                bytes_read,
                ..
            } = row.all;
            let Row {
                policy,
                capacity_bytes,
                slots,
                ..
            } = row;
            write!(
                out,
                "{policy},{capacity_bytes},{slots},{requests},{hits},{hit_rate},{bytes_read},{}",
                number(row.all.bytes_per_token)
            )?;
            for part in [row.prefill, row.decode] {
                match part {
                    Some(part) => write!(out, ",{},{}", part.requests, part.hits)?,
                    None => write!(out, ",,")?,
                }
            }
            if timed {
                let decode = row.decode.and_then(|decode| decode.seconds_per_token);
                for seconds in [row.all.read_seconds, row.all.seconds_per_token, decode] {
                    write!(out, ",{}", number(seconds))?;
                }
            }
            writeln!(out)?;
        }
        Ok(())
    }
}
