"""One chunk to bits, in numba: the same as encode_chunk in native/codec.c. Imported late."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import numpy as np

from weightline.codec.bitruns import (
    CAP,
    U64,
    bitlen,
    gap_cost,
    gap_k,
    jit,
    put,
    put_gaps,
    put_values,
    value_cost,
    value_r,
)
from weightline.codec.stepcode import (
    E_DENSE,
    E_FAST,
    E_RAW,
    EXCEPTIONS,
    K_HI,
    K_K,
    K_LO,
    K_MODE,
    K_N,
    K_R,
    K_X,
    LATER,
    MANY,
    ONES,
    OVERHEAD,
    PLAIN,
    RICE,
    T_CLASSES,
    T_ENCODING,
    T_K,
    T_NBYTES,
    context,
    step_of,
)

TRIED = 8
"""Rice parameters that the choice of dense classes looks at."""


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
def dense_cost(n: Any, ones: Any, bits: Any, everything: Any, sums: Any, width: Any) -> Any:
    """What a dense class costs, but for its n signs, in 1/256 bit: `sums` has the quotients that its steps
    have with each of TRIED parameters, and those that the steps of more than one unit have with one unit
    less."""
    gaps = gap_cost(n, everything)
    others = n - ones
    least = (width - 1) * n
    fewest = width * others
    if gaps > everything << 8 and everything >= n:
        gaps = everything << 8  # in unary
    if others == 0:
        return gaps
    if bits > 8 * others:
        return gaps + value_cost(n, ones, bits)  # larger steps than the sums tell apart
    for r in range(TRIED):
        least = min(least, n * (r + 1) + sums[r])
        fewest = min(fewest, others * (r + 1) + sums[TRIED + r])
    least <<= 8
    if others < n:
        between = min(gap_cost(others, n), n << 8)
        least = min(least, between + ((fewest + 2 * bitlen(U64(others))) << 8))
    return gaps + least


@jit
def weigh(was: Any, now: Any, is_float: Any, shift: Any, mask: Any, width: Any, sums: Any) -> None:
    """Those sums for each exponent."""
    for j in range(was.size):
        _, size = step_of(was[j], now[j], is_float, width)
        if size == U64(0):
            continue
        row = sums[context(was[j], shift, mask)]
        for r in range(TRIED):
            q = size >> U64(r)
            less = (size - U64(1)) >> U64(r)
            row[r] += np.int64(q) if q < U64(CAP) else CAP + width
            row[TRIED + r] += np.int64(less) if less < U64(CAP) else CAP + width


@jit
def find_classes(
    dense: Any,
    hits: Any,
    ones: Any,
    bits: Any,
    total: Any,
    sums: Any,
    width: Any,
    overhead: Any,
    cls: Any,
) -> Any:
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
        some = np.zeros(2 * TRIED, np.int64)
        cost[j] = -1
        for i in range(j - 1, -1, -1):
            n += hits[e[i]]
            o += ones[e[i]]
            b += bits[e[i]]
            for t in range(e[i], e[i + 1] if i + 1 < j else e[i] + 1):
                everything += total[t]
            if dense:
                some += sums[e[i]]
                c = cost[i] + overhead + dense_cost(n, o, b, everything, some, width)
            else:
                c = cost[i] + overhead + value_cost(n, o, b)
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
    sums = np.zeros((256 if dense else 0, 2 * TRIED), np.int64)
    if dense:
        weigh(was, now, is_float, shift, mask, width, sums)
    overhead = LATER if dense and n >= MANY and n < total >> 8 else OVERHEAD
    count = find_classes(dense, hits, ones, bits, everything, sums, width, overhead, cls)
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
