"""Make the golden files of `tests/golden`, or check that they are what this reference computes.

    python goldens.py           write them
    python goldens.py --check   compute again and compare; exit 1 on any difference

Both first check this reference against `published.json`: the numbers printed for the tiny checkpoint by an earlier reference,
written by other people from the same rules and itself compared with the official code.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import config as configs
import synth
from checkpoint import Checkpoint
from model import Model, Probe, margin
from shapes import SHAPES

VERSION = 1
TOLERANCE = 1e-3
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
PUBLISHED = json.loads((Path(__file__).resolve().parent / "published.json").read_text())
# Prompts of shapes are searched until every greedy choice is at least this clear.
MIN_MARGIN = 1e-2
GENERATED = 10


def rounded(values):
    """Numbers to 7 significant digits, nested lists kept."""
    if isinstance(values, (list, tuple, np.ndarray)):
        return [rounded(v) for v in values]
    return int(values) if isinstance(values, (int, np.integer)) else float(f"{values:.7g}")


def router_gaps(probe):
    """The smallest selection gap of each layer that leaves any expert out."""
    gaps = (p.get("router_gap", np.inf) for p in probe.layers.values())
    return [float(gap) for gap in gaps if np.isfinite(gap)]


def run(weights, prompt, count, eps):
    """Prefill and greedy decode. Returns what the golden files are made of, unrounded."""
    model = Model(weights, eps)
    model.probe = Probe(keep=True)
    streams = []
    state = model.new_state()
    logits = model.step(prompt, state, on_layer=lambda _, h: streams.append(h))
    probes, gaps = model.probe.layers, router_gaps(model.probe)
    ids, rows, row = [], [], logits[-1]
    for _ in range(count):
        ids.append(int(np.argmax(row)))
        rows.append(row)
        if len(ids) < count:
            model.probe = Probe(keep=True)
            row = model.step(ids[-1:], state)[-1]
            gaps += router_gaps(model.probe)
    return {
        "generated_ids": ids,
        "generated_logits": rows,
        "margins": [margin(r) for r in rows],
        "logits": logits,
        "streams": streams,
        "probes": probes,
        "router_gap": min(gaps) if gaps else None,
    }


def common(result, prompt, eps, root, shards, f32=False, flat=False):
    """The fields every golden file has."""
    last = [h[-1] for h in result["streams"]]
    return {
        "schema": "k3.golden/1",
        "config": configs.flatten(root) if flat else root,
        "dtype": "f32" if f32 else "bf16",
        "flat": flat,
        "mla_norm_eps": eps,
        "shards": shards,
        "prompt_ids": [int(i) for i in prompt],
        "generated_ids": result["generated_ids"],
        "generated_margins": rounded(result["margins"]),
        "generated_top_logits": rounded([r.max() for r in result["generated_logits"]]),
        "smallest_router_gap": None if result["router_gap"] is None else rounded(result["router_gap"]),
        "max_abs_h": rounded([np.abs(h).max() for h in result["streams"]]),
        "last_h_norm": rounded([np.linalg.norm(h) for h in last]),
        "last_experts": {
            str(layer): {"ids": rounded(p["experts"][-1]), "weights": rounded(p["expert_weights"][-1])}
            for layer, p in result["probes"].items()
            if "experts" in p
        },
        "last_logits": rounded(result["logits"][-1]),
        "final_logits": rounded(result["generated_logits"][-1]),
    }


def probe_values(probes, layer):
    """The last position's first four components of each intermediate value of a layer, the first head's where it has heads."""
    out = {}
    for name, value in probes[layer].items():
        if name == "router_gap":
            continue
        row = value[0, 0] if name == "S" else value[-1]
        row = row[0] if row.ndim == 2 else row
        out[name] = row[:4]
    return out


def tiny_golden(weights, eps, shards):
    """The golden file of the tiny checkpoint, and the unrounded run."""
    prompt = PUBLISHED["tiny"]["prompt_ids"]
    result = run(weights, prompt, 20, eps)
    golden = {"name": "tiny", **common(result, prompt, eps, synth.TINY, shards)}
    golden["argmax"] = rounded(result["logits"].argmax(axis=1))
    golden["argmax_margins"] = rounded([margin(r) for r in result["logits"]])
    golden["logits"] = rounded(result["logits"])
    golden["last_h"] = rounded([h[-1] for h in result["streams"]])
    golden["experts"] = {
        str(layer): rounded(p["experts"]) for layer, p in result["probes"].items() if "experts" in p
    }
    golden["probes"] = {
        str(layer): {name: rounded(row) for name, row in probe_values(result["probes"], layer).items()}
        for layer in result["probes"]
    }
    return golden, result


class Published:
    """Counts comparisons with published numbers; a printed number is matched to its last printed digit."""

    def __init__(self):
        self.matched = 0
        self.problems = []

    def equal(self, what, got, want):
        if got == want:
            self.matched += np.size(want)
        else:
            self.problems.append(f"{what}: {got} is not the published {want}")

    def close(self, what, got, want):
        """One unit of the last digit, as printed, is allowed: rounding of a number that was itself rounded."""
        for i, (g, w) in enumerate(zip(np.ravel(got), np.ravel(want), strict=True)):
            text = repr(float(w))
            unit = 10.0 ** -(len(text.split(".")[1]) if "." in text and "e" not in text else 9)
            if abs(g - w) <= 1.01 * unit:
                self.matched += 1
            else:
                self.problems.append(f"{what}[{i}]: {g:.10g} is not the published {w:.10g}")


def check_tiny(published, result, eps_name):
    """Compare one run of the tiny checkpoint with the published numbers."""
    want, logits, last = PUBLISHED["tiny"][eps_name], result["logits"], result["logits"][-1]
    tag = f"tiny {eps_name} "
    published.equal(tag + "generated ids", result["generated_ids"], want["generated_ids"])
    published.close(tag + "generated margin", min(result["margins"]), want["generated_margin"])
    published.close(tag + "argmax margin", min(margin(r) for r in logits), want["argmax_margin"])
    published.equal(tag + "argmax", logits.argmax(axis=1).tolist(), want["argmax"])
    top = np.argsort(-last, kind="stable")[:5]
    published.equal(tag + "top-5 ids", top.tolist(), [i for i, _ in want["top5"]])
    published.close(tag + "top-5 logits", last[top], [x for _, x in want["top5"]])
    published.close(tag + "sum of logits", last.sum(), want["logits_sum"])
    published.close(tag + "norm of logits", np.linalg.norm(last), want["logits_l2"])
    published.close(tag + "first logits", last[:6], want["first_logits"])
    published.close(tag + "max|h|", [np.abs(h).max() for h in result["streams"]], want["max_abs_h"])
    published.close(tag + "norm of h", [np.linalg.norm(h[-1]) for h in result["streams"]], want["h_norm"])
    if "logit_0" in want:
        published.close(tag + "logit 0", logits[:, 0], want["logit_0"])
        published.close(tag + "h", [h[-1, :4] for h in result["streams"]], want["h_first"])
    for layer, values in want.get("probes", {}).items():
        got = probe_values(result["probes"], int(layer))
        for name, row in values.items():
            published.close(f"{tag}layer {layer} {name}", got[name], row)


def check_incremental(weights, prompt, eps, logits):
    """Any split into calls gives the same logits; returns the largest difference seen."""
    model, worst = Model(weights, eps), 0.0
    for size in (1, 5):
        state = model.new_state()
        rows = [model.step(prompt[at : at + size], state) for at in range(0, len(prompt), size)]
        worst = max(worst, np.abs(np.concatenate(rows) - logits).max())
    return worst


def shape_golden(shape):
    """The golden file of one shape: the first prompt of a fixed sequence whose greedy choices and routing are all clear."""
    root = shape.root()
    with tempfile.TemporaryDirectory() as folder:
        shards = synth.write(folder, root, shape.f32, shape.flat)
        weights = Checkpoint(folder, keep=True)
        config = weights.config
        size = sum(s["bytes"] for s in shards)
        assert size < 3_000_000, f"{shape.name}: {size} bytes"
        eos = root["text_config"]["eos_token_id"]
        for attempt in range(200):
            stream = synth.words(synth.fnv1a(f"{shape.name} prompt {attempt}"), 0, shape.prompt_len)
            prompt = [int(w % np.uint64(config.vocab_size)) for w in stream]
            result = run(weights, prompt, GENERATED, 1e-6)
            clear = min(result["margins"]) >= MIN_MARGIN and (result["router_gap"] or 1) >= shape.min_gap
            varied = len(set(result["generated_ids"])) > GENERATED // 2
            if clear and varied and eos not in result["generated_ids"]:
                break
        else:
            raise SystemExit(f"{shape.name}: no prompt is clear enough")
        worst = check_incremental(weights, prompt[:24], 1e-6, result["logits"][:24])
        assert worst < 1e-9, f"{shape.name}: splitting the prompt moves the logits by {worst}"
    golden = common(result, prompt, 1e-6, root, shards, shape.f32, shape.flat)
    return {"name": shape.name, "why": shape.why, **golden}, size, result


def text_of(golden):
    """A golden as JSON, one member a line so that differences are readable."""
    lines = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in golden.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def make():
    """Every golden file as `{relative path: text}`, and the comparison with the published numbers."""
    files, published = {}, Published()
    with tempfile.TemporaryDirectory() as folder:
        shards = synth.write(folder, synth.TINY, vision=True)
        for number, shard in enumerate(shards, 1):
            want = PUBLISHED["tiny"]["shards"][str(number)]
            published.equal(f"tiny shard {number}", {k: shard[k] for k in ("bytes", "sha256")}, want)
        weights = Checkpoint(folder, keep=True)
        for eps_name in ("1e-6", "1e-5"):
            golden, result = tiny_golden(weights, float(eps_name), shards)
            check_tiny(published, result, eps_name)
            worst = check_incremental(weights, golden["prompt_ids"], float(eps_name), result["logits"])
            assert worst < 1e-9, f"splitting the prompt moves the logits by {worst}"
            files[f"tiny_eps{eps_name}.json"] = text_of(golden)
    for shape in SHAPES:
        golden, size, result = shape_golden(shape)
        gap = result["router_gap"]
        print(
            f"{shape.name:22} {size:9,} B  margin {min(result['margins']):.4f}  router gap {gap if gap is None else f'{gap:.1e}'}",
            file=sys.stderr,
        )
        files[f"shapes/{shape.name}.golden.json"] = text_of(golden)
        files[f"shapes/{shape.name}.config.json"] = json.dumps(shape.root(), indent=1) + "\n"
    return files, published


def digests():
    """SHA-256 of every committed file this reference makes."""
    paths = [p for pattern in ("tiny_*.json", "slices.json", "shapes/*.json") for p in GOLDEN.glob(pattern)]
    return {str(p.relative_to(GOLDEN)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(paths)}


def write_manifest():
    """Record who made the golden files, how, and their digests."""
    manifest = {
        "schema": "k3.golden-manifest/1",
        "generator": "tests/reference",
        "generator_version": VERSION,
        "arithmetic": "numpy float64, weights exactly as stored",
        "numpy": np.__version__,
        "ids": "equal",
        "absolute_tolerance": {"logits": TOLERANCE, "logits of slices": 2 * TOLERANCE},
        "files": digests(),
    }
    (GOLDEN / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")


def differs(got, want, path=""):
    """Where two JSON values differ: numbers by more than 1e-6 of their size, all else at all."""
    if isinstance(got, float) and isinstance(want, (int, float)):
        return [] if abs(got - want) <= 1e-6 * max(1.0, abs(want)) else [f"{path}: {got} is not {want}"]
    if isinstance(got, dict) and isinstance(want, dict) and got.keys() == want.keys():
        return [d for key in got for d in differs(got[key], want[key], f"{path}.{key}")]
    if isinstance(got, list) and isinstance(want, list) and len(got) == len(want):
        return [d for i, (g, w) in enumerate(zip(got, want)) for d in differs(g, w, f"{path}[{i}]")]
    return [] if got == want else [f"{path}: {str(got)[:60]} is not {str(want)[:60]}"]


def check(files):
    """Differences between computed and committed goldens, and between those and the manifest.

    Numbers are compared, not bytes: another BLAS may move the last printed digit.
    """
    problems = []
    for name, text in files.items():
        path = GOLDEN / name
        if path.is_file():
            problems += differs(json.loads(text), json.loads(path.read_text()), name)
        else:
            problems.append(f"{name}: missing")
    return problems + differs(digests(), json.loads((GOLDEN / "MANIFEST.json").read_text())["files"], "MANIFEST.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    args = parser.parse_args()
    files, published = make()
    print(f"published numbers matched: {published.matched}, not matched: {len(published.problems)}")
    problems = list(published.problems)
    if args.check:
        problems += check(files)
    elif not problems:
        for name, text in files.items():
            path = GOLDEN / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        write_manifest()
        print(f"wrote {len(files)} files to {GOLDEN}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
