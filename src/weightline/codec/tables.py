"""The tables of coded chunks as columns of variable-length integers, each column deflated by itself."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from weightline.codec.coding import (
    E_NONE,
    E_RAW,
    K_FIELDS,
    K_HI,
    K_K,
    K_LO,
    K_MODE,
    K_N,
    K_R,
    K_X,
    T_CLASSES,
    T_ENCODING,
    T_FIELDS,
    T_K,
    T_NBYTES,
    Rows,
)
from weightline.codec.container import MAX_INFLATE, broken

Ints = npt.NDArray[np.int64]


def varints(values: Ints) -> bytes:
    """LEB128 of non-negative integers."""
    values = values.astype(np.uint64)
    lengths = np.ones(values.size, np.int64)
    for byte in range(1, 9):
        lengths += values >= np.uint64(1 << (7 * byte))
    ends = np.cumsum(lengths)
    out = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    starts = ends - lengths
    for byte in range(9):
        has = lengths > byte
        if not has.any():
            break
        low = ((values[has] >> np.uint64(7 * byte)) & np.uint64(127)).astype(np.uint8)
        out[starts[has] + byte] = low | np.where(lengths[has] > byte + 1, 128, 0).astype(np.uint8)
    return out.tobytes()


def unvarints(data: bytes, where: str) -> Ints:
    """The inverse, for integers below 2^62. Raises `FormatError`."""
    raw = np.frombuffer(data, np.uint8)
    if raw.max(initial=0) < 128:
        return raw.astype(np.int64)
    ends = np.flatnonzero(raw < 128)
    if raw.size and (ends.size == 0 or ends[-1] != raw.size - 1):
        raise broken(where, "a table ends inside a number")
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: ends.size]
    lengths = ends - starts + 1
    if lengths.max(initial=0) > 8:
        raise broken(where, "a table holds a number that is too long")
    values = np.zeros(ends.size, np.int64)
    for byte in range(int(lengths.max(initial=0))):
        has = lengths > byte
        values[has] |= (raw[starts[has] + byte].astype(np.int64) & 127) << (7 * byte)
    return values


def _zigzag(values: Ints) -> Ints:
    return (values << 1) ^ (values >> 63)


def _unzigzag(values: Ints) -> Ints:
    return (values >> 1) ^ -(values & 1)


def _deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    return coder.compress(data) + coder.flush()


def _previous(values: Ints, chunk_of: Ints) -> Ints:
    """The value of the class before in the same chunk; 0 for the first."""
    before = np.concatenate([[0], values[:-1]]) if values.size else values
    same = np.concatenate([[False], chunk_of[1:] == chunk_of[:-1]]) if values.size else values.astype(bool)
    return np.asarray(np.where(same, before, 0))


def pack(chunks: Rows, classes: Rows) -> bytes:
    """The `tables` stream."""
    coded = chunks[chunks[:, T_ENCODING] != E_NONE]
    chunk_of = np.repeat(np.arange(len(coded)), coded[:, T_CLASSES])
    lo, hi, k = classes[:, K_LO], classes[:, K_HI], classes[:, K_K]
    step, before = lo - _previous(lo, chunk_of), _previous(k, chunk_of)
    columns = [
        chunks[:, T_ENCODING],
        coded[:, T_CLASSES],
        coded[:, T_NBYTES],
        coded[:, T_K],
        step,
        hi - lo,
        classes[:, K_N],
        # The chance of a change halves with each binade, so the best parameter of a gap run grows by one.
        _zigzag(k - np.where(before > 0, before + step, 0)),
        classes[:, K_MODE],
        classes[:, K_R],
        classes[:, K_X],
    ]
    return columns_to_bytes(columns)


def columns_to_bytes(columns: list[Ints]) -> bytes:
    """Each column: u32 packed bytes, u32 plain bytes, then DEFLATE without a wrapper."""
    out = []
    for column in columns:
        plain = varints(column)
        packed = _deflate(plain)
        out += [struct.pack("<II", len(packed), len(plain)), packed]
    return b"".join(out)


def bytes_to_columns(data: bytes, count: int, where: str) -> list[Ints]:
    """The inverse. Raises `FormatError`; what is declared is bounded by what is there before memory is
    taken."""
    columns, at = [], 0
    for _ in range(count):
        if at + 8 > len(data):
            raise broken(where, "its tables are cut short")
        packed, plain = struct.unpack_from("<II", data, at)
        at += 8
        if packed > len(data) - at or plain > MAX_INFLATE * packed + 64:
            raise broken(where, "a table declares more than there is")
        inflate = zlib.decompressobj(-15)
        try:
            column = inflate.decompress(data[at : at + packed], plain + 1)
        except zlib.error as error:
            raise broken(where, f"a table does not inflate ({error})") from None
        if len(column) != plain or not inflate.eof or inflate.unused_data:
            raise broken(where, "a table is not as long as it says")
        columns.append(unvarints(column, where))
        at += packed
    if at != len(data):
        raise broken(where, "its tables have a tail")
    return columns


def unpack(data: bytes, expected: int, where: str) -> tuple[Rows, Rows]:
    """Chunks and classes from the `tables` stream of a file with `expected` chunks. Raises `FormatError`."""
    columns = bytes_to_columns(data, 11, where)
    encoding, counts = columns[0], columns[1]
    has = encoding != E_NONE
    if encoding.size != expected or encoding.max(initial=0) > E_RAW:
        raise broken(where, f"its tables do not have the {expected} chunks of its tensors")
    total = int(counts.sum()) if counts.size and counts.max() <= 256 else -bool(counts.size)
    lengths = [column.size for column in columns]
    if lengths[1:4] != [int(has.sum())] * 3 or lengths[4:] != [total] * 7:
        raise broken(where, "its tables do not have equal columns")
    if (counts[encoding[has] == E_RAW] != 0).any() or (counts[encoding[has] != E_RAW] == 0).any():
        raise broken(where, "a chunk has classes that it cannot have")
    chunks = np.zeros((expected, T_FIELDS), np.int64)
    chunks[:, T_ENCODING] = encoding
    for field, column in ((T_CLASSES, 1), (T_NBYTES, 2), (T_K, 3)):
        chunks[has, field] = columns[column]
    return chunks, _classes(columns, counts, where)


def _classes(columns: list[Ints], counts: Ints, where: str) -> Rows:
    step, span, hits, k_code = columns[4], columns[5], columns[6], _unzigzag(columns[7])
    classes = np.zeros((step.size, K_FIELDS), np.int64)
    limits = (256, 256, 1 << 31, 1024, 3, 1 << 16, 1 << 31)
    if any(np.abs(column).max(initial=0) > limit for column, limit in zip(columns[4:], limits, strict=True)):
        raise broken(where, "a table holds a number that is too large")
    running = np.cumsum(step)
    first = np.repeat(np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)[: counts.size], counts)
    lo = running - (running[first] - step[first]) if step.size else step
    classes[:, K_LO], classes[:, K_HI], classes[:, K_N] = lo, lo + span, hits
    if k_code.any():
        k, before = [], 0
        starts = first.tolist()
        for at, (code, move) in enumerate(zip(k_code.tolist(), step.tolist(), strict=True)):
            before = 0 if starts[at] == at else before
            before = code + (before + move if before > 0 else 0)
            k.append(before)
        classes[:, K_K] = k
    classes[:, K_MODE], classes[:, K_R], classes[:, K_X] = columns[8], columns[9], columns[10]
    return classes
