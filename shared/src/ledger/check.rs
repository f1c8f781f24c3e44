//! Whether a plan, perhaps edited, belongs to a model and fits what it says.

use super::{
    Choice, LINE_NAMES, MIN_RING_SLOTS, Model, TileSet, lines, stream_slot_bytes, total_bytes,
};
use crate::cache::{CacheError, PolicyKind};
use crate::formats::plan::{LedgerLine, Plan, SCHEMA};

/// A plan that may be run, with every number that follows from its choices recomputed.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The plan's choices.
    pub choice: Choice,
    /// The ledger of those choices.
    pub ledger: Vec<LedgerLine>,
    /// Its sum: the peak resident size to hold to.
    pub total_bytes: u64,
    /// Bytes of one slot of the ring; zero when nothing streams.
    pub stream_slot_bytes: u64,
    /// Slots of the ring.
    pub stream_slots: usize,
    /// Payload bytes each step reads of the trunk and of the head.
    pub streamed_payload: (u64, u64),
    /// Numbers of the file that no longer follow from its choices, as after an edit by hand; the recomputed ones count.
    pub stale: Vec<String>,
}

/// Recompute the ledger of `plan` for `model`, whose checkpoint has `identity`.
///
/// A plan may be edited: its choices count, and what follows from them is recomputed here. Whether the total fits this host is
/// the caller's to ask, of [`Checked::total_bytes`].
///
/// # Errors
/// Everything that makes the plan no plan of this model, or one that does not fit its own budget, each naming its field.
pub fn check(plan: &Plan, model: &Model<'_>, identity: &str) -> Result<Checked, Vec<String>> {
    let mut problems = Vec::new();
    belongs(plan, model, identity, &mut problems);
    well_formed(plan, &mut problems);
    let choice = match choice(plan, model) {
        Ok(choice) => choice,
        Err(problem) => {
            problems.push(problem);
            return Err(problems);
        }
    };
    works(plan, model, &choice, &mut problems);
    let (slot, _) = stream_slot_bytes(model, &choice.pinned);
    let added = lines(model, &choice).and_then(|ledger| Ok((total_bytes(&ledger)?, ledger)));
    match added {
        Err(error) => problems.push(error.to_string()),
        Ok((total, _)) if total > plan.budget_bytes => problems.push(format!(
            "budget_bytes: {}, but the plan's choices take {total}",
            plan.budget_bytes
        )),
        Ok((total_bytes, ledger)) if problems.is_empty() => {
            let stream_slots = plan.stream_buffer_bytes.checked_div(slot).unwrap_or(0);
            let streamed_payload = model.streamed_payload(&choice.pinned);
            let stale = stale(plan, &ledger, streamed_payload);
            return Ok(Checked {
                choice,
                ledger,
                total_bytes,
                stream_slot_bytes: slot,
                stream_slots: usize::try_from(stream_slots).unwrap_or(usize::MAX),
                streamed_payload,
                stale,
            });
        }
        Ok(_) => {}
    }
    Err(problems)
}

fn belongs(plan: &Plan, model: &Model<'_>, identity: &str, problems: &mut Vec<String>) {
    if plan.schema != SCHEMA {
        problems.push(format!("schema: {:?}, not {SCHEMA:?}", plan.schema));
    }
    if plan.identity != identity {
        problems.push(format!(
            "identity: the plan is for checkpoint {}, the trunk is of {identity}",
            plan.identity
        ));
    }
    if plan.num_layers != model.num_layers {
        problems.push(format!(
            "num_layers: planned for {}, asked to run {}",
            plan.num_layers, model.num_layers
        ));
    }
}

/// The ledger as written must be one: all names, in order, summing to its total.
fn well_formed(plan: &Plan, problems: &mut Vec<String>) {
    let names: Vec<&str> = plan.ledger.iter().map(|line| line.name.as_str()).collect();
    if names != LINE_NAMES {
        problems.push(format!(
            "ledger: the lines are {}, not {}",
            names.join(" "),
            LINE_NAMES.join(" ")
        ));
    }
    match total_bytes(&plan.ledger) {
        Ok(sum) if sum == plan.total_bytes => {}
        Ok(sum) => problems.push(format!(
            "total_bytes: {}, but the ledger sums to {sum}",
            plan.total_bytes
        )),
        Err(error) => problems.push(error.to_string()),
    }
}

