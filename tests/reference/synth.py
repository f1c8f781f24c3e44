"""Synthetic checkpoints by rule (test-checkpoint specification 1.2, 1.3, 2), as files or straight into the model.

    python synth.py tiny OUT
    python synth.py slice OUT --slice 2
    python synth.py custom OUT --config FILE [--dtype f32] [--flat]
"""

import argparse
import copy
import hashlib
import json
import math
from pathlib import Path

import numpy as np

import config as configs
import tensors
from weights import Weights, round_to_bf16

FNV_BASIS, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
# Words mixed at a time: small enough to stay in cache.
CHUNK = 1 << 16

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "U8": 1}


def fnv1a(name):
    """FNV-1a-64 of the UTF-8 name: the seed of a tensor's stream."""
    value = FNV_BASIS
    for byte in name.encode():
        value = ((value ^ byte) * FNV_PRIME) & MASK
    return value


def words(seed, first, count):
    """Words `first .. first + count` of a stream: splitmix64 of the counter, so any range can be had by itself."""
    out = np.empty(count, dtype=np.uint64)
    for at in range(0, count, CHUNK):
        part = out[at : at + CHUNK]
        z = np.arange(first + at + 1, first + at + 1 + len(part), dtype=np.uint64)
        z *= np.uint64(GOLDEN_GAMMA)
        z += np.uint64(seed)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        part[:] = z ^ (z >> np.uint64(31))
    return out


def stream_bytes(seed, first, count):
    """Bytes of a stream, its words in little-endian order."""
    start = first // 8
    end = (first + count + 7) // 8
    raw = words(seed, start, end - start).astype("<u8").view(np.uint8)
    return raw[first - 8 * start :][:count]


def lanes(seed, first, count):
    """Elements of a float stream: four signed 16-bit lanes a word, low one first, as exact f32 in [-1, 1)."""
    raw = stream_bytes(seed, 2 * first, 2 * count).copy().view("<i2")
    return raw.astype(np.float32) * np.float32(1 / 32768)


def lin_factor(columns, gain):
    """The factor of rule `lin`: root and product in f64, rounded once to f32."""
    return np.float32(math.sqrt(3.0 / columns) * gain)


def scale_base(columns):
    """The lower of the two E8M0 bytes used for a row length: weights of about unit gain."""
    return 127 - round(math.log2(2.926 * math.sqrt(columns)))


def values(spec, first_row, end_row):
    """Rows of a float tensor in f32, before any rounding to BF16. Each product is rounded once."""
    columns = spec.elements // spec.shape[0]
    rows = end_row - first_row
    v = lanes(fnv1a(spec.name), first_row * columns, rows * columns).reshape(rows, columns)
    if spec.rule == "lin":
        out = v * lin_factor(columns, spec.gain)
    elif spec.rule == "amp":
        out = v * np.float32(spec.gain)
    elif spec.rule == "norm":
        out = np.float32(1) + np.float32(0.25) * v
    elif spec.rule == "alog":
        is_head = np.arange(first_row, end_row)[:, None] < spec.gain
        out = np.where(is_head, v * np.float32(0.7), np.float32(0))
    elif spec.rule == "kv_a":
        is_latent = np.arange(first_row, end_row)[:, None] < spec.gain
        out = v * np.where(is_latent, lin_factor(columns, 0.01), lin_factor(columns, 2.0))
    else:
        raise ValueError(f"{spec.name}: no float rule {spec.rule}")
    assert out.dtype == np.float32
    return out.reshape((rows,) + spec.shape[1:])


def stored(spec, first_row=0, end_row=None, dtype=None):
    """Rows of a tensor as they are stored: uint16 bits for BF16, else f32 or uint8. `dtype` "F32" keeps BF16 unrounded."""
    end_row = spec.shape[0] if end_row is None else end_row
    if spec.dtype == "U8":
        columns = spec.shape[1]
        raw = stream_bytes(fnv1a(spec.name), first_row * columns, (end_row - first_row) * columns)
        raw = raw.reshape(end_row - first_row, columns)
        return raw if spec.rule == "packed" else scale_base(32 * columns) + (raw & 1)
    out = values(spec, first_row, end_row)
    return round_to_bf16(out) if (dtype or spec.dtype) == "BF16" else out


class Synthetic(Weights):
    """The weights a synthetic checkpoint would have, made when asked for, without files."""

    def __init__(self, config, keep=False, f32=False):
        super().__init__(keep)
        self.config = config
        self._f32 = f32
        self._specs = {spec.name: spec for shard in tensors.shards(config) for spec in shard}

    def num_rows(self, name):
        return self._specs[name].shape[0]

    def stored(self, name, first_row=0, end_row=None):
        spec = self._specs[name]
        return stored(spec, first_row, end_row, "F32" if self._f32 and spec.dtype == "BF16" else None)


def file_order(specs):
    """Element size descending, then name in byte order (specification 2.1)."""
    return sorted(specs, key=lambda s: (-ELEMENT_BYTES[s.dtype], s.name.encode()))


def with_dtype(spec, f32):
    """The spec as stored: with `f32`, every BF16 tensor becomes F32."""
    return tensors.Spec(spec.name, "F32", spec.shape, spec.rule, spec.gain) if f32 and spec.dtype == "BF16" else spec


