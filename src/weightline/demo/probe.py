"""Asks the server, the engines and the kernel, from a thread, how the demo stands; the answers go to the
inbox.

Only public interfaces are asked: `connect("unix://…").versions()`, the engines' `/weight_info` and
`/is_paused`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Mapping
from typing import Any

from weightline.demo.board import EngineSeen, LineSeen, MemorySeen
from weightline.errors import WeightlineError

log = logging.getLogger(__name__)

PERIOD = 0.4


class Probe:
    """Polls until `stop`. A door that does not answer is asked again: whether its process lives is the
    supervisor's business.
    """

    def __init__(self, inbox: queue.SimpleQueue[Any], url: str, engines: Mapping[str, str]) -> None:
        self._inbox, self._url, self._engines = inbox, url, dict(engines)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask nothing more. Returns at once; answers under way may still come."""
        self._stop.set()

    def join(self) -> None:
        """Wait until the thread has ended, which it does soon once the doors are gone. After `stop`."""
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        import httpx

        import weightline

        with httpx.Client(timeout=5.0) as http, contextlib.ExitStack() as stack:
            line = None
            while not self._stop.is_set():
                try:
                    if line is None:
                        line = weightline.connect(self._url)
                        stack.callback(line.close)
                    self._inbox.put(LineSeen(tuple(line.versions())))
                except WeightlineError as error:
                    log.debug("server: %s", error)
                for name, url in self._engines.items():
                    try:
                        label = http.get(f"{url}/weight_info").raise_for_status().json()["weight_version"]
                        paused = http.get(f"{url}/is_paused").raise_for_status().json()["is_paused"]
                    except (httpx.HTTPError, KeyError, ValueError) as error:
                        log.debug("%s: %s", name, error)
                    else:
                        self._inbox.put(EngineSeen(name, str(label), bool(paused)))
                self._inbox.put(MemorySeen(resident_bytes()))
                self._stop.wait(PERIOD)


def resident_bytes() -> int:
    """Resident bytes of this process and all its descendants, summed."""
    import psutil

    total = 0
    me = psutil.Process(os.getpid())
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_info().rss
    return total
