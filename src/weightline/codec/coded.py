"""Delta files at the levels "fast" and "dense", read: coded chunks that are told relative to the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    T_CLASSES,
    T_ENCODING,
    T_NBYTES,
    Piece,
    Rows,
    Segment,
    address_of,
    batches,
    decode,
    hits_of,
    kind_of,
)
from weightline.codec.container import Mapped, broken
from weightline.codec.delta import Delta, TensorChange
from weightline.codec.diffing import by_dtype
from weightline.codec.dtypes import SUPPORTED, Bits, bits_dtype, count_of, width_of
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
        self.specs: Mapping[str, TensorSpec] = {
            r.name: TensorSpec(r.name, r.dtype, r.shape) for r in index.tensors
        }
        self.records = {record.name: record for record in index.tensors}
        self.elements = sum(record.count for record in index.tensors)
        self._data = mapped.stream("coded")
        self._check_records()
        self._chunks, self._classes = self._read_tables(mapped)

    def _broken(self, what: str) -> FormatError:
        return broken(str(self.path), what)

    def _check_records(self) -> None:
        if len(self.records) != len(self.index.tensors) or self.index.chunk_log2 != CHUNK_LOG2[self.level]:
            raise self._broken("a tensor is listed twice, or its chunks have an unknown size")
        if len(self.index.base_check) != 16 or len(self.index.check) != 16:
            raise self._broken("its digests are missing")
        for record in self.index.tensors:
            if record.dtype not in SUPPORTED or any(side < 0 for side in record.shape):
                raise self._broken(
                    f"tensor {record.name!r} has dtype {record.dtype!r} and shape {list(record.shape)}"
                )
            size = count_of(self.specs[record.name])
            if not 0 <= record.count <= size:
                raise self._broken(
                    f"tensor {record.name!r} of {size} elements declares {record.count} changes"
                )
            if len(record.base_check) != CHECK or len(record.check) != CHECK:
                raise self._broken(f"tensor {record.name!r} has no digest")

    def _read_tables(self, mapped: Mapped) -> tuple[Rows, Rows]:
        chunk = 1 << self.index.chunk_log2
        counts = {name: -(-count_of(spec) // chunk) for name, spec in self.specs.items()}
        expected = sum(counts.values())
        if expected > 8 * 1032 * mapped.nbytes:
            raise self._broken(f"it cannot hold {expected} chunks")
        data = mapped.stream("tables").tobytes()
        if not data:
            data = pack(np.empty((0, 4), np.int64), np.empty((0, K_FIELDS), np.int64))
        chunks, classes = unpack(data, expected, str(self.path))
        if (
            int(chunks[:, T_NBYTES].sum()) != self._data.size
            or chunks[:, T_NBYTES].max(initial=0) > self._data.size
        ):
            raise self._broken(f"its chunks need {int(chunks[:, T_NBYTES].sum())} bytes of {self._data.size}")
        wanted = E_DENSE if self.level == "dense" else E_FAST
        if np.isin(chunks[:, T_ENCODING], [E_DENSE + E_FAST - wanted]).any():
            raise self._broken(f"a chunk is not of level {self.level}")
        self._first: dict[str, int] = {}
        at = 0
        ends = np.concatenate([[0], np.cumsum(chunks[:, T_NBYTES])])
        class_ends = np.concatenate([[0], np.cumsum(chunks[:, T_CLASSES])])
        for name, count in counts.items():
            self._first[name] = at
            at += count
        self._offsets: list[int] = ends.tolist()
        self._encodings: list[int] = chunks[:, T_ENCODING].tolist()
        self._class_offsets = class_ends
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

    def decode(self, names: Sequence[str], bits: Mapping[str, Bits]) -> list[Segment]:
        """The changes of some tensors, given their old bits. Raises `IntegrityError`."""
        specs = [self.specs[name] for name in names]
        size = 1 << self.index.chunk_log2
        jobs: list[tuple[str, list[Piece], Rows, Rows]] = []
        start_of_data = address_of(self._data) if self._data.size else 0
        for dtype, ordinals in by_dtype(specs):
            pieces, chunk_ids = [], []
            for at in ordinals:
                old, width = bits[specs[at].name], width_of(dtype)
                first, count = self._first[specs[at].name], -(-old.size // size)
                address = address_of(old)
                for k in range(count):
                    start = k * size
                    if self._encodings[first + k] == E_NONE:
                        continue
                    coded = start_of_data + self._offsets[first + k]
                    pieces.append(
                        Piece(at, start, min(size, old.size - start), address + start * width, coded)
                    )
                    chunk_ids.append(first + k)
            done = 0
            # Nothing here takes scratch by the element, so batches are as large as the threads allow.
            share = sum(piece.elements for piece in pieces) // (4 * backend.threads())
            for batch in batches(pieces, max(share, BATCH)):
                ids = chunk_ids[done : done + len(batch)]
                done += len(batch)
                jobs.append((dtype, batch, self._chunks[ids], self._classes_of(ids)))

        def work(job: tuple[str, list[Piece], Rows, Rows]) -> Segment:
            dtype, batch, chunks, classes = job
            self._check_hits(chunks, classes, batch)
            where = f"delta file {self.path}"
            return decode(batch, bits_dtype(dtype), kind_of(dtype), chunks, classes, where)

        return list(backend.map_ordered(work, jobs))

    def decode_one(self, name: str, k: int, old: Bits) -> Segment | None:
        """The changes of the k-th chunk of a tensor, given its old bits; None when it has none."""
        at = self._first[name] + k
        if self._encodings[at] == E_NONE:
            return None
        coded = address_of(self._data) + self._offsets[at]
        piece = Piece(0, k << self.index.chunk_log2, old.size, address_of(old), coded)
        spec = self.specs[name]
        chunks, classes = self._chunks[at : at + 1], self._classes_of([at])
        self._check_hits(chunks, classes, [piece])
        where = f"delta file {self.path}"
        return decode([piece], bits_dtype(spec.dtype), kind_of(spec.dtype), chunks, classes, where)

    def _check_hits(self, chunks: Rows, classes: Rows, pieces: list[Piece]) -> None:
        counts = np.array([piece.elements for piece in pieces])
        if (hits_of(chunks, classes, counts) > counts).any():
            raise self._broken("a chunk declares more changes than it has elements")

    def check_base(self, before: Mapping[str, str]) -> None:
        """Compare digests of old tensors with what the file is against. Raises `IntegrityError`."""
        for name, found in before.items():
            if found[: 2 * CHECK] != self.records[name].base_check.hex():
                raise _foreign(name, found)
        if len(before) == len(self.records) and hash_digests(before) != self.index.base_check:
            raise _foreign(next(iter(before), ""), "another")

    def check_digests(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Compare digests before and after with those of the file. Raises `IntegrityError`."""
        self.check_base(before)
        for name, found in after.items():
            if found[: 2 * CHECK] != self.records[name].check.hex():
                raise _wrong(self, name)
        if len(after) == len(self.records) and hash_digests(after) != self.index.check:
            raise _wrong(self, next(iter(after), ""))

    def _classes_of(self, ids: list[int]) -> Rows:
        if not ids:
            return np.empty((0, K_FIELDS), np.int64)
        run = self._classes[self._class_offsets[ids[0]] : self._class_offsets[ids[-1] + 1]]
        if len(run) == int(self._chunks[ids, T_CLASSES].sum()):
            return np.ascontiguousarray(run)  # empty chunks between have no classes
        parts = [self._classes[self._class_offsets[i] : self._class_offsets[i + 1]] for i in ids]
        return np.ascontiguousarray(np.concatenate(parts)) if parts else np.empty((0, K_FIELDS), np.int64)


def open_coded(mapped: Mapped) -> Delta:
    """The delta of a mapped coded file. Raises `FormatError`."""
    try:
        index = msgspec.msgpack.decode(mapped.index, type=CodedIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise broken(str(mapped.path), f"its index is no index ({error})") from None
    return Delta(CodedFile(mapped, index), base=index.base, version=index.version)


def _foreign(name: str, found: str) -> IntegrityError:
    return IntegrityError(
        f"tensor {name!r} has digest {found}: it does not hold the delta's base",
        hint="fetch the delta for the version these weights hold, or the full version",
    )


def _wrong(file: CodedFile, name: str) -> IntegrityError:
    return IntegrityError(
        f"delta file {file.path}: tensor {name!r} does not decode to its digest",
        hint="the file or the base is damaged; take the full version",
    )
