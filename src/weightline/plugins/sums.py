"""The additive digest in numpy: the same value as `codec.digest`, computed where numba may not be.

    mix_l(i, b):  x = i*A_l + S_l + b*B_l;  x = (x ^ (x >> 32)) * C_l;  x ^ (x >> 32)      (all mod 2^64)

The digest is the sum of mix over all elements, so that parts (rows of a fused parameter, shards) add up to
the digest of the Hugging Face tensor as long as each element is taken at its index in that tensor.
`tests/vllm` holds it equal to the codec's.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[Any]
Lanes = tuple[int, int]

CHUNK = 1 << 15
"""Elements mixed at a time: two arrays of 256 KiB stay in the second-level cache."""
MASK = (1 << 64) - 1
ZERO: Lanes = (0, 0)


class _Lane(NamedTuple):
    a: int
    b: int
    s: int
    c: int


def _constant(lane: int, letter: str) -> int:
    seed = hashlib.sha256(f"weightline digest lane {lane} {letter}".encode()).digest()[:8]
    return int.from_bytes(seed, "big") | 1


_LANES = tuple(_Lane(*(_constant(lane, letter) for letter in "ABSC")) for lane in (0, 1))


@functools.cache
def _ramp(lane: int) -> npt.NDArray[np.uint64]:
    return np.arange(CHUNK, dtype=np.uint64) * np.uint64(_LANES[lane].a)


def _finish(x: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64], lane: _Lane) -> int:
    np.right_shift(x, np.uint64(32), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, np.uint64(lane.c), out=x)
    np.right_shift(x, np.uint64(32), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    return int(x.sum(dtype=np.uint64))


def of_range(bits: Bits, start: int) -> Lanes:
    """Lanes of contiguous elements (unsigned integers, 1-D) whose first one has index `start`."""
    total = [0, 0]
    x, y = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    for at in range(0, bits.size, CHUNK):
        piece = bits[at : at + CHUNK].astype(np.uint64)
        n = piece.size
        for k, lane in enumerate(_LANES):
            base = np.uint64(((start + at) * lane.a + lane.s) & MASK)
            np.multiply(piece, np.uint64(lane.b), out=x[:n])
            np.add(x[:n], _ramp(k)[:n], out=x[:n])
            np.add(x[:n], base, out=x[:n])
            total[k] += _finish(x[:n], y[:n], lane)
    return total[0] & MASK, total[1] & MASK


def of_elements(index: npt.NDArray[np.int64], bits: Bits) -> Lanes:
    """Lanes of single elements: bits[j] at index[j]."""
    total = [0, 0]
    x, y = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    for at in range(0, bits.size, CHUNK):
        piece = bits[at : at + CHUNK].astype(np.uint64)
        where = index[at : at + CHUNK].astype(np.uint64)
        n = piece.size
        for k, lane in enumerate(_LANES):
            np.multiply(where, np.uint64(lane.a), out=x[:n])
            np.multiply(piece, np.uint64(lane.b), out=y[:n])
            np.add(x[:n], y[:n], out=x[:n])
            np.add(x[:n], np.uint64(lane.s), out=x[:n])
            total[k] += _finish(x[:n], y[:n], lane)
    return total[0] & MASK, total[1] & MASK


def add(a: Lanes, b: Lanes) -> Lanes:
    """Digest of two disjoint parts together."""
    return (a[0] + b[0]) & MASK, (a[1] + b[1]) & MASK


def subtract(a: Lanes, b: Lanes) -> Lanes:
    """What is left of `a` when the elements of `b` are taken out."""
    return (a[0] - b[0]) & MASK, (a[1] - b[1]) & MASK


def render(lanes: Lanes) -> str:
    """32 hex digits, lane 0 first."""
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def parse(digest: str) -> Lanes:
    """The inverse of `render`. Raises `ValueError`."""
    if len(digest) != 32:
        raise ValueError(f"{digest!r} is not a tensor digest")
    return int(digest[:16], 16), int(digest[16:], 16)
