"""Delta files at the levels "fast" and "dense", written: changes to coded chunks, chunks to streams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weightline.codec import backend, digest
from weightline.codec.codedindex import make_index
from weightline.codec.coding import (
    CHUNK_LOG2,
    Piece,
    Segment,
    encode,
    kind_of,
    rows_of,
)
from weightline.codec.container import INDEX, header_nbytes, write_streams
from weightline.codec.delta import Delta, TensorChange, check_change
from weightline.codec.diffing import by_dtype
from weightline.codec.dtypes import Bits, address_of, bits_of, count_of
from weightline.codec.scanned import Scanned
from weightline.codec.tables import pack
from weightline.errors import InvalidInput


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
