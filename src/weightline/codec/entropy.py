"""How small a step can be: plug-in entropy bounds of the difference between two versions.

order-0: entropy of "changed or not" per element, and of the step (in units of the last place) per change,
over all tensors.
exponent: both given the exponent of the old value, per tensor, plus 2 bytes for each (tensor, exponent) that
changed and half a byte for
each that did not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightline.codec.coding import kind_of
from weightline.codec.dtypes import Bits

_STEP = 1 << 15


class Bounds(NamedTuple):
    """Bounds in bytes, and what they are of."""

    elements: int
    changed: int
    raw_bytes: int
    order0_bytes: float
    exponent_bytes: float


def _entropy(counts: npt.NDArray[Any]) -> float:
    """Bits of a message with these symbol counts under its own distribution."""
    counts = counts[counts > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum()) if counts.size else 0.0


def _ranks(bits: Bits, is_float: int) -> npt.NDArray[np.int64]:
    """Signed value order of the bits: sign and magnitude for floats."""
    width = 8 * bits.itemsize
    wide = bits.astype(np.uint64).astype(np.int64)
    if not is_float or width == 64:
        return wide
    magnitude = wide & ((1 << (width - 1)) - 1)
    return np.where(wide >> (width - 1), -magnitude, magnitude)


class Meter:
    """Adds up the bounds tensor by tensor."""

    def __init__(self) -> None:
        self.elements = self.changed = self.raw_bytes = 0
        self._steps = np.zeros(2 * _STEP + 1, np.int64)
        self._exponent_bits = 0.0

    def add(self, dtype: str, old: Bits, new: Bits) -> None:
        """One tensor."""
        kind = kind_of(dtype)
        at = np.flatnonzero(old != new)
        steps = _ranks(new[at], kind.is_float) - _ranks(old[at], kind.is_float)
        self.elements += old.size
        self.changed += at.size
        self.raw_bytes += old.nbytes
        self._steps += np.bincount(np.clip(steps, -_STEP, _STEP - 1) + _STEP, minlength=2 * _STEP + 1)
        shift, mask = old.dtype.type(kind.shift), old.dtype.type(kind.mask)
        population = np.bincount((old >> shift) & mask, minlength=256)
        contexts = ((old[at] >> shift) & mask).astype(np.int64)
        joint = np.bincount(contexts * 256 + np.clip(steps, -128, 127) + 128, minlength=256 * 256).reshape(
            256, 256
        )
        for context in np.flatnonzero(population).tolist():
            hits = int(joint[context].sum())
            if hits == 0:
                self._exponent_bits += 4
                continue
            split = np.array([hits, population[context] - hits])
            self._exponent_bits += _entropy(split) + _entropy(joint[context]) + 16

    def bounds(self) -> Bounds:
        """The bounds of what was added."""
        split = np.array([self.changed, self.elements - self.changed])
        order0 = _entropy(split) + _entropy(self._steps)
        return Bounds(self.elements, self.changed, self.raw_bytes, order0 / 8, self._exponent_bits / 8)
