"""Applying a delta in place: everything is checked before the first write, and the old bits are kept on the
way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from weightline.codec import backend, digest
from weightline.codec.delta import Delta, Held, TensorChange, check_change
from weightline.codec.dtypes import Bits, bits_dtype, spec_of, writable_bits
from weightline.errors import IntegrityError, InvalidInput


class _Target:
    """One tensor's own memory."""

    def __init__(self, change: TensorChange, array: Any) -> None:
        self.change = change
        self.view, self.flat = writable_bits(change.spec.name, array)
        self.old: Bits = np.empty(0, bits_dtype(change.spec.dtype))

    def _coordinates(self) -> tuple[npt.NDArray[Any], ...]:
        return np.unravel_index(self.change.index, self.change.spec.shape)  # type: ignore[arg-type]

    def read(self) -> Bits:
        """Old bits of what will be written: a copy."""
        index = self.change.index
        native = bits_dtype(self.change.spec.dtype)
        if index is None:
            return np.array(self.view, native, order="C", copy=True).reshape(-1)
        if self.flat:
            return backend.gather(self.view, np.ascontiguousarray(index))
        return np.ascontiguousarray(self.view[self._coordinates()], native)

    def write(self, bits: Bits) -> None:
        index = self.change.index
        if index is None:
            self.view[...] = bits.reshape(self.view.shape)
        elif self.flat:
            backend.scatter(self.view, np.ascontiguousarray(index), np.ascontiguousarray(bits))
        else:
            self.view[self._coordinates()] = bits


class Undo:
    """The old bits of what an `apply_` wrote: as small as the delta (a whole copy only of tensors that were
    written in full)."""

    def __init__(self, targets: list[_Target], delta: Delta, digests: dict[str, str]) -> None:
        self._targets = targets
        self._delta = delta
        self.digests = digests
        """Digest of each written tensor after the apply: what a caller carries on."""

    @property
    def nbytes(self) -> int:
        """Bytes of old values it holds."""
        return sum(target.old.nbytes for target in self._targets)

    def restore(self) -> None:
        """Put the old bits back. May be called again; the last applied delta must be undone first."""
        for target in self._targets:
            target.write(target.old)

    @property
    def inverse(self) -> Delta:
        """The delta that goes back."""
        changes = []
        for target in self._targets:
            change, old = target.change, target.old
            after = change.base_digest or digest.digest_of(old)
            base = None if change.index is None else change.digest
            changes.append(TensorChange(change.spec, change.index, old, after, base, change.bits))
        return Delta(Held(changes), base=self._delta.version, version=self._delta.base)


def _targets(delta: Delta, tensors: Mapping[str, Any]) -> list[_Target]:
    faults = []
    for name, spec in delta.specs.items():
        if name not in tensors:
            faults.append(f"missing {name!r}")
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
    targets = []
    for change in delta.changes():
        check_change(change)
        targets.append(_Target(change, tensors[change.spec.name]))
    return targets


def _check_target(target: _Target, carried: str | None) -> None:
    """That base, changes and result agree: carried digest in O(1), the changes in O(changed)."""
    change = target.change
    name = change.spec.name
    if change.index is None:
        return
    if carried is not None and carried != change.base_digest:
        raise IntegrityError(
            f"tensor {name!r} has digest {carried}, the delta is against {change.base_digest}",
            hint="fetch the delta for the version these weights hold, or the full version",
        )
    if change.base_digest is None:
        return
    after = digest.digest_update(
        change.base_digest, np.ascontiguousarray(change.index), target.old, change.bits
    )
    if after != change.digest:
        raise IntegrityError(
            f"tensor {name!r} does not hold the delta's base: digest {after} instead of {change.digest}",
            hint="these weights are not the version the delta is against; take the full version",
        )


def apply_(
    delta: Delta, tensors: Mapping[str, Any], *, digests: Mapping[str, str] | None = None, check: bool = True
) -> Undo:
    """Write a delta's changes into `tensors` (name -> numpy array or torch CPU tensor of the stored dtype)
    in place.

    Everything is checked before the first write: names, shapes, dtypes, indexes; the carried digest of each
    tensor when `digests` is
    given (O(1)); and that the old bits and the changes lead from the base's digest to the result's
    (O(changed)). `check=False` leaves
    the last two out: for repairing a half-applied tensor from an absolute delta, after which a full
    recomputation is due.
    Tensors that share memory under two names are fine. Returns the `Undo`.

    Raises `InvalidInput` (listing all misfits) or `IntegrityError`; nothing was written then.
    """
    targets = _targets(delta, tensors)
    for target in targets:
        target.old = target.read()
        if check:
            _check_target(target, None if digests is None else digests.get(target.change.spec.name))
    for target in targets:
        target.write(target.change.bits)
    return Undo(targets, delta, {target.change.spec.name: target.change.digest for target in targets})
