"""Applying a delta in place: refused as a whole or applied as a whole, and the old bits are kept on the way.

An absolute delta is checked before its first write. One that is told relative to its base is written chunk by
chunk as it is decoded, and taken back when its digests do not come out right: to visit each changed element a
second time would cost as much again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightline.codec import backend, digest
from weightline.codec.decoding import decode_bits
from weightline.codec.delta import Delta, Held, TensorChange, check_change
from weightline.codec.dtypes import Bits, bits_dtype, bits_of, plain_bits, spec_of, writable_bits
from weightline.codec.scanned import Scanned
from weightline.errors import IntegrityError, InvalidInput
from weightline.types import TensorSpec


class _Writer(Protocol):
    def write(self, *, old: bool) -> None: ...
    def undone(self) -> list[TensorChange]: ...
    @property
    def nbytes(self) -> int: ...


class _Target:
    """One tensor's own memory and its changes."""

    def __init__(self, change: TensorChange, view: npt.NDArray[Any], flat: bool) -> None:
        self.change = change
        self.view, self.flat = view.reshape(1) if view.ndim == 0 else view, flat
        self.index = None if change.index is None else np.ascontiguousarray(change.index)
        self.old: Bits = self._read()

    def _coordinates(self) -> tuple[npt.NDArray[Any], ...]:
        return np.unravel_index(self.index, self.view.shape)  # type: ignore[arg-type]

    def whole(self) -> Bits:
        """The bits of the whole tensor, in C order; a view of its memory where that is flat."""
        return np.ascontiguousarray(self.view, bits_dtype(self.change.spec.dtype)).reshape(-1)

    def _read(self) -> Bits:
        native = bits_dtype(self.change.spec.dtype)
        if self.index is None:
            return np.array(self.view, native, order="C", copy=True).reshape(-1)
        if self.flat:
            return backend.gather(self.view, self.index)
        return np.ascontiguousarray(self.view[self._coordinates()], native)

    @property
    def nbytes(self) -> int:
        return self.old.nbytes

    def write(self, *, old: bool) -> None:
        bits = self.old if old else np.ascontiguousarray(self.change.bits)
        if self.index is None:
            self.view[...] = bits.reshape(self.view.shape)
        elif self.flat:
            backend.scatter(self.view, self.index, bits)
        else:
            self.view[self._coordinates()] = bits

    def undone(self) -> list[TensorChange]:
        change = self.change
        after = change.base_digest or digest.digest_of(self.old)
        base = None if change.index is None else change.digest
        return [TensorChange(change.spec, change.index, self.old, after, base, change.bits)]


class _Pooled:
    """Many tensors' flat memory, into which their pooled changes were decoded."""

    def __init__(self, scanned: Scanned, memory: Mapping[str, Bits]) -> None:
        self.scanned = scanned
        self._memory = memory  # the segments know it by address only: it must live as long as they do

    @property
    def nbytes(self) -> int:
        return sum(segment.was.nbytes for segment in self.scanned.segments)

    def write(self, *, old: bool) -> None:
        for segment in self.scanned.segments:
            backend.engine().write(segment.rows, segment.pos, segment.was if old else segment.now)

    def undone(self) -> list[TensorChange]:
        changes = [self.scanned.change(name) for name in self.scanned.specs]
        return [
            TensorChange(
                c.spec, c.index, c.bits if c.old is None else c.old, str(c.base_digest), c.digest, c.bits
            )
            for c in changes
        ]


class Undo:
    """The old bits of what an `apply_` wrote: as small as the delta (a copy of tensors that were written in
    full)."""

    def __init__(self, writers: list[_Writer], delta: Delta, digests: dict[str, str]) -> None:
        self._writers = writers
        self._delta = delta
        self.digests = digests
        """Digest of each written tensor after the apply: what a caller carries on."""

    @property
    def nbytes(self) -> int:
        """Bytes of old values it holds."""
        return sum(writer.nbytes for writer in self._writers)

    def restore(self) -> None:
        """Put the old bits back. May be called again; the last applied delta must be undone first."""
        for writer in self._writers:
            writer.write(old=True)

    @property
    def inverse(self) -> Delta:
        """The delta that goes back."""
        changes = [change for writer in self._writers for change in writer.undone()]
        return Delta(Held(changes), base=self._delta.version, version=self._delta.base)


