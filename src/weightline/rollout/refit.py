"""Performs one `Transaction` on an engine: calls the verbs, times them, turns what they raise into events."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from weightline.errors import ConflictError, EngineState, RefitError, Unavailable, WeightlineError
from weightline.rollout.engines.base import EnginePort, Prepared, Refit
from weightline.rollout.transaction import Do, Done, Event, Failed, Failure, Retry, Transaction, Verb
from weightline.types import Verification


class RefitOutcome(Struct, frozen=True, kw_only=True):
    """How one refit ended, as far as the engine's answers tell."""

    state: EngineState
    verified: Verification
    elements: int
    """Elements that the engine said it writes."""
    phases: dict[str, float]
    """Verb -> milliseconds, repeats included."""
    pause_ms: float | None
    """From the call of `pause` to the answer of `resume`; None when the engine was not resumed by this
    refit."""
    error: WeightlineError | None
    """What turned the refit round."""
    failed_verb: Verb | None
    pause_in_doubt: bool
    open_session: Prepared | None
    """The session, when it could not be closed."""


def classify(verb: Verb, error: WeightlineError) -> Failure:
    """What an error means to the transaction."""
    if isinstance(error, RefitError):
        return "unknown" if error.engine_state == "unknown" else "refused"
    if isinstance(error, Unavailable):
        return "lost"
    if isinstance(error, ConflictError) and verb in ("rollback", "close"):
        # A session may always be rolled back or closed by its holder: a conflict says that the engine has
        # none of that name.
        return "gone"
    return "refused"


class _Performer:
    def __init__(self, port: EnginePort, refit: Refit, clock: Callable[[], float]) -> None:
        self.port = port
        self.refit = refit
        self.clock = clock
        self.prepared: Prepared | None = None
        self.verified: Verification = "none"
        self.phases: dict[str, float] = {}
        self.paused_at: float | None = None
        self.pause_ms: float | None = None
        self.errors: dict[Failed, WeightlineError] = {}
        self.interrupted: BaseException | None = None

    def perform(self, verb: Verb) -> Event:
        began = self.clock()
        if verb == "pause" and self.paused_at is None:
            self.paused_at = began
        try:
            self._call(verb)
        except WeightlineError as error:
            if verb == "rollback" and isinstance(error, RefitError) and error.engine_state == "old":
                return Done(verb)  # there was nothing to put back
            failed = Failed(verb, classify(verb, error))
            self.errors[failed] = error
            return failed
        except BaseException as error:
            if self.interrupted is not None:
                raise
            self.interrupted = error
            return Failed(verb, "refused")
        finally:
            now = self.clock()
            self.phases[verb] = self.phases.get(verb, 0.0) + (now - began) * 1e3
        if verb == "resume" and self.paused_at is not None:
            self.pause_ms = (now - self.paused_at) * 1e3
        return Done(verb)

    def _call(self, verb: Verb) -> None:
        port = self.port
        if verb == "prepare":
            self.prepared = port.prepare(self.refit)
            return
        if verb == "resume":
            port.resume()
            return
        prepared = self.prepared
        if prepared is None:
            raise RefitError(f"{verb} before prepare", engine_state="old")
        if verb == "verify":
            self.verified = port.verify(prepared)
            return
        calls = {
            "pause": port.pause,
            "apply": port.apply,
            "invalidate": port.invalidate,
            "label": port.label,
            "rollback": port.rollback,
            "close": port.close_session,
        }
        calls[verb](prepared)


def run_refit(
    port: EnginePort,
    refit: Refit,
    *,
    own_pause: bool = True,
    retry: Retry | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> RefitOutcome:
    """Take the engine from `refit.have` to `refit.version`, or back; never raises for what the engine does.

    `clock` and `sleep` are in seconds. An interrupt (`KeyboardInterrupt`, a bug) during a verb is raised
    again after the exit path.
    """
    performer = _Performer(port, refit, clock)
    transaction = Transaction(own_pause=own_pause, retry=retry)
    effect = transaction.begin()
    while isinstance(effect, Do):
        if effect.delay:
            sleep(effect.delay)
        effect = transaction.advance(performer.perform(effect.verb))
    if performer.interrupted is not None:
        raise performer.interrupted
    failure = transaction.first_failure
    return RefitOutcome(
        state=effect.state,
        verified=performer.verified,
        elements=performer.prepared.elements if performer.prepared else 0,
        phases={verb: round(ms, 3) for verb, ms in performer.phases.items()},
        pause_ms=performer.pause_ms,
        error=performer.errors.get(failure) if failure else None,
        failed_verb=failure.verb if failure else None,
        pause_in_doubt=effect.pause_in_doubt,
        open_session=None if effect.closed else performer.prepared,
    )
