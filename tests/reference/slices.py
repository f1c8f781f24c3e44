"""Goldens of the true-width slices (test-checkpoint specification 2.1), made without writing the 4 to 12 GB to disk.

    python slices.py make [--slice 2]           compute, compare with published.json, write tests/golden/slices.json
    python slices.py check MODEL_DIR LOGITS     compare a `k3-run --dump-logits` file for the golden prompt

`make` takes a few minutes a slice. `check` reads only the golden file and `config.json`: its tolerance is 2e-3 per logit and
the argmax must agree. For a full comparison with this reference, layer by layer, use conform.py. Exit 0, 1 differs, 2 usage.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import config as configs
import synth
from goldens import GOLDEN, PUBLISHED, Published, rounded, text_of, write_manifest
from model import Model, margin

FILE = GOLDEN / "slices.json"
TOLERANCE = 2e-3
# Whole rows of 20,480 logits would be most of the file; every 64th is as good a witness.
STRIDE = 64
EPSILONS = (1e-6, 1e-5)


def run(which, eps):
    """One prefill of the golden prompt: logits of every position and the stream after each layer."""
    streams = []

    def on_layer(layer, h):
        streams.append(h)
        print(f"slice {which} eps {eps:g}: layer {layer}, max|h| {np.abs(h).max():.6f}", file=sys.stderr, flush=True)

    model = Model(synth.Synthetic(configs.from_json(synth.slice_config(which))), eps)
    logits = model.step(PUBLISHED["slices"]["prompt_ids"], model.new_state(), on_layer)
    return logits, streams


def golden(which, eps, logits, streams):
    """The entry of one slice and eps."""
    last = logits[-1]
    top = np.argsort(-last, kind="stable")[:20]
    return {
        "slice": which,
        "mla_norm_eps": eps,
        "top": [[int(i), rounded(last[i])] for i in top],
        "logits_sum": rounded(last.sum()),
        "logits_l2": rounded(np.linalg.norm(last)),
        "argmax": rounded(logits.argmax(axis=1)),
        "argmax_margins": rounded([margin(row) for row in logits]),
        "max_abs_h": rounded([np.abs(h).max() for h in streams]),
        "last_h_norm": rounded([np.linalg.norm(h[-1]) for h in streams]),
        "every_64th_logit": rounded(last[::STRIDE]),
    }


def compare_published(published, which, eps, logits, streams):
    """Compare one run with the published numbers."""
    want = next(s for s in PUBLISHED["slices"]["slices"] if (s["slice"], s["mla_norm_eps"]) == (which, eps))
    tag, last = f"slice {which} eps {eps:g} ", logits[-1]
    top = np.argsort(-last, kind="stable")[:5]
    published.equal(tag + "top-5 ids", top.tolist(), [i for i, _ in want["top5"]])
    published.close(tag + "top-5 logits", last[top], [x for _, x in want["top5"]])
    published.close(tag + "sum of logits", last.sum(), want["logits_sum"])
    published.close(tag + "norm of logits", np.linalg.norm(last), want["logits_l2"])
    published.equal(tag + "argmax", logits.argmax(axis=1).tolist(), want["argmax"])
    published.close(tag + "max|h|", [np.abs(h).max() for h in streams], want["max_abs_h"])


def make(slices):
    published = Published()
    entries = json.loads(FILE.read_text())["slices"] if FILE.is_file() else []
    for which in slices:
        for eps in EPSILONS:
            logits, streams = run(which, eps)
            compare_published(published, which, eps, logits, streams)
            entries = [e for e in entries if (e["slice"], e["mla_norm_eps"]) != (which, eps)]
            entries.append(golden(which, eps, logits, streams))
    print(f"published numbers matched: {published.matched}, not matched: {len(published.problems)}")
    for problem in published.problems:
        print(problem)
    if published.problems:
        return 1
    entries.sort(key=lambda e: (e["slice"], e["mla_norm_eps"]))
    FILE.write_text(
        text_of(
            {
                "schema": "k3.golden-slices/1",
                "prompt_ids": PUBLISHED["slices"]["prompt_ids"],
                "absolute_tolerance": TOLERANCE,
                "slices": entries,
            }
        )
    )
    write_manifest()
    return 0


def check(model_dir, logits_file, eps):
    config = configs.open_config(model_dir)
    kinds = {layers: which for which, (layers, _, _) in synth.SLICES.items()}
    which = kinds.get(config.num_hidden_layers)
    want = [e for e in json.loads(FILE.read_text())["slices"] if (e["slice"], e["mla_norm_eps"]) == (which, eps)]
    if not want:
        print(f"slices.py: {model_dir}: no golden for {config.num_hidden_layers} layers, eps {eps:g}", file=sys.stderr)
        return 2
    want, dumped = want[0], np.fromfile(logits_file, dtype="<f4").astype(np.float64)
    if len(dumped) < config.vocab_size or len(dumped) % config.vocab_size:
        print(f"slices.py: {logits_file}: {len(dumped)} numbers are not rows of {config.vocab_size}", file=sys.stderr)
        return 2
    last = dumped[: config.vocab_size]
    errors = [last[i] - x for i, x in want["top"]] + list(last[::STRIDE] - want["every_64th_logit"])
    worst, top = np.abs(errors).max(), int(np.argmax(last))
    ok = worst < TOLERANCE and top == want["top"][0][0]
    print(f"slice {which}, eps {eps:g}: {len(errors)} logits, largest error {worst:.2e}, argmax {top}: {'pass' if ok else 'FAIL'}")
    return 0 if ok else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("--slice", type=int, choices=sorted(synth.SLICES), action="append")
    checker = commands.add_parser("check")
    checker.add_argument("model_dir", type=Path)
    checker.add_argument("logits_file", type=Path)
    checker.add_argument("--mla-norm-eps", type=float, default=1e-6)
    args = parser.parse_args()
    if args.command == "make":
        return make(args.slice or sorted(synth.SLICES))
    return check(args.model_dir, args.logits_file, args.mla_norm_eps)


if __name__ == "__main__":
    sys.exit(main())
