//! `--explain`: why every line of the ledger is as large as it is, what other divisions would have cost, and what more memory buys.

use std::fmt::Write as _;

use k3_shared::{
    formats::plan::{Plan, ReadKind},
    ledger::MIN_RING_SLOTS,
    size::Bytes,
    tiles::TileClass,
};

use crate::{
    cost::Reads,
    report::{number, size, table},
    spend::{Spender, Spent},
};

/// What more memory is asked about.
const MORE: u64 = 1_000_000_000;

/// Everything `--explain` prints.
pub(crate) fn explain(spender: &Spender<'_>, plan: &Plan, spent: &Spent) -> String {
    let mut text = String::from(
        "Memory is spent on what a run cannot do without, then on prefill chunk, reads in flight and ring; the rest is divided\n\
         between trunk tiles, the head and expert slots so that a token is expected to take least time.\n",
    );
    text.push_str(&lines(spender, plan, spent));
    text.push_str(&reading(spender, plan));
    text.push_str(&bound(spender, plan, spent));
    text.push_str(&policies(spender, plan, spent));
    text.push_str(&alternatives(spender, plan, spent));
    text.push_str(&landmarks(spender));
    text.push_str(&next_byte(spender, plan));
    text.push_str(&next_gigabyte(spender, plan, spent));
    text
}

/// Each line of the ledger and the decision behind it.
fn lines(spender: &Spender<'_>, plan: &Plan, spent: &Spent) -> String {
    let mut table = table(&["ledger", "bytes", "", "because"]);
    for line in &plan.ledger {
        table.add_row(vec![
            comfy_table::Cell::new(&line.name),
            number(line.bytes),
            size(line.bytes),
            comfy_table::Cell::new(because(&line.name, spender, plan, spent)),
        ]);
    }
    format!("{}\n", table.trim_fmt())
}

fn because(line: &str, spender: &Spender<'_>, plan: &Plan, spent: &Spent) -> String {
    let asks = spender.asks();
    let fewest = spender.model().min_expert_slots(plan.queue_depth);
    match line {
        "mla_cache" if plan.context < asks.context => format!(
            "context lowered from {} to {}: nothing larger fits",
            asks.context, plan.context
        ),
        "mla_cache" => format!("the context asked for, {} positions", plan.context),
        "recurrent_state" => "every token changes all of it".into(),
        "stream_buffers" if plan.stream_buffer_bytes == 0 => "nothing streams".into(),
        "stream_buffers" => format!(
            "read-ahead: at least {} tiles for {} reads in flight where they fit, {MIN_RING_SLOTS} to work at all; at most {}",
            plan.queue_depth.saturating_add(2),
            plan.queue_depth,
            Bytes(asks.ring_bytes)
        ),
        "expert_slots" if asks.expert_slots.is_some() => "given by hand".into(),
        "expert_slots" if plan.expert_slots == fewest => format!(
            "the fewest that work: one token's experts of a layer and {} reads in flight; more would save less than trunk tiles do",
            plan.queue_depth
        ),
        "expert_slots" => format!(
            "{} more than needed, for {:.2} % hits under {}",
            plan.expert_slots.saturating_sub(fewest),
            100.0 * spent.expected.hits.rate,
            plan.cache_policy
        ),
        "activations" | "logits" if plan.prefill_chunk < asks.prefill_chunk => format!(
            "prefill chunk lowered from {} to {} rows: no more fit",
            asks.prefill_chunk, plan.prefill_chunk
        ),
        "activations" | "logits" => {
            format!("the prefill chunk asked for, {} rows", plan.prefill_chunk)
        }
        "output_head" if plan.head_pinned => "the whole trunk is pinned, and room was left".into(),
        "output_head" => "read once a token like any tile, and pinned after all others".into(),
        "pinned_trunk" if asks.pin_bytes.is_some() => "given by hand".into(),
        "pinned_trunk" if plan.streamed_trunk_bytes == 0 => {
            "all there is: each byte saves a byte of reads a token".into()
        }
        "pinned_trunk" => "what is left: each byte saves a byte of reads a token".into(),
        "index" => "where each tile and expert lies".into(),
        "digests" if plan.expert_digests.is_none() => {
            "there are none (k3-census --hash --experts makes them)".into()
        }
        "digests" => "what each expert must hash to".into(),
        "tokenizer" => "the vocabulary".into(),
        _ => "the program itself".into(),
    }
}

/// Where request size and depth come from.
fn reading(spender: &Spender<'_>, plan: &Plan) -> String {
    let probe = plan.probe.as_ref();
    let sweep = probe.map_or(&[][..], |probe| &probe.sweep);
    let chosen = probe.and_then(|probe| Some((probe.read_bytes?, probe.queue_depth?)));
    let why = match chosen {
        Some((bytes, depth)) if (bytes, depth) == (plan.read_bytes, plan.queue_depth) => format!(
            "the fewest, and then the largest, within 3 % of the best of {} combinations measured",
            sweep.len()
        ),
        Some((bytes, depth)) if plan.queue_depth < depth => format!(
            "the probe chose {depth} of {}, and fewer fit or fewer are as good here",
            Bytes(bytes)
        ),
        Some(_) => "given by hand".into(),
        None if plan.queue_depth < spender.asks().queue_depth => "as many as fit".into(),
        None => "given by hand or usual; --probe finds what suits the disk".into(),
    };
    let mut text = format!(
        "Reads: {} in flight, {} each: {why}.\n",
        plan.queue_depth,
        Bytes(plan.read_bytes)
    );
    if sweep.iter().all(|cell| cell.kind != ReadKind::Random) && probe.is_some() {
        text.push_str(
            "Experts are taken to be read as fast as the trunk: their reads were not measured.\n",
        );
    }
    text
}

