"""Check this reference against operator vectors computed elsewhere in PyTorch f32.

    python operators.py FOLDER

FOLDER holds `rmsnorm.json`, `mla.json` and so on: inputs, weights and expected outputs. The project's tests pass without them.
Tolerance per element |got - want| <= 1e-5 + 1e-4 |want|. These vectors use eps 1e-5 in the two MLA low-rank norms.

The expected values carry f32 rounding themselves. Where large terms cancel, that exceeds the tolerance: `moe.json` has one such
output, -0.0219 out of terms whose sizes add up to 300, and f32 sums of them in other orders move it by up to 4e-5. Elements
outside the tolerance but within one f32 step of their row's largest value are therefore counted apart, as `rounding`; anything
further out fails.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import model as rules
from weights import decode_mxfp4

EPS = 1e-5


class Fixture(dict):
    """One file, its arrays as float64."""

    def __init__(self, path):
        def array(value):
            if isinstance(value, dict) and "shape" in value:
                return np.array(value["data"], dtype=np.float64).reshape(value["shape"])
            return value

        super().__init__({k: array(v) for k, v in json.loads(path.read_text()).items()})


class Dense:
    """Weights given as plain arrays under the checkpoint's names; experts are dense."""

    def __init__(self, arrays, config):
        self.arrays, self.config = arrays, config

    def vector(self, name):
        return self.arrays[name]

    def linear(self, name, x):
        return x @ self.arrays[name].T

    def mxfp4(self, name):
        return self.arrays[name]


CONFIG = SimpleNamespace(
    num_hidden_layers=13, rms_norm_eps=EPS, attn_res_block_size=3, situ_beta=4.0, situ_linear_beta=25.0, kda_num_heads=4,
    kda_head_dim=16, kda_projection_size=64, short_conv_kernel_size=4, gate_lower_bound=-5.0, num_attention_heads=4,
    q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, num_experts=8,
    num_experts_per_token=2, num_shared_experts=2, routed_scaling_factor=1.0,
    is_mla=lambda layer: layer in (3, 7, 11, 12), is_dense=lambda layer: layer < 1,
)  # fmt: skip


def model_of(arrays):
    return rules.Model(Dense(arrays, CONFIG), mla_norm_eps=EPS)


def moe_arrays(f, p, q):
    """The fixture's expert block, its members under `p`, as checkpoint names under `q`."""
    out = {
        q + "gate.weight": f[p + "gate_weight"],
        q + "gate.e_score_correction_bias": f[p + "e_score_correction_bias"],
        q + "routed_expert_down_proj.weight": f[p + "down_weight"],
        q + "routed_expert_up_proj.weight": f[p + "up_weight"],
        q + "routed_expert_norm.weight": f[p + "norm_weight"],
    }
    for name, w in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        out[f"{q}shared_experts.{name}.weight"] = f[f"{p}shared_{w}_weight"]
    for e in range(8):
        for w in ("w1", "w2", "w3"):
            out[f"{q}experts.{e}.{w}"] = f[f"{p}experts_{e}_{w}_weight"]
    return out


def rmsnorm(f):
    yield "out", rules.rms_norm(f["in"], f["weight"], f["eps"]), f["out"]


def situ_glu(f):
    half = f["in"].shape[1] // 2
    yield "out", rules.situ(f["in"][:, :half], f["in"][:, half:], f["beta"], f["linear_beta"]), f["out"]


def shortconv(f):
    history = np.zeros((f["kernel"] - 1, f["channels"]))
    out, history = rules.causal_conv(f["in"][0], history, f["weight"])
    yield "out", rules.silu(out), f["out"][0]
    yield "state_after", history.T, f["state_after"][0]
    out, _ = rules.causal_conv(f["in_next"][0], history, f["weight"])
    yield "out_next", rules.silu(out), f["out_next"][0]


def kda_decay(f):
    z = (f["z"] + f["dt_bias"]).reshape(4, 4, 16)
    g = rules.log_decay(z, f["A_log"], f["lower_bound"])
    yield "g", g, f["g"][0]
    yield "alpha", np.exp(g), f["alpha"][0]


def kda_recur(f):
    state = np.zeros((f["H"], f["d_k"], f["d_v"]))
    out = rules.delta_rule(f["q"] * f["q_scale"], f["k"], f["v"], np.log(f["alpha"]), f["beta"], state)
    yield "out", out, f["out"]
    yield "state_out", state, f["state_out"]


