"""Make the golden encodings of `tests/golden/tokenizer`, or check that they are what tiktoken computes.

    pip install tiktoken==0.14.0
    python tokenizer.py           write them
    python tokenizer.py --check   compute again and compare; exit 1 on any difference
    python tokenizer.py --more N DIR   N random texts with another seed, to try a change on; not committed

Encodings come from the tiktoken library with the published pattern; the outer cuts around it are spelled out here. Two vocabularies:
the tiny one, and one whose merges were learned across the borders of pieces, so that a text split in the wrong place gets other ids.
"""

import argparse
import base64
import collections
import hashlib
import json
import random
import sys
from pathlib import Path

import tiktoken

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "tokenizer"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SLICE, RUN = 400_000, 25_000

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [bytes([b]) for b in PRINTABLE + [b for b in range(256) if b not in PRINTABLE]]
MERGED = (
    " t|he| the|in|er| a|on|re|or|at|en|is| w|nd| and| s|es| o|ou|it|ing| of| i| in|ar|an|ll|'s|'t|  |    |\n\n|00|000|12|123|\r\n|ab|abc"
    "|Th|The|\udce4\udcbd|你|\udce5\udca5|好|你好|!!|--|==|é|\udce3\udc80|。|QU|JD|QUJD|RA|QUJDRA| wor|ld| world|hell|hello|ti|tion"
)
TINY = BYTES + [t.encode("utf-8", "surrogateescape") for t in MERGED.split("|")]

SPECIALS = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 6: "[start_header_id]",
            7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
            65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]"}  # fmt: skip

# What random texts are made of: one string, or one list of strings, per kind of character that the pattern tells apart.
KINDS = [
    "abcdefgstmdlrve", "ABCSTMDLRVE", "äßéñ\u017fж", "ÄÉЖΩ", "ǅǈ", "ʰʷー々〆", "אبกあア한", "你好世界中文", "\u3005\u3007\u3021",
    "\u0301\u0308\u0e31\u093f", "0123456789", "٣५Ⅷ½²①", " ", " ", "\t\u00a0\u2003\u3000\u0085\u2028", "\n", "\r", "\x1c\x1f\x00\x7f\u200d\ufeff",
    "'", "'", "!?.,:;-_()[]{}<>|/\\\"#*=+", "。，！？「」", "€©→∑", "😀👍🏽🇩🇪",
    ["'s", "'S", "'t", "'re", "'VE", "'m", "'ll", "'D", "'\u017f", "\r\n", "  ", "    ", "\n\n", "http", "World", "HTTP", "你a", "👩\u200d💻"],
    ["<|open|>", "<|close|>", "<|sep|>", "[BOS]", "[EOT]", "<|end_of_msg|>", "<osagent_mode>", "<|", "[", "<|sep|"],
]  # fmt: skip

TEXTS = [
    "", " ", "\n", "hello world", "The  end.\n\nIt's 12345 o'clock", "你好。world 你a", "  \t x", "x   ", "café Ça", "QUJDRAQUJDRA!!", "don'T'S",
    "a\u0301b", "10000 123", "HTTPServer xML", "\r\n\r\n a", "--==!! =", "hello<|open|>x<|close|>", "I'S I'\u017f I'q I'\u212a", "}\n///",
    "The quick brown fox jumps over the lazy dog.", "Kimi K3 是 Moonshot AI 的模型 (moonshot).", "a  b\t\tc\n\n\nd \n  e   ",
    "It's Bob's; they're here, we'll see, I'd go, you've won, don't.", "def f(x: int) -> int:\n    if x > 10:\n        return x**2\n    return -x\n",
    "0 7 42 1234 999999 3.14159 1e-9", "a\x00b\x01c\x7fd", "안녕하세요 세계 👩‍👩‍👧‍👦!", "role=\"user\"<|sep|>", "<<|sep|>[[BOS]]",
]  # fmt: skip

