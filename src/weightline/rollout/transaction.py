"""One refit of one engine, as a pure state machine: events in, effects out, no clock and no I/O.

The caller performs each `Do` on the engine and reports `Done` or `Failed`; `Finish` says where the engine
stands. The way forward is `prepare, pause, apply, verify, invalidate, label, resume, close`. Whatever fails
on the way leads to `rollback, resume, close`, so that every path ends with an engine that serves what its
label says, or with one that is known to need a full refit.

What may be assumed of an engine (see `engines/base.py`): every verb is idempotent within one session, so a
verb whose answer was lost is repeated; a session whose follower is not heard of any more is rolled back and
resumed by the engine itself, so an open session is never closed before the engine was told to resume.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from weightline.errors import EngineState

Verb = Literal["prepare", "pause", "apply", "verify", "invalidate", "label", "resume", "rollback", "close"]
Failure = Literal["lost", "refused", "gone", "unknown"]
"""`lost`: no answer, the verb may or may not have happened; `refused`: a typed no; `gone`: the engine does
not know the session any more; `unknown`: the engine says that its own weights are in an unknown state."""

FORWARD: tuple[Verb, ...] = ("prepare", "pause", "apply", "verify", "invalidate", "label", "resume", "close")
BACK: tuple[Verb, ...] = ("rollback", "resume", "close")


class Do(Struct, frozen=True):
    """Call this verb on the engine, after `delay` seconds."""

    verb: Verb
    delay: float = 0.0


class Finish(Struct, frozen=True):
    """The transaction is over."""

    state: EngineState
    """What the engine serves, as far as the answers tell; `unknown` is settled by the engine's next
    description."""
    closed: bool
    """False when the session was left open on purpose: the engine's own watchdog ends it."""
    pause_in_doubt: bool = False
    """A pause of ours may still be in force, or may yet come into force."""


Effect = Do | Finish


class Done(Struct, frozen=True):
    """The engine answered that the verb took effect."""

    verb: Verb


class Failed(Struct, frozen=True):
    """The verb raised."""

    verb: Verb
    how: Failure


Event = Done | Failed


class Retry(Struct, frozen=True):
    """How often a verb with a lost answer is repeated, and after which delays (seconds)."""

    forward: tuple[float, ...] = (0.05,)
    """On the way forward: short, because the engine may be paused."""
    exit: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    """For `rollback`, `resume` and `close`: more patient, because giving up leaves the rest to the engine's
    watchdog."""


class Transaction:
    """The order of one refit. `begin()` gives the first effect, `advance(event)` each next one, until
    `Finish`.

    `own_pause=False`: somebody else holds the engine paused and keeps it so; `pause` and `resume` are left
    out.
    """

    def __init__(self, *, own_pause: bool = True, retry: Retry | None = None) -> None:
        self._skip: frozenset[Verb] = frozenset() if own_pause else frozenset(("pause", "resume"))
        self._retry = retry or Retry()
        self._path: tuple[Verb, ...] = FORWARD
        self._expected: Verb | None = None
        self._tries = 0
        self._paused_by_us = False
        self._pause_lost = False
        self.first_failure: Failed | None = None
        """What turned the transaction round; None while it goes forward."""

    def begin(self) -> Effect:
        """The first effect."""
        return self._do("prepare")

    def advance(self, event: Event) -> Effect:
        """What to do after `event`. Raises `ValueError` for an event that answers no outstanding effect."""
        if event.verb != self._expected:
            raise ValueError(f"event for {event.verb!r} while {self._expected!r} is outstanding")
        if isinstance(event, Failed):
            return self._failed(event)
        if event.verb == "pause":
            self._pause_lost = False
        if event.verb == "resume":
            self._paused_by_us = False
        for verb in self._path[self._path.index(event.verb) + 1 :]:
            if verb not in self._skip:
                return self._do(verb)
        return self._finish(self._end_state(), closed=True)

    def _end_state(self) -> EngineState:
        return "new" if self._path is FORWARD else "old"

    def _do(self, verb: Verb, *, tries: int = 0, delay: float = 0.0) -> Do:
        self._expected, self._tries = verb, tries
        if verb == "pause":
            self._paused_by_us = True
        return Do(verb, delay)

    def _finish(self, state: EngineState, *, closed: bool, in_doubt: bool = False) -> Finish:
        self._expected = None
        return Finish(state, closed, in_doubt or self._pause_lost)

    def _failed(self, event: Failed) -> Effect:
        if event.how == "lost":
            self._pause_lost = self._pause_lost or event.verb == "pause"
            delays = self._retry.exit if event.verb in BACK else self._retry.forward
            if self._tries < len(delays):
                return self._do(event.verb, tries=self._tries + 1, delay=delays[self._tries])
        if self.first_failure is None and event.verb != "close":
            self.first_failure = event
        if event.verb == "close":
            # What is left of the session is only its undo log: the engine serves what the path before it came
            # to.
            return self._finish(self._end_state(), closed=event.how == "gone")
        return self._forward_failed(event) if self._path is FORWARD else self._back_failed(event)

    def _forward_failed(self, event: Failed) -> Effect:
        if event.verb == "prepare":
            # Nothing was paused or written. A session whose answer was lost is replaced by this follower's
            # next one.
            return self._finish("old", closed=event.how != "lost")
        if event.verb == "resume" and event.how == "lost":
            # New bits, new label, perhaps paused. The open session makes the engine's watchdog end the pause.
            return self._finish("unknown", closed=False, in_doubt=True)
        self._path = BACK
        return self._do("rollback")

    def _back_failed(self, event: Failed) -> Effect:
        if event.how == "gone":
            # The engine ended the session by itself (watchdog, restart). Its pause is over too, unless ours
            # came after that; a blind resume here could break the session of another follower.
            return self._finish("unknown", closed=True, in_doubt=self._paused_by_us)
        # Perhaps still paused, perhaps quarantined by the engine itself. The session stays open: this
        # follower's next one replaces it, and if there is none, the engine's watchdog ends it and the pause
        # with it.
        return self._finish("unknown", closed=False, in_doubt=self._paused_by_us)
