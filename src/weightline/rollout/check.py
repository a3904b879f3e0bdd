"""Do a live engine's weights equal a version, tensor by tensor?"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from msgspec import Struct

from weightline.errors import Unavailable, VersionNotFound
from weightline.rollout import mapping as names
from weightline.rollout.engines import open_engine
from weightline.rollout.engines.base import EngineDescription, EnginePort

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightline.service.line import Line

ATTEMPTS = 5
"""How often to start over when the engine took another version while its weights were being digested."""


class CheckReport(Struct, frozen=True):
    """What `check` found. `ok`: every committed tensor that the engine has bits of is there, bit by bit."""

    ok: bool
    version: int
    """The version that was compared."""
    label: str
    """The label that the engine puts on tokens."""
    label_matches: bool
    """Is it the label of `version`?"""
    tensors: int
    """Tensors compared."""
    mismatches: tuple[str, ...]
    """Committed names whose live bytes differ."""
    uncovered: tuple[str, ...] = ()
    """Live tensors that the version does not name."""
    unreadable: tuple[str, ...] = ()
    """Committed names that the engine processed after loading: it has no bits of theirs to compare."""


def check(
    line: Line,
    engine: EnginePort | str,
    version: int | None = None,
    *,
    rules: Mapping[str, str] | None = None,
) -> CheckReport:
    """Recompute the digest of every live tensor and compare it with the manifest of `version`.

    `engine`: a port, or `KIND=URL`. `version`: default what the engine says it serves, else the newest.
    Changes nothing. Raises `RefitError` when the names do not fit, `VersionNotFound`, and `Unavailable` (no
    answer; or it kept taking versions meanwhile).
    """
    if isinstance(engine, str):
        port = open_engine(engine, holder=f"check-{uuid.uuid4().hex}")
        try:
            return _check(line, port, version, rules)
        finally:
            port.close()
    return _check(line, engine, version, rules)


def _check(line: Line, port: EnginePort, wanted: int | None, rules: Mapping[str, str] | None) -> CheckReport:
    for _ in range(ATTEMPTS):
        before = port.describe()
        version = wanted if wanted is not None else _claimed(line, before)
        record = line.record(version)
        manifest = line.manifest(version)
        mapping = names.resolve([entry.spec for entry in manifest.tensors], before, rules=rules)
        live = port.digests(tuple(sorted(set(mapping.values()))))
        if _identity(port.describe()) != _identity(before):
            continue
        mismatches = tuple(
            entry.spec.name
            for entry in manifest.tensors
            if mapping[entry.spec.name] not in before.groups
            and live.get(mapping[entry.spec.name]) != entry.digest
        )
        unreadable = tuple(e.spec.name for e in manifest.tensors if mapping[e.spec.name] in before.groups)
        return CheckReport(
            ok=not mismatches,
            version=version,
            label=before.label,
            label_matches=before.label == record.label,
            tensors=len(manifest.tensors) - len(unreadable),
            mismatches=mismatches,
            uncovered=names.uncovered(mapping, before),
            unreadable=unreadable,
        )
    raise Unavailable(
        "the engine took new versions during every attempt to check it",
        hint="hold its follower, or try again",
    )


def _claimed(line: Line, engine: EngineDescription) -> int:
    if engine.version is not None and engine.run == line.run:
        return engine.version
    newest = line.latest()
    if newest is None:
        raise VersionNotFound("the store has no version yet", hint="commit one first")
    return newest


def _identity(engine: EngineDescription) -> tuple[str, str, int | None, str | None]:
    return engine.instance, engine.label, engine.version, engine.run
