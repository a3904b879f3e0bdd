"""What a follower remembers between two looks, and while one refit is under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weightline.rollout.engines.base import Prepared
from weightline.types import Verification, VersionRecord


class Plan(msgspec.Struct, frozen=True):
    """One refit that is due."""

    record: VersionRecord
    manifest: Any
    mapping: dict[str, str]
    groups: dict[str, int]
    fresh: bool
    """The engine was never told a version, and knows the digests of what it started from."""


class PendingAck(msgspec.Struct, frozen=True):
    """What the line is told of the version that the engine serves, and whether it was."""

    version: int
    verified: Verification = "none"
    pause_ms: float | None = None
    detail: str = ""
    sent: bool = False
    trace: dict[str, float] = {}
    """When the engine took the steps there, seconds since the Unix epoch."""


class Doubt(msgspec.Struct, frozen=True):
    """The end of a refit was lost on the way: the engine may still be paused by us, and the session may still
    be open."""

    session: Prepared | None


def times(phases: Mapping[str, float], ended: float) -> dict[str, float]:
    """When the bytes were proved (prepare) and when they were in place and read back, from the lengths of a
    refit's phases.
    """
    stages = {"prepare": "verified", "apply": "applied", "verify": "applied"}
    times: dict[str, float] = {}
    at = ended
    for verb, ms in reversed(list(phases.items())):
        if verb in stages:
            times.setdefault(stages[verb], at)
        at -= ms / 1e3
    return times
