"""A delta: what turns the bytes of one version into those of another, as absolute values of the elements
that changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from weightline.codec import backend, digest
from weightline.codec.dtypes import Bits, bits_dtype, bits_of, count_of, spec_of, specs_of
from weightline.errors import IntegrityError, InvalidInput
from weightline.types import TensorSpec

Index = npt.NDArray[np.int64]
LEVELS = ("absolute", "fast", "dense")


class TensorChange(Struct, frozen=True, eq=False):
    """One changed tensor. Arrays may be views of a mapped file: treat them as read-only."""

    spec: TensorSpec
    index: Index | None
    """Flat C-order indexes of the changed elements, strictly ascending; None: `bits` is the whole tensor."""
    bits: Bits
    """New bits, one for each index (or all of them)."""
    digest: str
    """Additive digest of the whole tensor afterwards."""
    base_digest: str | None
    """The same before; None when the whole tensor is given."""
    old: Bits | None = None
    """Old bits of the same elements, where they are known (what `diff` makes)."""

    @property
    def elements(self) -> int:
        """Elements that are written."""
        return int(self.bits.size)


class Source(Protocol):
    """Where a delta's changes come from: memory or a mapped file."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def elements(self) -> int: ...
    def measure(self, base: int | None, version: int | None) -> int: ...
    @property
    def level(self) -> str: ...
    def change(self, name: str) -> TensorChange: ...


class Held:
    """Changes held in memory."""

    level = "absolute"

    def __init__(self, changes: Sequence[TensorChange]) -> None:
        self._changes = {change.spec.name: change for change in changes}
        self.specs: Mapping[str, TensorSpec] = {change.spec.name: change.spec for change in changes}
        self.elements = sum(change.elements for change in changes)

    def measure(self, base: int | None, version: int | None) -> int:
        from weightline.codec.layout import absolute_nbytes

        return absolute_nbytes(self._changes.values(), base, version)

    def change(self, name: str) -> TensorChange:
        return self._changes[name]


class Delta:
    """What turns the bytes of one version into those of another. Immutable; safe to use from several
    threads."""

    def __init__(self, source: Source, *, base: int | None = None, version: int | None = None) -> None:
        self._source = source
        self.base = base
        """Version that the delta is against, when known."""
        self.version = version
        """Version that it makes, when known."""
        self.changed: tuple[str, ...] = tuple(source.specs)
        """Names of the tensors it writes to."""

    def __repr__(self) -> str:
        what = f"{len(self.changed)} tensors, {self.elements} elements, {self.level}"
        return f"Delta({self.base} -> {self.version}, {what})"

    def numbered(self, base: int | None, version: int | None) -> Delta:
        """The same delta with version numbers."""
        return Delta(self._source, base=base, version=version)

    @property
    def level(self) -> str:
        """ "absolute": every change is an absolute value; else the encoding of the file it is read from,
        which needs the base."""
        return self._source.level

    @property
    def nbytes(self) -> int:
        """Bytes of the file it was read from, or that `write_delta` makes of it at level "absolute"."""
        return self._source.measure(self.base, self.version)

    @property
    def elements(self) -> int:
        """Elements that it writes."""
        return self._source.elements

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name -> spec of the tensors it writes to."""
        return self._source.specs

    def change(self, name: str) -> TensorChange:
        """The changes of one tensor, decoded to absolute values. Raises `InvalidInput` for a name that is
        not in `changed`."""
        if name not in self._source.specs:
            raise InvalidInput(
                f"tensor {name!r} is not in this delta", hint="ask for a name in delta.changed"
            )
        return self._source.change(name)

    def changes(self) -> Iterator[TensorChange]:
        """`change` for every name, in order; one tensor is decoded at a time."""
        for name in self.changed:
            yield self._source.change(name)

    def apply_(
        self, tensors: Mapping[str, Any], *, digests: Mapping[str, str] | None = None, check: bool = True
    ) -> Any:
        """Write the changes into `tensors` in place and return an `Undo` that holds the old bits of what was
        written.

        See `codec.apply.apply_`.
        """
        from weightline.codec.apply import apply_

        return apply_(self, tensors, digests=digests, check=check)


def _diff_tensor(
    spec: TensorSpec, old: Bits, new: Bits, old_digest: str | None, threshold: float
) -> TensorChange | None:
    def part(piece: tuple[int, int]) -> tuple[Index, Bits, Bits]:
        start, stop = piece
        positions = backend.scan(old[start:stop], new[start:stop]).astype(np.int64)
        before = backend.gather(old[start:stop], positions)
        after = backend.gather(new[start:stop], positions)
        if threshold > 0.0 and positions.size:
            from weightline.codec.threshold import keep

            kept = keep(spec.dtype, before, after, threshold)
            positions, before, after = positions[kept], before[kept], after[kept]
        positions += start
        return positions, before, after

    pieces = [piece for piece in backend.map_ordered(part, backend.ranges(old.size)) if piece[0].size]
    if not pieces:
        return None
    index, before, after = (np.concatenate([piece[k] for piece in pieces]) for k in range(3))
    base_digest = old_digest if old_digest is not None else digest.digest_of(old)
    return TensorChange(
        spec, index, after, digest.digest_update(base_digest, index, before, after), base_digest, before
    )


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
    owns its memory: about
    8 bytes and two elements for each changed element. `old_digests` saves the recomputation of base digests.
    `threshold` > 0 leaves out changes of floats with |new - old| <= threshold * |old|: apply the delta to
    `old` to get the base of the next diff.

    Raises `InvalidInput` listing every mismatch.
    """
    if level not in LEVELS:
        raise InvalidInput(f"unknown level {level!r}", hint=f"use one of {', '.join(LEVELS)}")
    if not threshold >= 0.0:
        raise InvalidInput(f"threshold {threshold!r} is negative or NaN", hint="use 0 for a lossless delta")
    specs = specs_of(old)
    require_same(specs, specs_of(new))
    found = []
    for name, spec in specs.items():
        known = None if old_digests is None else old_digests.get(name)
        change = _diff_tensor(spec, bits_of(old[name]), bits_of(new[name]), known, threshold)
        if change is not None:
            found.append(change)
    return Delta(Held(found))


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


