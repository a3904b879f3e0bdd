"""What a conformance run found: named checks, each with what was seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field


class Check(Struct, frozen=True):
    """One named check."""

    id: str
    """Stable and dotted, e.g. `keep.stream.tokens.boundary`."""
    what: str
    """The rule, as a sentence."""
    ok: bool
    evidence: str
    """What was seen, in one line."""


class ConformanceReport(Struct, frozen=True, kw_only=True):
    """The outcome of one run. `checks` are in a fixed order that depends on the engine kind and the options
    only."""

    ok: bool
    engine: str
    """KIND=URL."""
    model: str
    seed: int
    checks: tuple[Check, ...]
    not_offered: dict[str, str] = field(default_factory=dict)
    """What this kind of engine does not have, and so was not checked -> why."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Counts and times of this run; they differ from run to run."""

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if not check.ok)


class Findings:
    """Collects checks, in order; each id once."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}

    def add(self, id: str, what: str, ok: bool, evidence: object = "") -> bool:
        """Record a check. A second one of the same id joins the first: both must hold, and the first
        failure's evidence stays."""
        text = " ".join(str(evidence).split())[:400]
        before = self._checks.get(id)
        if before is None or (before.ok and not ok):
            self._checks[id] = Check(id, what, bool(ok), text)
        return bool(ok)

    def extend(self, checks: Iterable[Check]) -> None:
        """Record several."""
        for check in checks:
            self.add(check.id, check.what, check.ok, check.evidence)

    def all(self) -> tuple[Check, ...]:
        """All checks so far."""
        return tuple(self._checks.values())
