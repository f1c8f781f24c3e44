//! The one memory ledger that k3-plan writes and k3-run enforces (design, section 4).
//!
//! [`lines`] adds up everything a run holds, from the model and the choices of a plan alone, so that k3-plan can decide before
//! anything is allocated and k3-run can recompute the same numbers from the plan it was given. Nothing here depends on the
//! machine. Sums are checked: sizes come from files that people edit.

mod activations;
mod attention;
mod check;
mod tile_set;

pub use activations::{activation_bytes, scratch_bytes};
pub use check::{Checked, check};
pub use tile_set::TileSet;

use crate::{
    config::{Config, Mixer},
    formats::plan::LedgerLine,
    size::Bytes,
    tiles::{TILE_ALIGN, TileClass, TileSpec},
};

/// The lines of every ledger, in order.
pub const LINE_NAMES: [&str; 12] = [
    "recurrent_state",
    "mla_cache",
    "stream_buffers",
    "expert_slots",
    "activations",
    "output_head",
    "index",
    "tokenizer",
    "logits",
    "digests",
    "process",
    "pinned_trunk",
];

/// Fewest slots of the ring that trunk tiles stream through: one is multiplied while the next arrives.
pub const MIN_RING_SLOTS: usize = 2;
/// Code, its relocations, the allocator and small things of all modules.
const PROCESS_BYTES: u64 = 10 << 20;
/// What one thread touches of its stack, and its arena in the allocator.
const THREAD_BYTES: u64 = 1 << 19;
/// A vocabulary entry: its bytes and rank in a table each way, with the tables' slack.
const TOKEN_BYTES: u64 = 128;
/// The compiled split pattern with its Unicode classes.
const SPLIT_PATTERN_BYTES: u64 = 2 << 20;
/// One SHA-256.
const DIGEST_BYTES: u64 = 32;
/// A tile's record: place, size, parts, digest.
const TILE_RECORD_BYTES: u64 = 256;
/// Where an expert lies in its shard.
const EXPERT_RECORD_BYTES: u64 = 8;
/// What the replacement policy remembers of an expert: slot, group, count, recency, list or tree links.
const POLICY_RECORD_BYTES: u64 = 48;

/// What is to be run: given, not chosen.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    /// The whole model's config.
    pub config: &'a Config,
    /// How many of its layers run (`--layers`).
    pub num_layers: usize,
    /// The tiles of those layers, the final vectors and the head, in order of use.
    pub tiles: &'a [TileSpec],
}

/// What a plan chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Positions that can be held.
    pub context: usize,
    /// Prompt rows of one step, at most.
    pub prefill_chunk: usize,
    /// Compute threads.
    pub threads: usize,
    /// Read requests in flight, each on a reader thread.
    pub queue_depth: usize,
    /// Bytes of the ring that tiles stream through, slots of [`stream_slot_bytes`] each.
    pub stream_buffer_bytes: u64,
    /// Slots for experts.
    pub expert_slots: usize,
    /// Tiles that stay in memory.
    pub pinned: TileSet,
    /// Whether experts are checked against their digests.
    pub verify_experts: bool,
}

/// Why a ledger cannot be added up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// A line, or the sum, is past what 64 bits hold.
    #[error(
        "ledger line {line}: more bytes than a 64-bit number holds (see context, prefill_chunk, expert_slots)"
    )]
    Overflow {
        /// The line, or `total`.
        line: &'static str,
    },
}

/// Every line of the ledger, in the order of [`LINE_NAMES`].
///
/// # Errors
/// If a line overflows.
pub fn lines(model: &Model<'_>, choice: &Choice) -> Result<Vec<LedgerLine>, LedgerError> {
    let line = |at: usize, (bytes, why): (Option<u64>, String)| {
        let name = LINE_NAMES[at];
        let bytes = bytes.ok_or(LedgerError::Overflow { line: name })?;
        Ok(LedgerLine {
            name: name.to_owned(),
            bytes,
            why,
        })
    };
    Ok(vec![
        line(0, recurrent_state(model))?,
        line(1, mla_cache(model, choice))?,
        line(2, stream_buffers(model, choice))?,
        line(3, expert_slots(model, choice))?,
        line(4, activations(model, choice))?,
        line(5, output_head(model, choice))?,
        line(6, index(model))?,
        line(7, tokenizer(model))?,
        line(8, logits(model, choice))?,
        line(9, digests(model, choice))?,
        line(10, process(model, choice))?,
        line(11, pinned_trunk(model, choice))?,
    ])
}

/// The sum of a ledger.
///
/// # Errors
/// If it overflows.
pub fn total_bytes(lines: &[LedgerLine]) -> Result<u64, LedgerError> {
    lines
        .iter()
        .try_fold(0u64, |sum, line| sum.checked_add(line.bytes))
        .ok_or(LedgerError::Overflow { line: "total" })
}

