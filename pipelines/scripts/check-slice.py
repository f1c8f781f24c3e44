"""Compare a logits dump of a slice's golden prompt with tests/golden/slices.json. Needs no packages.

    python check-slice.py SLICE LOGITS_FILE [--mla-norm-eps 1e-6]

LOGITS_FILE is `k3-run --dump-logits` for one generated token: little-endian f32. Every published logit, the sum and the norm
must be within the file's tolerance, and the argmax must agree. Exit 0, 1 differs, 2 usage.
"""

import argparse
import array
import json
import math
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "slices.json"
# The golden file has 7 significant digits, so its last digit may hide this much of a large number.
DIGITS = 7


def rounding(value):
    """Half a unit of the last digit kept of a golden number."""
    return 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) + 1 - DIGITS)


def read_f32(path):
    values = array.array("f")
    values.frombytes(path.read_bytes())
    if sys.byteorder == "big":
        values.byteswap()
    return values


def checks(logits, want):
    """(what, found, expected) of every number to compare."""
    for id_, value in want["top"]:
        yield f"logit {id_}", logits[id_], value
    for n, value in enumerate(want["every_64th_logit"]):
        yield f"logit {64 * n}", logits[64 * n], value
    yield "sum of logits", math.fsum(logits), want["logits_sum"]
    yield "norm of logits", math.sqrt(math.fsum(x * x for x in logits)), want["logits_l2"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slice", type=int)
    parser.add_argument("logits_file", type=Path)
    parser.add_argument("--mla-norm-eps", type=float, default=1e-6)
    args = parser.parse_args()
    golden = json.loads(GOLDEN.read_text())
    key = (args.slice, args.mla_norm_eps)
    want = next((s for s in golden["slices"] if (s["slice"], s["mla_norm_eps"]) == key), None)
    if want is None:
        parser.error(f"{GOLDEN}: has no slice {args.slice} with eps {args.mla_norm_eps:g}")
    logits = read_f32(args.logits_file)
    if not 64 * (len(want["every_64th_logit"]) - 1) < len(logits) <= 64 * len(want["every_64th_logit"]):
        parser.error(f"{args.logits_file}: {len(logits)} numbers are not one row of the slice's vocabulary")
    tolerance, worst, wrong = golden["absolute_tolerance"], 0.0, 0
    for what, found, expected in checks(logits, want):
        error = abs(found - expected)
        # Written so that NaN fails.
        ok = error <= tolerance + rounding(expected)
        wrong += not ok
        if what.startswith("logit "):
            worst = max(worst, error)
        else:
            print(f"  {what:15} {found:12.6f}  expected {expected:12.6f}  difference {error:.1e}")
        if not ok:
            print(f"  {what}: {found:.6f} is not {expected:.6f} within {tolerance:g}")
    argmax = max(range(len(logits)), key=logits.__getitem__)
    if argmax != want["top"][0][0]:
        print(f"  argmax {argmax} is not {want['top'][0][0]}")
        wrong += 1
    count = len(want["top"]) + len(want["every_64th_logit"])
    print(f"slice {args.slice}, eps {args.mla_norm_eps:g}: argmax {argmax}, {count} logits, largest difference {worst:.1e}: "
          f"{'pass' if not wrong else 'FAIL'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