fn choice(plan: &Plan, model: &Model<'_>) -> Result<Choice, String> {
    Ok(Choice {
        context: plan.context,
        prefill_chunk: plan.prefill_chunk,
        threads: plan.threads,
        queue_depth: plan.queue_depth,
        stream_buffer_bytes: plan.stream_buffer_bytes,
        expert_slots: plan.expert_slots,
        pinned: TileSet::from_ranges(&plan.pinned_tiles, model.tiles.len())?,
        verify_experts: plan.expert_digests.is_some(),
    })
}

/// What the engine needs at the least, and can use at the most.
fn works(plan: &Plan, model: &Model<'_>, choice: &Choice, problems: &mut Vec<String>) {
    for (name, value) in [
        ("context", plan.context),
        ("prefill_chunk", plan.prefill_chunk),
        ("threads", plan.threads),
        ("queue_depth", plan.queue_depth),
    ] {
        if value == 0 {
            problems.push(format!("{name}: must be at least 1"));
        }
    }
    if plan.read_bytes == 0 || !plan.read_bytes.is_multiple_of(crate::tiles::TILE_ALIGN) {
        problems.push(format!(
            "read_bytes: {} is not a positive multiple of 4096",
            plan.read_bytes
        ));
    }
    let (least, most) = (
        model.min_expert_slots(plan.queue_depth),
        model.num_experts(),
    );
    if plan.expert_slots < least || plan.expert_slots > most {
        problems.push(format!(
            "expert_slots: {} is not between {least} (one token's experts of a layer, and the reads in flight) and {most} \
             (all there are)",
            plan.expert_slots
        ));
    }
    let (slot, streamed) = stream_slot_bytes(model, &choice.pinned);
    let ring = slot.saturating_mul(MIN_RING_SLOTS.min(streamed) as u64);
    if plan.stream_buffer_bytes < ring {
        problems.push(format!(
            "stream_buffer_bytes: {} is less than {ring}, the smallest ring for the tiles that stream",
            plan.stream_buffer_bytes
        ));
    }
    if plan.experts_verified && plan.expert_digests.is_none() {
        problems.push("experts_verified: true, but there are no expert_digests".into());
    }
    match plan.cache_policy.parse::<PolicyKind>() {
        Err(error) => problems.push(format!("cache_policy: {error}")),
        Ok(kind) if kind.is_replay_only() => {
            problems.push(format!("cache_policy: {}", CacheError::ReplayOnly { kind }));
        }
        Ok(_) => {}
    }
    if plan.head_pinned != model.head_is_pinned(&choice.pinned) {
        problems.push(format!(
            "head_pinned: {}, but pinned_tiles say otherwise",
            plan.head_pinned
        ));
    }
    let always = model.always_pinned();
    if (0..model.tiles.len()).any(|tile| always.contains(tile) && !choice.pinned.contains(tile)) {
        problems.push("pinned_tiles: the final vectors are always pinned".into());
    }
}

fn stale(plan: &Plan, ledger: &[LedgerLine], (trunk, head): (u64, u64)) -> Vec<String> {
    let written = plan.ledger.iter().map(|line| line.bytes);
    let lines = ledger
        .iter()
        .zip(written)
        .map(|(line, written)| (format!("ledger {}", line.name), written, line.bytes));
    let pinned = ledger.last().map_or(0, |line| line.bytes);
    lines
        .chain([
            (
                "pinned_trunk_bytes".to_owned(),
                plan.pinned_trunk_bytes,
                pinned,
            ),
            (
                "streamed_trunk_bytes".to_owned(),
                plan.streamed_trunk_bytes,
                trunk,
            ),
            (
                "predicted.head_bytes_per_token".to_owned(),
                plan.predicted.head_bytes_per_token,
                head,
            ),
        ])
        .filter(|(_, written, right)| written != right)
        .map(|(name, written, right)| {
            format!("{name}: {written} is written, {right} follows from the choices")
        })
        .collect()
}
