"""The inner loops in numba: the base that runs everywhere, the same bits as native/codec.c. Imported late.

Compiled at first use per element width and cached on disk. Every kernel releases the GIL. Rows
(`coding.R_*`) hold addresses, so that a
whole batch is one call.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from weightline.codec import digest
from weightline.codec.bitruns import U64, jit
from weightline.codec.chunkcode import encode_chunk
from weightline.codec.chunkread import decode_chunk, finish_chunk
from weightline.codec.dtypes import address_of as _at
from weightline.codec.intrinsics import load64, over, trailing_zeros
from weightline.codec.stepcode import E_DENSE, E_RAW, contexts_of

Array = npt.NDArray[Any]
R_OLD, R_NEW, R_COUNT, R_START, R_OFFSET, R_HITS = range(6)
MAX_CLASSES = 256

A0, B0, S0, C0 = digest.A[0], digest.B[0], digest.S[0], digest.C[0]
A1, B1, S1, C1 = digest.A[1], digest.B[1], digest.S[1], digest.C[1]


@jit
def _digest_range(address: Any, count: Any, start: Any, out: Any, like: Any) -> None:
    bits = over(address, count, like.dtype)
    a0, b0, c0, a1, b1, c1 = U64(A0), U64(B0), U64(C0), U64(A1), U64(B1), U64(C1)
    i0 = U64(start) * a0 + U64(S0)
    i1 = U64(start) * a1 + U64(S1)
    s0 = U64(0)
    s1 = U64(0)
    for j in range(count):
        b = U64(bits[j])
        x = (i0 + U64(j) * a0) + b * b0
        x = (x ^ (x >> U64(32))) * c0
        s0 += x ^ (x >> U64(32))
        y = (i1 + U64(j) * a1) + b * b1
        y = (y ^ (y >> U64(32))) * c1
        s1 += y ^ (y >> U64(32))
    out[0] += s0
    out[1] += s1


@jit
def _mix0(i: Any, b: Any) -> Any:
    x = i * U64(A0) + U64(S0) + b * U64(B0)
    x = (x ^ (x >> U64(32))) * U64(C0)
    return x ^ (x >> U64(32))


@jit
def _mix1(i: Any, b: Any) -> Any:
    x = i * U64(A1) + U64(S1) + b * U64(B1)
    x = (x ^ (x >> U64(32))) * U64(C1)
    return x ^ (x >> U64(32))


@jit
def _digest_at(index: Any, base: Any, address: Any, count: Any, out: Any, like: Any) -> None:
    bits = over(address, count, like.dtype)
    places = over(index, count, np.int64)
    for j in range(count):
        i = U64(base) + U64(places[j])
        out[0] += _mix0(i, U64(bits[j]))
        out[1] += _mix1(i, U64(bits[j]))


@jit
def _digest_moves(start: Any, pos: Any, was: Any, now: Any, out: Any) -> None:
    s0 = U64(0)
    s1 = U64(0)
    for j in range(pos.size):
        i = U64(start) + U64(pos[j])
        s0 += _mix0(i, U64(now[j])) - _mix0(i, U64(was[j]))
        s1 += _mix1(i, U64(now[j])) - _mix1(i, U64(was[j]))
    out[0] = s0
    out[1] = s1


@jit
def _gather(source: Any, size: Any, index: Any, out: Any) -> None:
    values = over(source, size, out.dtype)
    places = over(index, out.size, np.int64)
    for j in range(out.size):
        out[j] = values[places[j]]


@jit
def _scatter(target: Any, index: Any, values: Any, count: Any) -> None:
    new = over(values, count, target.dtype)
    places = over(index, count, np.int64)
    for j in range(count):
        target[places[j]] = new[j]


@jit
def _scan_chunk(old: Any, new: Any, pos: Any, was: Any, now: Any) -> Any:
    n = old.size
    hits = np.int64(0)
    block = 128
    full = n // block
    width, each = U64(old.itemsize * 8), U64(old.itemsize)
    by = U64(trailing_zeros(each))
    ones = ~U64(0) >> (U64(64) - width)
    a, b = U64(old.ctypes.data), U64(new.ctypes.data)
    for k in range(full):
        at = k * block
        differs = old[0] ^ old[0]
        for j in range(block):
            differs |= old[at + j] ^ new[at + j]
        if differs != 0:
            # Eight bytes at a time: most have no change.
            first = U64(at) * each
            for w in range(first, first + U64(block) * each, U64(8)):
                x = load64(a + w) ^ load64(b + w)
                while x != U64(0):
                    i = U64(trailing_zeros(x)) >> (by + U64(3))
                    x &= ~(ones << (i * width))
                    j = np.int64((w >> by) + i)
                    pos[hits] = j
                    was[hits] = old[j]
                    now[hits] = new[j]
                    hits += 1
    for j in range(full * block, n):
        if old[j] != new[j]:
            pos[hits] = j
            was[hits] = old[j]
            now[hits] = new[j]
            hits += 1
    return hits


@jit
def _scan(rows: Any, pos: Any, was: Any, now: Any, lanes: Any) -> Any:
    at = np.int64(0)
    for r in range(len(rows)):
        row = rows[r]
        if at + row[R_COUNT] > pos.size:
            return r
        old, new = over(row[R_OLD], row[R_COUNT], was.dtype), over(row[R_NEW], row[R_COUNT], was.dtype)
        hits = _scan_chunk(old, new, pos[at:], was[at:], now[at:])
        row[R_OFFSET] = at
        row[R_HITS] = hits
        end = at + hits
        _digest_moves(row[R_START], pos[at:end], was[at:end], now[at:end], lanes[r])
        at = end
    return len(rows)


@jit
def _write(rows: Any, pos: Any, values: Any) -> None:
    for r in range(len(rows)):
        row = rows[r]
        target = over(row[R_OLD], row[R_COUNT], values.dtype)
        for j in range(row[R_OFFSET], row[R_OFFSET] + row[R_HITS]):
            target[pos[j]] = values[j]


@jit
def _narrow(master: Any, shadow: Any, new: Any) -> Any:
    """new = the bf16 of `master`; whether it differs from `shadow` anywhere. Equal lengths: the loop has no
    branch, so that it becomes vector code."""
    differs = np.uint16(0)
    for j in range(new.size):
        x = master[j]
        even = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nan = ((x >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7FC0)
        c = np.uint16(nan if (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else even)
        new[j] = c
        differs |= c ^ shadow[j]
    return differs != 0


@jit
def _cast_chunk(master: Any, shadow: Any, pos: Any, was: Any, now: Any) -> Any:
    hits = np.int64(0)
    block = 128
    room = np.empty(block, np.uint16)
    for at in range(0, master.size, block):
        stop = min(at + block, master.size)
        old, new = shadow[at:stop], room[: stop - at]
        if _narrow(master[at:stop], old, new):
            for j in range(new.size):
                if new[j] != old[j]:
                    pos[hits] = at + j
                    was[hits] = old[j]
                    now[hits] = new[j]
                    hits += 1
                    old[j] = new[j]
    return hits


@jit
def _cast(rows: Any, pos: Any, was: Any, now: Any, lanes: Any) -> Any:
    at = np.int64(0)
    for r in range(len(rows)):
        row = rows[r]
        if at + row[R_COUNT] > pos.size:
            return r
        master = over(row[R_NEW], row[R_COUNT], np.uint32)
        shadow = over(row[R_OLD], row[R_COUNT], np.uint16)
        hits = _cast_chunk(master, shadow, pos[at:], was[at:], now[at:])
        row[R_OFFSET] = at
        row[R_HITS] = hits
        end = at + hits
        _digest_moves(row[R_START], pos[at:end], was[at:end], now[at:end], lanes[r])
        at = end
    return len(rows)


def digest_range(bits: Array, start: int, lanes: Array) -> None:
    _digest_range(_at(bits), bits.size, np.uint64(start), lanes, np.empty(0, bits.dtype))


def digest_at(index: Array, base: int, bits: Array, lanes: Array) -> None:
    _digest_at(_at(index), np.uint64(base), _at(bits), bits.size, lanes, np.empty(0, bits.dtype))


def gather(source: Array, index: Array, out: Array) -> None:
    _gather(_at(source), source.size, _at(index), out)


def scatter(target: Array, index: Array, values: Array) -> None:
    _scatter(target, _at(index), _at(values), index.size)


def scan(rows: Array, pos: Array, was: Array, now: Array, lanes: Array) -> int:
    return int(_scan(rows, pos, was, now, lanes))


def write(rows: Array, pos: Array, values: Array) -> None:
    _write(rows, pos, values)


def cast(rows: Array, pos: Array, was: Array, now: Array, lanes: Array) -> int:
    return int(_cast(rows, pos, was, now, lanes))


def _contexts(row: Array, kind: tuple[int, int, int], like: Array) -> Array:
    out = np.empty(int(row[R_COUNT]), np.uint8)
    contexts_of(int(row[R_OLD]), out.size, like.dtype.type(kind[1]), like.dtype.type(kind[2]), out, like[:0])
    return out


def encode(
    rows: Array, pos: Array, was: Array, now: Array, kind: tuple[int, int, int], dense: bool,
    chunks: Array, classes: Array, out: Array, sizes: Array,
) -> int:  # fmt: skip
    raw = out.view(np.uint8)
    none = np.empty(0, np.uint8)
    at, used = 0, 0
    for r, row in enumerate(rows):
        total, first = int(row[R_COUNT]), int(row[R_OFFSET])
        worst = total * was.itemsize + total // 8 + 64
        if at + worst > raw.size or used + MAX_CLASSES > len(classes):
            sizes[:] = at, used
            return r
        chunks[r] = 0
        if row[R_HITS]:
            last = first + int(row[R_HITS])
            words = np.empty(worst // 8 + 16, np.uint64)
            encode_chunk(
                _contexts(row, kind, was) if dense else none, int(row[R_NEW] != 0), total, pos[first:last],
                was[first:last].astype(np.uint64), now[first:last].astype(np.uint64), *kind, int(dense),
                words, chunks[r], classes[used:], was.itemsize * 8,
            )  # fmt: skip
            nbytes = int(chunks[r, 3])
            if chunks[r, 0] == E_RAW:
                raw[at : at + nbytes] = np.frombuffer(ctypes.string_at(int(row[R_NEW]), nbytes), np.uint8)
            else:
                raw[at : at + nbytes] = words.view(np.uint8)[:nbytes]
            at, used = at + nbytes, used + int(chunks[r, 2])
    sizes[:] = at, used
    return len(rows)


@jit
def _decode(
    rows: Any, chunks: Any, classes: Any, is_float: Any, shift: Any, mask: Any, write: Any,
    words: Any, contexts: Any, scratch: Any, numbers: Any, sign: Any, pos: Any, was: Any, now: Any,
    lanes: Any,
) -> Any:  # fmt: skip
    """The rows in turn; see `decode`."""
    width = was.itemsize * 8
    maps, start, end = np.empty(256, np.int64), np.zeros(257, np.int64), np.zeros(257, np.int64)
    at = np.int64(0)
    used = np.int64(0)
    bad = np.int64(0)
    for r in range(len(rows)):
        row, hits = rows[r], np.int64(0)
        base = over(row[R_OLD], row[R_COUNT], was.dtype)
        if chunks[r, 0] != 0:
            nbytes = chunks[r, 3]
            over(words.ctypes.data, nbytes, np.uint8)[:] = over(row[R_NEW], nbytes, np.uint8)
            over(words.ctypes.data + nbytes, 24, np.uint8)[:] = 0
            bound = row[R_COUNT]
            if chunks[r, 0] != E_RAW:
                bound = np.int64(0)
                for c in range(used, used + chunks[r, 2]):
                    bound += classes[c, 2]
            if bound < 0 or bound > row[R_COUNT] or at + bound > pos.size:
                hits = np.int64(-1)
            elif chunks[r, 0] == E_RAW:
                hits = np.int64(-1)
                if nbytes == row[R_COUNT] * was.itemsize:
                    new = over(words.ctypes.data, row[R_COUNT], was.dtype)
                    hits = _scan_chunk(base, new, pos[at:], was[at:], now[at:])
                    if write:
                        base[:] = new
            else:
                few = contexts[:0]
                if chunks[r, 0] == E_DENSE:
                    few = contexts[: row[R_COUNT]]
                    for i in range(base.size):
                        few[i] = (U64(base[i]) >> U64(shift)) & U64(mask)
                hits = decode_chunk(
                    few, row[R_COUNT], words, nbytes * 8, chunks[r], classes[used:], scratch, numbers, sign,
                    maps, start, end, pos[at:], width,
                )  # fmt: skip
                if hits >= 0 and finish_chunk(
                    base, hits, chunks[r, 2], is_float, shift, mask, write, scratch[0], sign, maps, start,
                    end, pos[at:], was[at:], now[at:], width,
                ):  # fmt: skip
                    hits = np.int64(-2)
            if hits < 0:
                bad = -1 - r if hits == -1 else -(1 << 40) - r
                break
            used += chunks[r, 2]
        row[R_OFFSET] = at
        row[R_HITS] = hits
        stop = at + hits
        _digest_moves(row[R_START], pos[at:stop], was[at:stop], now[at:stop], lanes[r])
        at = stop
    if bad and write:
        r = -1 - bad if bad > -(1 << 40) else -(1 << 40) - bad
        _write(rows[:r], pos, was)
    return bad if bad else len(rows)


def decode(
    rows: Array, chunks: Array, classes: Array, kind: tuple[int, int, int], write: bool, longest: int,
    pos: Array, was: Array, now: Array, lanes: Array,
) -> int:  # fmt: skip
    """Rows in turn; with `write` the new bits of each are put into its base. Returns the rows done, -1 - row:
    damaged, -(1 << 40) - row: not this base; the old bits are back then."""
    counts = rows[:, R_COUNT]
    most = int(counts.max(initial=0))
    dense = most if (chunks[:, 0] == E_DENSE).any() else 0
    room = min(pos.size, most) + 8
    words = np.empty(longest // 8 + 4, np.uint64)
    return int(
        _decode(
            rows, chunks, classes, *kind, int(write), words, np.empty(dense, np.uint8),
            np.empty((2, room), np.uint64), np.empty((2, room), np.uint32), np.empty(room, np.uint8),
            pos, was, now, lanes,
        )
    )  # fmt: skip