def router(f):
    ids, weights, _ = rules.route(f["in"], f["gate_weight"], f["bias"], f["top_k"], 1.0)
    got, want = np.argsort(ids, axis=1), np.argsort(f["topk_idx"], axis=1)
    yield "topk_idx", np.take_along_axis(ids, got, 1), np.take_along_axis(f["topk_idx"], want, 1)
    yield "topk_weight", np.take_along_axis(weights, got, 1), np.take_along_axis(f["topk_weight"], want, 1)


def attnres(f):
    sources = list(f["block_residual"].transpose(1, 0, 2)) + [f["prefix_sum"]]
    yield "out", rules.attention_residual(sources, f["norm_weight"], f["proj_weight"], f["eps"]), f["out"]


def mla(f):
    model = model_of({k.replace("_weight", ".weight"): v for k, v in f.items() if k.endswith("_weight")})
    model.probe = rules.Probe(keep=True)
    out, _ = model.mla("", f["in"][0], None)
    yield "out", out, f["out"][0]
    yield "kv_latent", model.probe.layers[None]["latent"], f["kv_latent"][0]
    yield "k_rope", model.probe.layers[None]["rope"], f["k_rope"][0]


def moe(f):
    yield "out", model_of(moe_arrays(f, "", "")).moe("", f["in"][0]), f["out"][0]


def kda_layer(f):
    names = {
        **{f"{n}_proj.weight": f"{n}_proj" for n in "qkvgob"},
        **{f"{n}_conv1d.weight": f"{n}_conv" for n in "qkv"},
        **{"f_a_proj.weight": "f_a", "f_b_proj.weight": "f_b", "o_norm.weight": "o_norm"},
        **{"A_log": "A_log", "dt_bias": "dt_bias"},
    }
    out, state = model_of({name: f[key] for name, key in names.items()}).kda("", f["in"][0], None)
    yield "out", out, f["out"][0]
    yield "state_out", state["S"], f["state_out"][0]


def whole_layer(f):
    index = f["layer_idx"]
    p = f"{rules.MODEL}layers.{index}."
    arrays = moe_arrays(f, "mlp_", p + "block_sparse_moe.")
    for key, value in f.items():
        if key.startswith("self_attn_"):
            name = key.removeprefix("self_attn_")
            arrays[p + "self_attn." + (name.replace("_weight", ".weight"))] = value
        elif key.endswith("_weight") and not key.startswith("mlp_e"):
            arrays[p + key.replace("_weight", ".weight")] = value
    snapshots = list(f["block_residual_in"].transpose(1, 0, 2))
    out = model_of(arrays).layer(index, f["in"][0], snapshots, [None] * 13)
    yield "out", out, f["out"][0]
    yield "block_residual_out", np.stack(snapshots, axis=1), f["block_residual_out"]


def mxfp4(f):
    packed, scales = (np.array(f[k]).astype(np.uint8) for k in ("packed", "scales"))
    got = decode_mxfp4(packed, scales)
    yield "exact", (got == f["expected"]).astype(float), np.ones_like(got)


CHECKS = {
    "rmsnorm": rmsnorm, "situ_glu": situ_glu, "shortconv": shortconv, "kda_decay": kda_decay, "kda_recur1": kda_recur,
    "kda_recur8": kda_recur, "router": router, "attnres": attnres, "mla": mla, "moe": moe, "kda_layer1": kda_layer,
    "kda_layer8": kda_layer, "layer_kda": whole_layer, "layer_mla": whole_layer, "mxfp4": mxfp4,
}  # fmt: skip


def judge(got, want):
    """The largest error, and the verdict on one output."""
    if got.shape != want.shape:
        return float("nan"), "FAIL"
    error, tolerance = np.abs(got - want), 1e-5 + 1e-4 * np.abs(want)
    one_step = np.abs(want).max(axis=-1, keepdims=True) * 2.0**-23
    outside = int((~(error <= tolerance)).sum())
    if outside == 0:
        return error.max(), "pass"
    if (error <= tolerance + one_step).all():
        return error.max(), f"pass but for {outside} of {want.size} (rounding)"
    return error.max(), "FAIL"


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    failed = 0
    for name, run in CHECKS.items():
        for what, got, want in run(Fixture(Path(sys.argv[1]) / f"{name}.json")):
            error, verdict = judge(got, want)
            failed += verdict == "FAIL"
            print(f"{name:12} {what:20} {str(want.shape):16} max abs error {error:.2e}  {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
