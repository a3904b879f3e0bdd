"""The client's watch stream: one thread that listens while the server is up and comes back by itself when it
has been away.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from weightline.errors import Unavailable, WeightlineError
from weightline.service import wire
from weightline.service.feed import Feed
from weightline.service.rpc import Rpc

log = logging.getLogger("weightline.client")

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0


class Watching:
    """Feeds what a server announces into a `Feed`; while no server does, the feed polls the store (degraded
    mode).
    """

    def __init__(self, rpc: Rpc, feed: Feed, *, run: str, client: str, subscriber: str | None) -> None:
        self._rpc = rpc
        self._feed = feed
        self._run = run
        self._hello = wire.Hello(protocol=wire.PROTOCOL, client=client)
        self._watch = wire.Watch(client=client, subscriber=subscriber)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen. Idempotent."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(
                    target=self._run_forever, name="weightline-watch", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End the stream and the thread. Idempotent."""
        self._stop.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run_forever(self) -> None:
        pause, told = FIRST_PAUSE, ""
        while not self._stop.is_set():
            try:
                heard = self._listen()
            except WeightlineError as error:
                heard = False
                # An error other than absence (another release, another store) is said once; polling goes on.
                if not isinstance(error, Unavailable) and error.message != told:
                    told = error.message
                    log.warning("not listening, polling the store: %s (%s)", error.message, error.hint)
            finally:
                self._feed.ringing = False
                self._feed.stir()
            pause = FIRST_PAUSE if heard else min(2 * pause, LONGEST_PAUSE)
            self._stop.wait(pause)

    def _listen(self) -> bool:
        """Until the stream ends. True when it had begun."""
        welcome = self._rpc.call("Hello", self._hello, wire.Welcome, timeout=2.0)
        if welcome.run != self._run:
            raise WeightlineError(
                f"the server now serves run {welcome.run}, this client is of run {self._run}",
                hint="connect again",
            )
        call, events = self._rpc.stream("Watch", self._watch)
        with self._lock:
            self._call = call
        if self._stop.is_set():
            call.cancel()
        heard = False
        try:
            for event in events:
                heard = True
                self._feed.ringing = not event.closing
                self._feed.announce(event.newest)
        except Unavailable:
            if not heard:
                raise
        finally:
            with self._lock:
                self._call = None
            call.cancel()
        return heard
