"""One value for each token of a batch, or for each output: versions, staleness, masks, ages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from msgspec import Struct

from weightline.core import staleness as lines
from weightline.errors import InvalidInput, VersionNotFound
from weightline.spans.ragged import Span, SpanBatch, batch
from weightline.types import VersionRecord

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Array = NDArray[Any] | torch.Tensor

Like = Literal["numpy", "torch"]


class HasVersions(Protocol):
    """A line, or a store."""

    def versions(self) -> Sequence[VersionRecord]:
        """All committed versions."""
        ...


class Lineage(Struct, frozen=True):
    """What labels mean, and what each version was made from."""

    labels: Mapping[str, int]
    """Label -> version."""
    parents: Mapping[int, int | None] | None
    """Version -> the version that training went on from. None: each from the one before it in number."""


Source = HasVersions | Lineage | Mapping[str, int]


def as_batch(spans: SpanBatch | Iterable[Span]) -> SpanBatch:
    """A batch as it is, or one of the spans of a single output."""
    return spans if isinstance(spans, SpanBatch) else batch([spans])


def lineage_of(source: Source) -> Lineage:
    """What a source says of labels and parents."""
    if isinstance(source, Lineage):
        return source
    if isinstance(source, Mapping):
        return Lineage(source, None)
    records = source.versions()
    return Lineage({r.label: r.version for r in records}, {r.version: r.parent for r in records})


def versions_of(spans: SpanBatch, lineage: Lineage) -> Integers:
    """int64 [labels]: the version of each distinct label."""
    found = np.empty(len(spans.labels), np.int64)
    for i, label in enumerate(spans.labels):
        version = lineage.labels.get(label)
        if version is None:
            span = int(np.flatnonzero(spans.code == i)[0])
            raise VersionNotFound(
                f"{spans.place(span)}: no version has the label {label!r}",
                hint="resolve labels through the store of their own run, or add the label to the mapping",
            )
        found[i] = version
    return found


def _spread(spans: SpanBatch, values: NDArray[Any], like: Like, device: object) -> Array:
    """`values` [spans] as one value a token."""
    flat = np.repeat(values, spans.lengths)
    if like == "numpy":
        return flat
    if like != "torch":
        raise InvalidInput(f"like is {like!r}", hint="like is numpy or torch")
    import torch

    tensor = torch.from_numpy(flat)
    return tensor if device is None else tensor.to(device)  # type: ignore[call-overload]


def per_token(
    spans: SpanBatch | Iterable[Span],
    source: Source | None = None,
    *,
    like: Like = "numpy",
    device: object = None,
) -> Array:
    """The version of every token, int64 [tokens]; without a source its label (an array of `str`, numpy only).

    Raises `VersionNotFound` for a label that the source does not know, naming request and token, and
    `InvalidInput` as `batch`.
    """
    flat = as_batch(spans)
    if source is None:
        return _spread(flat, np.array(flat.labels, dtype=object)[flat.code], like, device)
    return _spread(flat, versions_of(flat, lineage_of(source))[flat.code], like, device)


def _ages(spans: SpanBatch, now: int | Sequence[int] | Integers, source: Source) -> Integers:
    """int64 [spans]: steps along the lineage between each span's version and `now`."""
    lineage = lineage_of(source)
    versions = versions_of(spans, lineage)
    current = np.asarray(now)
    typed = current.dtype.kind in "iu" or not current.size
    if not typed or current.shape not in ((), (len(spans),)):
        raise InvalidInput(
            f"now has shape {current.shape} and dtype {current.dtype} for {len(spans)} outputs",
            hint="give one version, or one an output",
        )
    target = np.broadcast_to(current, (len(spans),))[spans.owner] if len(spans) else np.empty(0, np.int64)
    pairs, where = np.unique(np.stack((versions[spans.code], target)), axis=1, return_inverse=True)
    if lineage.parents is None:
        steps = np.abs(pairs[0] - pairs[1])
    else:
        both = pairs.T.tolist()
        steps = np.array([lines.distance(lineage.parents, a, b) for a, b in both], np.int64)
    found: Integers = steps[where.reshape(-1)]
    return found


def staleness(
    spans: SpanBatch | Iterable[Span],
    now: int | Sequence[int] | Integers,
    source: Source,
    *,
    like: Like = "numpy",
    device: object = None,
) -> Array:
    """Training steps between the version that sampled each token and `now`, int64 [tokens].

    Along the lineage, not the numbers: after a rewind a token of an abandoned version counts its steps off
    the line, too. `now`: the version that is trained on (one, or one for each output). Raises
    `VersionNotFound` and `InvalidInput`.
    """
    flat = as_batch(spans)
    return _spread(flat, _ages(flat, now, source), like, device)


def mask(
    spans: SpanBatch | Iterable[Span],
    source: Source,
    *,
    now: int | Sequence[int] | Integers | None = None,
    at_most: int | None = None,
    versions: Iterable[int] | None = None,
    like: Like = "numpy",
    device: object = None,
) -> Array:
    """Which tokens to train on, bool [tokens]: at most `at_most` steps stale against `now`, and of one of
    `versions`.

    Either condition may be left out. Raises `InvalidInput` when both are, or only one of `now` and
    `at_most` is given.
    """
    if (now is None) != (at_most is None) or (now is None and versions is None):
        raise InvalidInput(
            "mask needs now and at_most, or versions",
            hint="for example mask(batch, line, now=120, at_most=4)",
        )
    flat = as_batch(spans)
    keep = np.ones(len(flat.code), bool)
    if now is not None and at_most is not None:
        keep &= _ages(flat, now, source) <= at_most
    if versions is not None:
        wanted = _numbers(versions)
        keep &= np.isin(versions_of(flat, lineage_of(source))[flat.code], wanted)
    return _spread(flat, keep, like, device)


def _numbers(versions: Iterable[int]) -> NDArray[np.int64]:
    found = list(versions)
    wrong = [v for v in found if isinstance(v, bool) or not isinstance(v, int | np.integer)]
    if wrong:
        raise InvalidInput(f"versions holds {wrong[0]!r}", hint="versions are numbers, labels are strings")
    return np.array(found, np.int64)


class Ages(Struct, frozen=True):
    """Staleness of each output: over its tokens, in training steps."""

    min: NDArray[np.int64]
    """[outputs]; -1 for an output without tokens."""
    max: NDArray[np.int64]
    """[outputs]; -1 for an output without tokens."""
    mean: NDArray[np.float64]
    """[outputs]; NaN for an output without tokens."""


def ages(spans: SpanBatch | Iterable[Span], now: int | Sequence[int] | Integers, source: Source) -> Ages:
    """Least, greatest and mean staleness of each output. Raises as `staleness`."""
    flat = as_batch(spans)
    steps = _ages(flat, now, source)
    some = flat.lengths > 0
    steps, owner, lengths = steps[some], flat.owner[some], flat.lengths[some]
    low = np.full(len(flat), np.iinfo(np.int64).max)
    high = np.full(len(flat), -1, np.int64)
    np.minimum.at(low, owner, steps)
    np.maximum.at(high, owner, steps)
    tokens = np.diff(flat.offsets)
    total = np.bincount(owner, weights=steps * lengths, minlength=len(flat))
    with np.errstate(invalid="ignore"):
        mean = np.where(tokens > 0, total / np.maximum(tokens, 1), np.nan)
    return Ages(np.where(tokens > 0, low, -1), high, mean)