impl Model<'_> {
    /// The config of the layers that run.
    fn layers_config(&self) -> Config {
        self.config.first_layers(self.num_layers)
    }

    /// Layers with routed experts.
    pub fn num_moe_layers(&self) -> usize {
        self.num_layers
            .saturating_sub(self.config.first_k_dense_replace)
    }

    /// Experts of all layers that run.
    pub fn num_experts(&self) -> usize {
        self.num_moe_layers()
            .saturating_mul(self.config.moe.num_experts)
    }

    /// Expert requests of one decoded token: the working set of a policy that only sees the past.
    pub fn experts_per_token(&self) -> usize {
        self.num_moe_layers()
            .saturating_mul(self.config.moe.num_experts_per_token)
    }

    /// Bytes of one slot: the widest direct read that covers an expert wherever it begins in its shard.
    pub fn expert_slot_bytes(&self) -> u64 {
        widened(self.config.moe.expert_bytes())
    }

    /// Fewest slots that work: one token's experts of a layer, and one for each read in flight; never more than there are.
    pub fn min_expert_slots(&self, queue_depth: usize) -> usize {
        self.config
            .moe
            .num_experts_per_token
            .saturating_add(queue_depth)
            .min(self.num_experts())
    }

    /// Payload bytes, by class, of the tiles that `pinned` leaves on disk: the trunk's (final vectors included), the head's.
    pub fn streamed_payload(&self, pinned: &TileSet) -> (u64, u64) {
        let mut trunk = 0u64;
        let mut head = 0u64;
        for (at, tile) in self.tiles.iter().enumerate() {
            if !pinned.contains(at) {
                let sum = if tile.class() == TileClass::Head {
                    &mut head
                } else {
                    &mut trunk
                };
                *sum = sum.saturating_add(tile.raw_bytes());
            }
        }
        (trunk, head)
    }

    /// Stored bytes, by class, of the pinned tiles: the trunk's (final vectors included), the head's; `None` on overflow.
    fn pinned_stored(&self, pinned: &TileSet) -> Option<(u64, u64)> {
        let mut sums = (0u64, 0u64);
        for (at, tile) in self.tiles.iter().enumerate() {
            if pinned.contains(at) {
                let sum = if tile.class() == TileClass::Head {
                    &mut sums.1
                } else {
                    &mut sums.0
                };
                *sum = sum.checked_add(tile.stored_bytes())?;
            }
        }
        Some(sums)
    }

    /// Whether every tile of the head is pinned.
    pub fn head_is_pinned(&self, pinned: &TileSet) -> bool {
        self.tiles
            .iter()
            .enumerate()
            .all(|(at, tile)| tile.class() != TileClass::Head || pinned.contains(at))
    }

    /// The tiles that every plan pins: the vectors after the last layer, too small to be worth a slot of the ring.
    pub fn always_pinned(&self) -> TileSet {
        let mut set = TileSet::none(self.tiles.len());
        for (at, tile) in self.tiles.iter().enumerate() {
            if tile.class() == TileClass::Final {
                set.insert(at);
            }
        }
        set
    }
}

/// The widest 4096-aligned read that covers `bytes` bytes beginning anywhere.
fn widened(bytes: u64) -> u64 {
    bytes
        .saturating_add(TILE_ALIGN - 1)
        .checked_next_multiple_of(TILE_ALIGN)
        .unwrap_or(u64::MAX)
}

/// Bytes of one slot of the ring, the largest tile that streams, and how many tiles stream; zeros when none does.
pub fn stream_slot_bytes(model: &Model<'_>, pinned: &TileSet) -> (u64, usize) {
    let mut slot = 0;
    let mut count = 0;
    for (at, tile) in model.tiles.iter().enumerate() {
        if !pinned.contains(at) {
            slot = tile.stored_bytes().max(slot);
            count += 1;
        }
    }
    (slot, count)
}

/// The product of all factors.
fn product<const N: usize>(factors: [usize; N]) -> Option<u64> {
    factors
        .into_iter()
        .try_fold(1u64, |product, factor| product.checked_mul(factor as u64))
}

fn recurrent_state(model: &Model<'_>) -> (Option<u64>, String) {
    let config = model.layers_config();
    let kda = &config.kda;
    let layers = config.num_layers_with(Mixer::Kda);
    let bytes = (|| {
        let state = product([kda.num_heads, kda.head_dim, kda.head_dim, 4])?;
        let taps = kda.short_conv_kernel_size.saturating_sub(1);
        let history = product([3, taps, kda.num_heads, kda.head_dim, 4])?;
        state.checked_add(history)?.checked_mul(layers as u64)
    })();
    let why = format!(
        "{layers} KDA layers x {} heads x {d} x {d} f32, and the convolutions' last inputs",
        kda.num_heads,
        d = kda.head_dim
    );
    (bytes, why)
}

