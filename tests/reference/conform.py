"""Compare what k3-run computed with this reference, layer by layer.

    python conform.py MODEL_DIR HIDDEN_FILE --ids 1,2,3 [--steps 2,1] [--logits FILE --prompt-rows 2]

HIDDEN_FILE is `k3-run --dump-hidden`: little-endian f32, [layer][row][hidden] for every step, the stream after each layer.
`--ids` are all ids that were fed, prompt then generated (the last generated one is never fed); `--steps` is how many rows
each step had: one or more prefill chunks, then 1 for each decode step. One layer's weights are held at a time, a block of rows
at a time, so true-width slices and the whole release fit in a few GB.

`--logits` compares `k3-run --dump-logits` too: one row of vocab_size after the last of `--prompt-rows` rows and after each
later row.

A layer passes when, in every row, both the relative L2 error and the largest error (relative to the row's largest
component, or to 1 if that is more) are within `--tolerance`. Exit 0 all pass, 1 some do not, 2 usage.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from checkpoint import Checkpoint
from model import Model, Probe


class UsageError(Exception):
    """The arguments or files cannot be compared; nothing is said about the model."""


def read_f32(path, count, what):
    """A dump of exactly `count` little-endian f32."""
    path = Path(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if size != 4 * count:
        raise UsageError(f"{path}: {size} bytes, but {what} are {4 * count} bytes")
    return np.fromfile(path, dtype="<f4").astype(np.float64)


def read_hidden(path, layers, steps, hidden):
    """The dump as [layer, row, hidden], the steps joined."""
    rows = sum(steps)
    flat = read_f32(path, layers * rows * hidden, f"{layers} layers x {rows} rows x {hidden}")
    parts, at = [], 0
    for step in steps:
        size = layers * step * hidden
        parts.append(flat[at : at + size].reshape(layers, step, hidden))
        at += size
    return np.concatenate(parts, axis=1)


class Comparison:
    """Errors of one [rows, width] array against the reference, and whether they are within the tolerance."""

    def __init__(self, got, want, tolerance):
        error = np.abs(got - want)
        self.max_abs = error.max()
        self.worst_row = int(np.argmax(np.where(np.isfinite(error).all(axis=1), error.max(axis=1), np.inf)))
        self.relative_l2 = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
        row_l2 = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
        row_max = error.max(axis=1) / np.maximum(1.0, np.abs(want).max(axis=1))
        # Written so that NaN fails.
        self.ok = bool((row_l2 <= tolerance).all() and (row_max <= tolerance).all())

    def __str__(self):
        return f"{self.max_abs:12.4e} {self.relative_l2:12.4e} {self.worst_row:6}  {'pass' if self.ok else 'FAIL'}"


def router_gap(probe, layer):
    """How close the router came to another choice, for the table; a tiny gap explains a sudden jump of the error."""
    gap = probe.layers.get(layer, {}).get("router_gap", np.inf)
    return f"{float(gap):10.1e}" if np.isfinite(gap) else " " * 9 + "-"


def compare(args, out):
    """Run the comparison; returns whether everything passed."""
    model = Model(Checkpoint(args.model_dir), args.mla_norm_eps, args.layers)
    ids, steps = args.ids, args.steps or [len(args.ids)]
    if sum(steps) != len(ids):
        raise UsageError(f"--steps sum to {sum(steps)} rows, but there are {len(ids)} --ids")
    too_high = [i for i in ids if not 0 <= i < model.c.vocab_size]
    if too_high:
        raise UsageError(f"--ids: {too_high[0]} is not below vocab_size = {model.c.vocab_size}")
    hidden = read_hidden(args.hidden_file, model.num_layers, steps, model.c.hidden_size)
    logit_rows = read_logits(args, model, len(ids))
    passed = []
    print("layer kind        max |h|      max abs   relative L2  worst row        router gap", file=out)

    def on_layer(layer, h):
        result = Comparison(hidden[layer], h, args.tolerance)
        passed.append(result.ok)
        kind = ("mla" if model.c.is_mla(layer) else "kda") + ("+dense" if model.c.is_dense(layer) else "+moe")
        gap = router_gap(model.probe, layer)
        print(f"{layer:5} {kind:9} {np.abs(h).max():9.4f} {result} {gap}", file=out, flush=True)
        model.probe.layers.clear()
        return hidden[layer] if args.isolate else None

    model.probe = Probe(keep=True)
    h, snapshots = model.walk(ids, model.new_state(), on_layer)
    if logit_rows is not None:
        first = args.prompt_rows - 1
        want = model.head(h[first:], [s[first:] for s in snapshots])
        result = Comparison(logit_rows, want, args.tolerance)
        same = bool((logit_rows.argmax(axis=1) == want.argmax(axis=1)).all())
        passed.append(result.ok and same)
        print(f"logits {'' if same else 'ARGMAX DIFFERS':14} {np.abs(want).max():4.1f} {result}", file=out)
    print(f"{sum(passed)} of {len(passed)} pass (tolerance {args.tolerance:g}, eps {args.mla_norm_eps:g})", file=out)
    return all(passed)


def read_logits(args, model, rows):
    """The dumped logits as [step, vocab], or None when they were not asked for."""
    if args.logits is None:
        return None
    if not 1 <= args.prompt_rows <= rows:
        raise UsageError(f"--logits needs --prompt-rows between 1 and {rows}")
    steps, vocab = rows - args.prompt_rows + 1, model.c.vocab_size
    return read_f32(args.logits, steps * vocab, f"{steps} steps x {vocab} logits").reshape(steps, vocab)


def id_list(text):
    """Comma-separated whole numbers."""
    return [int(part) for part in text.split(",")]


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model_dir", type=Path)
    p.add_argument("hidden_file", type=Path)
    p.add_argument("--ids", type=id_list, required=True, help="every id that was fed, prompt first")
    p.add_argument("--steps", type=id_list, help="rows of each step (default: one step)")
    p.add_argument("--layers", type=int, help="the run used only the first N layers")
    p.add_argument("--mla-norm-eps", type=float, default=1e-6)
    p.add_argument("--tolerance", type=float, default=1e-4)
    p.add_argument("--logits", type=Path, help="a --dump-logits file to compare too")
    p.add_argument("--prompt-rows", type=int, default=0, help="how many of --ids were the prompt")
    p.add_argument(
        "--isolate",
        action="store_true",
        help="feed each layer the dumped stream, so that each line shows the error of that layer alone",
    )
    return p


def main():
    args = parser().parse_args()
    try:
        return 0 if compare(args, sys.stdout) else 1
    except (UsageError, OSError, KeyError) as error:
        print(f"conform.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
