"""Which tensors a checkpoint has, in which file, with which dtype, shape and synthetic rule.

Names, dtypes and shapes: specification 2.3. Rules of the synthetic weights: test-checkpoint specification 1.3.
"""

from dataclasses import dataclass

PREFIX = "language_model."
MODEL = PREFIX + "model."


@dataclass(frozen=True)
class Spec:
    """One tensor: `rule` names how its synthetic values are made, `gain` is the rule's number."""

    name: str
    dtype: str  # "F32", "BF16" or "U8"
    shape: tuple
    rule: str  # "lin", "amp", "norm", "alog", "kv_a", "packed" or "scale"
    gain: float = 1.0

    @property
    def elements(self):
        count = 1
        for size in self.shape:
            count *= size
        return count


def _lin(name, rows, columns, gain=1.0):
    return Spec(name, "BF16", (rows, columns), "lin", gain)


def _norm(name, size, dtype="BF16"):
    return Spec(name, dtype, (size,), "norm")


def a_log_length(c):
    """Entries of `A_log`: `max(head_dim, num_heads)`, those past `num_heads` being zero padding.

    The release stores 128 for 96 heads of 128, the tiny checkpoint 16 for 5 heads of 16; with more heads than head
    dimensions there is no padding.
    """
    return max(c.kda_head_dim, c.kda_num_heads)


def _kda(p, c):
    size, h, d = c.kda_projection_size, c.hidden_size, c.kda_head_dim
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        yield _lin(f"{p}{name}.weight", size, h)
    yield _lin(p + "o_proj.weight", h, size)
    yield _lin(p + "f_a_proj.weight", d, h)
    yield _lin(p + "f_b_proj.weight", size, d, 2.0)
    yield _lin(p + "b_proj.weight", c.kda_num_heads, h, 2.0)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield Spec(f"{p}{name}.weight", "F32", (size, 1, c.short_conv_kernel_size), "amp", 0.8)
    yield Spec(p + "A_log", "F32", (a_log_length(c),), "alog", c.kda_num_heads)
    yield Spec(p + "dt_bias", "F32", (size,), "amp", 3.0)
    yield _norm(p + "o_norm.weight", d, "F32")


def _mla(p, c):
    heads, h = c.num_attention_heads, c.hidden_size
    yield _lin(p + "q_a_proj.weight", c.q_lora_rank, h, 0.01)
    yield _norm(p + "q_a_layernorm.weight", c.q_lora_rank)
    yield _lin(p + "q_b_proj.weight", heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank, 2.0)
    rows = c.kv_lora_rank + c.qk_rope_head_dim
    yield Spec(p + "kv_a_proj_with_mqa.weight", "BF16", (rows, h), "kv_a", c.kv_lora_rank)
    yield _norm(p + "kv_a_layernorm.weight", c.kv_lora_rank)
    yield _lin(p + "kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank, 2.0)
    yield _lin(p + "g_proj.weight", heads * c.v_head_dim, h)
    yield _lin(p + "o_proj.weight", h, heads * c.v_head_dim)


def _gated_mlp(p, inner, h):
    yield _lin(p + "gate_proj.weight", inner, h, 3.0)
    yield _lin(p + "up_proj.weight", inner, h, 3.0)
    yield _lin(p + "down_proj.weight", h, inner)


def expert(p, c, e):
    """The six tensors of routed expert `e`; `p` is the prefix of the layer's `block_sparse_moe.`"""
    z, m = c.routed_expert_hidden_size, c.moe_intermediate_size
    for name, rows, columns in (("w1", m, z), ("w2", z, m), ("w3", m, z)):
        yield Spec(f"{p}experts.{e}.{name}.weight_packed", "U8", (rows, columns // 2), "packed")
        yield Spec(f"{p}experts.{e}.{name}.weight_scale", "U8", (rows, columns // 32), "scale")


def _moe(p, c):
    h, z = c.hidden_size, c.routed_expert_hidden_size
    yield _lin(p + "gate.weight", c.num_experts, h)
    yield Spec(p + "gate.e_score_correction_bias", "F32", (c.num_experts,), "amp", 0.25)
    yield _lin(p + "routed_expert_down_proj.weight", z, h)
    yield _lin(p + "routed_expert_up_proj.weight", h, z)
    yield _norm(p + "routed_expert_norm.weight", z)
    yield from _gated_mlp(p + "shared_experts.", c.shared_intermediate_size, h)
    for e in range(c.num_experts):
        yield from expert(p, c, e)


def layer(c, index):
    """Every tensor of layer `index`, counted from zero; they are shard `index + 1`."""
    p, h = f"{MODEL}layers.{index}.", c.hidden_size
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield _norm(f"{p}{name}.weight", h)
    yield _lin(p + "self_attention_res_proj.weight", 1, h)
    yield _lin(p + "mlp_res_proj.weight", 1, h)
    yield from (_mla if c.is_mla(index) else _kda)(p + "self_attn.", c)
    if c.is_dense(index):
        yield from _gated_mlp(p + "mlp.", c.intermediate_size, h)
    else:
        yield from _moe(p + "block_sparse_moe.", c)


def ends(c):
    """Embedding, head and the three final vectors; they are the shard after the layers."""
    h = c.hidden_size
    yield _lin(PREFIX + "lm_head.weight", c.vocab_size, h, 2.0)
    yield Spec(MODEL + "embed_tokens.weight", "BF16", (c.vocab_size, h), "amp", 1.0)
    yield _norm(MODEL + "norm.weight", h)
    yield _norm(MODEL + "output_attn_res_norm.weight", h)
    yield _lin(MODEL + "output_attn_res_proj.weight", 1, h)


def foreign():
    """One tensor each of the two vision shards of the tiny checkpoint, there to be ignored."""
    yield [_norm("mm_projector.post_norm.weight", 8)]
    yield [_norm("vision_tower.encoder.final_layernorm.weight", 8)]


def shards(c, vision=False):
    """The tensors of each shard, in shard order."""
    lists = [list(layer(c, index)) for index in range(c.num_hidden_layers)] + [list(ends(c))]
    return lists + list(foreign()) if vision else lists


def shard_name(index, total):
    """File name of shard `index`, counted from zero: five digits, of six (specification 2.1)."""
    return f"model-{index + 1:05}-of-{total:06}.safetensors"
