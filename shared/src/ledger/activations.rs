//! Bytes of the vectors that one forward step holds.

use crate::config::{Config, MlaConfig, MoeConfig};

/// Rows are stored twice where a kernel wants them position by position and head by head, or transposed.
const COPIES: u64 = 2;
/// Positions of one attention block; scores and partial sums exist for one block at a time.
const ATTENTION_BLOCK: u64 = 256;
/// Smallest direct read: what holds an embedding row that crosses a page.
const ROW_READ_SLACK: u64 = 2 * 4096;

/// Bytes of activations of a step of `rows` rows on `threads` threads; `None` on overflow.
///
/// - `config`: of the layers that run.
/// - `heads_per_group`: heads of one `kv_b_proj` tile, for which the two long vectors of MLA exist at a time.
///
/// All values are f32. A layer runs its mixer, then its MLP, each of which reuses the memory of the other's temporaries, as
/// every layer reuses the layer's before it.
pub fn activation_bytes(
    config: &Config,
    heads_per_group: usize,
    rows: usize,
    threads: usize,
) -> Option<u64> {
    let values_per_row =
        stream_values(config)?.checked_add(temporary_values(config, heads_per_group)?)?;
    let all_rows = values_per_row.checked_mul(rows as u64)?;
    let scratch = thread_values(config)?.checked_mul(threads as u64)?;
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
fn temporary_values(config: &Config, heads_per_group: usize) -> Option<u64> {
    let kinds = [
        kda_values(config)?,
        mla_values(&config.mla, heads_per_group)?,
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

/// The low-rank query, the latent, queries, gate and output over all heads, each also transposed; the absorbed query and the
/// attended latent over the heads of one group.
fn mla_values(mla: &MlaConfig, heads_per_group: usize) -> Option<u64> {
    let low_rank = sum(&[mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim])?;
    let query_width = sum(&[mla.qk_nope_head_dim, mla.qk_rope_head_dim])?;
    let head_width = query_width.checked_add((mla.v_head_dim as u64).checked_mul(2)?)?;
    let long = sum(&[mla.kv_lora_rank, mla.kv_lora_rank, mla.qk_rope_head_dim])?;
    let group_heads = heads_per_group.min(mla.num_heads) as u64;
    head_width
        .checked_mul(mla.num_heads as u64)?
        .checked_add(low_rank)?
        .checked_mul(COPIES)?
        .checked_add(long.checked_mul(group_heads)?)
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

/// Values of one thread's own: scores and partial sums of one attention block, f64 sums of the cached width, and one row as
/// wide as the widest input.
fn thread_values(config: &Config) -> Option<u64> {
    let cached = sum(&[config.mla.kv_lora_rank, config.mla.qk_rope_head_dim])?;
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
    cached
        .checked_mul(4)?
        .checked_add(ATTENTION_BLOCK)?
        .checked_add(widest)
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
