"""One refit session of the engine: prepared → applied → verified → labelled, with a way back from each.

All methods run on the engine thread, between two steps, except `decode`, which touches no engine state. The
session keeps the old bits until it is closed. How bits become live is the business of `change.py`. A holder
that falls silent loses the session: what was written is taken back, and a pause that the session brought is
ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, Protocol
from uuid import uuid4

from msgspec import Struct

from weightline.errors import ConflictError, RefitError, WeightlineError
from weightline.generate.change import STANDBY_FROM, Change, choose
from weightline.generate.plan import make_plan, refused
from weightline.generate.weights import LiveWeights
from weightline.generate.wire import RefitOrder

log = logging.getLogger(__name__)

State = Literal["preparing", "prepared", "applied", "verified", "labelled", "rolled_back"]
_WRITTEN = ("applied", "verified")


class Identity(Struct, frozen=True):
    """What the live weights are said to be."""

    label: str
    version: int | None = None
    run: str | None = None


class Host(Protocol):
    """What a session needs of the engine around it."""

    identity: Identity
    quarantined: bool

    @property
    def paused(self) -> bool:
        """No step runs until `resume`."""
        ...

    @property
    def halted(self) -> bool:
        """Paused, or on the way there."""
        ...

    def pause_now(self, *, clear_cache: bool) -> None:
        """Stop before the next step; running requests stay as they are."""
        ...

    def resume_now(self) -> None:
        """Let generation go on."""
        ...

    def weights_changed(self) -> None:
        """Weights or label are others now: a half-computed pass must start over."""
        ...

    def quarantine(self, why: str) -> None:
        """The weights are in an unknown state: end all requests and take no more."""
        ...


class Session:
    """What one refit has done so far."""

    def __init__(self, order: RefitOrder, now: float) -> None:
        self.id = uuid4().hex
        self.order = order
        self.state: State = "preparing"
        self.heard = now
        self.change: Change | None = None
        self.why = ""
        """Why the refit goes the way it goes."""
        self.identity: Identity | None = None
        self.carried: dict[tuple[str, int, int], str] = {}
        self.stored: dict[str, str] = {}
        self.paused_engine = False

    @property
    def elements(self) -> int:
        """How many are written; 0 before they are known."""
        return self.change.plan.elements if self.change else 0


class Refits:
    """At most one session, and the rules between sessions."""

    def __init__(
        self, host: Host, weights: LiveWeights, *, timeout: float, clock: Callable[[], float]
    ) -> None:
        self.host = host
        self.weights = weights
        self.timeout = timeout
        self.clock = clock
        self.session: Session | None = None
        self.standby_from = STANDBY_FROM
        self.expired = 0
        """Sessions that were ended because their holder fell silent."""

    @property
    def unlabelled(self) -> bool:
        """New weights are live under the old label: nothing may be sampled now."""
        return self.session is not None and self.session.state in _WRITTEN

    # Opening.

    def open(self, order: RefitOrder) -> Session:
        """A session for `order`: a new one, or the open one when its holder asks for the same again.

        Raises `ConflictError` while another holder's session is open, `RefitError("old")` when `order` does
        not start from what is live.
        """
        current = self.session
        if current is not None:
            if current.order == order and current.state == "prepared":
                current.heard = self.clock()
                return current
            if not order.holder or current.order.holder != order.holder or current.state == "preparing":
                holder = current.order.holder or "somebody unnamed"
                raise ConflictError(
                    f"a refit to version {current.order.version} is open, held by {holder}",
                    hint=f"wait: it ends by itself {self.timeout:g} s after its holder falls silent",
                )
            self.close(current.id)
        self._check_base(order)
        self.session = Session(order, self.clock())
        return self.session

    def _check_base(self, order: RefitOrder) -> None:
        live = self.host.identity
        state: Literal["old", "unknown"] = "unknown" if self.host.quarantined else "old"
        if order.have is None:
            return
        if self.host.quarantined:
            raise RefitError(
                "the engine is quarantined: its weights are in an unknown state",
                engine_state=state,
                hint="refit it in full",
            )
        wrong = []
        if order.have != live.version:
            wrong.append(f"version {order.have} (live: {live.version})")
        if order.run != live.run:
            wrong.append(f"run {order.run!r} (live: {live.run!r})")
        if order.have_label is not None and order.have_label != live.label:
            wrong.append(f"label {order.have_label!r} (live: {live.label!r})")
        if wrong:
            raise RefitError(
                f"the delta is against {', '.join(wrong)}",
                engine_state=state,
                hint="ask the engine what it serves, or refit it in full",
            )

    def decode(self, session: Session) -> tuple[Change, str]:
        """Read and check the delta, and fill the standby tensors if the refit is large; returns it and why it
        goes that way. Runs on any thread, while the engine serves. Raises `RefitError("old")`.
        """
        plan = make_plan(self.weights, session.order)
        return choose(self.weights, plan, standby_from=self.standby_from)

    def ready(self, session: Session, decoded: tuple[Change, str]) -> Session:
        """`decode` is done."""
        self._find(session.id)
        session.change, session.why = decoded
        session.state, session.heard = "prepared", self.clock()
        return session

    def discard(self, session: Session) -> None:
        """`decode` failed; nothing was written."""
        if self.session is session:
            self.session = None

    def _find(self, session_id: str) -> Session:
        current = self.session
        if current is None or current.id != session_id:
            raise ConflictError(
                f"no refit session {session_id} is open",
                hint="it was closed, or undone after its holder fell silent; prepare again",
            )
        current.heard = self.clock()
        return current

    # Verbs.

    def apply(self, session_id: str) -> int:
        """Write the new bits. Returns elements written. Raises `ConflictError` unless paused; on any
        failure the old bits are back.
        """
        session = self._find(session_id)
        if session.state in (*_WRITTEN, "labelled"):
            return session.elements
        self._need(session, ("prepared",), "apply")
        self._need_pause("apply")
        self._check_base(session.order)
        change = session.change
        if change is None:
            raise ConflictError(f"refit session {session_id} has nothing prepared", hint="prepare first")
        session.identity = self.host.identity
        session.carried, session.stored = dict(self.weights.carried), dict(self.weights.stored)
        session.state = "applied"
        try:
            with self.weights.lock:
                change.apply()
        except Exception as error:  # whatever went wrong, half a version must not stay
            self._restore(session)
            session.state = "rolled_back"
            raise refused(
                [f"writing failed: {error}"], "the old bits are back; see the engine's log"
            ) from error
        return session.elements

    def verify(self, session_id: str) -> None:
        """Prove that what is live is the version: bits read back, and the digest of each tensor compared with
        the order's (a standby set was proved when it was filled: it is live). Raises `RefitError("unknown")`.
        """
        session = self._find(session_id)
        if session.state in ("verified", "labelled"):
            return
        self._need(session, ("applied",), "verify")
        change = session.change
        with self.weights.lock:
            # The dtype of a storage changes only when all of it is written, so this holds for every write
            # of the plan.
            for write in change.plan.writes if change else ():
                self.weights.stored[write.window.owner] = write.stored
            differing = change.verify() if change else []
        if differing:
            raise RefitError(
                f"read back: {'; '.join(differing[:8])}",
                engine_state="unknown",
                hint="roll back, then refit the engine in full",
            )
        session.state = "verified"

    def invalidate(self, session_id: str) -> int:
        """Cached prefixes that a new request could have read under older weights, now dropped: none are
        kept between requests, so 0.
        """
        self._find(session_id)
        return 0

    def label(self, session_id: str) -> Identity:
        """From the next step on tokens carry the order's label. Raises `ConflictError` unless verified and
        paused.
        """
        session = self._find(session_id)
        if session.state == "labelled":
            return self.host.identity
        self._need(session, ("verified",), "label")
        self._need_pause("label")
        order = session.order
        self.weights.carried.update(session.change.digests if session.change else {})
        self.host.identity = Identity(order.label, order.version, order.run)
        self.host.quarantined = False
        self.host.weights_changed()
        session.state = "labelled"
        return self.host.identity

    def rollback(self, session_id: str) -> None:
        """Old bits and old label again. Raises `RefitError("unknown")`, and quarantines the engine, when
        the old bits do not come back.
        """
        session = self._find(session_id)
        if session.state in (*_WRITTEN, "labelled"):
            self._need_pause("roll back")
            self._restore(session)
        session.state = "rolled_back"

    def close(self, session_id: str) -> None:
        """Drop the session and the old bits. Written but unlabelled weights are taken back first.
        Idempotent.
        """
        if self.session is None or self.session.id != session_id:
            return
        try:
            if self.unlabelled:
                self._restore(self.session)
        finally:
            self.session = None

    def _restore(self, session: Session) -> None:
        try:
            with self.weights.lock:
                if session.change is not None:
                    session.change.restore()
                self.weights.carried, self.weights.stored = dict(session.carried), dict(session.stored)
        except Exception as error:  # the engine must not serve weights that nobody knows
            self.host.quarantine(f"the old bits did not come back: {error}")
            session.state = "rolled_back"
            raise RefitError(
                f"rollback failed: {error}", engine_state="unknown", hint="refit the engine in full"
            ) from error
        if session.identity is not None:
            self.host.identity = session.identity
        self.host.weights_changed()

    def facts(self, session_id: str) -> dict[str, object]:
        """Which way the refit goes, why, and the memory that it holds meanwhile."""
        session = self._find(session_id)
        way, held = (session.change.way, session.change.standby_bytes) if session.change else (None, 0)
        return {"elements": session.elements, "path": way, "why": session.why, "standby_bytes": held}

    def switch(self, session_id: str, *, clear_cache: bool = False) -> Identity:
        """`apply`, `verify` and `label` between two steps, as under a keep-pause (`clear_cache` as there): no
        request notices more than that. An engine that is paused stays so. Raises as they do; then the old
        bits are back and generation goes on.
        """
        session = self._find(session_id)
        pause = session.state != "labelled" and not self.host.halted
        if pause:
            self.host.pause_now(clear_cache=clear_cache)
        try:
            self.apply(session_id)
            self.verify(session_id)
            return self.label(session_id)
        except WeightlineError as error:
            if session.state not in _WRITTEN:
                raise
            self.rollback(session_id)
            raise RefitError(error.message, engine_state="old", hint="the old bits are back") from error
        finally:
            if pause:
                self.host.resume_now()

    # Silence.

    def pause_came(self, *, by_it: bool) -> None:
        """A pause came while a session may be open. `by_it`: it stopped the engine, which goes on by itself
        if the holder falls silent.
        """
        if self.session is not None:
            self.session.paused_engine |= by_it
            self.session.heard = self.clock()

    def resumed(self) -> None:
        """The pause is over."""
        if self.session is not None:
            self.session.paused_engine = False

    def deadline(self) -> float | None:
        """When the open session ends if nothing more is heard of its holder."""
        if self.session is None or self.session.state == "preparing":
            return None
        return self.session.heard + self.timeout

    def expire(self) -> None:
        """End the session whose holder has been silent for `timeout` seconds."""
        deadline = self.deadline()
        session = self.session
        if session is None or deadline is None or self.clock() < deadline:
            return
        log.warning(
            "refit to version %s: nothing heard of %s for %g s; undoing what was not labelled",
            session.order.version, session.order.holder or "its holder", self.timeout,
        )  # fmt: skip
        self.expired += 1
        try:
            self.close(session.id)
        except WeightlineError as error:
            log.error("%s", error)
        if session.paused_engine and self.host.halted:
            self.host.resume_now()

    def _need(self, session: Session, states: tuple[State, ...], verb: str) -> None:
        if session.state not in states:
            raise ConflictError(
                f"cannot {verb}: the refit is {session.state}", hint=f"it must be {' or '.join(states)}"
            )

    def _need_pause(self, verb: str) -> None:
        if not self.host.paused:
            raise ConflictError(
                f"cannot {verb}: the engine is not paused", hint="POST /pause?mode=keep first"
            )
