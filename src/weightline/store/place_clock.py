"""The clock that leases and grace periods go by: that of the place, which all hosts share.

Two hosts whose clocks differ by ten minutes would otherwise end each other's leases at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from weightline.errors import InvalidInput, Unavailable
from weightline.store.place import Place

logger = logging.getLogger(__name__)

_AGE_S = 600.0
"""How long a difference that was measured is believed."""
_TOLD_S = 30.0


class PlaceClock:
    """Seconds since the Unix epoch, by the clock of `place`. Safe to use from any thread.

    Where the place cannot be asked, this host's clock has to do.
    """

    def __init__(self, place: Place, clock: Callable[[], float] = time.time) -> None:
        self._place = place
        self._clock = clock
        self._lock = threading.Lock()
        self._skew = 0.0
        self._measured: float | None = None

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            if self._measured is None or now - self._measured > _AGE_S:
                self._measured = now
                self._measure()
            return self._clock() + self._skew

    def _measure(self) -> None:
        try:
            skew = self._place.skew()
        except (Unavailable, InvalidInput) as error:
            logger.warning("the clock of %s is not known, this host's is used: %s", self._place.url, error)
            return
        if abs(skew - self._skew) > _TOLD_S:
            logger.warning(
                "this host's clock is %.0f s %s that of %s; leases go by the latter",
                abs(skew),
                "behind" if skew > 0 else "ahead of",
                self._place.url,
            )
        self._skew = skew