/// What a token is bound by.
fn bound(spender: &Spender<'_>, plan: &Plan, spent: &Spent) -> String {
    let expert = spender.model().config.moe.expert_bytes() as f64;
    let reads = Reads {
        trunk_bytes: plan.predicted.trunk_bytes_per_token as f64
            + plan.predicted.head_bytes_per_token as f64,
        expert_bytes: spent.expected.hits.missed_per_token() * expert,
    };
    match spent.cost.seconds {
        Some(seconds) => format!(
            "A token takes {seconds:.3} s at the least, bound by {}.\n",
            spender.cost().at(spent.depth).bound_by(reads)
        ),
        None => "Divisions are compared by bytes read a token: give --disk-speed, or --probe, to compare by time.\n".into(),
    }
}

/// How the policy was chosen.
fn policies(spender: &Spender<'_>, plan: &Plan, spent: &Spent) -> String {
    if plan.expert_slots == 0 {
        return String::new();
    }
    if !spent.expected.hits.from_trace {
        return format!(
            "Policy {}: without a trace all experts are taken to be equally likely, the least any text gives; a trace (k3-run --trace FILE, then --trace FILE here) chooses better.\n",
            plan.cache_policy
        );
    }
    let ranking = spender.curve().ranking(plan.expert_slots);
    let shown: Vec<String> = ranking
        .iter()
        .take(4)
        .map(|one| format!("{} {:.2} %", one.policy, 100.0 * one.hits.rate))
        .collect();
    format!(
        "Policy {}: hits of the trace at {} slots: {}.\n",
        plan.cache_policy,
        plan.expert_slots,
        shown.join(", ")
    )
}

/// What the same budget would have done with other numbers of slots.
fn alternatives(spender: &Spender<'_>, plan: &Plan, spent: &Spent) -> String {
    let asks = spender.asks();
    if asks.expert_slots.is_some() || asks.pin_bytes.is_some() {
        return String::new();
    }
    let model = spender.model();
    let fewest = model.min_expert_slots(asks.queue_depth);
    let set = model.experts_per_token();
    let mut text = String::new();
    for (what, slots) in [
        ("all to the trunk first", fewest),
        ("slots for half a token's experts", set / 2),
        ("slots for one token's experts", set),
        ("slots for two tokens' experts", set.saturating_mul(2)),
    ] {
        if slots == plan.expert_slots || slots < fewest || slots > model.num_experts() {
            continue;
        }
        let Some(cost) = spender.spend_with(plan.budget_bytes, slots) else {
            continue;
        };
        let verdict = match (cost.seconds, spent.cost.seconds) {
            (Some(other), Some(chosen)) => format!(
                "{other:.3} s a token, {:+.1} %",
                100.0 * (other / chosen - 1.0)
            ),
            _ => format!("{} read a token", whole(cost.bytes)),
        };
        let _ = writeln!(text, "Instead, {what} ({slots}): {verdict}.");
    }
    text
}

/// Between the smallest budget and the largest that is of use.
fn landmarks(spender: &Spender<'_>) -> String {
    let model = spender.model();
    let slot = model.expert_slot_bytes();
    let resident = spender.all_resident();
    let with_slots = |slots: usize| {
        let more = slots.saturating_sub(model.min_expert_slots(spender.asks().queue_depth));
        resident?.checked_add(slot.checked_mul(more as u64)?)
    };
    let mut text = String::new();
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

/// What a gigabyte more would buy.
fn next_gigabyte(spender: &Spender<'_>, plan: &Plan, spent: &Spent) -> String {
    let Some(more) = plan
        .budget_bytes
        .checked_add(MORE)
        .and_then(|budget| spender.spend(budget))
    else {
        return String::new();
    };
    let model = spender.model();
    let (trunk, head) = model.streamed_payload(&more.choice.pinned);
    let now = plan.predicted.trunk_bytes_per_token + plan.predicted.head_bytes_per_token;
    let pinned = now.saturating_sub(trunk.saturating_add(head));
    let slots = more.choice.expert_slots.saturating_sub(plan.expert_slots);
    let saved = spent.cost.bytes - more.cost.bytes;
    let time = match (spent.cost.seconds, more.cost.seconds) {
        (Some(now), Some(then)) => format!(", {now:.3} s a token become {then:.3}"),
        _ => String::new(),
    };
    format!(
        "The next {} would buy {} of trunk and head and {slots} expert slots: {} less to read a token{time}.\n",
        Bytes(MORE),
        Bytes(pinned),
        whole(saved)
    )
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a number of bytes, rounded for display"
)]
fn whole(bytes: f64) -> Bytes {
    Bytes(bytes.max(0.0).round() as u64)
}
