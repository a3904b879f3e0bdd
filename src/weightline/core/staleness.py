"""Staleness: how far apart two versions are along the lineage of training, not along their numbers.

After a rewind numbers lie: with versions 116-120 abandoned and 121 made from 115, a token of 115 is one step
behind 121, and a token of 118 is three steps off the line and one behind.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from weightline.errors import VersionNotFound


class Distance(Struct, frozen=True):
    """Steps from the newest common ancestor of two versions to each of them."""

    off: int
    """To the version that sampled the token: 0 when it lies on the line of the other."""
    behind: int
    """To the version that is trained now."""

    @property
    def total(self) -> int:
        """Training steps between the two: `off + behind`."""
        return self.off + self.behind


def between(lineage: Mapping[int, int | None], sampled: int, now: int) -> Distance:
    """`lineage` maps each version to its parent (a parent is always an older number). Raises
    `VersionNotFound`.

    Versions without a common ancestor are as far apart as their roots make them, plus one step between the
    roots.
    """
    off = behind = 0
    left, right = sampled, now
    for version in (left, right):
        if version not in lineage:
            raise VersionNotFound(
                f"version {version} is not in the lineage",
                hint="refresh the store, or check that it is of this run",
            )
    while left != right:
        if left > right:
            step, off = lineage[left], off + 1
            if step is None:
                return Distance(off, behind + _depth(lineage, right))
            left = step
        else:
            step, behind = lineage[right], behind + 1
            if step is None:
                return Distance(off + _depth(lineage, left), behind)
            right = step
    return Distance(off, behind)


def distance(lineage: Mapping[int, int | None], a: int, b: int) -> int:
    """Training steps between versions `a` and `b`; symmetric, 0 only for a == b. Raises `VersionNotFound`."""
    return between(lineage, a, b).total


def _depth(lineage: Mapping[int, int | None], version: int) -> int:
    depth, at = 0, lineage[version]
    while at is not None:
        depth, at = depth + 1, lineage[at]
    return depth
