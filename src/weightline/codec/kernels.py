"""The inner loops in numba: the base that runs everywhere. Imported late; compiled on first use per element
width and cached on disk.

Every kernel takes its inputs read-only and releases the GIL, so that chunks run on threads. Positions are
offsets inside one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from numba import types as nt

_UINT = {1: nt.uint8, 2: nt.uint16, 4: nt.uint32, 8: nt.uint64}
U64 = np.uint64

# Constants of the two digest lanes: first 8 bytes (big-endian) of SHA-256("weightline digest lane <l>
# <letter>"), made odd.
A0, B0, S0, C0 = 0xD2B4130F5F20D123, 0x96582715A92284FD, 0xE7413F2FF84F515D, 0x8C2DC07002823359
A1, B1, S1, C1 = 0x6F20BBE878FD5F13, 0x4312407410415125, 0x1E30DD2C1FD0F03B, 0x97106B247A5F892D


def _in(width: int) -> Any:
    return nt.Array(_UINT[width], 1, "C", readonly=True)


def _ro(kind: Any) -> Any:
    return nt.Array(kind, 1, "C", readonly=True)


def _out(kind: Any) -> Any:
    return nt.Array(kind, 1, "C")


def _compiled(function: Callable[..., Any], *signature: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = nb.njit(signature, cache=True, nogil=True, boundscheck=False)(function)
    return compiled


def _digest_range(bits: Any, start: Any, out: Any) -> None:
    a0, b0, c0, a1, b1, c1 = U64(A0), U64(B0), U64(C0), U64(A1), U64(B1), U64(C1)
    i0 = U64(start) * a0 + U64(S0)
    i1 = U64(start) * a1 + U64(S1)
    s0 = U64(0)
    s1 = U64(0)
    for j in range(bits.size):
        b = U64(bits[j])
        x = (i0 + U64(j) * a0) + b * b0
        x = (x ^ (x >> U64(32))) * c0
        s0 += x ^ (x >> U64(32))
        y = (i1 + U64(j) * a1) + b * b1
        y = (y ^ (y >> U64(32))) * c1
        s1 += y ^ (y >> U64(32))
    out[0] += s0
    out[1] += s1


def _digest_at(index: Any, base: Any, bits: Any, out: Any) -> None:
    s0 = U64(0)
    s1 = U64(0)
    for j in range(bits.size):
        b = U64(bits[j])
        i = U64(base) + U64(index[j])
        x = i * U64(A0) + U64(S0) + b * U64(B0)
        x = (x ^ (x >> U64(32))) * U64(C0)
        s0 += x ^ (x >> U64(32))
        y = i * U64(A1) + U64(S1) + b * U64(B1)
        y = (y ^ (y >> U64(32))) * U64(C1)
        s1 += y ^ (y >> U64(32))
    out[0] += s0
    out[1] += s1


def _scan(old: Any, new: Any, positions: Any) -> Any:
    n = old.size
    count = 0
    block = 128
    full = n // block
    for k in range(full):
        at = k * block
        differs = old[0] ^ old[0]
        for j in range(block):
            differs |= old[at + j] ^ new[at + j]
        if differs != 0:
            for j in range(at, at + block):
                if old[j] != new[j]:
                    positions[count] = j
                    count += 1
    for j in range(full * block, n):
        if old[j] != new[j]:
            positions[count] = j
            count += 1
    return count


def _gather(source: Any, index: Any, out: Any) -> None:
    for j in range(index.size):
        out[j] = source[index[j]]


def _scatter(target: Any, index: Any, values: Any) -> None:
    for j in range(index.size):
        target[index[j]] = values[j]


@functools.cache
def digest_range(width: int) -> Callable[..., Any]:
    """(bits, start, out uint64[2]): adds the digest of `bits` at indexes start, start + 1, … to `out`."""
    return _compiled(_digest_range, _in(width), nt.uint64, _out(nt.uint64))


@functools.cache
def digest_at(width: int) -> Callable[..., Any]:
    """(index int64, base, bits, out uint64[2]): adds the digest of elements at base + index to `out`."""
    return _compiled(_digest_at, _ro(nt.int64), nt.uint64, _in(width), _out(nt.uint64))


@functools.cache
def scan(width: int) -> Callable[..., Any]:
    """(old, new, positions uint32): writes where they differ, ascending; returns how many."""
    return _compiled(_scan, _in(width), _in(width), _out(nt.uint32))


@functools.cache
def gather(width: int) -> Callable[..., Any]:
    """(source, index int64, out)."""
    return _compiled(_gather, _in(width), _ro(nt.int64), _out(_UINT[width]))


@functools.cache
def scatter(width: int) -> Callable[..., Any]:
    """(target, index int64, values)."""
    return _compiled(_scatter, _out(_UINT[width]), _ro(nt.int64), _in(width))