def header(specs):
    """The header of a shard whose tensors are packed in this order: length word, compact JSON, spaces to 8 bytes."""
    entries, at = {}, 0
    for spec in specs:
        size = spec.elements * ELEMENT_BYTES[spec.dtype]
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


def write_shard(path, specs, f32=False):
    """Write one shard; returns its size and SHA-256. Tensors are made and written a block of rows at a time."""
    specs = file_order([with_dtype(spec, f32) for spec in specs])
    head, _ = header(specs)
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for block in _blocks(head, specs):
            file.write(block)
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def _blocks(head, specs):
    yield head
    for spec in specs:
        step = max(1, (64 << 20) // max(1, spec.elements // spec.shape[0]))
        for at in range(0, spec.shape[0], step):
            block = stored(spec, at, min(at + step, spec.shape[0]))
            yield np.ascontiguousarray(block).astype(block.dtype.newbyteorder("<")).tobytes()


def write(out, root, f32=False, flat=False, vision=False):
    """Write a whole checkpoint into the folder `out`; returns `{file, bytes, sha256}` of every shard."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    shards = tensors.shards(configs.from_json(root), vision)
    report, weight_map, total = [], {}, 0
    for index, specs in enumerate(shards):
        name = tensors.shard_name(index, len(shards))
        size, digest = write_shard(out / name, specs, f32)
        report.append({"file": name, "bytes": size, "sha256": digest})
        for spec in specs:
            weight_map[spec.name] = name
            total += spec.elements * ELEMENT_BYTES[with_dtype(spec, f32).dtype]
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(configs.flatten(root) if flat else root, indent=1) + "\n")
    return report


QUANTIZATION = {
    "format": "mxfp4-pack-quantized",
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "group_size": 32,
                "type": "float",
                "strategy": "group",
                "symmetric": True,
                "scale_dtype": "torch.uint8",
            },
        }
    },
}

TINY = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "bos_token_id": 320,
    "eos_token_id": 322,
    "pad_token_id": 575,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_linear",
        "vocab_size": 576,
        "hidden_size": 160,
        "num_hidden_layers": 13,
        "rms_norm_eps": 1e-05,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 13],
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
            "gate_lower_bound": -5.0,
            "head_dim": 16,
            "num_heads": 5,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 12,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 64,
        "moe_intermediate_size": 96,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 224,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 320,
        "eos_token_id": 322,
        "pad_token_id": 575,
        "quantization_config": QUANTIZATION,
    },
}


def variant(text, linear):
    """A nested `config.json`: the tiny one with some fields of `text_config` and `linear_attn_config` replaced.

    `full_attn_layers` (counted from one) decides `kda_layers`, and `num_attention_heads` decides `num_key_value_heads`; the
    special tokens move to the top of the vocabulary.
    """
    root = copy.deepcopy(TINY)
    root["text_config"].update(text)
    t = root["text_config"]
    t["linear_attn_config"].update(linear)
    mla = t["linear_attn_config"]["full_attn_layers"]
    t["linear_attn_config"]["kda_layers"] = [n for n in range(1, t["num_hidden_layers"] + 1) if n not in mla]
    t["num_key_value_heads"] = t["num_attention_heads"]
    top = t["vocab_size"]
    specials = (top - 256, top - 254) if top >= 512 else (top - 3, top - 2)
    for name, token in zip(("bos_token_id", "eos_token_id", "pad_token_id"), specials + (top - 1,)):
        t[name] = root[name] = token
    return root


# Released widths, and what each slice changes (test-checkpoint specification 2).
RELEASED_WIDTHS = {
    "hidden_size": 7168, "num_attention_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_token": 16, "routed_expert_hidden_size": 3584,
    "moe_intermediate_size": 3072, "intermediate_size": 33792, "vocab_size": 20480, "attn_res_block_size": 2,
}  # fmt: skip
SLICES = {2: (2, [2], 32), 3: (3, [3], 128), 5: (5, [4, 5], 64)}


def slice_config(which):
    """`config.json` of slice 2, 3 or 5."""
    layers, mla, experts = SLICES[which]
    text = dict(RELEASED_WIDTHS, num_hidden_layers=layers, num_experts=experts)
    return variant(text, {"full_attn_layers": mla, "num_heads": 96, "head_dim": 128})


def main():
    parser = argparse.ArgumentParser(description="Write a synthetic checkpoint by rule.")
    parser.add_argument("kind", choices=["tiny", "slice", "custom"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--slice", type=int, choices=sorted(SLICES), default=2)
    parser.add_argument("--config", type=Path, help="nested config.json of a custom checkpoint")
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16", help="f32 stores every BF16 tensor unrounded")
    parser.add_argument("--flat", action="store_true", help="write config.json in the flat form")
    args = parser.parse_args()
    if args.kind == "custom":
        if args.config is None:
            parser.error("custom needs --config FILE")
        root = json.loads(args.config.read_text())
    else:
        root = TINY if args.kind == "tiny" else slice_config(args.slice)
    for shard in write(args.out, root, args.dtype == "f32", args.flat, vision=args.kind == "tiny"):
        print(f"{shard['sha256']}  {shard['file']}  {shard['bytes']}")


if __name__ == "__main__":
    main()
