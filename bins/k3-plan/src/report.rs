//! What people read: ledgers, tables of budgets, presets and explanations.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table};
use k3_shared::{formats::plan::Plan, host::Host, size::Bytes, term::shell};

use crate::{
    budget::{PRESETS, auto_bytes},
    predict::Hits,
    probe,
    spend::Spent,
};

/// The ledger of one plan, and what a token reads and takes.
pub(crate) fn ledger(plan: &Plan, spent: &Spent, note: &str) -> String {
    let mut table = table(&["ledger", "bytes", "", "why"]);
    for line in &plan.ledger {
        table.add_row(vec![
            Cell::new(&line.name),
            number(line.bytes),
            size(line.bytes),
            Cell::new(&line.why),
        ]);
    }
    table.add_row(vec![
        Cell::new("total"),
        number(plan.total_bytes),
        size(plan.total_bytes),
        Cell::new(format!(
            "of a budget of {}; this host: {} by {}",
            Bytes(plan.budget_bytes),
            Bytes(plan.host.limit_bytes),
            plan.host.limited_by
        )),
    ]);
    let mut text = format!("{}\n", table.trim_fmt());
    text.push_str(&per_token(plan, spent.expected.hits, note));
    text
}

fn per_token(plan: &Plan, hits: Hits, note: &str) -> String {
    let predicted = &plan.predicted;
    let sum = predicted
        .trunk_bytes_per_token
        .saturating_add(predicted.head_bytes_per_token)
        .saturating_add(predicted.expert_bytes_per_token);
    let mut text = format!(
        "a token reads {}: trunk {}, head {}, experts {} ({:.2} % hits {}, {} slots, {})\n",
        Bytes(sum),
        Bytes(predicted.trunk_bytes_per_token),
        Bytes(predicted.head_bytes_per_token),
        Bytes(predicted.expert_bytes_per_token),
        hits.rate * 100.0,
        if hits.from_trace {
            "by the trace"
        } else {
            "if all experts are equally likely"
        },
        plan.expert_slots,
        plan.cache_policy,
    );
    let _ = writeln!(
        text,
        "context {}, prefill chunk {}, {} threads, {} reads of {} in flight",
        plan.context,
        plan.prefill_chunk,
        plan.threads,
        plan.queue_depth,
        Bytes(plan.read_bytes)
    );
    if !plan.experts_verified {
        let _ = writeln!(
            text,
            "experts_verified: false; digests to check experts by are made with: k3-census --hash --experts {}",
            shell(&plan.model_dir)
        );
    }
    if let Some(measured) = &plan.probe {
        let _ = writeln!(text, "{} ({note})", probe::summary(measured));
    }
    if let Some(seconds) = predicted.seconds_per_token {
        let _ = writeln!(text, "a token takes {seconds:.2} s at the physical limit");
    }
    text
}

/// One row a plan; `rates` are their hit rates.
pub(crate) fn budgets(plans: &[Plan], rates: &[f64], from_trace: bool) -> String {
    let mut table = table(&[
        "budget",
        "total",
        "pinned",
        "trunk/tok",
        "head/tok",
        "slots",
        "policy",
        "hits",
        "experts/tok",
        "context",
        "chunk",
        "s/token",
    ]);
    for (plan, rate) in plans.iter().zip(rates) {
        let predicted = &plan.predicted;
        let pinned = plan
            .ledger
            .iter()
            .filter(|line| line.name == "pinned_trunk" || line.name == "output_head")
            .map(|line| line.bytes)
            .sum();
        let seconds = predicted
            .seconds_per_token
            .map_or_else(|| "-".to_owned(), |s| format!("{s:.2}"));
        table.add_row(vec![
            size(plan.budget_bytes),
            size(plan.total_bytes),
            size(pinned),
            size(predicted.trunk_bytes_per_token),
            size(predicted.head_bytes_per_token),
            number(plan.expert_slots as u64),
            Cell::new(&plan.cache_policy),
            right(format!("{:.1} %", 100.0 * rate)),
            size(predicted.expert_bytes_per_token),
            number(plan.context as u64),
            number(plan.prefill_chunk as u64),
            right(seconds),
        ]);
    }
    let hits = if from_trace {
        "hits are those of the trace"
    } else {
        "hits are what equally likely experts give; --trace counts with those of an earlier run"
    };
    format!("{}\n{hits}\n", table.trim_fmt())
}

/// `--list-presets`.
pub(crate) fn presets() -> String {
    let mut table = table(&["preset", "budget", "for"]);
    for preset in PRESETS {
        table.add_row(vec![
            Cell::new(preset.name),
            preset.bytes.map_or_else(|| Cell::new(""), size),
            Cell::new(preset.about),
        ]);
    }
    format!("{}\n", table.trim_fmt())
}

/// A warning if the plan does not fit this host, or only just: it may be for another.
pub(crate) fn host_warning(plan: &Plan, host: &Host) -> Option<String> {
    let comfortable = auto_bytes(host);
    if plan.total_bytes > host.limit_bytes {
        Some(format!(
            "the plan takes {}, this host can give {} ({}); k3-run will refuse it here (plan for this host: k3-plan --budget auto)",
            Bytes(plan.total_bytes),
            Bytes(host.limit_bytes),
            host.limited_by
        ))
    } else if plan.total_bytes > comfortable {
        Some(format!(
            "the plan takes {} of the {} this host can give ({}); so near the limit the system takes pages back that a run needs, \
             and more cache is slower (--budget auto stops at {})",
            Bytes(plan.total_bytes),
            Bytes(host.limit_bytes),
            host.limited_by,
            Bytes(comfortable)
        ))
    } else {
        None
    }
}

pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.to_vec());
    table
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

pub(crate) fn number(value: u64) -> Cell {
    right(value.to_string())
}

pub(crate) fn size(bytes: u64) -> Cell {
    right(Bytes(bytes).to_string())
}
