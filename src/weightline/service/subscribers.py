"""Who takes versions from this server, how far each has come, and who lags."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from weightline.service.wire import Subscriber
from weightline.types import Ack


class _Known:
    def __init__(self, first_seen: float) -> None:
        self.first_seen = first_seen
        self.last_seen = first_seen
        self.watching = 0
        self.ack: Ack | None = None


class Roll:
    """Subscribers by name. Thread-safe; times are seconds since the Unix epoch from the caller's clock."""

    def __init__(self, *, sync_timeout: float) -> None:
        self._sync_timeout = sync_timeout
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}

    def restore(self, acks: Iterable[Ack]) -> None:
        """Take over what was kept of acks that went another way; known ones change nothing."""
        for ack in acks:
            self.acked(ack, now=ack.at)

    def seen(self, name: str, *, now: float) -> None:
        """A sign of life of a subscriber; readers that never watched or acked by name are none."""
        with self._lock:
            if name in self._known:
                self._touch(name, now)

    def joined(self, name: str, *, now: float) -> None:
        """It opened a watch stream."""
        with self._lock:
            self._touch(name, now).watching += 1

    def left(self, name: str, *, now: float) -> None:
        """Its watch stream ended."""
        with self._lock:
            self._touch(name, now).watching -= 1

    def acked(self, ack: Ack, *, now: float) -> None:
        """Its engine serves a version: the latest ack counts, not the highest (engines roll back)."""
        with self._lock:
            known = self._touch(ack.subscriber, now)
            if known.ack is None or ack.at >= known.ack.at:
                known.ack = ack

    def live(self, *, now: float, within: float) -> dict[str, int]:
        """Subscriber -> version it serves, for those that watch now or were seen in the last `within`
        seconds.
        """
        with self._lock:
            return {
                name: known.ack.version
                for name, known in self._known.items()
                if known.ack is not None and (known.watching > 0 or now - known.last_seen <= within)
            }

    def states(
        self, newest: int | None, committed_at: Callable[[int], float], *, now: float
    ) -> tuple[Subscriber, ...]:
        """Every subscriber, by name. `committed_at(version)` is when that version was committed."""
        with self._lock:
            return tuple(
                self._state(name, known, newest, committed_at, now)
                for name, known in sorted(self._known.items())
            )

    def _touch(self, name: str, now: float) -> _Known:
        known = self._known.setdefault(name, _Known(now))
        known.last_seen = max(known.last_seen, now)
        return known

    def _state(
        self, name: str, known: _Known, newest: int | None, committed_at: Callable[[int], float], now: float
    ) -> Subscriber:
        version = known.ack.version if known.ack is not None else None
        lag = max(0, (newest or 0) - (version or 0))
        late = False
        if lag:
            # The clock of a subscriber runs from the first version that it lacks, or from when it came, if
            # later.
            since = max(committed_at((version or 0) + 1), known.first_seen)
            late = now - since > self._sync_timeout
        return Subscriber(
            name=name,
            state="lagging" if late else "behind" if lag else "current",
            version=version,
            lag=lag,
            connected=known.watching > 0,
            last_seen=known.last_seen,
            ack=known.ack,
        )
