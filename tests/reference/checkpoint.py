"""A checkpoint folder: index, safetensors headers, and tensors mapped one at a time (specification 2.1 to 2.4)."""

import json
from pathlib import Path

import numpy as np

import config as configs
from weights import Weights

# BF16 has no numpy type; its bits are carried as uint16.
STORED = {"F32": "<f4", "BF16": "<u2", "U8": "u1"}


def read_header(path):
    """Entries of a shard's header and the offset its data starts at."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length


class Checkpoint(Weights):
    """Weights from files. Names are looked up in the index; a missing shard matters only once a tensor of it is asked for.

    One shard's header is held at a time: a layer is a shard, so a pass over the layers parses each header once.
    """

    def __init__(self, model_dir, keep=False):
        super().__init__(keep)
        self.dir = Path(model_dir)
        self.config = configs.open_config(self.dir)
        index = json.loads((self.dir / "model.safetensors.index.json").read_text())
        self._file_of = index["weight_map"]
        self._open = None

    def _entry(self, name):
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            entries, data = read_header(self.dir / file)
            self._open = (file, entries, data, np.memmap(self.dir / file, dtype=np.uint8, mode="r"))
        _, entries, data, mapped = self._open
        return entries[name], data, mapped

    def num_rows(self, name):
        return self._entry(name)[0]["shape"][0]

    def stored(self, name, first_row=0, end_row=None):
        """Rows of a tensor as stored. Offsets in a shard are unaligned, so the bytes are copied before they are viewed."""
        entry, data, mapped = self._entry(name)
        shape = entry["shape"]
        end_row = shape[0] if end_row is None else end_row
        begin, end = entry["data_offsets"]
        row_bytes = (end - begin) // shape[0]
        raw = mapped[data + begin + first_row * row_bytes : data + begin + end_row * row_bytes]
        return np.array(raw).view(STORED[entry["dtype"]]).reshape([end_row - first_row] + shape[1:])
