"""Chunks on their way through the kernels: scanned, encoded and decoded in batches on threads.

A batch is a table of rows, one a chunk, with the addresses of its elements; a kernel works through it
without coming back to Python.
Scratch is bounded by BATCH elements a thread. docs/codec.md specifies what the kernels write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from weightline.codec import backend
from weightline.codec.dtypes import Bits, address_of
from weightline.errors import IntegrityError, Unavailable

Rows = npt.NDArray[np.int64]
R_OLD, R_NEW, R_COUNT, R_START, R_OFFSET, R_HITS, R_FIELDS = range(7)
T_ENCODING, T_K, T_CLASSES, T_NBYTES, T_FIELDS = range(5)
K_LO, K_HI, K_N, K_K, K_MODE, K_R, K_X, K_FIELDS = range(8)
E_NONE, E_FAST, E_DENSE, E_RAW = range(4)
MAX_CLASSES = 256
BATCH = 1 << 23
"""Elements of a batch."""
BATCH_ROWS = 512
CHUNK_LOG2 = {"absolute": 20, "fast": 20, "dense": 22}
"""Elements of a chunk at each level, as a power of two."""
_DAMAGED, _FOREIGN, _MEMORY = -1, -(1 << 40), -(1 << 41)


class Kind(NamedTuple):
    """How the elements of a dtype are modelled."""

    is_float: int
    """1: sign and magnitude, put in order before steps are taken; 0: a plain integer."""
    shift: int
    mask: int
    """(bits >> shift) & mask is the context of an element: its exponent; mask 0: there is one context."""


_INTEGER = Kind(0, 0, 0)
KINDS: dict[str, Kind] = {
    "BF16": Kind(1, 7, 0xFF),
    "F16": Kind(1, 10, 0x1F),
    "F32": Kind(1, 23, 0xFF),
    "F64": Kind(1, 55, 0xFF),
    "F8_E4M3": Kind(1, 3, 0x0F),
    "F8_E5M2": Kind(1, 2, 0x1F),
}


def kind_of(dtype: str) -> Kind:
    """The model of a dtype; integers, bool and complex have one context."""
    return KINDS.get(dtype, _INTEGER)


class Piece(NamedTuple):
    """One chunk of one tensor."""

    tensor: int
    """Ordinal of the tensor in its list."""
    start: int
    elements: int
    old: int
    """Address of its old elements; 0: not at hand."""
    new: int
    """Address of its new elements; 0: not at hand. When decoding: of its coded bytes."""


class Coded(NamedTuple):
    """The encoded form of a batch."""

    chunks: Rows
    """T_FIELDS a chunk."""
    classes: Rows
    """K_FIELDS a class, in the order of the chunks."""
    data: bytes


class Segment(NamedTuple):
    """The changes of a batch: `pos` (offsets in the chunk), old and new bits, pooled over its chunks."""

    pieces: Sequence[Piece]
    rows: Rows
    pos: npt.NDArray[np.uint32]
    was: Bits
    now: Bits
    lanes: npt.NDArray[np.uint64]
    """What the digest of the tensor gains by each chunk, uint64[chunks, 2]."""
    coded: Coded | None


class Pieces(Sequence[Piece]):
    """Pieces that lie in a table (int64[n, fields of `Piece`]): a model has thousands of chunks, and whoever
    applies a delta looks at none of them one by one."""

    def __init__(self, table: Rows) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> Pieces: ...
    def __getitem__(self, at: int | slice) -> Piece | Pieces:
        return Pieces(self.table[at]) if isinstance(at, slice) else Piece._make(self.table[at].tolist())

    def __iter__(self) -> Iterator[Piece]:
        return map(Piece._make, self.table.tolist())


def tensors_of(pieces: Sequence[Piece]) -> npt.NDArray[np.int64]:
    """The tensor of each piece."""
    if isinstance(pieces, Pieces):
        return pieces.table[:, 0]
    return np.array([piece.tensor for piece in pieces], np.int64)


def pieces_of(tensor: int, old: Bits, new: Bits | None, chunk: int) -> Iterator[Piece]:
    """The chunks of one tensor. The arrays must stay alive and unmoved while the pieces are used."""
    width = old.itemsize
    before, after = address_of(old), 0 if new is None else address_of(new)
    for start in range(0, old.size, chunk):
        at = start * width
        yield Piece(tensor, start, min(chunk, old.size - start), before + at, after + at if after else 0)


def cuts(elements: Sequence[int], limit: int = 0) -> Iterator[tuple[int, int]]:
    """Consecutive pieces, given their elements, as [first, last) of together about `limit` elements (BATCH
    when 0)."""
    limit = limit or BATCH
    first = total = 0
    for at, more in enumerate(elements):
        if at > first and (total + more > limit or at - first == BATCH_ROWS):
            yield first, at
            first, total = at, 0
        total += more
    if first < len(elements):
        yield first, len(elements)


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces of together about BATCH elements."""
    pieces = list(pieces)
    for first, last in cuts([piece.elements for piece in pieces]):
        yield pieces[first:last]


