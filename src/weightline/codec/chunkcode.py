"""One chunk to bits and back, in numba: the same as encode_chunk and decode_chunk in native/codec.c.
Imported late."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import numpy as np

from weightline.codec.bitruns import (
    U64,
    bitlen,
    gap_cost,
    gap_k,
    get,
    get_gaps,
    get_values,
    jit,
    put,
    put_gaps,
    put_values,
    value_cost,
    value_r,
)
from weightline.codec.intrinsics import over

ONES, RICE, EXCEPTIONS, PLAIN = 0, 1, 2, 3
E_FAST, E_DENSE, E_RAW = 1, 2, 3
OVERHEAD = 28 << 8
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
def choose_values(m: Any, n: Any, row: Any, x: Any, g: Any, width: Any) -> Any:
    """How one class of n steps is coded best: sets K_MODE, K_R, K_X; returns the bits, signs included."""
    others = np.int64(0)
    last = np.int64(-1)
    for i in range(n):
        if m[i]:
            x[others] = U64(m[i]) - U64(1)
            g[others] = i - last - 1
            last = i
            others += 1
    row[K_R] = 0
    row[K_X] = 0
    if others == 0:
        row[K_MODE] = ONES
        return n
    plain = n * width
    r, rice = value_r(m, n, width)
    rice += n
    if others < n:
        xk, gaps = gap_k(g, others)
        xr, sizes = value_r(x, others, width)
        exceptions = n + gaps + sizes + 2 * bitlen(U64(others))
        if exceptions < rice and exceptions < plain:
            row[K_MODE] = EXCEPTIONS
            row[K_R] = xr | (xk << 8)
            row[K_X] = others
            return exceptions
    if plain <= rice:
        row[K_MODE] = PLAIN
        return plain
    row[K_MODE] = RICE
    row[K_R] = r
    return rice


@jit
def find_classes(dense: Any, hits: Any, ones: Any, bits: Any, total: Any, cls: Any) -> Any:
    """Classes of exponents for `hits` changes: the cheapest partition by dynamic programming. Returns how
    many."""
    e = np.empty(256, np.int64)
    m = 0
    for i in range(256):
        if hits[i]:
            e[m] = i
            m += 1
    cost = np.zeros(257, np.int64)
    origin = np.zeros(257, np.int64)
    for j in range(1, m + 1):
        n = np.int64(0)
        o = np.int64(0)
        b = np.int64(0)
        everything = np.int64(0)
        cost[j] = -1
        for i in range(j - 1, -1, -1):
            n += hits[e[i]]
            o += ones[e[i]]
            b += bits[e[i]]
            for t in range(e[i], e[i + 1] if i + 1 < j else e[i] + 1):
                everything += total[t]
            c = cost[i] + OVERHEAD + value_cost(n, o, b)
            if dense:
                c += gap_cost(n, everything)
            if cost[j] < 0 or c < cost[j]:
                cost[j] = c
                origin[j] = i
    count = 0
    j = m
    while j > 0:
        count += 1
        j = origin[j]
    c = count
    j = m
    while j > 0:
        c -= 1
        n = np.int64(0)
        for i in range(origin[j], j):
            n += hits[e[i]]
        cls[c, K_LO] = e[origin[j]]
        cls[c, K_HI] = e[j - 1]
        cls[c, K_N] = n
        cls[c, K_K] = 0
        j = origin[j]
    return count


@jit
def rank_gaps(contexts: Any, pos: Any, n: Any, classes: Any, fill: Any, gaps: Any) -> None:
    """Gaps in the rank space of each class, in class order: fill[c] is the first free place of class c."""
    seen = np.zeros(257, np.int64)
    i = np.int64(0)
    for j in range(n):
        stop = np.int64(pos[j])
        while i < stop:
            seen[classes[contexts[i]]] += 1
            i += 1
        c = classes[contexts[i]]
        i += 1
        gaps[fill[c]] = seen[c]
        fill[c] += 1
        seen[c] = 0


@jit
def put_class(out: Any, bit: Any, row: Any, m: Any, sign: Any, x: Any, other: Any, width: Any) -> Any:
    """Signs and sizes of one class that is not PLAIN; returns the bit after them."""
    n = row[K_N]
    for i in range(n):
        out[bit >> 6] |= U64(sign[i]) << U64(bit & 63)
        bit += 1
    if row[K_MODE] == RICE:
        bit = put_values(out, bit, m, n, row[K_R], width)
    if row[K_MODE] == EXCEPTIONS:
        others = np.int64(0)
        last = np.int64(-1)
        for i in range(n):
            if m[i]:
                x[others] = U64(m[i]) - U64(1)
                other[others] = i - last - 1
                last = i
                others += 1
        bit = put_gaps(out, bit, other, others, row[K_R] >> 8)
        bit = put_values(out, bit, x, others, row[K_R] & 255, width)
    return bit


@jit
def write_chunk(
    out: Any, now: Any, n: Any, dense: Any, chunk: Any, cls: Any, count: Any, maps: Any, of: Any,
    gaps: Any, m: Any, sign: Any, x: Any, other: Any, width: Any,
) -> Any:  # fmt: skip
    """The bits of a chunk whose classes and parameters are chosen; returns how many."""
    bit = np.int64(0)
    at = np.int64(0)
    if dense:
        for c in range(count):
            bit = put_gaps(out, bit, gaps[at:], cls[c, K_N], cls[c, K_K])
            at += cls[c, K_N]
    else:
        bit = put_gaps(out, bit, gaps, n, chunk[T_K])
    at = 0
    for c in range(count):
        if cls[c, K_MODE] == PLAIN:
            for j in range(n):
                if maps[of[j]] == c:
                    put(out, bit, U64(now[j]), width)
                    bit += width
        else:
            bit = put_class(out, bit, cls[c], m[at:], sign[at:], x, other, width)
        at += cls[c, K_N]
    return bit


@jit
def encode_chunk(
    contexts: Any, raw: Any, total: Any, pos: Any, was: Any, now: Any, is_float: Any, shift: Any, mask: Any,
    dense: Any, out: Any, chunk: Any, cls: Any, width: Any,
) -> Any:  # fmt: skip
    """Sets `chunk` and `cls`; writes the coded bits to `out` (words); a raw chunk (where `raw` allows it) is
    not written.

    `was` and `now` are widened to uint64; `contexts` are those of the whole chunk (empty unless dense)."""
    numbers, scratch = np.empty((2, pos.size + 8), np.uint32), np.empty((2, pos.size + 8), np.uint64)
    n = pos.size
    gaps, other = numbers[0], numbers[1]
    m, x = scratch[0], scratch[1]
    of = np.empty(n, np.uint8)
    sign = np.empty(n, np.uint8)
    hits, ones, bits, everything = (
        np.zeros(256, np.int64),
        np.zeros(256, np.int64),
        np.zeros(256, np.int64),
        np.zeros(256, np.int64),
    )
    for j in range(n):
        _, size = step_of(was[j], now[j], is_float, width)
        e = context(was[j], shift, mask)
        of[j] = e
        hits[e] += 1
        ones[e] += 1 if size == U64(0) else 0
        bits[e] += bitlen(size)
    if dense:
        stride = (total >> 16) | 1
        for i in range(0, total, stride):
            everything[contexts[i]] += stride
    count = find_classes(dense, hits, ones, bits, everything, cls)
    maps = np.zeros(256, np.uint8)
    with_rest = np.full(256, min(count, 255), np.uint8)
    fill, start = np.zeros(257, np.int64), np.zeros(257, np.int64)
    at = np.int64(0)
    for c in range(count):
        for e in range(cls[c, K_LO], cls[c, K_HI] + 1):
            maps[e] = c
            with_rest[e] = c
        fill[c] = at
        start[c] = at
        at += cls[c, K_N]
    for j in range(n):
        c = maps[of[j]]
        down, size = step_of(was[j], now[j], is_float, width)
        sign[fill[c]] = 1 if down else 0
        m[fill[c]] = size
        fill[c] += 1
    total_bits = np.int64(0)
    if dense:
        fill[:] = start
        rank_gaps(contexts, pos, n, with_rest, fill, gaps)
    else:
        gaps[0] = pos[0]
        for j in range(1, n):
            gaps[j] = pos[j] - pos[j - 1] - np.uint32(1)
        chunk[T_K], total_bits = gap_k(gaps, n)
    for c in range(count):
        if dense:
            cls[c, K_K], b = gap_k(gaps[start[c] :], cls[c, K_N])
            total_bits += b
        total_bits += choose_values(m[start[c] :], cls[c, K_N], cls[c], x, other, width)
    if raw and total_bits >= total * width:
        chunk[T_ENCODING] = E_RAW
        chunk[T_NBYTES] = total * (width // 8)
        return chunk[T_NBYTES]
    for w in range(min((total_bits + 63) // 64 + 2, out.size)):
        out[w] = U64(0)
    bit = write_chunk(out, now, n, dense, chunk, cls, count, maps, of, gaps, m, sign, x, other, width)
    chunk[T_ENCODING] = E_DENSE if dense else E_FAST
    chunk[T_CLASSES] = count
    chunk[T_NBYTES] = (bit + 7) >> 3
    return chunk[T_NBYTES]


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
    address: Any, total: Any, n: Any, count: Any, is_float: Any, shift: Any, mask: Any, m: Any, sign: Any,
    maps: Any, start: Any, end: Any, pos: Any, was: Any, now: Any, width: Any,
) -> Any:  # fmt: skip
    """Old bits at the positions, and new bits from sizes and signs. Returns 0, -2: they do not belong to
    this base."""
    base = over(address, total, was.dtype)
    full = ~U64(0) >> U64(64 - width)
    for j in range(n):
        u = base[pos[j]]
        was[j] = u
        c = maps[context(u, shift, mask)]
        if c >= count or start[c] >= end[c]:
            return -2
        t = start[c]
        start[c] += 1
        if sign[t] == 2:
            now[j] = m[t]
        else:
            o = order(U64(u), is_float, width)
            size = m[t] + U64(1)
            now[j] = disorder((o - size if sign[t] else o + size) & full, is_float, width)
    return 0


@jit
def contexts_of(address: Any, count: Any, shift: Any, mask: Any, out: Any, like: Any) -> None:
    """The context of every element of a chunk."""
    base = over(address, count, like.dtype)
    for i in range(count):
        out[i] = (base[i] >> shift) & mask
