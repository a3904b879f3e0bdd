"""One request under way in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from time import monotonic

from weightline.errors import Unavailable
from weightline.testing.client import Ask, Client, Reply

PATIENCE = 120.0
"""Seconds that the suite waits for something that must come."""


def until(condition: Callable[[], bool], *, timeout: float = PATIENCE) -> bool:
    """Whether `condition` became true within `timeout` seconds."""
    deadline, pause = monotonic() + timeout, threading.Event()
    while not condition():
        if monotonic() > deadline:
            return False
        pause.wait(0.002)
    return True


class Flight:
    """Sends `ask` at once; `tokens` counts what a stream has brought so far."""

    def __init__(self, client: Client, ask: Ask) -> None:
        self.ask = ask
        self.tokens = 0
        self._reply: Reply | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(client,), daemon=True)
        self._thread.start()

    def _run(self, client: Client) -> None:
        reply = client.generate(self.ask, self._hear)
        with self._changed:
            self._reply = reply
            self._changed.notify_all()

    def _hear(self, tokens: int) -> None:
        with self._changed:
            self.tokens = tokens
            self._changed.notify_all()

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._reply is not None

    def wait_tokens(self, count: int, timeout: float = PATIENCE) -> None:
        """Until the stream has brought `count` tokens or has ended. Raises `Unavailable`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.tokens >= count or self.done, timeout):
                raise Unavailable(
                    f"request {self.ask.id} brought {self.tokens} tokens in {timeout:.0f} s",
                    hint="is the engine paused by somebody else?",
                )

    def reply(self, timeout: float = PATIENCE) -> Reply:
        """The answer; one with an error when none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.done, timeout)
            return self._reply or Reply(ask=self.ask, error=f"no answer within {timeout:.0f} s")


def replies(flights: Iterable[Flight]) -> list[Reply]:
    """All answers, in order."""
    return [flight.reply() for flight in flights]