def _rows(table: Rows) -> Rows:
    rows = np.zeros((len(table), R_FIELDS), np.int64)
    if len(table):
        rows[:, [R_START, R_COUNT, R_OLD, R_NEW]] = table[:, 1:]
    return rows


def rows_of(pieces: Sequence[Piece]) -> Rows:
    """The row table of a batch; offsets and hits are still zero."""
    return _rows(np.array(pieces, np.int64))


def scan(pieces: Sequence[Piece], dtype: np.dtype[Any]) -> Segment:
    """Compare old and new bits of a batch. The result owns exactly what it needs."""
    rows = rows_of(pieces)
    room = int(rows[:, R_COUNT].sum())
    pos = backend.scratch("pos", room, np.dtype(np.uint32))
    was, now = backend.scratch("was", room, dtype), backend.scratch("now", room, dtype)
    lanes = np.zeros((len(pieces), 2), np.uint64)
    backend.engine().scan(rows, pos, was, now, lanes)
    hits = int(rows[:, R_HITS].sum())
    return Segment(pieces, rows, pos[:hits].copy(), was[:hits].copy(), now[:hits].copy(), lanes, None)


def encode(segment: Segment, kind: Kind, *, dense: bool) -> Coded:
    """Encode a batch. For `dense` (and for raw chunks) its pieces must have their addresses."""
    rows, width = segment.rows, segment.was.itemsize
    chunks = np.zeros((len(rows), T_FIELDS), np.int64)
    worst = int((rows[:, R_COUNT] * width + rows[:, R_COUNT] // 8 + 64).max(initial=0))
    out = backend.scratch("coded", max(worst, 1 << 22) // 8 + 8, np.dtype(np.uint64))
    classes = backend.scratch("classes", 64 * MAX_CLASSES * K_FIELDS, np.dtype(np.int64)).reshape(
        -1, K_FIELDS
    )
    sizes = np.zeros(2, np.int64)
    data, tables, done = [], [], 0
    while done < len(rows):
        more = backend.engine().encode(
            rows[done:],
            segment.pos,
            segment.was,
            segment.now,
            kind,
            dense,
            chunks[done:],
            classes,
            out,
            sizes,
        )
        if more <= 0:
            raise Unavailable("no memory to encode a chunk", hint="free memory and try again")
        done += more
        data.append(out.view(np.uint8)[: sizes[0]].tobytes())
        tables.append(classes[: sizes[1]].copy())
    return Coded(
        chunks, np.concatenate(tables) if tables else np.empty((0, K_FIELDS), np.int64), b"".join(data)
    )


def hits_of(chunks: Rows, classes: Rows, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Upper bound of the changes in each chunk, from the tables: exact but for raw chunks."""
    sums = np.concatenate([[0], np.cumsum(classes[:, K_N])])
    ends = np.cumsum(chunks[:, T_CLASSES])
    hits = sums[ends] - sums[ends - chunks[:, T_CLASSES]]
    return np.asarray(np.where(chunks[:, T_ENCODING] == E_RAW, counts, hits))


def restore(segment: Segment) -> None:
    """Put the old bits of a decoded batch back into the memory it was decoded against."""
    backend.engine().write(segment.rows, segment.pos, segment.was)


def decode(
    table: Rows, dtype: np.dtype[Any], kind: Kind, chunks: Rows, classes: Rows, where: str,
    *, write: bool = False,
) -> Segment:  # fmt: skip
    """Decode a batch (a row of `Piece`'s fields for each chunk) against its base; with `write`, into it, in
    the same pass. Raises `IntegrityError` for damaged bits and for a base that they do not belong to; nothing
    is written then."""
    rows = _rows(table)
    room = int(hits_of(chunks, classes, rows[:, R_COUNT]).sum())
    pos, was, now = np.empty(room, np.uint32), np.empty(room, dtype), np.empty(room, dtype)
    lanes = np.zeros((len(rows), 2), np.uint64)
    longest = int(chunks[:, T_NBYTES].max(initial=0))
    done = backend.engine().decode(rows, chunks, classes, kind, write, longest, pos, was, now, lanes)
    if done <= _MEMORY:
        raise Unavailable("no memory to decode a chunk", hint="free memory and try again")
    if done <= _FOREIGN:
        raise IntegrityError(
            f"{where}: its changes do not belong to these weights", hint="fetch the full version"
        )
    if done != len(rows):
        raise IntegrityError(f"{where}: its coded bits are damaged", hint="fetch it again")
    hits = int(rows[:, R_HITS].sum())
    return Segment(Pieces(table), rows, pos[:hits], was[:hits], now[:hits], lanes, None)
