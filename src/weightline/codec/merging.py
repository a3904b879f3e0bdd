"""Several deltas as one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightline.codec import backend, digest
from weightline.codec.delta import Delta, Held, TensorChange
from weightline.codec.diffing import by_dtype, diff
from weightline.codec.dtypes import bits_of, from_bits
from weightline.codec.scanned import Scanned
from weightline.errors import IntegrityError, InvalidInput


def require_chain(deltas: Sequence[Delta]) -> None:
    """Raise `InvalidInput` when there is no delta, or when their version numbers do not follow."""
    if not deltas:
        raise InvalidInput("there are no deltas to join", hint="pass at least one")
    for before, after in itertools.pairwise(deltas):
        if before.version is not None and after.base is not None and before.version != after.base:
            raise InvalidInput(
                f"a delta against version {after.base} does not follow one that makes {before.version}",
                hint="pass consecutive deltas, oldest first",
            )


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
    require_chain(deltas)
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


def squash(
    base: Mapping[str, Any],
    deltas: Sequence[Delta],
    *,
    digests: Mapping[str, str] | None = None,
    level: str = "absolute",
) -> Delta:
    """Consecutive deltas of any level, oldest first, and the bytes of their base, as one delta against that
    base.

    One tensor is copied at a time: memory is the largest tensor and the result, never a second model.
    Elements that come back to
    their old bits drop out. `digests`: the base's carried digests. Raises what `merge` and `apply_` raise.
    """
    require_chain(deltas)
    results = []
    for name in dict.fromkeys(name for delta in deltas for name in delta.changed):
        if name not in base:
            raise InvalidInput(
                f"the base has no tensor {name!r}", hint="pass the weights that the first delta is against"
            )
        known = None if digests is None else digests.get(name)
        first = known or digest.digest_of(bits_of(base[name]))
        spec = next(delta.specs[name] for delta in deltas if name in delta.specs)
        copy = {name: from_bits(bits_of(base[name]).copy(), spec)}
        carried = first
        for delta in deltas:
            if name in delta.specs:
                carried = delta.only([name]).apply_(copy, digests={name: carried}).digests[name]
        results.append(diff({name: base[name]}, copy, old_digests={name: first}, level=level))
    return join(results).numbered(deltas[0].base, deltas[-1].version)


def join(deltas: Sequence[Delta]) -> Delta:
    """Deltas that `diff` made of different tensors at one level, as one. Nothing is copied."""
    found = [(delta.source, name) for delta in deltas for name in delta.changed]
    sources = [source for source, _ in found if isinstance(source, Scanned)]
    if len(sources) != len(found):
        raise InvalidInput("only what diff made can be joined", hint="merge other deltas")
    specs = [source.specs[name] for source, (_, name) in zip(sources, found, strict=True)]
    order = [at for _, ordinals in by_dtype(specs) for at in ordinals]
    segments = []
    digests = {}
    for at in order:
        source, name = sources[at], found[at][1]
        if len(source.specs) != 1:
            raise InvalidInput("join takes one tensor a delta", hint="diff tensor by tensor")
        segments += [
            segment._replace(pieces=[piece._replace(tensor=at) for piece in segment.pieces])
            for segment in source.segments
        ]
        digests[name] = source.digests[name]
    levels = {source.encoded for source in sources}
    return Delta(Scanned(specs, segments, digests, levels.pop() if len(levels) == 1 else None))
