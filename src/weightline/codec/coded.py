"""Reading delta files at the levels "fast" and "dense": coded chunks that are told relative to the base."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from weightline.codec import backend
from weightline.codec.codedindex import CHECK, CodedIndex, hash_digests
from weightline.codec.coding import (
    BATCH,
    CHUNK_LOG2,
    E_DENSE,
    E_FAST,
    E_NONE,
    K_FIELDS,
    K_HI,
    T_CLASSES,
    T_ENCODING,
    T_NBYTES,
    Piece,
    Rows,
    Segment,
    cuts,
    decode,
    hits_of,
    kind_of,
    restore,
)  # fmt: skip
from weightline.codec.container import Mapped, broken
from weightline.codec.delta import Delta, TensorChange
from weightline.codec.diffing import by_dtype
from weightline.codec.dtypes import SUPPORTED, Bits, address_of, bits_dtype, width_of
from weightline.codec.tables import pack, unpack
from weightline.errors import FormatError, IntegrityError, InvalidInput
from weightline.types import TensorSpec


class CodedFile:
    """A mapped delta file at level "fast" or "dense"."""

    def __init__(self, mapped: Mapped, index: CodedIndex) -> None:
        self.path = mapped.path
        self.level = mapped.level
        self._nbytes = mapped.nbytes
        self.index = index
        self.records = {record.name: record for record in index.tensors}
        self._sizes = self._check_records()
        self.specs: Mapping[str, TensorSpec] = {
            r.name: TensorSpec(r.name, r.dtype, r.shape) for r in index.tensors
        }
        self.elements = sum(record.count for record in index.tensors)
        self._data = mapped.stream("coded")
        self._chunks, self._classes = self._read_tables(mapped)

    def _broken(self, what: str) -> FormatError:
        return broken(str(self.path), what)

    def _check_records(self) -> dict[str, int]:
        """Elements of each tensor."""
        index, sizes = self.index, {}
        if len(self.records) != len(index.tensors) or index.chunk_log2 != CHUNK_LOG2[self.level]:
            raise self._broken("a tensor is listed twice, or its chunks have an unknown size")
        if len(index.base_check) != 16 or len(index.check) != 16:
            raise self._broken("its digests are missing")
        for record in index.tensors:
            size = math.prod(record.shape)
            if min(record.shape, default=0) < 0 or record.dtype not in SUPPORTED:
                raise self._broken(
                    f"tensor {record.name!r} has dtype {record.dtype!r} and shape {list(record.shape)}"
                )
            if not 0 <= record.count <= size:
                raise self._broken(
                    f"tensor {record.name!r} of {size} elements declares {record.count} changes"
                )
            if len(record.base_check) != CHECK or len(record.check) != CHECK:
                raise self._broken(f"tensor {record.name!r} has no digest")
            sizes[record.name] = size
        return sizes

    def _read_tables(self, mapped: Mapped) -> tuple[Rows, Rows]:
        chunk = 1 << self.index.chunk_log2
        counts = [-(-size // chunk) for size in self._sizes.values()]
        expected = sum(counts)
        if expected > 8 * 1032 * mapped.nbytes:
            raise self._broken(f"it cannot hold {expected} chunks")
        data = mapped.stream("tables").tobytes()
        if not data:
            data = pack(np.empty((0, 4), np.int64), np.empty((0, K_FIELDS), np.int64))
        chunks, classes = unpack(data, expected, str(self.path))
        sizes = chunks[:, T_NBYTES]
        if int(sizes.sum()) != self._data.size or sizes.max(initial=0) > self._data.size:
            raise self._broken(f"its chunks need {int(sizes.sum())} bytes of {self._data.size}")
        wanted = E_DENSE if self.level == "dense" else E_FAST
        if (chunks[:, T_ENCODING] == E_DENSE + E_FAST - wanted).any():
            raise self._broken(f"a chunk is not of level {self.level}")
        self._first = dict(zip(self._sizes, accumulate(counts, initial=0), strict=False))
        self._offsets = np.concatenate([[0], np.cumsum(sizes)])
        self._class_offsets = np.concatenate([[0], np.cumsum(chunks[:, T_CLASSES])])
        return chunks, classes

    def measure(self, base: int | None, version: int | None) -> int:  # noqa: ARG002
        return self._nbytes

    def count(self, name: str) -> int:
        return self.records[name].count

    def change(self, name: str) -> TensorChange:
        raise InvalidInput(
            f"tensor {name!r} is told relative to its base in {self.path} (level {self.level})",
            hint="call delta.decoded(base), with the weights the delta is against",
        )

    def _table(self, names: Sequence[str], ordinals: Rows, places: Rows, elements: Rows) -> tuple[Rows, Rows]:
        """Pieces of the changed chunks of some tensors of one dtype, as a table, and the number of each chunk
        in the file."""
        size, width = 1 << self.index.chunk_log2, width_of(self.specs[names[0]].dtype)
        first = np.array([self._first[name] for name in names], np.int64)
        counts = -(-elements // size)
        of = np.repeat(np.arange(len(names)), counts)
        k = np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = first[of] + k
        kept = self._chunks[ids, T_ENCODING] != E_NONE
        of, start, ids = of[kept], k[kept] * size, ids[kept]
        table = np.empty((ids.size, len(Piece._fields)), np.int64)
        table[:, 0], table[:, 1] = ordinals[of], start
        table[:, 2] = np.minimum(size, elements[of] - start)
        table[:, 3] = places[of] + start * width
        table[:, 4] = self._offsets[ids] + (address_of(self._data) if self._data.size else 0)
        return table, ids

    def decode(self, names: Sequence[str], bits: Mapping[str, Bits], *, write: bool = False) -> list[Segment]:
        """The changes of some tensors, given their old bits; with `write`, put into `bits`: in the same pass,
        while the lines of each chunk are at hand, unless tensors share memory. Raises `IntegrityError`;
        nothing is written then."""
        places = np.array([address_of(bits[name]) for name in names], np.int64)
        elements = np.array([self._sizes[name] for name in names], np.int64)
        widths = np.array([width_of(self.records[name].dtype) for name in names], np.int64)
        direct = write and _apart(places, elements * widths)
        jobs: list[tuple[str, Rows, Rows]] = []
        for dtype, ordinals in by_dtype([self.specs[name] for name in names]):
            at = np.array(ordinals)
            table, ids = self._table([names[i] for i in ordinals], at, places[at], elements[at])
            # Nothing here takes scratch by the element, so batches are as large as the threads allow.
            share = int(table[:, 2].sum()) // (4 * backend.threads() if backend.threads() > 1 else 1)
            for a, b in cuts(table[:, 2].tolist(), max(share, BATCH)):
                jobs.append((dtype, table[a:b], ids[a:b]))
        done: list[Segment] = []

        def work(job: tuple[str, Rows, Rows]) -> Segment:
            segment = self._decode(*job, write=direct)
            done.append(segment)
            return segment

        try:
            segments = list(backend.map_ordered(work, jobs))
        except BaseException:
            for segment in done if direct else ():
                restore(segment)
            raise
        for segment in segments if write and not direct else ():
            backend.engine().write(segment.rows, segment.pos, segment.now)
        return segments

    def decode_one(self, name: str, k: int, old: Bits) -> Segment | None:
        """The changes of the k-th chunk of a tensor, given its old bits; None when it has none."""
        at = self._first[name] + k
        if self._chunks[at, T_ENCODING] == E_NONE:
            return None
        coded = address_of(self._data) + int(self._offsets[at])
        table = np.array([(0, k << self.index.chunk_log2, old.size, address_of(old), coded)], np.int64)
        return self._decode(self.specs[name].dtype, table, np.array([at]))

    def _decode(self, dtype: str, table: Rows, ids: Rows, *, write: bool = False) -> Segment:
        chunks, classes = self._chunks[ids], self._classes_of(ids)
        if (hits_of(chunks, classes, table[:, 2]) > table[:, 2]).any():
            raise self._broken("a chunk declares more changes than it has elements")
        if (classes[:, K_HI] > kind_of(dtype).mask).any():
            raise self._broken(f"a class has contexts that {dtype} does not have")
        where = f"delta file {self.path}"
        return decode(table, bits_dtype(dtype), kind_of(dtype), chunks, classes, where, write=write)

    def _classes_of(self, ids: Rows) -> Rows:
        """Classes of some chunks, given in ascending order."""
        run = self._classes[self._class_offsets[ids[0]] : self._class_offsets[ids[-1] + 1]]
        if len(run) == int(self._chunks[ids, T_CLASSES].sum()):
            return np.ascontiguousarray(run)  # empty chunks between have no classes
        parts = [self._classes[self._class_offsets[i] : self._class_offsets[i + 1]] for i in ids.tolist()]
        return np.ascontiguousarray(np.concatenate(parts))

    def check_base(self, before: Mapping[str, str]) -> None:
        """Compare digests of old tensors with what the file is against. Raises `IntegrityError`."""
        records = self.records
        wanted = b"".join([records[name].base_check for name in before]).hex()
        if wanted != "".join([found[: 2 * CHECK] for found in before.values()]):
            for name, found in before.items():
                if found[: 2 * CHECK] != records[name].base_check.hex():
                    raise _foreign(name, found)
        if len(before) == len(records) and hash_digests(before) != self.index.base_check:
            raise _foreign(next(iter(before), ""), "another")

    def check_after(self, after: Mapping[str, str]) -> None:
        """Compare digests of the result with those of the file. Raises `IntegrityError`."""
        records = self.records
        wanted = b"".join([records[name].check for name in after]).hex()
        if wanted != "".join([found[: 2 * CHECK] for found in after.values()]):
            raise self._wrong(
                next(n for n, found in after.items() if found[: 2 * CHECK] != records[n].check.hex())
            )
        if len(after) == len(records) and hash_digests(after) != self.index.check:
            raise self._wrong(next(iter(after), ""))

    def _wrong(self, name: str) -> IntegrityError:
        return IntegrityError(
            f"delta file {self.path}: tensor {name!r} does not decode to its digest",
            hint="the file or the base is damaged; take the full version",
        )


def _apart(places: Rows, nbytes: Rows) -> bool:
    """Whether no two tensors share memory."""
    order = np.argsort(places)
    begin, end = places[order], (places + nbytes)[order]
    return bool((end[:-1] <= begin[1:]).all())


def _foreign(name: str, found: str) -> IntegrityError:
    return IntegrityError(
        f"tensor {name!r} has digest {found}: it does not hold the delta's base",
        hint="fetch the delta for the version these weights hold, or the full version",
    )


def open_coded(mapped: Mapped) -> Delta:
    """The delta of a mapped coded file. Raises `FormatError`."""
    try:
        index = msgspec.msgpack.decode(mapped.index, type=CodedIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise broken(str(mapped.path), f"its index is no index ({error})") from None
    return Delta(CodedFile(mapped, index), base=index.base, version=index.version)
