"""What the index of a delta file says: which tensors change, and where their parts lie in the streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from weightline.codec import backend, digest
from weightline.codec.container import (
    INDEX,
    Mapped,
    broken,
    header_nbytes,
    pack_index,
    write_streams,
)
from weightline.codec.delta import Delta, TensorChange, check_change
from weightline.codec.dtypes import SUPPORTED, bits_dtype, count_of, width_of
from weightline.errors import FormatError, IntegrityError, InvalidInput
from weightline.types import TensorSpec

SPARSE, WHOLE = 0, 1
_PIECE = 1 << 20


class TensorRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One changed tensor in the index."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int
    """SPARSE: positions and values; WHOLE: every element."""
    count: int
    """Elements written."""
    digest: bytes
    """Additive digest afterwards, 16 bytes."""
    base_digest: bytes
    """The same before; empty for WHOLE."""


class FileIndex(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The index, as a MessagePack array."""

    base: int | None
    version: int | None
    tensors: tuple[TensorRecord, ...]


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % 8


def _position_dtype(size: int) -> np.dtype[Any]:
    return np.dtype("<u4" if size <= 1 << 32 else "<u8")


def _layout_of(change: TensorChange) -> int:
    if change.index is None:
        return WHOLE
    return SPARSE


def _record(change: TensorChange) -> TensorRecord:
    check_change(change)
    spec = change.spec
    digest.parse(change.digest)
    if change.index is not None and change.base_digest is None:
        raise InvalidInput(
            f"tensor {spec.name!r}: a sparse change needs the digest of its base", hint="set base_digest"
        )
    base = b"" if change.index is None else bytes.fromhex(change.base_digest or "")
    return TensorRecord(
        spec.name,
        spec.dtype,
        spec.shape,
        _layout_of(change),
        change.elements,
        bytes.fromhex(change.digest),
        base,
    )


def _sizes(records: Iterable[TensorRecord], index: bytes) -> dict[str, int]:
    sizes = {"whole": 0, "positions": 0, "values": 0}
    for record in records:
        width = width_of(record.dtype)
        if record.layout == WHOLE:
            sizes["whole"] += _padded(record.count * width)
        else:
            size = count_of(TensorSpec(record.name, record.dtype, record.shape))
            sizes["positions"] += _padded(record.count * _position_dtype(size).itemsize)
            sizes["values"] += _padded(record.count * width)
    sizes[INDEX] = len(index)
    return {name: size for name, size in sizes.items() if size}


def _plan(
    changes: Iterable[TensorChange], base: int | None, version: int | None
) -> tuple[dict[str, int], bytes]:
    records = tuple(_record(change) for change in changes)
    index = pack_index(msgspec.msgpack.encode(FileIndex(base, version, records)))
    return _sizes(records, index), index


def absolute_nbytes(
    changes: Iterable[TensorChange], base: int | None = None, version: int | None = None
) -> int:
    """Bytes of the file at level "absolute"."""
    sizes, _ = _plan(changes, base, version)
    return header_nbytes(sizes, "absolute") + sum(sizes.values())


def _with_padding(pieces: Iterable[Any], nbytes: int) -> Iterator[Any]:
    yield from pieces
    if nbytes % 8:
        yield bytes(-nbytes % 8)


def _positions(changes: Iterable[TensorChange]) -> Iterator[Any]:
    for change in changes:
        if change.index is not None:
            kind = _position_dtype(count_of(change.spec))
            parts = (change.index[a:b].astype(kind) for a, b in backend.ranges(change.index.size, _PIECE))
            yield from _with_padding(parts, change.index.size * kind.itemsize)


def _values(changes: Iterable[TensorChange], whole: bool) -> Iterator[Any]:
    for change in changes:
        if (change.index is None) == whole:
            yield from _with_padding([np.ascontiguousarray(change.bits)], change.bits.nbytes)


def write_absolute(delta: Delta, path: Path) -> int:
    """Write a delta at level "absolute"; returns the file's bytes."""
    sizes, index = _plan(delta.changes(), delta.base, delta.version)
    pieces: Mapping[str, Iterable[Any]] = {
        "whole": _values(delta.changes(), True),
        "positions": _positions(delta.changes()),
        "values": _values(delta.changes(), False),
        INDEX: [index],
    }
    return write_streams(path, sizes, pieces, "absolute")


