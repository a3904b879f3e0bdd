"""Comparing two sets of weights by their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from weightline.codec import backend, digest
from weightline.codec.coding import (
    CHUNK_LOG2,
    R_HITS,
    R_OFFSET,
    Piece,
    Segment,
    batches,
    encode,
    kind_of,
    pieces_of,
    scan,
)
from weightline.codec.delta import LEVELS, Delta, Held, TensorChange
from weightline.codec.dtypes import Bits, bits_dtype, bits_of, spec_of, specs_of
from weightline.codec.scanned import Scanned
from weightline.errors import InvalidInput
from weightline.types import TensorSpec


def require_same(old: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> None:
    """Raise `InvalidInput` that lists every name, dtype and shape in which two sets of weights differ."""
    faults = [f"missing {name!r}" for name in old if name not in new]
    faults += [f"unknown {name!r}" for name in new if name not in old]
    for name, spec in new.items():
        was = old.get(name)
        if was is not None and was != spec:
            faults.append(f"{name!r} was {was.dtype}{list(was.shape)}, is {spec.dtype}{list(spec.shape)}")
    if faults:
        raise InvalidInput(
            f"the weights do not match their base: {'; '.join(faults)}",
            hint="names, shapes and dtypes change only with a full version (anchor=True)",
        )


def check_options(level: str, threshold: float) -> None:
    """Raise `InvalidInput` for a level or threshold that does not exist."""
    if level not in LEVELS:
        raise InvalidInput(f"unknown level {level!r}", hint=f"use one of {', '.join(LEVELS)}")
    if not threshold >= 0.0:
        raise InvalidInput(f"threshold {threshold!r} is negative or NaN", hint="use 0 for a lossless delta")


def _above(segment: Segment, dtype: str, threshold: float) -> Segment:
    """The segment without changes that are too small to be sent."""
    from weightline.codec.threshold import keep

    kept = keep(dtype, segment.was, segment.now, threshold)
    if kept.all():
        return segment
    rows, lanes = segment.rows.copy(), segment.lanes.copy()
    pos, was, now = segment.pos[kept], segment.was[kept], segment.now[kept]
    before = np.concatenate([[0], np.cumsum(kept)])
    first = rows[:, R_OFFSET]
    rows[:, R_HITS] = before[first + rows[:, R_HITS]] - before[first]
    rows[:, R_OFFSET] = before[first]
    for at, piece in enumerate(segment.pieces):
        a, b = int(rows[at, R_OFFSET]), int(rows[at, R_OFFSET] + rows[at, R_HITS])
        index = pos[a:b].astype(np.int64)
        lanes[at] = backend.digest_at(index, piece.start, now[a:b]) - backend.digest_at(
            index, piece.start, was[a:b]
        )
    return Segment(segment.pieces, rows, pos, was, now, lanes, None)


def compare(batch: list[Piece], dtype: str, level: str, threshold: float) -> Segment:
    """Scan a batch of one dtype and encode it when `level` asks for it."""
    segment = scan(batch, bits_dtype(dtype))
    if threshold > 0.0:
        segment = _above(segment, dtype, threshold)
        # A raw chunk would send what the threshold leaves out.
        segment.rows[:, 1] = 0
    if level == "absolute":
        return segment
    return segment._replace(coded=encode(segment, kind_of(dtype), dense=level == "dense"))


def sum_lanes(segments: list[Segment]) -> dict[int, tuple[int, int]]:
    """What the digest of each changed tensor gains, by ordinal (not reduced modulo 2^64)."""
    total: dict[int, tuple[int, int]] = {}
    for segment in segments:
        lanes, hits = segment.lanes.tolist(), segment.rows[:, R_HITS].tolist()
        for piece, (one, other), count in zip(segment.pieces, lanes, hits, strict=True):
            if count:
                before = total.get(piece.tensor, (0, 0))
                total[piece.tensor] = (before[0] + one, before[1] + other)
    return total


def by_dtype(specs: list[TensorSpec]) -> Iterator[tuple[str, list[int]]]:
    """Ordinals of the tensors of each dtype: the order of tensors in a coded file."""
    groups: dict[str, list[int]] = {}
    for at, spec in enumerate(specs):
        groups.setdefault(spec.dtype, []).append(at)
    yield from groups.items()


def diff(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    old_digests: Mapping[str, str] | None = None,
    threshold: float = 0.0,
    level: str = "absolute",
) -> Delta:
    """What turns `old` into `new`, by comparing bits.

    Both map names to numpy or torch arrays of any layout with the same names, shapes and dtypes. The result
    owns its memory: 4 bytes
    and two elements for each changed element, and the encoded form when `level` is "fast" or "dense"
    (`write_delta` at that level
    then has nothing left to do). `old_digests` saves the recomputation of base digests.
    `threshold` > 0 leaves out changes of floats with |new - old| <= threshold * |old|; apply the delta to
    `old` to get the base of
    the next diff, so that what was left out is carried forward.

    Raises `InvalidInput` listing every mismatch.
    """
    check_options(level, threshold)
    named = specs_of(old)
    require_same(named, specs_of(new))
    specs = list(named.values())
    chunk = 1 << CHUNK_LOG2[level]
    before: list[Bits] = [bits_of(old[spec.name]) for spec in specs]
    after: list[Bits] = [bits_of(new[spec.name]) for spec in specs]
    segments: list[Segment] = []
    for dtype, ordinals in by_dtype(specs):
        pieces = [piece for at in ordinals for piece in pieces_of(at, before[at], after[at], chunk)]

        def work(batch: list[Piece], dtype: str = dtype) -> Segment:
            return compare(batch, dtype, level, threshold)

        segments.extend(backend.map_ordered(work, batches(pieces)))
    digests: dict[str, tuple[str, str]] = {}
    for at, gain in sorted(sum_lanes(segments).items()):
        name = specs[at].name
        known = None if old_digests is None else old_digests.get(name)
        base = known if known is not None else digest.digest_of(before[at])
        digests[name] = (base, digest.moved(base, gain))
    return Delta(Scanned(specs, segments, digests, None if level == "absolute" else level))


def full(weights: Mapping[str, Any], *, digests: Mapping[str, str] | None = None) -> Delta:
    """Every tensor in full. Borrows the memory of `weights` where the layout allows it: write or apply it
    before they change."""
    changes = []
    for name, array in weights.items():
        spec = spec_of(name, array)
        bits = bits_of(array)
        known = None if digests is None else digests.get(name)
        changes.append(TensorChange(spec, None, bits, known or digest.digest_of(bits), None))
    return Delta(Held(changes))