LONG = [
    [["QUJDRA", 5000]], [[" ", 30000], ["end", 1]], [["word ", 100000]], [["a", 1000000]], [["😀", 25001]], [["x ", 3], ["A", 60000], ["a", 3]],
    [[" \x1c\u2003\x85", 7000], ["x", 1]], [["é ", 199999], ["hello", 2]], [["a", 390000], [" b", 10000]], [["\n", 25001], ["\t", 25000], ["!", 1]],
    [["你好", 20000], ["。", 30000]], [["1", 50000]], [["'s", 13000]],
]  # fmt: skip


def random_text(rng):
    kinds = rng.sample(KINDS, rng.randint(1, 6))
    return "".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 40)))


def learn(texts, count):
    """Merges of the commonest neighbours over whole texts, whatever the pattern says about them."""
    parts = [[bytes([b]) for b in t.encode()] for t in texts]
    tokens = list(BYTES)
    known = set(tokens)
    while len(tokens) < 256 + count:
        pairs = collections.Counter(p for part in parts for p in zip(part, part[1:], strict=False) if p[0] + p[1] not in known)
        left, right = min(pairs, key=lambda p: (-pairs[p], p))
        tokens.append(left + right)
        known.add(left + right)
        for part in parts:
            at = 0
            while at + 1 < len(part):
                if part[at] == left and part[at + 1] == right:
                    part[at : at + 2] = [left + right]
                at += 1
    return tokens


def model(tokens):
    base = len(tokens)
    names = {SPECIALS.get(i, f"<|reserved_token_{base + i}|>"): base + i for i in range(256)}
    return tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks={t: i for i, t in enumerate(tokens)}, special_tokens=names)


def outer_cuts(text):
    """Slices of 400,000 code points, and in each of them runs of one class cut every 25,000."""
    for start in range(0, len(text), SLICE):
        part, begin, run = text[start : start + SLICE], 0, 0
        for at, char in enumerate(part):
            run = run + 1 if at and char.isspace() == part[at - 1].isspace() else 1
            if run > RUN:
                yield part[begin:at]
                begin, run = at, 1
        yield part[begin:]


def encode(encoding, text):
    return [i for part in outer_cuts(text) for i in encoding.encode_ordinary(part)]


def golden(tokens, texts):
    encoding = model(tokens)
    lines = "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens))
    records = []
    for text in texts:
        record = {"text": text, "ids": encode(encoding, text)}
        with_specials = encoding.encode(text, allowed_special="all")
        if with_specials != record["ids"]:
            record["ids_with_specials"] = with_specials
        records.append(record)
    long = []
    for parts in LONG:
        ids = encode(encoding, "".join(text * times for text, times in parts))
        digest = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()
        long.append({"parts": parts, "num_ids": len(ids), "sha256_of_le_u32": digest})
    return lines, {
        "schema": "k3.golden-tokenizer/1",
        "generator": "tests/reference/tokenizer.py",
        "tiktoken": tiktoken.__version__,
        "vocabulary_sha256": hashlib.sha256(lines.encode()).hexdigest(),
        "texts": records,
        "long": long,
    }


def text_of(value):
    """JSON with one record a line."""
    lists = {k: v for k, v in value.items() if isinstance(v, list)}
    head = json.dumps({k: v for k, v in value.items() if k not in lists}, indent=1)[:-2]
    for name, records in lists.items():
        head += f',\n "{name}": [\n' + ",\n".join("  " + json.dumps(r) for r in records) + "\n ]"
    return head + "\n}\n"


def make(seed, count):
    rng = random.Random(seed)
    texts = TEXTS + [random_text(rng) for _ in range(count)]
    learned = learn([random_text(random.Random(s)) for s in range(3000)], 768)
    files = {}
    for name, tokens in (("tiny", TINY), ("learned", learned)):
        lines, value = golden(tokens, texts)
        files[f"{name}.json"] = text_of(value)
        if name == "learned":
            files["learned.tiktoken"] = lines
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--more", nargs=2, metavar=("N", "DIR"))
    args = parser.parse_args()
    folder, files = (Path(args.more[1]), make(2, int(args.more[0]))) if args.more else (GOLDEN, make(1, 400))
    if args.check:
        wrong = [name for name, text in files.items() if (folder / name).read_bytes() != text.encode()]
        for name in wrong:
            print(f"{folder / name}: not what this reference computes")
        return 1 if wrong else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
