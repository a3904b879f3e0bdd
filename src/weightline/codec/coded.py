"""Delta files at the levels "fast" and "dense": coded chunks that are told relative to the base."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from weightline.codec import backend, digest
from weightline.codec.coding import (
    BATCH,
    CHUNK_LOG2,
    E_DENSE,
    E_FAST,
    E_NONE,
    K_FIELDS,
    R_COUNT,
    T_CLASSES,
    T_ENCODING,
    T_NBYTES,
    Coded,
    Piece,
    Rows,
    Segment,
    address_of,
    batches,
    decode,
    encode,
    hits_of,
    kind_of,
    rows_of,
)
from weightline.codec.container import INDEX, Mapped, broken, header_nbytes, pack_index, write_streams
from weightline.codec.delta import Delta, Source, Subset, TensorChange, check_change
from weightline.codec.diffing import by_dtype, sum_lanes
from weightline.codec.dtypes import SUPPORTED, Bits, bits_dtype, bits_of, count_of, spec_of, width_of
from weightline.codec.scanned import Scanned
from weightline.codec.tables import pack, unpack
from weightline.errors import FormatError, IntegrityError, InvalidInput
from weightline.types import TensorSpec

CHECK = 4
"""Leading bytes of each tensor's digests in the index; one hash over all of them in full stands beside."""


class CodedRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One changed tensor in the index of a coded file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    """Elements changed."""
    base_check: bytes
    """First CHECK bytes of the additive digest before."""
    check: bytes
    """The same afterwards."""