fn mla_cache(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    let config = model.layers_config();
    let layers = config.num_layers_with(Mixer::Mla);
    // Positions are stored in whole runs of the kernels; the release's 576 values are.
    let width = config.mla.cache_width().next_multiple_of(attention::RUN);
    let bytes = product([layers, width, 4, choice.context]);
    let why = format!(
        "{} positions x {layers} MLA layers x {width} f32",
        choice.context
    );
    (bytes, why)
}

fn stream_buffers(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    let bytes = choice.stream_buffer_bytes;
    let (slot, count) = stream_slot_bytes(model, &choice.pinned);
    let why = match bytes.checked_div(slot) {
        Some(slots) => format!(
            "{slots} slots of {}, the largest of {count} tiles that stream",
            Bytes(slot)
        ),
        None => "no tile streams".to_owned(),
    };
    (Some(bytes), why)
}

fn expert_slots(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    let slot = model.expert_slot_bytes();
    let bytes = slot.checked_mul(choice.expert_slots as u64);
    let why = format!(
        "{} slots x {slot} B, {:.1} a layer, of {} experts; one token asks for {}",
        choice.expert_slots,
        choice.expert_slots as f64 / model.num_moe_layers().max(1) as f64,
        model.num_experts(),
        model.experts_per_token()
    );
    (bytes, why)
}

fn activations(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    let config = model.layers_config();
    let rows = choice.prefill_chunk;
    let bytes = activation_bytes(&config, model.tiles, rows, choice.threads);
    let why = format!(
        "{rows} rows of one step, and scratch of {} threads",
        choice.threads
    );
    (bytes, why)
}

fn output_head(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    let bytes = model.pinned_stored(&choice.pinned).map(|sums| sums.1);
    let why = if model.head_is_pinned(&choice.pinned) {
        "pinned whole"
    } else if bytes == Some(0) {
        "streams as the last piece of the trunk"
    } else {
        "pinned in part; the rest streams"
    };
    (bytes, why.to_owned())
}

fn index(model: &Model<'_>) -> (Option<u64>, String) {
    let experts = model.num_experts() as u64;
    let tiles = model.tiles.len() as u64;
    let bytes = (|| {
        experts
            .checked_mul(EXPERT_RECORD_BYTES)?
            .checked_add(tiles.checked_mul(TILE_RECORD_BYTES)?)
    })();
    let why = format!(
        "{experts} experts x {EXPERT_RECORD_BYTES} B, {tiles} tiles x {TILE_RECORD_BYTES} B"
    );
    (bytes, why)
}

fn tokenizer(model: &Model<'_>) -> (Option<u64>, String) {
    let vocab = model.config.vocab_size as u64;
    let bytes = vocab
        .checked_mul(TOKEN_BYTES)
        .and_then(|bytes| bytes.checked_add(SPLIT_PATTERN_BYTES));
    let why = format!("{vocab} tokens x {TOKEN_BYTES} B, and the split pattern");
    (bytes, why)
}

/// One row of logits; the sampler's candidates, a probability and an id each; and for `--score` the logits before each row's
/// token, whose rank is not known until its own logit comes.
fn logits(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    let (vocab, rows) = (model.config.vocab_size, choice.prefill_chunk);
    let why = format!("{vocab} f32, {vocab} x 16 B to sample from, {rows} rows of f32 to score");
    let scored = rows
        .checked_add(5)
        .and_then(|rows| product([vocab, 4, rows]));
    (scored, why)
}

fn digests(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    if !choice.verify_experts {
        return (
            Some(0),
            "experts have no digests to be checked against".into(),
        );
    }
    let experts = model.num_experts() as u64;
    let why = format!("{experts} experts x {DIGEST_BYTES} B");
    (experts.checked_mul(DIGEST_BYTES), why)
}

fn process(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    let bytes = (|| {
        let threads = choice.threads.checked_add(choice.queue_depth)? as u64;
        let policy = (model.num_experts() as u64).checked_mul(POLICY_RECORD_BYTES)?;
        threads
            .checked_mul(THREAD_BYTES)?
            .checked_add(policy)?
            .checked_add(PROCESS_BYTES)
    })();
    let why = format!(
        "code and allocator {}, {} compute and {} reader threads x {}, cache policy {POLICY_RECORD_BYTES} B an expert",
        Bytes(PROCESS_BYTES),
        choice.threads,
        choice.queue_depth,
        Bytes(THREAD_BYTES)
    );
    (bytes, why)
}

fn pinned_trunk(model: &Model<'_>, choice: &Choice) -> (Option<u64>, String) {
    let bytes = model.pinned_stored(&choice.pinned).map(|sums| sums.0);
    let count = model
        .tiles
        .iter()
        .enumerate()
        .filter(|(at, tile)| tile.class() != TileClass::Head && choice.pinned.contains(*at))
        .count();
    let why = format!("{count} tiles; each byte saves one byte of reads a token");
    (bytes, why)
}

#[cfg(test)]
mod tests;
