//! What people read: ledgers, tables of budgets, presets and explanations.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table};
use k3_shared::{
    formats::plan::{HostRecord, Plan},
    size::Bytes,
    tiles::TileClass,
};

use crate::{budget::PRESETS, predict::Hits, probe, spend::Spender};

/// The ledger of one plan, and what a token reads and takes.
pub(crate) fn ledger(plan: &Plan, hits: Hits) -> String {
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
    text.push_str(&per_token(plan, hits));
    text
}

fn per_token(plan: &Plan, hits: Hits) -> String {
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
        "context {}, prefill chunk {}, {} threads, {} reads in flight",
        plan.context, plan.prefill_chunk, plan.threads, plan.queue_depth
    );
    if let Some(measured) = &plan.probe {
        let _ = writeln!(text, "{}", probe::summary(measured));
    }
    if let Some(seconds) = predicted.seconds_per_token {
        let _ = writeln!(text, "a token takes {seconds:.2} s at the physical limit");
    }
    text
}

/// One row a plan.
pub(crate) fn budgets(plans: &[Plan]) -> String {
    let mut table = table(&[
        "budget",
        "total",
        "pinned",
        "streamed/token",
        "slots",
        "experts/token",
        "context",
        "chunk",
        "s/token",
    ]);
    for plan in plans {
        let predicted = &plan.predicted;
        let pinned = plan
            .ledger
            .iter()
            .filter(|line| line.name == "pinned_trunk" || line.name == "output_head")
            .map(|line| line.bytes)
            .sum();
        let streamed = predicted
            .trunk_bytes_per_token
            .saturating_add(predicted.head_bytes_per_token);
        table.add_row(vec![
            size(plan.budget_bytes),
            size(plan.total_bytes),
            size(pinned),
            size(streamed),
            number(plan.expert_slots as u64),
            size(predicted.expert_bytes_per_token),
            number(plan.context as u64),
            number(plan.prefill_chunk as u64),
            right(
                predicted
                    .seconds_per_token
                    .map_or_else(|| "-".to_owned(), |s| format!("{s:.2}")),
            ),
        ]);
    }
    format!("{}\n", table.trim_fmt())
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

/// `--explain`: the landmarks between the smallest budget and the largest that is of use, and where this plan stands.
pub(crate) fn explain(spender: &Spender<'_>, plan: &Plan) -> String {
    let model = spender.model();
    let slot = model.expert_slot_bytes();
    let resident = spender.all_resident();
    let with_slots = |slots: usize| {
        let more = slots.saturating_sub(model.min_expert_slots(spender.asks().queue_depth));
        resident?.checked_add(slot.checked_mul(more as u64)?)
    };
    let mut text = String::from(
        "Memory is spent on what a run cannot do without, then on prefill chunk, reads in flight and ring, then on trunk tiles\n\
         (each pinned byte saves one byte of reads a token), then on the head, and only then on expert slots.\n",
    );
    for (what, bytes) in [
        (
            "smallest that works, with a short context",
            spender.smallest(),
        ),
        ("smallest with the context asked for", spender.floor()),
        ("trunk and head wholly resident", resident),
        (
            "and slots for one token's experts",
            with_slots(model.experts_per_token()),
        ),
        ("and slots for all experts", with_slots(model.num_experts())),
    ] {
        let bytes = bytes.map_or_else(|| "past 64 bits".to_owned(), |b| format!("{b} B"));
        let _ = writeln!(text, "{bytes:>20}  {what}");
    }
    text.push_str(&next_byte(spender, plan));
    text
}

/// What the next bytes would go to.
fn next_byte(spender: &Spender<'_>, plan: &Plan) -> String {
    let asks = spender.asks();
    let model = spender.model();
    let trunk = model
        .tiles
        .iter()
        .filter(|tile| tile.class() != TileClass::Head)
        .map(k3_shared::tiles::TileSpec::raw_bytes)
        .fold(0u64, u64::saturating_add);
    let text = if plan.context < asks.context {
        format!(
            "Here the context is lowered from {} to {}: more memory goes there first.",
            asks.context, plan.context
        )
    } else if plan.prefill_chunk < asks.prefill_chunk || plan.queue_depth < asks.queue_depth {
        format!(
            "Here prefill chunk or reads in flight are lowered ({} of {}, {} of {}): more memory goes there first.",
            plan.prefill_chunk, asks.prefill_chunk, plan.queue_depth, asks.queue_depth
        )
    } else if plan.streamed_trunk_bytes > 0 || !plan.head_pinned {
        format!(
            "Here {} of {} of trunk stream each token: more memory pins more of them.",
            Bytes(plan.streamed_trunk_bytes),
            Bytes(trunk)
        )
    } else if plan.expert_slots < model.num_experts() {
        format!(
            "Here nothing of the trunk streams: more memory goes to expert slots ({} of {} experts; one token asks for {}).",
            plan.expert_slots,
            model.num_experts(),
            model.experts_per_token()
        )
    } else {
        "Here everything is resident: more memory buys nothing.".to_owned()
    };
    text + "\n"
}

/// A warning if the plan does not fit this host; it may be for another.
pub(crate) fn host_warning(total_bytes: u64, host: &HostRecord) -> Option<String> {
    (total_bytes > host.limit_bytes).then(|| {
        format!(
            "the plan takes {}, this host can give {} ({}); k3-run will refuse it here (plan for this host: k3-plan --budget auto)",
            Bytes(total_bytes),
            Bytes(host.limit_bytes),
            host.limited_by
        )
    })
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.to_vec());
    table
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn number(value: u64) -> Cell {
    right(value.to_string())
}

fn size(bytes: u64) -> Cell {
    right(Bytes(bytes).to_string())
}
