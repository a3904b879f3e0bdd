"""One refit of the live weights: prepared, applied (and read back), committed; with a way back from each.

`apply`, `commit` and `rollback` run on the worker's main thread, between two steps of the engine, because
the engine calls them there. `prepare` runs on a background thread while the engine serves: it only reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from weightline.plugins import sums
from weightline.plugins.exchange import Refused, WholeTensor, read_refit
from weightline.plugins.live import LiveWeights, Planned, Write
from weightline.plugins.whole import WholePlan

State = Literal["preparing", "prepared", "applied", "committed", "rolled_back"]

TIMEOUT = 30.0
"""Seconds of silence after which a session is ended, unless its holder asked for another time."""


@dataclass(frozen=True)
class Identity:
    """What the live weights are said to be."""

    run: str | None = None
    version: int | None = None
    label: str = "default"


@dataclass(eq=False)
class Session:
    """What one refit has done so far."""

    id: str
    holder: str
    url: str
    timeout: float
    order: Identity
    before: Identity
    heard: float
    state: State = "preparing"
    pausing: bool = False
    """Its holder said that it pauses the engine: whoever ends the session ends that pause."""
    labelled: bool = False
    """It was committed once: the engine's label may be the new one, even after a rollback."""
    planned: list[Planned] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    carried: dict[str, sums.Lanes] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)

    whole: WholePlan | None = None
    loading: bool = False
    """The loaders of `whole` were called: its modules hold the old weights no more."""

    @property
    def elements(self) -> int:
        whole = 0 if self.whole is None else self.whole.elements
        return whole + sum(write.elements for write in self.writes)


