"""Retention: which bytes to let go, and why each version stays, gets thinner or goes.

A version can be read as long as its chain (itself, its base, ... back to the nearest anchor) is there, so
versions fall into groups: an anchor and the deltas that rest on it. Whatever must stay takes its chain with
it. What costs no version goes first: attachments that nobody would recover from, and anchors that have a
delta beside them (the version stays, it is then rebuilt from the anchor before). Then the oldest group goes.
Log entries never go: a number that is gone says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from weightline.core.ledger import LedgerState
from weightline.core.plan import chain
from weightline.errors import InvalidInput

Action = Literal["keep", "thin", "detach", "retire"]


class Explained(Struct, frozen=True):
    """What happens to one version, and why, in one line."""

    version: int
    keep: bool
    nbytes: int
    why: str
    action: Action = "keep"
    """"thin": its anchor goes, its delta stays. "detach": its attachments go (and its anchor, if `why` says
    so).
    """


class RetentionDecision(Struct, frozen=True):
    """What to let go."""

    retire: tuple[int, ...]
    """Versions, ascending. Empty when everything fits."""
    kept_nbytes: int
    freed_nbytes: int
    anchor_wanted: bool
    """The bounds cannot be met: what must stay rests on older versions. An anchor at the newest would free
    them.
    """
    explained: tuple[Explained, ...]
    """Every version that is not retired yet, oldest first."""
    thin: tuple[int, ...] = ()
    """Versions that stay and lose their anchor."""
    detach: tuple[int, ...] = ()
    """Versions that stay and lose their attachments."""


def decide(
    state: LedgerState,
    *,
    max_versions: int | None = None,
    disk_budget: int | None = None,
    pinned: Collection[int] = (),
    leased: Mapping[int, str] | None = None,
    recovery: int | None = None,
) -> RetentionDecision:
    """What to let go so that at most `max_versions` anchors and `disk_budget` bytes stay (None: no bound).

    The newest version, the one to recover from, pinned and leased ones stay as they are, whatever the bounds
    say. Bytes are those of anchors, deltas and attachments. Raises `InvalidInput` for bounds below 1.
    """
    for name, bound in (("max_versions", max_versions), ("disk_budget", disk_budget)):
        if bound is not None and bound < 1:
            raise InvalidInput(f"{name} is {bound}", hint=f"{name} must be at least 1, or None for no bound")
    claimed = {recovery, *pinned, *(leased or {})}
    held = _Held(state, _protected(state, pinned, leased or {}, recovery), claimed)
    before = {v: held.nbytes(v) for v in held.alive}
    held.drop_orphans()
    while max_versions is not None and (anchors := held.anchors()) > max_versions:
        why = f"{anchors} anchors are more than max_versions {max_versions}; the oldest goes first"
        if not (held.thin(why, lambda: held.anchors() <= max_versions, dear=True) or held.retire(why)):
            break
    while disk_budget is not None and (total := held.total()) > disk_budget:
        why = f"{total} bytes are more than disk_budget {disk_budget}; the oldest goes first"
        if held.detach(why) or held.thin(why, lambda: held.total() <= disk_budget, dear=False):
            continue
        if not held.retire(why):
            break
    over = (max_versions is not None and held.anchors() > max_versions) or (
        disk_budget is not None and held.total() > disk_budget
    )
    kept = held.total()
    return RetentionDecision(
        retire=tuple(sorted(held.going)),
        kept_nbytes=kept,
        freed_nbytes=sum(before.values()) - kept,
        anchor_wanted=over and len(chain(state, len(state))) > 1,
        explained=tuple(held.explain(v, before[v]) for v in held.alive),
        thin=tuple(sorted(v for v in held.thinner if v not in held.going)),
        detach=tuple(sorted(v for v in held.detached if v not in held.going)),
    )


class _Held:
    """What is stored now, less what was decided so far."""

    def __init__(self, state: LedgerState, must: Mapping[int, str], claimed: Collection[int | None]) -> None:
        self._state = state
        self._claimed = claimed
        self._must = must
        self.alive = [v for v in range(1, len(state) + 1) if v not in state.retired]
        self.going: dict[int, str] = {}
        self.thinner: dict[int, str] = {}
        self.detached: dict[int, str] = {}
        self._roots = self._find_roots()

    def nbytes(self, version: int) -> int:
        """Bytes of a version that stays."""
        entry = self._state.version(version)
        attached = version not in self._state.detached and version not in self.detached
        whole = entry.nbytes if not self._is_thin(version) else entry.delta_nbytes
        return whole + (entry.attachment_nbytes if attached else 0)

    def total(self) -> int:
        return sum(self.nbytes(v) for v in self._left())

    def anchors(self) -> int:
        return sum(1 for v in self._left() if self._is_anchor(v))

    def drop_orphans(self) -> None:
        """Versions whose chain is broken already."""
        broken: dict[int, int] = {v: v for v in self._state.retired}
        for version in self.alive:
            base = self._state.version(version).base
            if self._is_anchor(version) or base is None or base not in broken:
                continue
            broken[version] = broken[base]
            if version not in self._must:
                self.going[version] = f"rests on version {broken[version]}, which is gone"

    def detach(self, why: str) -> bool:
        """Let the oldest attachments go that nobody has a claim on."""
        for version in self._left():
            done = version in self._state.detached or version in self.detached
            if self._state.version(version).attachment_nbytes and not done and version not in self._claimed:
                self.detached[version] = why
                return True
        return False

    def thin(self, why: str, enough: Callable[[], bool], *, dear: bool) -> bool:
        """Let the oldest anchors go whose versions can be rebuilt without them, until it is `enough`; none at
        all if it never is, for what is retired then would only take more versions with it.

        A version that would have to read more bytes of deltas than its anchor has keeps it, unless `dear`.
        """
        before = dict(self.thinner)
        while (version := self._thinnable(dear)) is not None:
            self.thinner[version] = why
            self._roots = self._find_roots()
            if enough():
                return True
        self.thinner = before
        self._roots = self._find_roots()
        return False

    def _thinnable(self, dear: bool) -> int | None:
        newest_root = self._roots.get(len(self._state))
        left = set(self._left())
        for version in sorted(left):
            entry = self._state.version(version)
            if not self._is_anchor(version) or entry.base is None or entry.base not in left:
                continue
            if version in self._must or version == newest_root:
                continue
            if dear or self._replay(version) <= entry.nbytes - entry.delta_nbytes:
                return version
        return None

    def retire(self, why: str) -> bool:
        """Let the oldest group go, but for what must stay."""
        groups: dict[int, list[int]] = {}
        for version in self._left():
            groups.setdefault(self._roots[version], []).append(version)
        for _, group in sorted(groups.items()):
            if free := [v for v in group if v not in self._must]:
                self.going.update(dict.fromkeys(free, why))
                return True
        return False

    def explain(self, version: int, nbytes: int) -> Explained:
        if version in self.going:
            return Explained(version, False, nbytes, self.going[version], "retire")
        if version in self.detached:
            also = " (its anchor too)" if version in self.thinner else ""
            return Explained(
                version, True, nbytes, f"its attachments go{also}: {self.detached[version]}", "detach"
            )
        if version in self.thinner:
            return Explained(version, True, nbytes, f"its anchor goes: {self.thinner[version]}", "thin")
        return Explained(version, True, nbytes, self._must.get(version) or "within the bounds", "keep")

    def _left(self) -> Iterator[int]:
        return (v for v in self.alive if v not in self.going)

    def _is_thin(self, version: int) -> bool:
        return version in self._state.thinned or version in self.thinner

    def _is_anchor(self, version: int) -> bool:
        return self._state.version(version).stored == "anchor" and not self._is_thin(version)

    def _find_roots(self) -> dict[int, int]:
        """version -> the anchor that it is rebuilt from. A base is always older, so one pass will do."""
        roots: dict[int, int] = {}
        for version in range(1, len(self._state) + 1):
            base = self._state.version(version).base
            roots[version] = version if self._is_anchor(version) or base is None else roots[base]
        return roots

    def _replay(self, version: int) -> int:
        """Bytes of deltas between the anchor before `version` and the last version that would rest on it."""
        total, at = 0, version
        while True:
            entry = self._state.version(at)
            if entry.base is None or (at != version and self._is_anchor(at)):
                break
            total, at = total + entry.delta_nbytes, entry.base
        following = (v for v in self._left() if v > version and self._roots[v] == version)
        return total + sum(self._state.version(v).delta_nbytes for v in following)


def _protected(
    state: LedgerState,
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
    for root, itself, beneath in roots:
        if not state.has(root) or root in state.retired:
            continue
        reasons.setdefault(root, itself)
        for version in chain(state, root)[:-1]:
            if version not in state.retired:
                reasons.setdefault(version, beneath)
    return reasons
