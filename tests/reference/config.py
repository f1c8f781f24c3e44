"""`config.json`, nested as released or flat, to one `Config` (specification 1).

Nothing is defaulted: a missing field is an error, because the class defaults of the official configuration object describe
another model. This reader trusts the file otherwise; refusing contradictory files is the engine's work.
"""

import json
from dataclasses import dataclass
from pathlib import Path

# Flat files rename the fields whose own name would be ambiguous at the root (specification 1.1, "flat alias").
LINEAR_ALIASES = {"num_heads": "kda_num_heads", "head_dim": "kda_head_dim"}
TEXT_ALIASES = {"activation_situ_beta": "situ_beta", "activation_situ_linear_beta": "situ_linear_beta"}


@dataclass(frozen=True)
class Config:
    """The dimensions and constants the text model reads. Layers count from zero here."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    rms_norm_eps: float
    attn_res_block_size: int
    situ_beta: float
    situ_linear_beta: float
    first_k_dense_replace: int
    intermediate_size: int
    # Kimi Delta Attention
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    mla_layers: frozenset
    # multi-head latent attention
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # mixture of experts
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    routed_expert_hidden_size: int
    moe_intermediate_size: int
    routed_scaling_factor: float

    def is_mla(self, layer):
        return layer in self.mla_layers

    def is_dense(self, layer):
        return layer < self.first_k_dense_replace

    @property
    def kda_projection_size(self):
        return self.kda_num_heads * self.kda_head_dim

    @property
    def shared_intermediate_size(self):
        return self.num_shared_experts * self.moe_intermediate_size


def from_json(root):
    """Read a parsed `config.json` of either form."""
    text = root.get("text_config", root)
    linear = text.get("linear_attn_config", text)
    nested = linear is not text

    def text_field(name):
        return text[name] if name in text else text[TEXT_ALIASES.get(name, name)]

    def linear_field(name):
        # A bare `num_heads` outside `linear_attn_config` would not be the KDA value, so a flat file needs the alias.
        return linear[name if nested else LINEAR_ALIASES.get(name, name)]

    return Config(
        hidden_size=text_field("hidden_size"),
        num_hidden_layers=text_field("num_hidden_layers"),
        vocab_size=text_field("vocab_size"),
        rms_norm_eps=text_field("rms_norm_eps"),
        attn_res_block_size=text_field("attn_res_block_size"),
        situ_beta=text_field("activation_situ_beta"),
        situ_linear_beta=text_field("activation_situ_linear_beta"),
        first_k_dense_replace=text_field("first_k_dense_replace"),
        intermediate_size=text_field("intermediate_size"),
        kda_num_heads=linear_field("num_heads"),
        kda_head_dim=linear_field("head_dim"),
        short_conv_kernel_size=linear_field("short_conv_kernel_size"),
        gate_lower_bound=linear_field("gate_lower_bound"),
        mla_layers=frozenset(one_based - 1 for one_based in linear_field("full_attn_layers")),
        num_attention_heads=text_field("num_attention_heads"),
        q_lora_rank=text_field("q_lora_rank"),
        kv_lora_rank=text_field("kv_lora_rank"),
        qk_nope_head_dim=text_field("qk_nope_head_dim"),
        qk_rope_head_dim=text_field("qk_rope_head_dim"),
        v_head_dim=text_field("v_head_dim"),
        num_experts=text_field("num_experts"),
        num_experts_per_token=text_field("num_experts_per_token"),
        num_shared_experts=text_field("num_shared_experts"),
        routed_expert_hidden_size=text_field("routed_expert_hidden_size"),
        moe_intermediate_size=text_field("moe_intermediate_size"),
        routed_scaling_factor=text_field("routed_scaling_factor"),
    )


def open_config(model_dir):
    """Read `config.json` of a checkpoint folder."""
    return from_json(json.loads((Path(model_dir) / "config.json").read_text()))


def flatten(root):
    """The flat form of a nested `config.json`: every field of `text_config` and `linear_attn_config` at the root.

    `text_config.model_type` is dropped, and so is everything outside `text_config`.
    """
    text = dict(root["text_config"])
    linear = text.pop("linear_attn_config")
    text.pop("model_type", None)
    flat = {TEXT_ALIASES.get(name, name): value for name, value in text.items()}
    flat.update({LINEAR_ALIASES.get(name, name): value for name, value in linear.items()})
    return flat