def _views(
    specs: Mapping[str, TensorSpec], tensors: Mapping[str, Any]
) -> dict[str, tuple[npt.NDArray[Any], bool]]:
    """Writable views of all tensors of a delta. Raises `InvalidInput` listing every misfit."""
    faults = []
    views: dict[str, tuple[npt.NDArray[Any], bool]] = {}
    for name, spec in specs.items():
        if name not in tensors:
            faults.append(f"missing {name!r}")
            continue
        plain = plain_bits(tensors[name], spec)
        if plain is not None:
            views[name] = plain, True
            continue
        found = spec_of(name, tensors[name])
        if found != spec:
            faults.append(
                f"{name!r} is {found.dtype}{list(found.shape)}, the delta has {spec.dtype}{list(spec.shape)}"
            )
    if faults:
        raise InvalidInput(
            f"the delta does not fit these tensors: {'; '.join(faults)}",
            hint="apply it to the weights it was made for",
        )
    if len(views) == len(specs):
        return views
    return {name: views.get(name) or writable_bits(name, tensors[name]) for name in specs}


def _check_target(target: _Target, carried: str | None) -> None:
    """That base, changes and result agree: carried digest in O(1), the changes in O(changed).

    Without a carried digest the whole tensor is read: the old bits of the changed elements say nothing
    about the elements between them.
    """
    change = target.change
    name = change.spec.name
    if target.index is None:
        return
    if carried is None and change.base_digest is not None:
        carried = digest.digest_of(target.whole())
    if carried is not None and carried != change.base_digest:
        raise IntegrityError(
            f"tensor {name!r} has digest {carried}, the delta is against {change.base_digest}",
            hint="fetch the delta for the version these weights hold, or the full version",
        )
    if change.base_digest is None:
        return
    after = digest.digest_update(change.base_digest, target.index, target.old, change.bits)
    if after != change.digest:
        raise IntegrityError(
            f"tensor {name!r} does not hold the delta's base: digest {after} instead of {change.digest}",
            hint="these weights are not the version the delta is against; take the full version",
        )


def _apply_coded(
    delta: Delta, tensors: Mapping[str, Any], digests: Mapping[str, str] | None
) -> tuple[list[_Writer], dict[str, str]]:
    """A delta told relative to its base: flat memory in one pass, the rest by coordinates."""
    views = _views(delta.specs, tensors)
    writers: list[_Writer]
    if all(flat for _, flat in views.values()):
        memory = {name: view for name, (view, _) in views.items()}
        source = decode_bits(delta.source, memory, digests, write=True)
        writers = [_Pooled(source, memory)]
    else:
        bits = {name: view if flat else bits_of(tensors[name]) for name, (view, flat) in views.items()}
        source = decode_bits(delta.source, bits, digests)
        writers = [_Target(source.change(name), *views[name]) for name in source.specs]
        for writer in writers:
            writer.write(old=False)
    return writers, {name: pair[1] for name, pair in source.digests.items()}


def apply_(
    delta: Delta, tensors: Mapping[str, Any], *, digests: Mapping[str, str] | None = None, check: bool = True
) -> Undo:
    """Write a delta's changes into `tensors` (name -> numpy array or torch CPU tensor of the stored dtype)
    in place.

    Names, shapes, dtypes, indexes and the carried digest of each tensor (`digests`, O(1)) are checked before
    the first write; that the old bits and the changes lead from the base's digest to the result's
    (O(changed)) before it as well for an absolute delta, and before this returns for one told relative to
    its base, whose writes are taken back then.
    The digest of a tensor's base that is not carried is recomputed in full, at every level, unless the
    change writes the whole tensor and so needs no base.
    `check=False` leaves digests out, for an absolute delta only: for repairing a half-applied tensor, after
    which a full
    recomputation is due. Tensors that share memory under two names are fine. Returns the `Undo`.

    Raises `InvalidInput` (listing all misfits) or `IntegrityError`; the tensors are as they were then.
    """
    if delta.level != "absolute":
        coded, after = _apply_coded(delta, tensors, digests)
        return Undo(coded, delta, after)
    writers: list[_Writer] = []
    views = _views(delta.specs, tensors)
    after = {}
    for change in delta.changes():
        check_change(change)
        name = change.spec.name
        target = _Target(change, *views[name])
        if check:
            _check_target(target, None if digests is None else digests.get(name))
        writers.append(target)
        after[name] = change.digest
    for writer in writers:
        writer.write(old=False)
    return Undo(writers, delta, after)
