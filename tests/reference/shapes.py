"""Small models that differ from the release in one structural way each, so that no number of it can be hard-coded.

A shape is the base below with some fields replaced. Every checkpoint stays under 3 MB and every vocabulary under 300 ids.
"""

from dataclasses import dataclass, field

from synth import variant

BASE_TEXT = {
    "vocab_size": 192,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "attn_res_block_size": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "routed_expert_hidden_size": 32,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}
BASE_LINEAR = {"full_attn_layers": [2, 4], "num_heads": 2, "head_dim": 8}


@dataclass(frozen=True)
class Shape:
    """One small model. `min_gap` is the least router gap its prompt may have, `why` what the shape is there to catch."""

    name: str
    why: str
    text: dict = field(default_factory=dict)
    linear: dict = field(default_factory=dict)
    f32: bool = False
    flat: bool = False
    prompt_len: int = 9
    min_gap: float = 1e-4

    def root(self):
        """The nested `config.json`."""
        return variant({**BASE_TEXT, **self.text}, {**BASE_LINEAR, **self.linear})


SHAPES = [
    Shape(
        "odd-heads",
        "odd head counts, 7 KDA and 5 MLA; more KDA heads than head dimensions, so A_log has no padding",
        {"num_attention_heads": 5, "v_head_dim": 14},
        {"num_heads": 7, "head_dim": 6},
    ),
    Shape("one-kda-head", "a single KDA head; A_log is nearly all padding", linear={"num_heads": 1, "head_dim": 24}),
    Shape("conv-1", "convolution of one tap: no history at all", linear={"short_conv_kernel_size": 1}),
    Shape("conv-2", "convolution of two taps", linear={"short_conv_kernel_size": 2}),
    Shape("conv-3", "convolution of three taps", linear={"short_conv_kernel_size": 3}),
    Shape("top-1", "one expert a token: its weight is the scaling factor", {"num_experts": 5, "num_experts_per_token": 1}),
    Shape("all-experts", "every expert is chosen: order still decides the sum", {"num_experts": 4, "num_experts_per_token": 4}),
    Shape(
        "many-experts",
        "112 experts: ranks of the decimal strings differ from the numbers from two digits on",
        {"num_hidden_layers": 3, "num_experts": 112, "num_experts_per_token": 10},
        {"full_attn_layers": [2]},
    ),
    Shape(
        "wide-latent",
        "latent and inner width differ, three groups of scales a row",
        {"routed_expert_hidden_size": 96, "moe_intermediate_size": 160},
    ),
    Shape("one-shared", "one shared expert", {"num_shared_experts": 1}),
    Shape("three-shared", "three shared experts, fused", {"num_shared_experts": 3}),
    Shape(
        "scaled-routing",
        # The norm on the aggregate cancels any common factor but for its epsilon, so only a large one shows the factor.
        "routed_scaling_factor 2.5 and renormalised weights, made visible by a large epsilon",
        {"routed_scaling_factor": 2.5, "rms_norm_eps": 0.5},
    ),
    Shape("two-dense", "two dense layers", {"first_k_dense_replace": 2}),
    Shape("zero-dense", "no dense layer: layer 0 has experts", {"first_k_dense_replace": 0}),
    Shape("all-dense", "no layer has experts", {"num_hidden_layers": 3, "first_k_dense_replace": 3}, {"full_attn_layers": [2]}),
    Shape("mla-first", "layer 0 is MLA, with the dense MLP", linear={"full_attn_layers": [1, 4]}),
    Shape(
        "single-kda",
        "one KDA layer among MLA layers, layer 0 MLA with experts",
        {"num_hidden_layers": 3, "first_k_dense_replace": 0},
        {"full_attn_layers": [1, 3]},
    ),
    Shape("single-mla", "one MLA layer, the last", {"num_hidden_layers": 5}, {"full_attn_layers": [5]}),
    Shape("snapshot-every-layer", "attn_res_block_size 1: every layer is a boundary", {"attn_res_block_size": 1}),
    Shape("one-snapshot", "attn_res_block_size past the last layer: the embedding is the only snapshot", {"attn_res_block_size": 9}),
    Shape(
        "ragged",
        "no width is a multiple of 16 or 32 except those MXFP4 needs",
        {
            "vocab_size": 277,
            "hidden_size": 90,
            "num_attention_heads": 3,
            "q_lora_rank": 22,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 10,
            "intermediate_size": 70,
            "num_experts": 11,
            "num_experts_per_token": 3,
        },
        {"num_heads": 3, "head_dim": 10},
    ),
    Shape(
        "prime-widths",
        "widths that are odd primes",
        {
            "vocab_size": 199,
            "hidden_size": 67,
            "q_lora_rank": 19,
            "kv_lora_rank": 17,
            "qk_nope_head_dim": 11,
            "qk_rope_head_dim": 3,
            "v_head_dim": 13,
            "intermediate_size": 101,
            "num_experts": 7,
        },
        {"num_heads": 5, "head_dim": 11},
    ),
    Shape("flat", "config.json in the flat form", flat=True),
    Shape("f32-trunk", "every trunk tensor stored F32", f32=True),
    Shape("flat-f32", "flat config.json and F32 trunk together, as the fixtures of other engines are", f32=True, flat=True),
    Shape(
        "other-constants",
        "epsilon, decay bound and both caps are read from the file",
        {"rms_norm_eps": 1e-4, "activation_situ_beta": 2.0, "activation_situ_linear_beta": 6.0},
        {"gate_lower_bound": -3.0},
    ),
    Shape(
        "long-prompt",
        "more positions than one attention block or prefill chunk",
        {"num_hidden_layers": 3, "first_k_dense_replace": 2, "num_experts": 3, "num_experts_per_token": 1},
        {"full_attn_layers": [2]},
        prompt_len=300,
        min_gap=2e-5,
    ),
]
