"""From a delta file to writes that are known to fit: the part of a refit that runs while serving."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import Struct

from weightline import codec
from weightline.codec import Delta, TensorChange
from weightline.errors import RefitError, WeightlineError
from weightline.generate.weights import LiveWeights, Window
from weightline.generate.widen import Bits, widen, widens
from weightline.generate.wire import RefitOrder


class Write(Struct, frozen=True, eq=False):
    """New bits for one window."""

    window: Window
    index: Bits | None
    bits: Bits
    """In the stored dtype."""
    live_bits: Bits | None
    """Widened ahead of the pause, where the change is sparse; a full tensor is widened as it is written."""
    stored: str
    digest: str
    """Of the whole tensor afterwards, in the stored dtype."""


class Plan(Struct, frozen=True, eq=False):
    """All writes of one refit."""

    writes: tuple[Write, ...]
    elements: int


def refused(misses: Sequence[str], hint: str) -> RefitError:
    """One error for all misses; the engine still serves what it served."""
    return RefitError(f"refit refused: {'; '.join(misses)}", engine_state="old", hint=hint)


def make_plan(weights: LiveWeights, order: RefitOrder) -> Plan:
    """Read, decode and check the order's delta file against the live model. Nothing is written.

    Raises `RefitError("old")` listing every miss: an unreadable or damaged file, a name with no home,
    another shape, a dtype that does not widen exactly, a missing digest, tied names that differ, or (in a
    full refit) tensors that are neither in the file nor known to have the digest that the order names.
    """
    try:
        delta = codec.read_delta(Path(order.file))
    except (WeightlineError, OSError) as error:
        hint = (
            getattr(error, "hint", "") or "the engine must be able to read the file; fetch the version again"
        )
        raise RefitError(f"delta file {order.file}: {error}", engine_state="old", hint=hint) from error
    return plan_delta(weights, order, delta)


def plan_delta(weights: LiveWeights, order: RefitOrder, delta: Delta) -> Plan:
    """`make_plan` on a delta that was read already."""
    misses: list[str] = []
    writes: dict[tuple[str, int, int], Write] = {}
    for change in delta.changes():
        window = weights.windows.get(change.spec.name)
        miss = _miss(weights, order, change, window)
        if miss is not None or window is None:
            misses.append(miss or f"{change.spec.name}: no such tensor")
            continue
        write = _write(change, window, order.digests[change.spec.name])
        twin = writes.setdefault(window.region, write)
        if twin is not write and not _same(twin, write):
            misses.append(
                f"{window.name} and {twin.window.name} share storage and are given different values"
            )
    misses += _overlaps(writes)
    if order.have is None:
        full = [w.window for w in writes.values() if w.index is None]
        there = weights.holding(order.digests)
        misses += [f"{owner}: not in a full refit" for owner in weights.uncovered([*full, *there])]
    misses += _dtype_changes(weights, tuple(writes.values()))
    if misses:
        raise refused(
            misses,
            "the version must have the names, shapes and dtypes of the engine's own model",
        )
    return Plan(tuple(writes.values()), sum(w.bits.size for w in writes.values()))


def _miss(weights: LiveWeights, order: RefitOrder, change: TensorChange, window: Window | None) -> str | None:
    spec = change.spec
    if window is None:
        why = (
            "is held in another form by the engine"
            if spec.name in weights.unproved
            else "no such tensor in the engine"
        )
        return f"{spec.name}: {why}"
    if spec.shape != window.shape:
        return f"{spec.name}: shape {list(spec.shape)}, the engine has {list(window.shape)}"
    if not widens(spec.dtype, window.dtype):
        return f"{spec.name}: {spec.dtype} does not widen exactly to the engine's {window.dtype}"
    if order.have is None and change.index is not None:
        return f"{spec.name}: a sparse change in a full refit"
    if change.index is not None and change.index.size:
        first, last = int(change.index[0]), int(change.index[-1])
        if first < 0 or last >= window.size or not bool(np.all(np.diff(change.index) > 0)):
            return f"{spec.name}: element indexes are not ascending within 0..{window.size}"
    if change.bits.size != (window.size if change.index is None else change.index.size):
        return f"{spec.name}: {change.bits.size} values do not fit"
    if spec.name not in order.digests:
        return f"{spec.name}: the order has no digest for it"
    return None


def _write(change: TensorChange, window: Window, digest: str) -> Write:
    sparse = change.index is not None
    live = widen(change.bits, change.spec.dtype, window.dtype) if sparse else None
    return Write(window, change.index, change.bits, live, change.spec.dtype, digest)


def _same(a: Write, b: Write) -> bool:
    indexes = (a.index is None and b.index is None) or (
        a.index is not None and b.index is not None and np.array_equal(a.index, b.index)
    )
    return indexes and a.stored == b.stored and a.digest == b.digest and np.array_equal(a.bits, b.bits)


def _overlaps(writes: dict[tuple[str, int, int], Write]) -> list[str]:
    """A fused tensor and its parts in one refit: the order of writing would decide."""
    found = []
    ordered = sorted(writes)
    for before, after in pairwise(ordered):
        if before[0] == after[0] and after[1] < before[2]:
            found.append(f"{writes[after].window.name} overlaps {writes[before].window.name}")
    return found


def _dtype_changes(weights: LiveWeights, writes: Sequence[Write]) -> list[str]:
    """A storage has one stored dtype: it may change only when all of it is written in the new one."""
    changed: dict[str, list[Write]] = {}
    for write in writes:
        if write.stored != weights.stored[write.window.owner]:
            changed.setdefault(write.window.owner, []).append(write)
    found = []
    for owner, part in changed.items():
        whole = [w.window for w in part if w.index is None]
        if len({w.stored for w in part}) > 1 or owner in weights.uncovered(whole):
            found.append(
                f"{part[0].window.name}: {part[0].stored}, the engine was last given {weights.stored[owner]}"
            )
    return found
