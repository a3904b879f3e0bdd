"""The additive digest of a tensor: a sum over its elements, so it is cheap to update and blind to order.

    lane l:  D_l = sum over elements of mix_l(i, b)  (mod 2^64)
    mix_l(i, b):  x = i*A_l + S_l + b*B_l;  x = (x ^ (x >> 32)) * C_l;  x ^ (x >> 32)      (all mod 2^64)

i is the element's C-order index in the Hugging Face tensor, b its bits (zero-extended). A digest is written
as 32 hex digits, lane 0
first. It detects accidents, not forgers; collisions are reasoned about in
docs/design/0002-absolute-encoding-and-digest.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from weightline.codec import backend
from weightline.codec.dtypes import Bits
from weightline.errors import InvalidInput
from weightline.types import TensorSpec

A = (0xD2B4130F5F20D123, 0x6F20BBE878FD5F13)
B = (0x96582715A92284FD, 0x4312407410415125)
S = (0xE7413F2FF84F515D, 0x1E30DD2C1FD0F03B)
C = (0x8C2DC07002823359, 0x97106B247A5F892D)
"""Constants of the lanes: first 8 bytes (big-endian) of SHA-256("weightline digest lane <l> <letter>"), made
odd."""
EMPTY = "0" * 32
"""Digest of a tensor without elements."""
_HEX = re.compile(r"[0-9a-f]{32}")
_MASK = (1 << 64) - 1


def parse(digest: str) -> npt.NDArray[np.uint64]:
    """The two lanes of a hex digest. Raises `InvalidInput` for anything but 32 lower-case hex digits."""
    if not _HEX.fullmatch(digest):
        raise InvalidInput(f"{digest!r} is not a tensor digest", hint="a digest is 32 lower-case hex digits")
    return np.array([int(digest[:16], 16), int(digest[16:], 16)], np.uint64)


def render(lanes: npt.NDArray[np.uint64]) -> str:
    """The hex form of two lanes."""
    return f"{int(lanes[0]):016x}{int(lanes[1]):016x}"


def combine(digests: Iterable[str]) -> str:
    """Digest of a tensor from those of its disjoint parts (shards, rows, element ranges), each taken at its
    own indexes."""
    lanes = [0, 0]
    for digest in digests:
        part = parse(digest)
        lanes = [(lanes[0] + int(part[0])) & _MASK, (lanes[1] + int(part[1])) & _MASK]
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def difference(digest: str, part: str) -> str:
    """What is left of `digest` when the elements that `part` covers are taken out."""
    a, b = parse(digest), parse(part)
    return f"{(int(a[0]) - int(b[0])) & _MASK:016x}{(int(a[1]) - int(b[1])) & _MASK:016x}"


def moved(digest: str, gain: tuple[int, int]) -> str:
    """A digest whose lanes gain what some changes add."""
    lanes = int(digest, 16)
    return f"{((lanes >> 64) + gain[0] & _MASK) << 64 | (lanes + gain[1] & _MASK):032x}"


def digest_of(bits: Bits, *, start: int = 0) -> str:
    """Digest of `bits` (`bits_of`), whose first element has index `start` in its tensor. Chunks run on
    threads."""
    return render(backend.digest_range(bits, start))


def digest_at(index: npt.NDArray[np.int64], bits: Bits) -> str:
    """Digest of single elements: bits[j] at index[j]. The order does not matter."""
    if index.shape != bits.shape:
        raise InvalidInput(f"{index.size} indexes for {bits.size} elements", hint="give one index an element")
    return render(backend.digest_at(np.ascontiguousarray(index, np.int64), 0, bits))


def digest_rows(bits: Bits, rows: npt.NDArray[np.int64], columns: int, *, first: int = 0) -> str:
    """Digest of a part of a matrix with `columns` columns: row r of `bits` (flat, shape [len(rows), width])
    holds the columns
    first … first + width - 1 of row rows[r] of the tensor.

    The way to check a slice of a fused or tensor-parallel parameter against the digest of the Hugging Face
    tensor it holds: parts of
    one tensor `combine`. Raises `InvalidInput` when the sizes do not fit.
    """
    rows = np.asarray(rows, np.int64)
    width = bits.size // rows.size if rows.size else 0
    if bits.size != rows.size * width or first < 0 or first + width > columns:
        raise InvalidInput(
            f"{bits.size} elements are not {rows.size} rows of at most {columns - first} columns",
            hint="give one index a row",
        )
    lanes = np.zeros(2, np.uint64)
    if not width:
        return render(lanes)
    table = bits.reshape(rows.size, width)
    if width == columns:
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), rows.size], strict=True):
            lanes += backend.digest_range(table[begin:end].reshape(-1), int(rows[begin]) * columns)
        return render(lanes)
    inside = np.arange(first, first + width)
    step = max(1, backend.CHUNK // width)
    for begin in range(0, rows.size, step):
        index = (rows[begin : begin + step, None] * columns + inside).reshape(-1)
        lanes += backend.digest_at(index, 0, table[begin : begin + step].reshape(-1))
    return render(lanes)


def digest_update(digest: str, index: npt.NDArray[np.int64], old_bits: Bits, new_bits: Bits) -> str:
    """Digest after the elements at `index` went from `old_bits` to `new_bits`, in time proportional to their
    number."""
    index = np.ascontiguousarray(index, np.int64)
    lanes = parse(digest) + backend.digest_at(index, 0, new_bits) - backend.digest_at(index, 0, old_bits)
    return render(lanes)


def weights_digest(items: Iterable[tuple[TensorSpec, str]]) -> str:
    """One value for a whole version: SHA-256 over its tensors sorted by name, each as a line `name NUL dtype
    NUL shape NUL digest`."""
    total = hashlib.sha256()
    for spec, digest in sorted(items, key=lambda item: item[0].name):
        shape = ",".join(str(side) for side in spec.shape)
        total.update("\0".join((spec.name, spec.dtype, shape, digest)).encode() + b"\n")
    return total.hexdigest()


def narrow(bits_or_array: Any, dtype: str) -> Bits:
    """Bits, in `dtype`, of a tensor held in a wider float dtype. Raises `InvalidInput` when some value does
    not narrow exactly.

    bf16, fp16 and fp8 in fp32 or fp64; fp32 in fp64. NaN must be one that the widening cast gives (payload
    in the leading bits).
    """
    from weightline.codec.narrowing import narrow_exactly

    return narrow_exactly(bits_or_array, dtype)
