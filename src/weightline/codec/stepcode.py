"""Steps and contexts of elements, and the fields of the coded format, in numba: the alphabet of chunkcode and
chunkread. Imported late."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import numpy as np

from weightline.codec.bitruns import (
    U64,
    jit,
)
from weightline.codec.intrinsics import over

ONES, RICE, EXCEPTIONS, PLAIN = 0, 1, 2, 3
E_FAST, E_DENSE, E_RAW = 1, 2, 3
OVERHEAD, LATER, MANY = 28 << 8, 14 << 8, 128
K_LO, K_HI, K_N, K_K, K_MODE, K_R, K_X = range(7)
T_ENCODING, T_K, T_CLASSES, T_NBYTES = range(4)
NEVER = np.int64((1 << 63) - 1)


@jit
def order(u: Any, is_float: Any, width: Any) -> Any:
    """Bits of a float as an unsigned integer in the order of its values, within `width` bits."""
    if not is_float:
        return U64(u)
    sign = U64(1) << U64(width - 1)
    full = ~U64(0) >> U64(64 - width)
    return U64(u) ^ (full if U64(u) & sign else sign)


@jit
def disorder(v: Any, is_float: Any, width: Any) -> Any:
    """The inverse of `order`."""
    if not is_float:
        return U64(v)
    sign = U64(1) << U64(width - 1)
    full = ~U64(0) >> U64(64 - width)
    return U64(v) ^ (sign if U64(v) & sign else full)


@jit
def step_of(was: Any, now: Any, is_float: Any, width: Any) -> Any:
    """Whether the step is down, and its size less one."""
    full = ~U64(0) >> U64(64 - width)
    d = (order(now, is_float, width) - order(was, is_float, width)) & full
    down = (d >> U64(width - 1)) != U64(0)
    size = (U64(0) - d) & full if down else d
    return down, (size - U64(1)) & full


@jit
def context(u: Any, shift: Any, mask: Any) -> Any:
    """The exponent of an element."""
    return np.int64((U64(u) >> U64(shift)) & U64(mask))


@jit
def contexts_of(address: Any, count: Any, shift: Any, mask: Any, out: Any, like: Any) -> None:
    """The context of every element of a chunk."""
    base = over(address, count, like.dtype)
    for i in range(count):
        out[i] = (base[i] >> shift) & mask
