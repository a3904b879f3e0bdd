"""Bits to one chunk, in numba: the same as decode_chunk in native/codec.c. Imported late."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import numpy as np

from weightline.codec.bitruns import (
    U64,
    get,
    get_gaps,
    get_values,
    jit,
)
from weightline.codec.intrinsics import ask
from weightline.codec.stepcode import (
    E_FAST,
    EXCEPTIONS,
    K_HI,
    K_K,
    K_LO,
    K_MODE,
    K_N,
    K_R,
    K_X,
    NEVER,
    ONES,
    PLAIN,
    RICE,
    T_CLASSES,
    T_ENCODING,
    T_K,
    context,
    disorder,
    order,
)

AHEAD = 256
"""Changes whose memory is asked for ahead."""


@jit
def find_ranks(contexts: Any, maps: Any, count: Any, fill: Any, end: Any, gaps: Any, pos: Any) -> Any:
    """Positions of a dense chunk: counts each class down to its next hit. Returns their number."""
    left = np.full(257, NEVER, np.int64)
    for c in range(count):
        if fill[c] < end[c]:
            left[c] = np.int64(gaps[fill[c]]) + 1
            fill[c] += 1
    hits = np.int64(0)
    for i in range(contexts.size):
        c = maps[contexts[i]]
        left[c] -= 1
        if left[c] == 0:
            pos[hits] = i
            hits += 1
            if fill[c] < end[c]:
                left[c] = np.int64(gaps[fill[c]]) + 1
                fill[c] += 1
            else:
                left[c] = NEVER
    return hits


@jit
def get_class(
    words: Any, at: Any, bits: Any, row: Any, m: Any, sign: Any, x: Any, other: Any, width: Any
) -> Any:
    """Signs and sizes of one class; returns the bit after them, or -1."""
    n = row[K_N]
    if row[K_MODE] == PLAIN:
        if at + n * width > bits:
            return np.int64(-1)
        for i in range(n):
            m[i] = get(words, at, width)
            at += width
            sign[i] = 2
        return at
    if at + n > bits:
        return np.int64(-1)
    for i in range(n):
        sign[i] = (words[at >> 6] >> U64(at & 63)) & U64(1)
        at += 1
    if row[K_MODE] == RICE:
        return get_values(words, at, bits, m, n, row[K_R], width)
    if row[K_MODE] != ONES and row[K_MODE] != EXCEPTIONS:
        return np.int64(-1)
    for i in range(n):
        m[i] = 0
    if row[K_MODE] == ONES:
        return at
    others = row[K_X]
    if others < 0 or others > n:
        return np.int64(-1)
    at = get_gaps(words, at, bits, other, others, row[K_R] >> 8)
    if at < 0:
        return at
    at = get_values(words, at, bits, x, others, row[K_R] & 255, width)
    if at < 0:
        return at
    p = np.int64(-1)
    for i in range(others):
        p += np.int64(other[i]) + 1
        if p >= n:
            return np.int64(-1)
        m[p] = U64(x[i]) + U64(1)
    return at


@jit
def decode_chunk(
    contexts: Any, total: Any, words: Any, bits: Any, chunk: Any, cls: Any, scratch: Any, numbers: Any,
    sign: Any, maps: Any, start: Any, end: Any, pos: Any, width: Any,
) -> Any:  # fmt: skip
    """Positions, and sizes and signs in class order. Returns the hits, -1: damaged bits, -2: not of this
    base."""
    count = chunk[T_CLASSES]
    gaps, other = numbers[0], numbers[1]
    m, x = scratch[0], scratch[1]
    if count < 1 or count > 256:
        return np.int64(-1)
    maps[:] = 255 if count > 255 else count
    n = np.int64(0)
    low = np.int64(0)
    for c in range(count):
        if cls[c, K_N] < 1 or cls[c, K_N] > total - n or cls[c, K_LO] < low:
            return np.int64(-1)
        if cls[c, K_HI] < cls[c, K_LO] or cls[c, K_HI] > 255:
            return np.int64(-1)
        for e in range(cls[c, K_LO], cls[c, K_HI] + 1):
            maps[e] = c
        low = cls[c, K_HI] + 1
        start[c] = n
        n += cls[c, K_N]
        end[c] = n
    if n > pos.size:
        return np.int64(-1)
    at = np.int64(0)
    if chunk[T_ENCODING] == E_FAST:
        at = get_gaps(words, at, bits, gaps, n, chunk[T_K])
        if at < 0:
            return at
        p = np.int64(-1)
        for j in range(n):
            p += np.int64(gaps[j]) + 1
            if p >= total:
                return np.int64(-1)
            pos[j] = p
    else:
        for c in range(count):
            at = get_gaps(words, at, bits, gaps[start[c] :], cls[c, K_N], cls[c, K_K])
            if at < 0:
                return at
        if find_ranks(contexts, maps, count, start.copy(), end, gaps, pos) != n:
            return np.int64(-2)
    for c in range(count):
        at = get_class(words, at, bits, cls[c], m[start[c] :], sign[start[c] :], x, other, width)
        if at < 0:
            return at
    if bits - at >= 8:
        return np.int64(-1)
    return n


@jit
def finish_chunk(
    base: Any, n: Any, count: Any, is_float: Any, shift: Any, mask: Any, write: Any, m: Any, sign: Any,
    maps: Any, start: Any, end: Any, pos: Any, was: Any, now: Any, width: Any,
) -> Any:  # fmt: skip
    """Old bits at the positions, and new bits from sizes and signs, put into `base` if `write`. Returns 0, or
    -2: they do not belong to this base, which is as it was."""
    full = ~U64(0) >> U64(64 - width)
    address, each = U64(base.ctypes.data), U64(width >> 3)
    for j in range(min(n, AHEAD)):
        ask(address + U64(pos[j]) * each)
    for j in range(n):
        ask(address + U64(pos[min(j + AHEAD, n - 1)]) * each)
        u = base[pos[j]]
        was[j] = u
        c = maps[context(u, shift, mask)]
        if c >= count or start[c] >= end[c]:
            if write:
                for i in range(j):
                    base[pos[i]] = was[i]
            return -2
        t = start[c]
        start[c] += 1
        o = order(U64(u), is_float, width)
        size = m[t] + U64(1)
        new = disorder((o - size if sign[t] & 1 else o + size) & full, is_float, width)
        now[j] = m[t] if sign[t] == 2 else new
        if write:
            base[pos[j]] = now[j]
    return 0
