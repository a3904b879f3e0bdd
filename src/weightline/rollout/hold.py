"""A hold: the engine remembers it for all its followers, and they remember it over its restart."""

from __future__ import annotations

from weightline.rollout.engines.base import EngineDescription, EnginePort, Hold, HoldingPort


class Holds:
    """What one follower knows of the hold on its engine."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._instance: str | None = None
        self._hold: Hold | None = None

    def seen(self, engine: EngineDescription, port: EnginePort) -> int | None:
        """The version that the engine is held at, or None.

        An engine that was restarted has forgotten: it is told again, so that its other followers see it too.
        Raises what the engine answers.
        """
        hold = engine.hold
        restarted = self._instance not in (None, engine.instance)
        if restarted and hold is None and self._hold is not None and isinstance(port, HoldingPort):
            port.set_hold(self._hold)
            hold = self._hold
        self._instance, self._hold = engine.instance, hold
        return hold.version if hold is not None and hold.run == self._run else None
