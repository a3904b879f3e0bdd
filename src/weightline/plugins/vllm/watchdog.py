"""Ends a refit whose follower fell silent: the engine must neither stay paused nor keep unlabelled weights.

It acts through the engine's own front door, as a follower would, because only there a rollback falls between
two steps and a resume is possible. Every step may be repeated; what fails is tried again.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightline.plugins.exchange import OWNER

if TYPE_CHECKING:
    from weightline.plugins.vllm.engine import WeightlineTransferEngine
    from weightline.plugins.vllm.session import Refits, Session

log = logging.getLogger("vllm.weightline")

LOOK = 1.0
"""Seconds between two looks at the open session."""
CALL = 30.0
"""Seconds for one call of the engine's own routes."""


class Watchdog(threading.Thread):
    """One thread in each worker; it sleeps unless a session is open."""

    def __init__(self, engine: WeightlineTransferEngine) -> None:
        super().__init__(name="weightline-watchdog", daemon=True)
        self.engine = engine
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
                log.exception("weightline: ending a silent refit failed; trying again")

    def look(self) -> None:
        """End the open session if its holder has been silent for too long."""
        refits = self.engine.refits
        session = refits.session if refits is not None else None
        if refits is None or session is None or session.state == "preparing":
            return
        if refits.silence(session) <= session.timeout:
            return
        log.warning(
            "weightline: nothing heard of %s for %g s; ending its refit to version %s (%s)",
            session.holder, session.timeout, session.order.version, session.state,
        )  # fmt: skip
        self._end(refits, session)
        self.ended += 1

    def _end(self, refits: Refits, session: Session) -> None:
        url = session.url
        if not url:
            log.error("weightline: the silent refit came with no URL; the engine cannot be resumed from here")
            return
        with tempfile.TemporaryDirectory(prefix="weightline-watchdog-") as folder:
            (Path(folder) / OWNER).touch()
            if session.state == "prepared" and not session.pausing:
                # It touched nothing; another follower may have taken its place by now.
                self._ask(url, folder, {"action": "close", "session": session.id})
                return
            committed = session.state == "committed"
            if session.state == "applied":
                self._ask(url, folder, {"action": "rollback", "session": session.id})
            # A session of vLLM's left open would refuse the next follower's start; ending none is a 500.
            self._post(url, "/finish_weight_update", {}, tolerate=True)
            if committed and self._get(url, "/weight_info").get("weight_version") != session.order.label:
                self._post(url, "/update_weight_version", {"new_version": session.order.label})
            if session.pausing and not refits.quarantined:
                self._post(url, "/resume", {})
            self._ask(url, folder, {"action": "close", "session": session.id})

    def _ask(self, url: str, folder: str, request: dict[str, Any]) -> None:
        answer = str(Path(folder) / f"{request['action']}.json")
        self._post(url, "/init_weight_transfer_engine", {"init_info": {**request, "answer": answer}})

    def _post(self, url: str, path: str, body: dict[str, Any], *, tolerate: bool = False) -> None:
        request = urllib.request.Request(
            url + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
        )
        try:
            with _opener().open(request, timeout=CALL) as response:
                response.read()
        except urllib.error.HTTPError:
            if not tolerate:
                raise

    def _get(self, url: str, path: str) -> dict[str, Any]:
        with _opener().open(url + path, timeout=CALL) as response:
            found: dict[str, Any] = json.loads(response.read())
        return found


def _opener() -> urllib.request.OpenerDirector:
    # No proxy from the environment: the engine speaks to itself.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
