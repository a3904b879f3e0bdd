"""Plans: which blobs turn the bytes of one version into those of another, by cost.

Deltas hold absolute values, so they only lead forward, from their base. An anchor leads to its version from
anywhere. A version that carries both can be reached either way.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from weightline.core.ledger import LedgerState
from weightline.errors import VersionGone
from weightline.types import VersionKind

Relation = Literal["same", "forward", "full"]


class PlanStep(Struct, frozen=True):
    """Read one blob of one version."""

    version: int
    form: VersionKind
    nbytes: int


class Plan(Struct, frozen=True):
    """How to get to `want`. Steps are in the order in which they are applied."""

    have: int | None
    want: int
    relation: Relation
    """"same": nothing to do. "forward": deltas onto the bytes of `have`. "full": an anchor, then deltas."""
    steps: tuple[PlanStep, ...]
    nbytes: int
    """Bytes to read."""


def plan(state: LedgerState, have: int | None, want: int, *, gone: Collection[int] | None = None) -> Plan:
    """The cheapest way from the bytes of `have` (None: from nothing) to those of `want`.

    `gone` are versions whose blobs cannot be read (default: the retired ones). A `have` that is newer than
    `want`, or on no chain that leads there, gives the same plan as None: the caller who holds both versions'
    bytes compares them. Raises `VersionNotFound`, or `VersionGone` when no way is left.
    """
    state.version(want)
    if have is not None:
        state.version(have)
    if have == want:
        return Plan(have, want, "same", (), 0)
    gone = state.retired if gone is None else gone
    best: Plan | None = None
    steps: list[PlanStep] = []
    cost, at = 0, want
    while True:
        entry = state.version(at)
        if at in gone:
            break
        if state.holds_anchor(at):
            step = PlanStep(at, "anchor", entry.nbytes - entry.delta_nbytes)
            best = _cheaper(best, Plan(have, want, "full", (step, *reversed(steps)), cost + step.nbytes))
        if entry.base is None:
            break
        steps.append(PlanStep(at, "delta", entry.delta_nbytes))
        cost, at = cost + entry.delta_nbytes, entry.base
        if at == have:
            # Deltas win a tie: they touch less of what the reader holds.
            return _cheaper(Plan(have, want, "forward", tuple(reversed(steps)), cost), best)
        if best is not None and cost > best.nbytes:
            break
    if best is None:
        raise VersionGone(
            f"version {want} cannot be rebuilt: the bytes of version {at} are gone",
            hint="take a newer one; pin versions that must stay, or raise max_versions and disk_budget",
        )
    return best


def forward(state: LedgerState, have: int, want: int) -> tuple[int, ...] | None:
    """The versions whose deltas lead from the bytes of `have` to those of `want`, oldest first; None if none
    do.
    """
    out, at = [], want
    while at > have:
        base = state.version(at).base
        if base is None or at in state.retired:
            return None
        out.append(at)
        at = base
    return tuple(reversed(out)) if at == have else None


def chain(state: LedgerState, version: int) -> list[int]:
    """The versions whose blobs rebuild `version`, oldest first: back over bases to the nearest anchor."""
    out, at = [version], version
    while not state.holds_anchor(at):
        base = state.version(at).base
        if base is None:
            break
        at = base
        out.append(at)
    return out[::-1]


def _cheaper(first: Plan | None, second: Plan | None) -> Plan:
    if first is None or second is None:
        chosen = first or second
        if chosen is None:
            raise ValueError("no plan to choose from")
        return chosen
    return second if second.nbytes < first.nbytes else first


def anchor_due(delta_nbytes: int, anchor_nbytes: int) -> bool:
    """Should the next version carry an anchor too? When the deltas since the last one outweigh an anchor.

    Rebuilding a version then never reads more than about two anchors' worth of bytes, and anchors cost at
    most as much room as deltas do.
    """
    return delta_nbytes >= anchor_nbytes