class AbsoluteFile:
    """A delta file at level "absolute", mapped: changes are views of the mapping, but for the widened
    positions."""

    level = "absolute"

    def __init__(self, mapped: Mapped, index: FileIndex, *, verify: bool) -> None:
        self._mapped = mapped
        self.elements = sum(record.count for record in index.tensors)
        self.specs: Mapping[str, TensorSpec] = {
            r.name: TensorSpec(r.name, r.dtype, r.shape) for r in index.tensors
        }
        self._records = {record.name: record for record in index.tensors}
        self._places: dict[str, tuple[int, int]] = {}
        self._place(index)
        if verify:
            self._verify()

    def _broken(self, what: str) -> FormatError:
        return FormatError(
            f"delta file {self._mapped.path}: {what}", hint="the file is damaged; fetch it again"
        )

    def _place(self, index: FileIndex) -> None:
        """Offsets of each tensor, and that every declared size is one that the file has."""
        if len(self._records) != len(index.tensors):
            raise self._broken("a tensor is listed twice")
        at = {"whole": 0, "positions": 0, "values": 0}
        for record in index.tensors:
            self._check_record(record)
            width = width_of(record.dtype)
            size = count_of(self.specs[record.name])
            if record.layout == WHOLE:
                self._places[record.name] = (at["whole"], 0)
                at["whole"] += _padded(record.count * width)
            else:
                self._places[record.name] = (at["positions"], at["values"])
                at["positions"] += _padded(record.count * _position_dtype(size).itemsize)
                at["values"] += _padded(record.count * width)
        for name, nbytes in at.items():
            if nbytes != self._mapped.stream(name).size:
                raise self._broken(
                    f"stream {name} has {self._mapped.stream(name).size} bytes, its index needs {nbytes}"
                )

    def _check_record(self, record: TensorRecord) -> None:
        if record.dtype not in SUPPORTED or any(side < 0 for side in record.shape):
            raise self._broken(
                f"tensor {record.name!r} has dtype {record.dtype!r} and shape {list(record.shape)}"
            )
        size = count_of(self.specs[record.name])
        whole = record.layout == WHOLE
        if record.layout not in (SPARSE, WHOLE) or not (
            record.count == size if whole else 0 <= record.count <= size
        ):
            raise self._broken(f"tensor {record.name!r} of {size} elements declares {record.count}")
        if len(record.digest) != 16 or len(record.base_digest) != (0 if whole else 16):
            raise self._broken(f"tensor {record.name!r} has no digest")

    def _verify(self) -> None:
        whole = self._mapped.stream("whole")
        for record in self._records.values():
            if record.layout == WHOLE:
                change = self.change(record.name)
                begin = self._places[record.name][0] + change.bits.nbytes
                rest = whole[begin : begin + -change.bits.nbytes % 8]
                if digest.digest_of(change.bits) != change.digest or rest.any():
                    raise IntegrityError(
                        f"delta file {self._mapped.path}: tensor {record.name!r} differs from its digest",
                        hint="the file is damaged; fetch it again",
                    )

    def measure(self, base: int | None, version: int | None) -> int:  # noqa: ARG002
        return self._mapped.nbytes

    def count(self, name: str) -> int:
        return self._records[name].count

    def change(self, name: str) -> TensorChange:
        record, spec = self._records[name], self.specs[name]
        kind = bits_dtype(record.dtype)
        first, second = self._places[name]
        after = record.digest.hex()
        if record.layout == WHOLE:
            bits = self._mapped.stream("whole")[first : first + record.count * kind.itemsize].view(kind)
            return TensorChange(spec, None, bits, after, None)
        place = _position_dtype(count_of(spec))
        packed = self._mapped.stream("positions")[first : first + record.count * place.itemsize].view(place)
        bits = self._mapped.stream("values")[second : second + record.count * kind.itemsize].view(kind)
        index = packed.astype(np.int64)
        if not backend.ascending(index, count_of(spec)):
            raise self._broken(f"tensor {name!r} has positions that are not ascending within its shape")
        return TensorChange(spec, index, bits, after, record.base_digest.hex())


def open_absolute(mapped: Mapped, *, verify: bool) -> Delta:
    """The delta of a mapped file at level "absolute". Raises `FormatError` or `IntegrityError`."""
    try:
        index = msgspec.msgpack.decode(mapped.index, type=FileIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise broken(str(mapped.path), f"its index is no index ({error})") from None
    return Delta(AbsoluteFile(mapped, index, verify=verify), base=index.base, version=index.version)
