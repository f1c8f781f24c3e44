//! Bytes of the vectors that one forward step holds.

use crate::config::{Config, MlaConfig, MoeConfig};

/// Rows are stored twice where a kernel wants them position by position and head by head, or transposed.
const COPIES: u64 = 2;
/// Positions of one attention block; scores exist for one block at a time.
const ATTENTION_BLOCK: u64 = 64;
/// Queries that meet a block of the latent cache together.
const ATTENTION_QUERIES: u64 = 32;
/// Rows of one task of the latent attention, at most.
const ATTENTION_ROWS: u64 = 64;
/// Attended latents (rows by heads) that a task keeps for each of its rows, and altogether, at most.
const ATTENDED_PER_ROW: u64 = 16;
const ATTENDED: u64 = 128;
/// Kernels store vectors in whole runs of this many values, and cached positions too.
pub(super) const RUN: usize = 16;
/// Inputs of a matrix are stored in whole blocks of this many values.
const BLOCK: u64 = 128;
/// Smallest direct read: what holds an embedding row that crosses a page.
const ROW_READ_SLACK: u64 = 2 * 4096;

/// Bytes of activations of a step of `rows` rows on `threads` threads; `None` on overflow.
///
/// - `config`: of the layers that run.
///
/// All values are f32. A layer runs its mixer, then its MLP, each of which reuses the memory of the other's temporaries, as
/// every layer reuses the layer's before it.
pub fn activation_bytes(config: &Config, rows: usize, threads: usize) -> Option<u64> {
    let values_per_row = stream_values(config)?.checked_add(temporary_values(config)?)?;
    let all_rows = values_per_row.checked_mul(rows as u64)?;
    let scratch = thread_values(config, rows)?.checked_mul(threads as u64)?;
    let values = all_rows.checked_add(scratch)?;
    let embedding_row = (config.hidden_size as u64)
        .checked_mul(2)?
        .checked_add(ROW_READ_SLACK)?;
    values.checked_mul(4)?.checked_add(embedding_row)
}

/// Values of one row that live through the layers.
///
/// Six of the model's width: the stream, the attention residual's mix, the normed input, the mixer's and the MLP's output, and
/// a transposed copy of the input; and one snapshot for every begun attention-residual block.
fn stream_values(config: &Config) -> Option<u64> {
    let snapshots = config
        .num_hidden_layers
        .div_ceil(config.attn_res_block_size.max(1)) as u64;
    (config.hidden_size as u64).checked_mul(snapshots.checked_add(6)?)
}

/// Values of one row that live within a layer: the most that any kind of mixer or MLP needs.
fn temporary_values(config: &Config) -> Option<u64> {
    let kinds = [
        kda_values(config)?,
        mla_values(&config.mla)?,
        dense_values(config)?,
        moe_values(&config.moe)?,
    ];
    kinds.into_iter().max()
}

/// Queries, keys, values, decay gate, output gate and output over all heads; the low-rank gate and the write strengths.
fn kda_values(config: &Config) -> Option<u64> {
    let kda = &config.kda;
    let projection = product(&[kda.num_heads, kda.head_dim])?;
    let small = sum(&[kda.head_dim, kda.num_heads])?;
    projection
        .checked_mul(6)?
        .checked_add(small)?
        .checked_mul(COPIES)
}

/// The low-rank query, the latent, queries, gate and output over all heads, each also transposed. What is as wide as the latent
/// for each head exists for one task of a thread at a time.
fn mla_values(mla: &MlaConfig) -> Option<u64> {
    let low_rank = sum(&[mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim])?;
    let query_width = sum(&[mla.qk_nope_head_dim, mla.qk_rope_head_dim])?;
    let head_width = query_width.checked_add((mla.v_head_dim as u64).checked_mul(2)?)?;
    head_width
        .checked_mul(mla.num_heads as u64)?
        .checked_add(low_rank)?
        .checked_mul(COPIES)
}

/// Of one thread: a group of absorbed queries, the scores of one block, the f64 sums of each query and the f32 sums of a tile of
/// four by four scores, twice; the attended latents of a task, and those of one head as the value expansion reads them.
fn attention_values(mla: &MlaConfig, rows: usize) -> Option<u64> {
    let rank = (mla.kv_lora_rank as u64).checked_next_multiple_of(RUN as u64)?;
    let width =
        sum(&[mla.kv_lora_rank, mla.qk_rope_head_dim])?.checked_next_multiple_of(RUN as u64)?;
    let group = rank
        .checked_mul(2)?
        .checked_add(width)?
        .checked_add(ATTENTION_BLOCK)?
        .checked_mul(ATTENTION_QUERIES)?;
    let tile = width.div_ceil(BLOCK).checked_mul(2 * 16 * RUN as u64)?;
    let attended = (rows as u64).checked_mul(ATTENDED_PER_ROW)?.min(ATTENDED);
    let attended = rank.checked_mul(attended)?;
    let expanded = rank
        .checked_next_multiple_of(BLOCK)?
        .checked_mul((rows as u64).min(ATTENTION_ROWS))?;
    group
        .checked_add(tile)?
        .checked_add(attended)?
        .checked_add(expanded)
}

/// Gate and up of the dense MLP; zero when no layer has one.
fn dense_values(config: &Config) -> Option<u64> {
    if config.first_k_dense_replace == 0 {
        return Some(0);
    }
    (config.intermediate_size as u64)
        .checked_mul(2)?
        .checked_mul(COPIES)
}

/// Router scores and the chosen; the latent input, sum and its transposed copy; the outputs of all chosen experts, kept until
/// they are summed in selection order; gate, up and product of one expert; gate, up and product of the shared experts.
fn moe_values(moe: &MoeConfig) -> Option<u64> {
    let latent = moe.routed_expert_hidden_size as u64;
    let chosen = moe.num_experts_per_token as u64;
    let router = (moe.num_experts as u64)
        .checked_mul(COPIES)?
        .checked_add(chosen.checked_mul(2)?)?;
    let latents = latent.checked_mul(chosen.checked_add(3)?)?;
    let expert = (moe.moe_intermediate_size as u64).checked_mul(3)?;
    let shared = product(&[moe.num_shared_experts, moe.moe_intermediate_size, 3])?;
    router
        .checked_add(latents)?
        .checked_add(expert)?
        .checked_add(shared)
}

/// Values of one thread's own: those of the latent attention, and one row as wide as the widest input.
fn thread_values(config: &Config, rows: usize) -> Option<u64> {
    let widest = [
        config.hidden_size as u64,
        product(&[config.kda.num_heads, config.kda.head_dim])?,
        product(&[config.mla.num_heads, config.mla.v_head_dim])?,
        product(&[
            config.moe.num_shared_experts,
            config.moe.moe_intermediate_size,
        ])?,
        config.intermediate_size as u64,
    ]
    .into_iter()
    .max()?;
    attention_values(&config.mla, rows)?.checked_add(widest)
}

fn product(factors: &[usize]) -> Option<u64> {
    factors
        .iter()
        .try_fold(1u64, |product, factor| product.checked_mul(*factor as u64))
}

fn sum(terms: &[usize]) -> Option<u64> {
    terms
        .iter()
        .try_fold(0u64, |sum, term| sum.checked_add(*term as u64))
}