class CodedIndex(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The index of a coded file, as a MessagePack array."""

    base: int | None
    version: int | None
    chunk_log2: int
    base_check: bytes
    """`hash_digests` of the digests before, of all changed tensors."""
    check: bytes
    """The same afterwards."""
    tensors: tuple[CodedRecord, ...]


def hash_digests(digests: Mapping[str, str]) -> bytes:
    """16 bytes over name and digest of several tensors: SHA-256 of `name NUL digest LF`, sorted by name,
    cut."""
    lines = "".join(f"{name}\0{digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).digest()[:16]


def make_index(
    specs: Iterable[TensorSpec], counts: Mapping[str, int], digests: Mapping[str, tuple[str, str]],
    level: str, base: int | None, version: int | None,
) -> bytes:  # fmt: skip
    """The packed index stream."""
    records = tuple(
        CodedRecord(
            spec.name, spec.dtype, spec.shape, counts[spec.name],
            bytes.fromhex(digests[spec.name][0])[:CHECK], bytes.fromhex(digests[spec.name][1])[:CHECK],
        )
        for spec in specs
    )  # fmt: skip
    before = hash_digests({name: pair[0] for name, pair in digests.items()})
    after = hash_digests({name: pair[1] for name, pair in digests.items()})
    index = CodedIndex(base, version, CHUNK_LOG2[level], before, after, records)
    return pack_index(msgspec.msgpack.encode(index))


def _parts(source: Scanned, level: str, base: int | None, version: int | None) -> dict[str, list[bytes]]:
    """The streams of a scanned source that carries its coded form: chunks of unchanged tensors are left
    out."""
    chunks, classes, data = [], [], []
    names = {at: name for name, at in source.ordinals.items()}
    for segment in source.segments:
        if segment.coded is None:
            raise InvalidInput("this delta is not encoded", hint="make it with diff(…, level=…)")
        listed = np.array([names[piece.tensor] in source.specs for piece in segment.pieces], np.bool_)
        chunks.append(segment.coded.chunks[listed])
        classes.append(segment.coded.classes)
        data.append(segment.coded.data)
    ordered = [source.specs[name] for name in _file_order(source)]
    counts = {spec.name: source.count(spec.name) for spec in ordered}
    tables = pack(np.concatenate(chunks), np.concatenate(classes)) if chunks else b""
    index = make_index(ordered, counts, source.digests, level, base, version)
    return {"coded": data, "tables": [tables], INDEX: [index]}


def _file_order(source: Scanned) -> list[str]:
    """Names of the changed tensors in the order in which the segments come."""
    names = {at: name for name, at in source.ordinals.items()}
    seen = dict.fromkeys(piece.tensor for segment in source.segments for piece in segment.pieces)
    return [names[at] for at in seen if names[at] in source.specs]


def coded_nbytes(source: Scanned, base: int | None, version: int | None) -> int:
    """Bytes of the file of a delta that carries its coded form."""
    level = source.encoded or "fast"
    sizes = {name: sum(map(len, parts)) for name, parts in _parts(source, level, base, version).items()}
    sizes = {name: size for name, size in sizes.items() if size}
    return header_nbytes(sizes, level) + sum(sizes.values())


def write_coded(delta: Delta, path: Path, level: str, base: Mapping[str, Any] | None) -> int:
    """Write a delta at level "fast" or "dense"; returns the file's bytes."""
    source = delta.source
    if not (isinstance(source, Scanned) and source.encoded == level):
        source = encoded(delta, level, base)
    parts = _parts(source, level, delta.base, delta.version)
    return write_streams(path, {name: sum(map(len, p)) for name, p in parts.items()}, parts, level)


def _change_segments(change: TensorChange, at: int, level: str, base: Bits | None) -> list[Segment]:
    """The coded chunks of one tensor's changes."""
    spec, chunk = change.spec, 1 << CHUNK_LOG2[level]
    if change.index is None or change.old is None:
        raise InvalidInput(
            f"tensor {spec.name!r}: the old bits of its changes are not known",
            hint='pass base=, the weights the delta is against, or write it at level "absolute"',
        )
    size = count_of(spec)
    starts = np.arange(0, size, chunk)
    cuts = np.searchsorted(change.index, np.append(starts, size)).tolist()
    address = 0 if base is None else address_of(base)
    segments = []
    for k, start in enumerate(starts.tolist()):
        a, b = cuts[k], cuts[k + 1]
        piece = Piece(
            at, start, min(chunk, size - start), address + start * change.bits.itemsize if address else 0, 0
        )
        rows = rows_of([piece])
        rows[0, 5] = b - a
        pos = (change.index[a:b] - start).astype(np.uint32)
        was, now = np.ascontiguousarray(change.old[a:b]), np.ascontiguousarray(change.bits[a:b])
        segment = Segment([piece], rows, pos, was, now, np.zeros((1, 2), np.uint64), None)
        segments.append(segment._replace(coded=encode(segment, kind_of(spec.dtype), dense=level == "dense")))
    return segments


def encoded(delta: Delta, level: str, base: Mapping[str, Any] | None) -> Scanned:
    """A delta's changes in their coded form. `base` is needed for "dense", and where the old bits are not
    known."""
    if base is None and level == "dense":
        raise InvalidInput(
            'level "dense" needs the weights the delta is against',
            hint="pass base=, or make it with diff(…, level=…)",
        )
    specs = [delta.specs[name] for name in delta.changed]
    segments: list[Segment] = []
    digests: dict[str, tuple[str, str]] = {}
    for _, ordinals in by_dtype(specs):
        for at in ordinals:
            change = delta.change(specs[at].name)
            check_change(change)
            if base is not None and specs[at].name not in base:
                raise InvalidInput(
                    f"the base has no tensor {specs[at].name!r}", hint="pass the weights it is against"
                )
            bits = None if base is None else bits_of(base[specs[at].name])
            change = with_old(change, bits)
            segments += _change_segments(change, at, level, bits)
            digests[specs[at].name] = (str(change.base_digest), change.digest)
    return Scanned(specs, segments, digests, level)


def with_old(change: TensorChange, base: Bits | None) -> TensorChange:
    """The change as a sparse one with its old bits, taken from the base where it does not hold them."""
    if base is None or (change.old is not None and change.index is not None):
        return change
    if base.size != count_of(change.spec) or base.dtype != change.bits.dtype:
        raise InvalidInput(
            f"tensor {change.spec.name!r} has another shape in the base",
            hint="pass the weights it is against",
        )
    if change.index is None:
        index = np.flatnonzero(base != change.bits)
        return TensorChange(
            change.spec, index, change.bits[index], change.digest, digest.digest_of(base), base[index]
        )
    old = backend.gather(base, np.ascontiguousarray(change.index))
    return TensorChange(change.spec, change.index, change.bits, change.digest, change.base_digest, old)


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


def _base_bits(source: Source, base: Mapping[str, Any]) -> dict[str, Bits]:
    faults, bits = [], {}
    for name, spec in source.specs.items():
        if name not in base:
            faults.append(f"missing {name!r}")
            continue
        found = spec_of(name, base[name])
        if found != spec:
            faults.append(
                f"{name!r} is {found.dtype}{list(found.shape)}, the delta has {spec.dtype}{list(spec.shape)}"
            )
        else:
            bits[name] = bits_of(base[name])
    if faults:
        raise InvalidInput(
            f"the delta does not fit these tensors: {'; '.join(faults)}",
            hint="pass the weights it was made for",
        )
    return bits


def decoded_source(source: Source, base: Mapping[str, Any], digests: Mapping[str, str] | None) -> Scanned:
    """`Delta.decoded`: base checked, decoded, result checked."""
    return decode_bits(source, _base_bits(source, base), digests)


def decode_bits(source: Source, bits: Mapping[str, Bits], digests: Mapping[str, str] | None) -> Scanned:
    """The same, given the bits of tensors whose shapes are right."""
    file = source.parent if isinstance(source, Subset) else source
    if not isinstance(file, CodedFile):
        raise InvalidInput(f"level {source.level!r} cannot be decoded", hint="read the delta from its file")
    names = list(source.specs)
    carried = {} if digests is None else {name: digests[name] for name in names if name in digests}
    before = {name: carried.get(name) or digest.digest_of(bits[name]) for name in names}
    file.check_base(before)
    segments = file.decode(names, bits)
    gains = sum_lanes(segments)
    after = {}
    for at, name in enumerate(names):
        after[name] = digest.moved(before[name], gains[at]) if at in gains else before[name]
    file.check_digests(before, after)
    specs = [source.specs[name] for name in names]
    return Scanned(specs, segments, {name: (before[name], after[name]) for name in names})


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


__all__ = [
    "R_COUNT",
    "Coded",
    "CodedFile",
    "coded_nbytes",
    "decoded_source",
    "encoded",
    "open_coded",
    "write_coded",
]
