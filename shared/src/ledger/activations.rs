//! Bytes of the vectors that one forward step holds, from the shapes alone.
//!
//! This is the sum of the buffers of `k3_run::model`, to the byte except where a buffer's size depends on what a router
//! chooses; its tests compare the two. Arithmetic saturates in 128 bits, so that only the last conversion can fail.

use super::attention::attention_bytes;
use crate::{
    config::{Config, Mixer},
    names::{LayerTensor, TensorRole},
    tiles::{TileClass, TileSpec, layer_vectors},
};

/// Bytes of an f32.
const F32: u128 = 4;
/// Inputs of a kernel are padded to whole blocks of so many.
const INPUT_BLOCK: usize = 128;
/// What a row's routing takes besides its experts and weights: two lists.
const ROUTING_BYTES: u128 = 48;
/// Slots of each kind of a workspace.
const WIDE: usize = 7;
const SMALL: usize = 2;
const INPUTS: usize = 4;
/// Smallest direct read: what holds an embedding row that crosses a page.
const ROW_READ_SLACK: u128 = 2 * 4096;

/// Bytes of activations of a step of `rows` rows on `threads` threads; `None` if 64 bits do not hold them.
///
/// - `config`: of the layers that run. `tiles`: theirs, and the head's.
pub fn activation_bytes(
    config: &Config,
    tiles: &[TileSpec],
    rows: usize,
    threads: usize,
) -> Option<u64> {
    let embedding_row = area(config.hidden_size, 2).saturating_add(ROW_READ_SLACK);
    let attention = if config.num_layers_with(Mixer::Mla) > 0 {
        attention_bytes(&config.mla, rows, threads)
    } else {
        0
    };
    let all = scratch(config, tiles, rows)
        .saturating_add(attention)
        .saturating_add(embedding_row);
    u64::try_from(all).ok()
}

/// Of [`activation_bytes`], everything that is not attention's own or the embedding's.
pub fn scratch_bytes(config: &Config, tiles: &[TileSpec], rows: usize) -> Option<u64> {
    u64::try_from(scratch(config, tiles, rows)).ok()
}

fn scratch(config: &Config, tiles: &[TileSpec], rows: usize) -> u128 {
    let parts = [
        stream(config, rows),
        vectors(config),
        workspace(config, rows),
        groups(config, rows),
        results(tiles, rows),
        head(config, tiles, rows),
    ];
    parts.into_iter().fold(0, u128::saturating_add)
}

/// The stream, the sublayer's mixed input and its output; a snapshot for every begun attention-residual block; the mixing
/// weights of all snapshots and the stream; the normed input as the kernels read it.
fn stream(config: &Config, rows: usize) -> u128 {
    let blocks = config.attn_res_block_size.max(1);
    let snapshots = config.num_hidden_layers.div_ceil(blocks);
    let hidden = floats(rows, config.hidden_size);
    hidden
        .saturating_mul(snapshots as u128 + 3)
        .saturating_add(floats(rows, snapshots.saturating_add(1)))
        .saturating_add(inputs(rows, config.hidden_size))
}

/// The small tensors of one layer as f32, each as large as the largest of its kind, and the two products of norm and projection
/// for the attention residuals.
fn vectors(config: &Config) -> u128 {
    let mut largest = [0u128; LayerTensor::ALL.len()];
    for layer in config.layers() {
        for tensor in layer_vectors(config, layer) {
            let shape = TensorRole::Layer(layer, tensor).spec(config).shape;
            let values = shape
                .iter()
                .fold(1, |n, &x| u128::saturating_mul(n, x as u128));
            let largest = &mut largest[tensor as usize];
            *largest = values.max(*largest);
        }
    }
    let values = largest.into_iter().fold(0, u128::saturating_add);
    values
        .saturating_mul(F32)
        .saturating_add(floats(2, config.hidden_size))
}

/// Widths of the slots that sublayers take turns in, as one kind of sublayer uses them.
#[derive(Clone, Copy, Default)]
struct Slots {
    wide: [usize; WIDE],
    small: [usize; SMALL],
    inputs: [usize; INPUTS],
}

/// Every slot as wide as the kind that needs most of it.
fn workspace(config: &Config, rows: usize) -> u128 {
    let kinds = [kda_slots(config), dense_slots(config), moe_slots(config)];
    let widest = |slot: &dyn Fn(&Slots) -> usize| kinds.iter().map(slot).max().unwrap_or(0);
    let wide = (0..WIDE).map(|at| floats(rows, widest(&|kind| kind.wide[at])));
    let small = (0..SMALL).map(|at| floats(rows, widest(&|kind| kind.small[at])));
    let kernel = (0..INPUTS).map(|at| inputs(rows, widest(&|kind| kind.inputs[at])));
    wide.chain(small)
        .chain(kernel)
        .fold(0, u128::saturating_add)
}

