"""Runs of numbers as bits, in numba: the same as the functions of these names in native/codec.c. Imported
late."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba as nb
import numpy as np

from weightline.codec.intrinsics import leading_zeros, load64, trailing_zeros

U64 = np.uint64
CAP = 24
MAXK = 24
F = TypeVar("F", bound=Callable[..., Any])


def _stamp() -> str:
    """One value over the sources of all kernels."""
    total = hashlib.sha256()
    for name in ("intrinsics", "bitruns", "stepcode", "chunkcode", "chunkread", "kernels", "digest"):
        total.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return total.hexdigest()


_STAMP = _stamp()


def jit(function: F) -> F:
    """Compile at first use; keep on disk; release the GIL.

    numba's cache notices a change of the file that a kernel is in, but not of the files whose kernels are
    inlined into it: here each
    entry carries a stamp over all of them."""
    compiled: F = nb.njit(cache=True, nogil=True, boundscheck=False)(function)
    cache_file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _STAMP
    return compiled


@jit
def bitlen(x: Any) -> Any:
    """Bits of x; 0 for 0."""
    if x == U64(0):
        return 0
    return 64 - np.int64(leading_zeros(U64(x)))


@jit
def lg(x: Any) -> Any:
    """log2(x) in 1/256, x >= 1: exponent and a linear fraction. Integers only, so that every backend decides
    alike."""
    h = bitlen(U64(x)) - 1
    f = U64(x) >> U64(h - 8) if h >= 8 else U64(x) << U64(8 - h)
    return h * 256 + np.int64(f & U64(255))


@jit
def gap_cost(n: Any, total: Any) -> Any:
    """Bits, in 1/256, of n gaps among `total` elements."""
    if total < n:
        total = n
    return n * (lg(total) - lg(n)) + n * 369


@jit
def value_cost(n: Any, ones: Any, bits: Any) -> Any:
    """Bits, in 1/256, of n steps, of which `ones` are one unit and the others are `bits` bits long in all."""
    others = n - ones
    c = np.int64(0)
    if others and ones:
        c = n * lg(n) - ones * lg(ones) - others * lg(others)
    return c + (bits + others) * 256


@jit
def put(out: Any, at: Any, value: Any, bits: Any) -> None:
    """Write the low `bits` bits of value (no others may be set) at bit `at` of zeroed words."""
    if bits == 0:
        return
    w = at >> 6
    s = at & 63
    out[w] |= U64(value) << U64(s)
    if s + bits > 64:
        out[w + 1] |= U64(value) >> U64(64 - s)


@jit
def get(words: Any, at: Any, bits: Any) -> Any:
    """Read `bits` bits at bit `at`."""
    if bits == 0:
        return U64(0)
    w = at >> 6
    s = at & 63
    v = words[w] >> U64(s)
    if s + bits > 64:
        v |= words[w + 1] << U64(64 - s)
    if bits < 64:
        v &= (U64(1) << U64(bits)) - U64(1)
    return v


@jit
def peek(address: Any, at: Any, low: Any) -> Any:
    """Up to 56 bits (`low`: that many ones) at bit `at` of padded words at an address, without a branch."""
    return (load64(address + U64(at >> 3)) >> U64(at & 7)) & low


@jit
def gap_k(g: Any, n: Any) -> Any:
    """The best parameter of a gap run, and its bits."""
    total = np.int64(0)
    for i in range(n):
        total += np.int64(g[i])
    mid = bitlen(U64(total // n)) if n else 0
    mid = mid - 1 if mid else 0
    best = 0
    least = np.int64(-1)
    for k in range(mid - 1 if mid else 0, mid + 2):
        if k > MAXK:
            break
        b = n * (k + 1)
        for i in range(n):
            b += np.int64(U64(g[i]) >> U64(k))
        if least < 0 or b < least:
            least = b
            best = k
    return best, max(least, 0)


@jit
def put_gaps(out: Any, at: Any, g: Any, n: Any, k: Any) -> Any:
    """All quotients in unary, then all remainders; returns the bit after them."""
    for i in range(n):
        at += np.int64(U64(g[i]) >> U64(k))
        out[at >> 6] |= U64(1) << U64(at & 63)
        at += 1
    low = (U64(1) << U64(k)) - U64(1)
    for i in range(n):
        put(out, at, U64(g[i]) & low, k)
        at += k
    return at


@jit
def get_gaps(words: Any, at: Any, bits: Any, g: Any, n: Any, k: Any) -> Any:
    """The bit after the run, or -1 when the bits end first or a gap is no number of 31 bits."""
    if n == 0:
        return at
    if at + n > bits or k < 0 or k > MAXK:
        return np.int64(-1)
    count = (bits + 63) >> 6
    w = at >> 6
    before = at
    now = words[w] & (~U64(0) << U64(at & 63))
    for i in range(n):
        while now == U64(0):
            w += 1
            if w >= count:
                return np.int64(-1)
            now = words[w]
        b = (w << 6) + np.int64(trailing_zeros(now))
        now &= now - U64(1)
        q = b - before
        if q >> (31 - k):
            return np.int64(-1)
        g[i] = q << k
        before = b + 1
    at = before
    if at + n * k > bits:
        return np.int64(-1)
    if k:
        place, low = U64(words.ctypes.data), (U64(1) << U64(k)) - U64(1)
        for i in range(n):
            g[i] |= np.uint32(peek(place, at, low))
            at += k
    return at


@jit
def value_r(m: Any, n: Any, width: Any) -> Any:
    """The best parameter of a value run, and its bits."""
    total = np.int64(0)
    for i in range(n):
        total += bitlen(U64(m[i]))
    mid = total // n if n else 0
    best = 0
    least = np.int64(-1)
    for r in range(mid - 1 if mid else 0, mid + 2):
        if r >= width:
            break
        b = n * (r + 1)
        for i in range(n):
            q = np.int64(min(U64(m[i]) >> U64(r), U64(CAP)))
            b += q if q < CAP else CAP + width
        if least < 0 or b < least:
            least = b
            best = r
    return best, max(least, 0)


@jit
def put_values(out: Any, at: Any, m: Any, n: Any, r: Any, width: Any) -> Any:
    """Quotients in unary (CAP: escape), remainders, escaped values in full; returns the bit after them."""
    for i in range(n):
        at += np.int64(min(U64(m[i]) >> U64(r), U64(CAP)))
        out[at >> 6] |= U64(1) << U64(at & 63)
        at += 1
    low = (U64(1) << U64(r)) - U64(1)
    for i in range(n):
        put(out, at, U64(m[i]) & low, r)
        at += r
    for i in range(n):
        if U64(m[i]) >> U64(r) >= U64(CAP):
            put(out, at, U64(m[i]), width)
            at += width
    return at


@jit
def get_values(words: Any, at: Any, bits: Any, m: Any, n: Any, r: Any, width: Any) -> Any:
    """The bit after the run, or -1 when the bits end first."""
    if n == 0:
        return at
    if at + n > bits or r < 0 or r >= width:
        return np.int64(-1)
    count = (bits + 63) >> 6
    w = at >> 6
    before = at
    escapes = np.int64(0)
    now = words[w] & (~U64(0) << U64(at & 63))
    for i in range(n):
        while now == U64(0):
            w += 1
            if w >= count:
                return np.int64(-1)
            now = words[w]
        b = (w << 6) + np.int64(trailing_zeros(now))
        now &= now - U64(1)
        q = b - before
        if q > CAP:
            return np.int64(-1)
        if q == CAP:
            escapes += 1
        m[i] = q
        before = b + 1
    at = before
    if at + n * r + escapes * width > bits:
        return np.int64(-1)
    full = at + n * r
    if not escapes and r <= 56:
        if r:
            place, low = U64(words.ctypes.data), (U64(1) << U64(r)) - U64(1)
            for i in range(n):
                m[i] = (U64(m[i]) << U64(r)) | peek(place, at + i * r, low)
        return full
    for i in range(n):
        if m[i] == CAP:
            m[i] = get(words, full, width)
            full += width
        else:
            m[i] = (U64(m[i]) << U64(r)) | get(words, at, r)
        at += r
    return full
