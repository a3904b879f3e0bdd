"""Retention: which versions' blobs to let go, and why each one stays or goes.

A version can be read as long as its chain (itself, its base, ... back to the nearest anchor) is there, so
versions fall into groups: an anchor and the deltas that rest on it. Whatever must stay takes its chain with
it; what goes first is the oldest. Log entries never go: a number that is gone says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from weightline.core.ledger import LedgerState
from weightline.core.plan import chain
from weightline.errors import InvalidInput


class Explained(Struct, frozen=True):
    """What happens to one version, and why, in one line."""

    version: int
    keep: bool
    nbytes: int
    why: str


class RetentionDecision(Struct, frozen=True):
    """What to retire."""

    retire: tuple[int, ...]
    """Ascending. Empty when everything fits."""
    kept_nbytes: int
    freed_nbytes: int
    anchor_wanted: bool
    """The bounds cannot be met: what must stay rests on older versions. An anchor at the newest would free
    them.
    """
    explained: tuple[Explained, ...]
    """Every version that is not retired yet, oldest first."""


def decide(
    state: LedgerState,
    *,
    max_versions: int | None = None,
    disk_budget: int | None = None,
    pinned: Collection[int] = (),
    leased: Mapping[int, str] | None = None,
    recovery: int | None = None,
    sizes: Mapping[int, int] | None = None,
) -> RetentionDecision:
    """What to retire so that at most `max_versions` anchors and `disk_budget` bytes stay (None: no bound).

    The newest version, the one to recover from, pinned and leased ones stay whatever the bounds say. `leased`
    maps a version to who leases it; `sizes` gives bytes on disk where they are more than the weights
    (attachments). Raises `InvalidInput` for bounds below 1.
    """
    for name, bound in (("max_versions", max_versions), ("disk_budget", disk_budget)):
        if bound is not None and bound < 1:
            raise InvalidInput(f"{name} is {bound}", hint=f"{name} must be at least 1, or None for no bound")
    alive = [v for v in range(1, len(state) + 1) if v not in state.retired]
    nbytes = {v: max(state.version(v).nbytes, (sizes or {}).get(v, 0)) for v in alive}
    must = _protected(state, alive, pinned, leased or {}, recovery)
    going: dict[int, str] = {}
    for version in alive:
        if missing := [v for v in chain(state, version) if v in state.retired]:
            going[version] = f"rests on version {missing[-1]}, which is gone"
    going = {v: why for v, why in going.items() if v not in must}
    _bound(state, alive, must, going, nbytes, max_versions, disk_budget)
    left = [v for v in alive if v not in going]
    over = _over(state, left, nbytes, max_versions, disk_budget) is not None
    explained = tuple(
        Explained(v, v not in going, nbytes[v], going.get(v) or must.get(v) or "within the bounds")
        for v in alive
    )
    return RetentionDecision(
        retire=tuple(going),
        kept_nbytes=sum(nbytes[v] for v in left),
        freed_nbytes=sum(nbytes[v] for v in going),
        anchor_wanted=over and len(chain(state, len(state))) > 1,
        explained=explained,
    )


def _protected(
    state: LedgerState,
    alive: list[int],
    pinned: Collection[int],
    leased: Mapping[int, str],
    recovery: int | None,
) -> dict[int, str]:
    """version -> why it must stay."""
    reasons: dict[int, str] = {}
    roots: list[tuple[int, str, str]] = []
    if newest := len(state):
        roots.append((newest, "the newest", "the newest rests on it"))
    if recovery is not None:
        roots.append(
            (recovery, "recover() goes back to it", f"version {recovery}, for recover(), rests on it")
        )
    roots += [(v, "pinned", f"pinned version {v} rests on it") for v in sorted(pinned)]
    roots += [(v, f"leased by {who}", f"leased version {v} rests on it") for v, who in sorted(leased.items())]
    known = set(alive)
    for root, itself, beneath in roots:
        if root not in known:
            continue
        reasons.setdefault(root, itself)
        for version in chain(state, root)[:-1]:
            if version in known:
                reasons.setdefault(version, beneath)
    return reasons


def _bound(
    state: LedgerState,
    alive: list[int],
    must: Mapping[int, str],
    going: dict[int, str],
    nbytes: Mapping[int, int],
    max_versions: int | None,
    disk_budget: int | None,
) -> None:
    """Adds to `going`, oldest group first, until both bounds hold or nothing is left that may go."""
    groups: dict[int, list[int]] = {}
    for version in alive:
        groups.setdefault(chain(state, version)[0], []).append(version)
    for _, group in sorted(groups.items()):
        left = [v for v in alive if v not in going]
        why = _over(state, left, nbytes, max_versions, disk_budget)
        if why is None:
            break
        for version in group:
            if version not in must:
                going.setdefault(version, why)
    for version in sorted(going):
        going[version] = going.pop(version)


def _over(
    state: LedgerState,
    left: list[int],
    nbytes: Mapping[int, int],
    max_versions: int | None,
    disk_budget: int | None,
) -> str | None:
    anchors = sum(1 for v in left if state.version(v).stored == "anchor")
    if max_versions is not None and anchors > max_versions:
        return f"{anchors} anchors are more than max_versions {max_versions}; the oldest goes first"
    total = sum(nbytes[v] for v in left)
    if disk_budget is not None and total > disk_budget:
        return f"{total} bytes are more than disk_budget {disk_budget}; the oldest goes first"
    return None
