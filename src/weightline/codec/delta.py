"""A delta: what turns the bytes of one version into those of another, as absolute values of the elements
that changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from weightline.codec import backend
from weightline.codec.dtypes import Bits, bits_dtype, count_of
from weightline.errors import InvalidInput
from weightline.types import TensorSpec

if TYPE_CHECKING:
    from weightline.codec.apply import Undo

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
    @property
    def level(self) -> str: ...
    def measure(self, base: int | None, version: int | None) -> int: ...
    def change(self, name: str) -> TensorChange: ...
    def count(self, name: str) -> int: ...


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

    def count(self, name: str) -> int:
        return self._changes[name].elements


class Subset:
    """Some tensors of another source."""

    def __init__(self, parent: Source, names: Sequence[str]) -> None:
        self.parent: Source = parent.parent if isinstance(parent, Subset) else parent
        self.level = parent.level
        self.specs: Mapping[str, TensorSpec] = {name: parent.specs[name] for name in names}
        self.elements = sum(parent.count(name) for name in names)

    def measure(self, base: int | None, version: int | None) -> int:
        if self.level != "absolute":
            return self.parent.measure(base, version)
        from weightline.codec.layout import absolute_nbytes

        return absolute_nbytes((self.change(name) for name in self.specs), base, version)

    def change(self, name: str) -> TensorChange:
        return self.parent.change(name)

    def count(self, name: str) -> int:
        return self.parent.count(name)


class Delta:
    """What turns the bytes of one version into those of another. Immutable; safe to use from several
    threads."""

    def __init__(self, source: Source, *, base: int | None = None, version: int | None = None) -> None:
        self.source = source
        """Where the changes come from; the codec's own business."""
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
        return Delta(self.source, base=base, version=version)

    def only(self, names: Iterable[str]) -> Delta:
        """The same delta for some of its tensors. Raises `InvalidInput` for a name that is not in
        `changed`."""
        names = list(names)
        for name in names:
            self._require(name)
        return Delta(Subset(self.source, names), base=self.base, version=self.version)

    @property
    def level(self) -> str:
        """ "absolute": every change is an absolute value. "fast" or "dense": read from a file whose changes
        are told relative
        to the base, so that `change` needs `decoded` first (`apply_` does not)."""
        return self.source.level

    @property
    def nbytes(self) -> int:
        """Bytes of the file it was read from, or that `write_delta` makes of it at the level it was made
        for."""
        return self.source.measure(self.base, self.version)

    @property
    def elements(self) -> int:
        """Elements that it writes."""
        return self.source.elements

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name -> spec of the tensors it writes to."""
        return self.source.specs

    def change(self, name: str) -> TensorChange:
        """The changes of one tensor as absolute values. Raises `InvalidInput` for a name that is not in
        `changed`."""
        self._require(name)
        return self.source.change(name)

    def changes(self) -> Iterator[TensorChange]:
        """`change` for every name, in order; one tensor is decoded at a time."""
        for name in self.changed:
            yield self.source.change(name)

    def _require(self, name: str) -> None:
        if name not in self.source.specs:
            raise InvalidInput(
                f"tensor {name!r} is not in this delta", hint="ask for a name in delta.changed"
            )

    def decoded(self, base: Mapping[str, Any], *, digests: Mapping[str, str] | None = None) -> Delta:
        """The same delta with absolute values, given the tensors it is against (name -> array; others are
        ignored).

        A delta that is absolute already comes back as it is, unread. Otherwise the base is checked: against
        its carried
        `digests` (O(1) a tensor), or by recomputing them where they are not given; and so is the result,
        before it is returned.
        Raises `InvalidInput` (missing tensor, other shape) or `IntegrityError` (another base, damage).
        """
        if self.level == "absolute":
            return self
        from weightline.codec.decoding import decoded_source

        return Delta(decoded_source(self.source, base, digests), base=self.base, version=self.version)

    def apply_(
        self, tensors: Mapping[str, Any], *, digests: Mapping[str, str] | None = None, check: bool = True
    ) -> Undo:
        """Write the changes into `tensors` in place and return an `Undo` that holds the old bits of what was
        written.

        See `codec.apply.apply_`.
        """
        from weightline.codec.apply import apply_

        return apply_(self, tensors, digests=digests, check=check)


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