class Refits:
    """At most one session, and the rules between sessions."""

    def __init__(self, weights: LiveWeights, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.weights = weights
        self.clock = clock
        self.identity = Identity()
        self.quarantined = ""
        """Why the live weights are in an unknown state; empty when they are not."""
        self.hold: tuple[str, int] | None = None
        """Run and version at which every follower leaves the engine."""
        self.session: Session | None = None
        self.fault: Callable[[str], None] = lambda _where: None
        """Called with "apply:<n>" before write n; tests inject failures here."""

    # Opening.

    def open(self, request: Mapping[str, Any]) -> Session:
        """A session for `request`.

        Raises `Refused` while another holder's session is open, and when the refit does not start from what
        is live."""
        current = self.session
        if current is not None:
            # One that may have paused the engine is ended by the watchdog, which resumes it: replaced here,
            # its pause would look like somebody else's for ever.
            stale = self.silence(current) > current.timeout and not current.pausing
            if current.holder != request["holder"] and not stale:
                raise Refused(
                    f"a refit to version {current.order.version} is open, held by {current.holder}",
                    kind="conflict",
                    hint=f"wait: it ends by itself {current.timeout:g} s after its holder falls silent",
                )
            if current.state == "applied":
                raise Refused(
                    "an unfinished refit of this holder is still applied",
                    kind="conflict",
                    hint="roll it back first",
                )
        order = Identity(str(request["run"]), int(request["version"]), str(request["label"]))
        self._check_base(request)
        pausing = current is not None and current.pausing
        self.session = Session(
            id=uuid4().hex,
            holder=str(request["holder"]),
            url=str(request.get("url", "")),
            timeout=float(request.get("timeout", TIMEOUT)),
            order=order,
            before=self.identity,
            heard=self.clock(),
            pausing=pausing,
        )
        return self.session

    def _check_base(self, request: Mapping[str, Any]) -> None:
        have = request.get("have")
        if have is None:
            return
        if self.quarantined:
            raise Refused(
                f"the engine is quarantined: {self.quarantined}", state="unknown", hint="refit it in full"
            )
        live = self.identity
        if (request["run"], have) != (live.run, live.version):
            raise Refused(
                f"the delta is against version {have} of run {request['run']}; "
                f"live is version {live.version} of run {live.run}",
                hint="ask the engine what it serves, or refit it in full",
            )

    def prepare(self, session: Session, request: Mapping[str, Any]) -> None:
        """Read, check and gather. Raises `Refused`; the session is gone then."""
        try:
            self.weights.proved.wait()
            changes = read_refit(Path(request["file"]), str(request["sha256"]))
            session.planned = self.weights.plan(changes)
            session.writes = [write for planned in session.planned for write in planned.writes]
            entries = [WholeTensor.parse(entry) for entry in request.get("whole", ())]
            full = request.get("have") is None
            session.whole = self.weights.whole.plan(
                entries, self.weights.places, self.weights.aliases, full=full
            )
        except BaseException:
            if self.session is session:
                self.session = None
            raise
        session.state, session.heard = "prepared", self.clock()

    def find(self, session_id: str) -> Session:
        """The open session of that id, heard of now. Raises `Refused`."""
        session = self.session
        if session is None or session.id != session_id:
            raise Refused(
                f"no refit session {session_id} is open",
                kind="conflict",
                hint="it was ended after its holder fell silent; prepare again",
            )
        session.heard = self.clock()
        return session

    def silence(self, session: Session) -> float:
        """Seconds since its holder was last heard of."""
        return self.clock() - session.heard

    # Writing.

    def apply(self, session_id: str) -> int:
        """Write the new bits and read them back. Idempotent. Raises `Refused`: "old" when the old bits are
        back, "unknown" when they are not."""
        session = self.find(session_id)
        if session.state in ("applied", "committed"):
            return session.elements
        if session.state != "prepared":
            raise Refused(f"cannot apply: the refit is {session.state}", kind="conflict")
        session.state = "applied"
        try:
            with self.weights.written():
                for number, write in enumerate(session.writes):
                    self.fault(f"apply:{number}")
                    if not write.put(write.new):
                        raise RuntimeError(f"{write.live.key} does not hold what was written")
                if session.whole is not None:
                    self.fault("apply:whole")
                    session.loading = True
                    self.weights.whole.load(session.whole)
        except Exception as error:  # whatever went wrong, half a version must not stay
            self._restore(session)
            raise Refused(
                f"writing failed: {error}", hint="the old bits are back; see the engine's log"
            ) from error
        return session.elements

    def commit(self) -> None:
        """The label is about to move: what was applied is what the engine serves from now on."""
        session = self.session
        if session is None or session.state != "applied":
            return
        for planned in session.planned:
            place = planned.place
            if place.name in self.weights.carried:
                session.carried[place.name] = self.weights.carried[place.name]
            session.stored[place.name] = place.stored
            self.weights.carried[place.name], place.stored = planned.lanes, planned.stored
        if session.whole is not None:
            self.weights.whole.commit(session.whole)
        self.identity, self.quarantined, session.state = session.order, "", "committed"
        session.labelled = True

    def rollback(self, session_id: str) -> None:
        """Old bits and old identity again. Raises `Refused("unknown")` when the old bits do not come back."""
        session = self.find(session_id)
        if session.state in ("applied", "committed"):
            self._restore(session)
        elif session.state in ("preparing", "prepared"):
            session.state = "rolled_back"

    def _restore(self, session: Session) -> None:
        committed = session.state == "committed"
        try:
            with self.weights.written():
                wrong = [write.live.key for write in reversed(session.writes) if not write.put(write.old)]
                if session.whole is not None and session.loading:
                    self.weights.whole.load_back(session.whole)
                    session.loading = False
        except Exception as error:  # noqa: BLE001  the engine must not serve weights that nobody knows
            wrong = [str(error)]
        session.state = "rolled_back"
        if wrong:
            self.quarantined = f"the old bits did not come back: {', '.join(sorted(set(wrong))[:4])}"
            raise Refused(self.quarantined, state="unknown", hint="refit the engine in full")
        if committed:
            self.identity = session.before
            if session.whole is not None:
                self.weights.whole.uncommit(session.whole)
            for planned in session.planned:
                place = planned.place
                place.stored = session.stored[place.name]
                if place.name in session.carried:
                    self.weights.carried[place.name] = session.carried[place.name]
                else:
                    self.weights.carried.pop(place.name, None)

    def close(self, session_id: str) -> None:
        """Drop the session and the old bits. What was applied and not committed is taken back first."""
        session = self.session
        if session is None or session.id != session_id:
            return
        try:
            if session.state == "applied":
                self._restore(session)
        finally:
            self.session = None

    def foreign(self, how: str) -> None:
        """Somebody else wrote weights, over a way of the engine's own: nothing is known of them."""
        session = self.session
        self.identity = Identity()
        self.weights.carried.clear()
        if session is not None and session.state in ("applied", "committed"):
            self.quarantine(f"{how} wrote into the middle of a refit")
        elif session is not None:
            session.state = "rolled_back"

    def quarantine(self, why: str) -> None:
        """The live weights are not what they are said to be."""
        self.quarantined = why
