"""Stored bytes to float64: BF16, F32 and MXFP4, and the products the model asks for.

Two sources give stored tensors: `checkpoint.Checkpoint` from files and `synth.Synthetic` by rule. Both derive from `Weights`
and hold at most one tensor at a time, widened a block of rows at a time, so that layers of true width fit.
"""

import numpy as np

# E2M1 by nibble: three bits of magnitude, then the sign (specification 2.4).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK_BYTES = 128 << 20


def widen(stored):
    """BF16 (as its uint16 bits) or F32 to float64; both are exact."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def round_to_bf16(values):
    """f32 to BF16 bits, nearest even; the inputs are finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode_mxfp4(packed, scale):
    """MXFP4 rows to float64 (specification 2.4).

    `packed` [rows, in/2] holds element i in the low nibble when i is even, else in the high one; `scale` [rows, in/32] is
    the power of two of each group, biased by 127. A scale of 255 is NaN.
    """
    rows = packed.shape[0]
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, scale.shape[1], 32)
    factor = np.where(scale == 255, np.nan, np.ldexp(1.0, scale.astype(np.int32) - 127))
    return (E2M1[nibbles] * factor[:, :, None]).reshape(rows, -1)


class Weights:
    """A checkpoint as the model sees it. Subclasses give `config` and `stored(name, first_row, end_row)`."""

    def __init__(self, keep=False):
        # Keeping every widened tensor makes many short steps of a small model fast; wide models must not.
        self._kept = {} if keep else None

    def _once(self, key, make):
        if self._kept is None:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def vector(self, name):
        """A whole small tensor, in its stored shape."""
        return self._once(name, lambda: widen(self.stored(name)))

    def rows(self, name, indices):
        """Chosen rows of a matrix."""
        return np.stack([widen(self.stored(name, i, i + 1))[0] for i in indices])

    def linear(self, name, x):
        """`W x` for every row of `x` [tokens, in]; no linear layer of the text model has a bias."""
        if self._kept is not None:
            return x @ self.vector(name).T
        step = max(1, BLOCK_BYTES // (8 * x.shape[1]))
        end = self.num_rows(name)
        blocks = (widen(self.stored(name, at, min(at + step, end))) for at in range(0, end, step))
        return np.concatenate([x @ block.T for block in blocks], axis=1)

    def mxfp4(self, name):
        """The dense matrix of one expert projection; `name` lacks `.weight_packed` and `.weight_scale`."""
        return self._once(
            name, lambda: decode_mxfp4(self.stored(name + ".weight_packed"), self.stored(name + ".weight_scale"))
        )
