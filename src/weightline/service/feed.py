"""The newest version as one handle knows it, and the waking of those who wait for a newer one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weightline.errors import InvalidInput

SLOW_POLL_SECONDS = 0.5
"""While a server rings: only against a ring that was lost."""


class Feed:
    """Waits on a ring from this process or from a watch stream, and probes the log besides.

    `probe` returns the newest version in the log, or None; it is called without a lock held and may be called
    by several threads; where nobody rings, every `poll_s` seconds.
    """

    def __init__(self, probe: Callable[[], int | None], poll_s: float) -> None:
        self._probe = probe
        self._poll_s = poll_s
        self._cond = threading.Condition()
        self._newest: int | None = None
        self._returned: int | None = None
        self._closed = False
        self.ringing = False
        """Somebody rings for every version now, so that probing may be slow."""

    @property
    def newest(self) -> int | None:
        """Newest version that was announced or probed so far."""
        return self._newest

    def announce(self, newest: int | None) -> None:
        """A version is in the log. Older news than what is known changes nothing."""
        with self._cond:
            if newest is not None and newest > (self._newest or 0):
                self._newest = newest
                self._cond.notify_all()

    def stir(self) -> None:
        """Make those who wait look at the log now, because `ringing` has changed."""
        with self._cond:
            self._cond.notify_all()

    def wait(self, timeout: float | None, after: int | None) -> int | None:
        """Newest version > `after` (None: what `wait` last returned); None after `timeout` seconds (None: no
        limit).
        """
        if timeout is not None and not timeout >= 0:
            raise InvalidInput(
                f"timeout {timeout!r} is not a number of seconds >= 0", hint="None waits without a limit"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        floor = after if after is not None else (self._returned or 0)
        while True:
            self.announce(self._probe())
            with self._cond:
                if self._closed:
                    raise InvalidInput(
                        "this handle is closed", hint="open the store again to wait for versions"
                    )
                if self._newest is not None and self._newest > floor:
                    return self._hand_out(self._newest)
                pause = max(SLOW_POLL_SECONDS, self._poll_s) if self.ringing else self._poll_s
                if deadline is not None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    pause = min(pause, left)
                self._cond.wait(pause)
                if self._newest is not None and self._newest > floor:
                    return self._hand_out(self._newest)

    def _hand_out(self, newest: int) -> int:
        self._returned = max(newest, self._returned or 0)
        return newest

    def close(self) -> None:
        """Wake and refuse everybody who waits. Idempotent."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