/// Raw projections and outputs by head, queries, keys, values, decays; the low-rank gate and the write strengths; the gated
/// output, the low-rank gate again.
fn kda_slots(config: &Config) -> Slots {
    if config.num_layers_with(Mixer::Kda) == 0 {
        return Slots::default();
    }
    let kda = &config.kda;
    let width = kda.num_heads.saturating_mul(kda.head_dim);
    Slots {
        wide: [width, width, width, width, width, 0, 0],
        small: [kda.head_dim, kda.num_heads],
        inputs: [width, kda.head_dim, 0, 0],
    }
}

/// Gate, up and their product.
fn dense_slots(config: &Config) -> Slots {
    if config.first_k_dense_replace == 0 {
        return Slots::default();
    }
    let inner = config.intermediate_size;
    Slots {
        wide: [inner, inner, 0, 0, 0, 0, 0],
        small: [0, 0],
        inputs: [inner, 0, 0, 0],
    }
}

/// The outputs of all chosen experts, kept until they are summed in selection order; gate and up of the shared experts, and their
/// output; the latent, an expert's raw output, the sum; gate and up of one expert, which all rows may have chosen. Router scores.
/// The inputs of the shared experts' down projection and the sum; the latent; the rows of one expert, and the inputs of its down
/// projection.
fn moe_slots(config: &Config) -> Slots {
    if config.num_hidden_layers <= config.first_k_dense_replace {
        return Slots::default();
    }
    let moe = &config.moe;
    let latent = moe.routed_expert_hidden_size;
    let shared = moe
        .num_shared_experts
        .saturating_mul(moe.moe_intermediate_size);
    let width = moe.moe_intermediate_size;
    let chosen = moe.num_experts_per_token.saturating_mul(latent);
    Slots {
        wide: [
            chosen,
            shared,
            shared,
            config.hidden_size,
            latent,
            width,
            width,
        ],
        small: [moe.num_experts, 0],
        inputs: [shared.max(latent), latent, latent, width],
    }
}

/// Routings by row and by expert.
fn groups(config: &Config, rows: usize) -> u128 {
    if config.num_hidden_layers <= config.first_k_dense_replace {
        return 0;
    }
    let moe = &config.moe;
    let choices = area(rows, moe.num_experts_per_token);
    let experts = moe.num_experts as u128;
    // An expert, a weight, a row and a place a choice; file rank and first place of every expert, one place more at the end;
    // the distinct ones.
    (rows as u128)
        .saturating_mul(ROUTING_BYTES)
        .saturating_add(choices.saturating_mul(4 * F32))
        .saturating_add((2 * experts + 1 + experts.min(choices)).saturating_mul(F32))
}

/// Results of one trunk tile as the kernels write them for several rows.
fn results(tiles: &[TileSpec], rows: usize) -> u128 {
    let multiplied =
        |role| matches!(role, TensorRole::Layer(_, tensor) if tensor != LayerTensor::MlaKvB);
    let of_tile = |tile: &TileSpec| match tile.parts.as_slice() {
        [part] if multiplied(part.role) => part.rows.len(),
        _ => 0,
    };
    let most = tiles.iter().map(of_tile).max().unwrap_or(0);
    if rows > 1 { floats(rows, most) } else { 0 }
}

/// The three vectors after the last layer; all rows mixed and as the kernels read them, as scoring a prompt needs them; the
/// logits of one tile, for several rows also as the kernels write them; the rows' numbers.
fn head(config: &Config, tiles: &[TileSpec], rows: usize) -> u128 {
    let of_tile = |tile: &TileSpec| tile.parts.first().map_or(0, |part| part.rows.len());
    let heads = tiles.iter().filter(|t| t.class() == TileClass::Head);
    let most = heads.map(of_tile).max().unwrap_or(0);
    let copies = if rows > 1 { 2 } else { 1 };
    floats(3, config.hidden_size)
        .saturating_add(floats(rows, config.hidden_size))
        .saturating_add(inputs(rows, config.hidden_size))
        .saturating_add(floats(rows, most).saturating_mul(copies))
        .saturating_add(area(rows, size_of::<usize>()))
}

fn area(rows: usize, cols: usize) -> u128 {
    rows as u128 * cols as u128
}

/// Bytes of `[rows, cols]` f32.
pub(super) fn floats(rows: usize, cols: usize) -> u128 {
    area(rows, cols).saturating_mul(F32)
}

/// Bytes of `[rows, cols]` f32 as the kernels read them.
pub(super) fn inputs(rows: usize, cols: usize) -> u128 {
    floats(rows, cols.div_ceil(INPUT_BLOCK) | 1).saturating_mul(INPUT_BLOCK as u128)
}