def _overlay(first: TensorChange, second: TensorChange) -> TensorChange:
    """`first`, then `second`, as one change of the same tensor."""
    if first.spec != second.spec:
        raise InvalidInput(
            f"tensor {first.spec.name!r} changes dtype or shape between deltas",
            hint="start from the newer full version",
        )
    if second.index is None:
        return second
    if second.base_digest != first.digest:
        raise IntegrityError(
            f"tensor {first.spec.name!r}: a delta starts from digest {second.base_digest}, "
            f"the one before ends in {first.digest}",
            hint="merge consecutive deltas, oldest first",
        )
    if first.index is None:
        bits = first.bits.copy()
        backend.scatter(bits, np.ascontiguousarray(second.index), second.bits)
        return TensorChange(first.spec, None, bits, second.digest, None)
    both = np.concatenate([first.index, second.index])
    order = np.argsort(both, kind="stable")
    both = both[order]
    last = np.append(both[1:] != both[:-1], True)
    bits = np.concatenate([first.bits, second.bits])[order][last]
    old = None
    if first.old is not None and second.old is not None:
        begins = np.append(True, both[1:] != both[:-1])
        old = np.concatenate([first.old, second.old])[order][begins]
    return TensorChange(first.spec, both[last], bits, second.digest, first.base_digest, old)


def _without_reverts(change: TensorChange) -> TensorChange | None:
    """The change without elements that came back to their old bits; None when nothing is left."""
    if change.index is None or change.old is None:
        return change
    kept = change.old != change.bits
    if kept.all():
        return change
    if not kept.any():
        return None
    return TensorChange(
        change.spec,
        change.index[kept],
        change.bits[kept],
        change.digest,
        change.base_digest,
        change.old[kept],
    )


def merge(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas, oldest first, as one: the last value of each element wins. Needs no copy of the
    weights.

    Raises `InvalidInput` when there are none or when numbers or shapes do not follow, `IntegrityError` when
    digests do not follow.
    """
    if not deltas:
        raise InvalidInput("there are no deltas to merge", hint="pass at least one")
    for before, after in itertools.pairwise(deltas):
        if before.version is not None and after.base is not None and before.version != after.base:
            raise InvalidInput(
                f"a delta against version {after.base} does not follow one that makes {before.version}",
                hint="pass consecutive deltas, oldest first",
            )
    names = dict.fromkeys(name for delta in deltas for name in delta.changed)
    merged = []
    for name in names:
        total: TensorChange | None = None
        for delta in deltas:
            if name in delta.specs:
                change = delta.change(name)
                total = change if total is None else _overlay(total, change)
        if total is not None:
            total = _without_reverts(total)
        if total is not None:
            merged.append(total)
    return Delta(Held(merged), base=deltas[0].base, version=deltas[-1].version)


def check_change(change: TensorChange) -> None:
    """Raise `InvalidInput` for a change whose arrays do not fit its tensor (what would write out of
    bounds)."""
    spec, size = change.spec, count_of(change.spec)
    if change.bits.dtype != bits_dtype(spec.dtype) or change.bits.ndim != 1:
        raise InvalidInput(
            f"tensor {spec.name!r}: bits of {change.bits.dtype} for {spec.dtype}",
            hint="pass what bits_of gives",
        )
    if change.index is None:
        if change.bits.size != size:
            raise InvalidInput(
                f"tensor {spec.name!r}: {change.bits.size} elements instead of {size}",
                hint="pass the whole tensor",
            )
    elif change.index.shape != change.bits.shape or not backend.ascending(change.index, size):
        raise InvalidInput(
            f"tensor {spec.name!r}: indexes are not ascending within 0..{size - 1}, one for each value",
            hint="sort the indexes and keep each once",
        )
