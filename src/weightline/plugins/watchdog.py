"""Ends a refit whose follower fell silent: the engine must neither stay paused nor keep unlabelled weights.

It acts through the engine's own front door, as a follower would. Every step may be repeated; what fails is
tried again.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from weightline.plugins.exchange import OWNER

if TYPE_CHECKING:
    from weightline.plugins.front import Front
    from weightline.plugins.kind import Door
    from weightline.plugins.session import Refits, Session

LOOK = 1.0
"""Seconds between two looks at the open session."""


class Watchdog(threading.Thread):
    """One thread in each worker; it sleeps unless a session is open."""

    def __init__(self, front: Front, door: Door, log: logging.Logger) -> None:
        super().__init__(name="weightline-watchdog", daemon=True)
        self.front, self.door, self.log = front, door, log
        self.ended = 0
        self._over = threading.Event()
        self._wake = threading.Event()

    def stop(self) -> None:
        """No look is started any more."""
        self._over.set()
        self._wake.set()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def run(self) -> None:
        while not self._over.is_set():
            self._wake.wait(LOOK)
            self._wake.clear()
            try:
                self.look()
            except Exception:  # the next look tries again; a dead watchdog would leave the engine paused
                self.log.exception("weightline: ending a silent refit failed; trying again")

    def look(self) -> None:
        """End the open session if its holder has been silent for too long."""
        refits = self.front.refits
        session = refits.session if refits is not None else None
        if refits is None or session is None or session.state == "preparing":
            return
        if refits.silence(session) <= session.timeout:
            return
        self.log.warning(
            "weightline: nothing heard of %s for %g s; ending its refit to version %s (%s)",
            session.holder, session.timeout, session.order.version, session.state,
        )  # fmt: skip
        self._end(refits, session)
        self.ended += 1

    def _end(self, refits: Refits, session: Session) -> None:
        url = session.url
        if not url:
            self.log.error("weightline: the silent refit came with no URL; the engine cannot be resumed")
            return
        with tempfile.TemporaryDirectory(prefix="weightline-watchdog-") as folder:
            (Path(folder) / OWNER).touch()
            if session.state == "prepared" and not session.pausing:
                # It touched nothing; another follower may have taken its place by now.
                self._ask(url, folder, "close", session)
                return
            committed = session.state == "committed"
            if session.state == "applied":
                self._ask(url, folder, "rollback", session)
            # A session of the engine's left open would refuse the next follower's start.
            self.door.finish(url)
            wanted = session.order.label if committed else session.before.label
            if session.labelled and self.door.label(url) != wanted:
                self.door.set_label(url, wanted)
            if session.pausing and not refits.quarantined:
                self.door.resume(url)
            self._ask(url, folder, "close", session)

    def _ask(self, url: str, folder: str, action: str, session: Session) -> None:
        answer = str(Path(folder) / f"{action}.json")
        self.door.ask(url, {"action": action, "session": session.id, "answer": answer})
