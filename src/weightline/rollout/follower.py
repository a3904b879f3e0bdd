"""Keeps one engine on the version it should serve: looks at the engine, looks at the store, refits,
acknowledges, waits.

The engine's own description decides what is live, never the follower's memory. Each look (`step`) is complete
in itself, so a follower can be killed and started again at any point.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from weightline.errors import (
    ConflictError,
    EngineState,
    FormatError,
    IntegrityError,
    InvalidInput,
    RefitError,
    StorageFull,
    Unavailable,
    VersionGone,
    VersionNotFound,
    WeightlineError,
)
from weightline.rollout import mapping as names
from weightline.rollout.engines.base import EngineDescription, EnginePort, Refit, WritingPort
from weightline.rollout.hold import Holds
from weightline.rollout.memory import Doubt, PendingAck, Plan, times
from weightline.rollout.refit import RefitOutcome, run_refit
from weightline.rollout.replica import RefitFile, Replica
from weightline.rollout.target import chosen, live_version
from weightline.types import VersionRecord

if TYPE_CHECKING:
    from weightline.service.line import Line

OnEvent = Callable[[dict[str, Any]], None]

LOOK = 1.0
"""Seconds between two looks at an engine that is up to date; a new version ends the wait at once."""
BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds to wait after the first, second, … failure in a row; the last one repeats."""
DELTA_FAILURES = 2
"""So many failures in a row with a delta, then the full version is tried."""


class Follower:
    """One follower of one engine. `run()` until `stop` is set; `step()` is one look, for tests and for
    callers with a loop of their own."""

    def __init__(
        self,
        line: Line,
        port: EnginePort,
        replica: Replica,
        *,
        id: str,
        at: int | None = None,
        hold: bool = False,
        rules: Mapping[str, str] | None = None,
        on_event: OnEvent | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`clock` and `sleep` (seconds) serve a refit; waits between looks end early when `stop` is set or a
        version comes."""
        self.line, self.port, self.replica = line, port, replica
        replica.writer = port.write_refit if isinstance(port, WritingPort) else None
        self.id, self.at, self.hold, self.rules = id, at, hold, rules
        self.stop = stop or threading.Event()
        self._on_event = on_event
        self._clock, self._sleep = clock, sleep
        self._failures = 0
        self._delta_failures = 0
        self._last_served: int | None = None
        self._seen: int | None = None
        self._ack: PendingAck | None = None
        self._doubt: Doubt | None = None
        self._said: tuple[Any, ...] | None = None
        self._holds = Holds(line.run)

    # --- the loop ---

    def run(self) -> None:
        """Follow until `stop` is set. A refit in progress is completed or rolled back first.

        Raises what no waiting can mend: `InvalidInput` (not an engine of this kind), and for `at`:
        `VersionNotFound`, `VersionGone`.
        """
        while not self.stop.is_set():
            self._wait(self.step())

    def step(self) -> float:
        """One look at engine and store, and a refit when one is due. Returns the seconds after which to look
        again."""
        try:
            engine = self.port.describe()
            held = self._holds.seen(engine, self.port)
        except Unavailable as error:
            return self._waiting("engine", error)
        try:
            versions = self.line.versions()
        except Unavailable as error:
            return self._waiting("store", error)
        self._seen = max((record.version for record in versions), default=None)
        live = live_version(engine, self.line.run, versions)
        self._last_served = live if live is not None else self._last_served
        target = chosen(versions, live, self.at, held, self._last_served, still=self.hold)
        if target is not None and target != live:
            return self._refit(engine, next(r for r in versions if r.version == target), live)
        if self._doubt is not None:
            try:
                engine = self._end_doubt(engine)
            except WeightlineError as error:
                return self._waiting("engine", error)
            if live_version(engine, self.line.run, versions) != live:
                return 0.0
        if target is None:
            still = versions and (self.hold or held is not None)
            return self._waiting("held" if still else "empty", None, engine=engine)
        return self._up_to_date(engine, next(r for r in versions if r.version == target))

    def _wait(self, seconds: float) -> None:
        deadline = self._clock() + seconds
        while not self.stop.is_set() and (left := deadline - self._clock()) > 0:
            try:
                newer = self.line.wait_for_update(timeout=min(left, LOOK), after=self._seen or 0)
            except WeightlineError:
                self.stop.wait(min(left, LOOK))
                continue
            if newer is not None and newer > (self._seen or 0):
                self._failures = 0  # a new version is a new chance
                return

    def _up_to_date(self, engine: EngineDescription, record: VersionRecord) -> float:
        self._failures = self._delta_failures = 0
        if engine.paused:
            self._say("waiting", record=record, have=record.version, once=("paused",), reason="paused")
            return LOOK
        self._acknowledge(record)
        self._say("ready", record=record, have=record.version, once=(record.version, engine.instance))
        return LOOK

    def _end_doubt(self, engine: EngineDescription) -> EngineDescription:
        """The end of our last refit was lost on the way, and there is no other to come: let the engine go on.

        Bits and label of an engine that is not quarantined agree, so a resume is all it needs. Raises what
        the engine answers.
        """
        doubt = self._doubt
        if doubt is None or engine.quarantined:
            return engine
        if engine.paused:
            self.port.resume()
        if doubt.session is not None:
            # When the engine's watchdog ended it already, the next description shows what came of it.
            with contextlib.suppress(ConflictError):
                self.port.close_session(doubt.session)
        self._doubt = None
        return self.port.describe()

    # --- one refit ---

    def _refit(self, engine: EngineDescription, record: VersionRecord, live: int | None) -> float:
        began = self._clock()
        have = live if self._delta_failures < DELTA_FAILURES else None
        try:
            plan = self._plan(engine, record)
            planned = self._clock()
            file, have = self._fetch(plan, have)
        except StorageFull as error:
            return self._failed(error, record, live, have)
        except Unavailable as error:
            return self._waiting("store", error)
        except WeightlineError as error:
            return self._failed(error, record, live, have)
        phases = {"plan": (planned - began) * 1e3, "fetch": (self._clock() - planned) * 1e3}
        refit = Refit(
            run=self.line.run,
            version=record.version,
            label=record.label,
            have=have,
            have_label=engine.label if have is not None else None,
            file=file.path,
            digests=file.digests,
            whole=file.whole,
        )
        foreign_pause = engine.paused and not engine.quarantined and self._doubt is None
        try:
            outcome = run_refit(
                self.port, refit, own_pause=not foreign_pause, clock=self._clock, sleep=self._sleep
            )
            if outcome.pause_in_doubt or outcome.open_session is not None:
                self._doubt = Doubt(outcome.open_session)
            elif outcome.state != "unknown":
                self._doubt = None
            if outcome.state == "new":
                trace = times(outcome.phases, time.time())
                self._ack = PendingAck(record.version, outcome.verified, outcome.pause_ms, trace=trace)
            self._confirm(engine, record, outcome, foreign_pause)
        except WeightlineError as error:
            return self._failed(error, record, live, have)
        finally:
            self.replica.discard(file)
        self._failures = self._delta_failures = 0
        self._last_served = record.version
        acked = not foreign_pause and self._acknowledge(record)
        phases.update(outcome.phases)
        self._say(
            "refit",
            record=record,
            have=have,
            elements=file.elements,
            nbytes=file.nbytes,
            pause_ms=_round(outcome.pause_ms),
            total_ms=_round((self._clock() - began) * 1e3),
            phases={name: _round(ms) for name, ms in phases.items()},
            verified=outcome.verified,
            acked=acked,
            uncovered=list(names.uncovered(plan.mapping, engine)),
        )
        return 0.0

    def _plan(self, engine: EngineDescription, record: VersionRecord) -> Plan:
        manifest = self.line.manifest(record.version)
        specs = [entry.spec for entry in manifest.tensors]
        mapping = names.resolve(specs, engine, rules=self.rules)
        apart = names.tied_apart(mapping, {e.spec.name: e.digest for e in manifest.tensors}, engine)
        if apart:
            raise RefitError(
                f"version {record.version}: tied in this engine, but of different bytes: {'; '.join(apart)}",
                engine_state="old",
                hint="serve a model with untied weights, or commit tied ones",
            )
        fresh = engine.proves_digests and engine.version is None and not engine.quarantined
        return Plan(record, manifest, mapping, engine.groups, fresh)

    def _fetch(self, plan: Plan, have: int | None) -> tuple[RefitFile, int | None]:
        """The file to hand over, and the version it starts from: None for a full one, also when the way from
        `have` is gone."""
        if have is not None:
            try:
                return self.replica.delta_file(
                    self.line, plan.record, have, plan.manifest, plan.mapping, plan.groups
                ), have
            except (VersionGone, VersionNotFound, InvalidInput):
                pass  # deltas retired, or shapes changed on the way: the full version needs neither
        live = None
        if plan.fresh:
            # Started from a folder that may hold this very version, or most of it.
            with contextlib.suppress(InvalidInput, RefitError):
                live = self.port.digests(tuple(plan.mapping.values()))
        file = self.replica.full_file(
            self.line, plan.record, plan.manifest, plan.mapping, plan.groups, live=live
        )
        return file, None

    def _confirm(
        self, before: EngineDescription, record: VersionRecord, outcome: RefitOutcome, foreign_pause: bool
    ) -> None:
        """Raise unless the engine itself says that it serves `record`."""
        cause = outcome.error
        try:
            after = self.port.describe()
        except Unavailable as error:
            raise RefitError(
                (cause or error).message, engine_state="unknown", hint=(cause or error).hint
            ) from None
        if (
            cause is not None
            and outcome.failed_verb == "prepare"
            and isinstance(cause, ConflictError | Unavailable)
        ):
            raise cause  # another follower's session, or an engine that went away: nothing was tried
        where = f" (at {outcome.failed_verb})" if outcome.failed_verb else ""
        same = after.instance == before.instance and not after.quarantined
        state: EngineState = "unknown"
        if same and (after.run, after.version, after.label) == (self.line.run, record.version, record.label):
            if not after.paused or foreign_pause:
                return
            state = "new"
        elif same and (after.run, after.version, after.label) == (before.run, before.version, before.label):
            state = "old"
        raise RefitError(
            f"version {record.version} did not go live{where}: "
            + (
                cause.message
                if cause
                else f"the engine serves {after.label!r}, {'paused' if after.paused else 'not paused'}"
            ),
            engine_state=state,
            hint=cause.hint if cause and cause.hint else "the follower tries again by itself",
        )

    def _failed(
        self, error: WeightlineError, record: VersionRecord, live: int | None, have: int | None
    ) -> float:
        if have is not None and isinstance(error, IntegrityError | FormatError):
            # Broken bytes do not mend by themselves: the full version is tried next.
            self._delta_failures = DELTA_FAILURES
        elif have is not None and not isinstance(error, ConflictError | Unavailable):
            self._delta_failures += 1
        delay = BACKOFF[min(self._failures, len(BACKOFF) - 1)]
        self._failures += 1
        self._say(
            "refused",
            record=record,
            have=live,
            error=error.to_dict(),
            engine_state=error.engine_state if isinstance(error, RefitError) else "old",
            retry_in=delay,
            full_next=self._delta_failures >= DELTA_FAILURES,
        )
        return delay

    # --- acks and events ---

    def _acknowledge(self, record: VersionRecord) -> bool:
        """Tell the line what the engine serves, once a version; False when that has to wait for the line."""
        ack = self._ack
        if ack is None or ack.version != record.version:
            # The engine served it before this follower came: it was acknowledged by the one before, or it
            # died in between.
            said = any(a.subscriber == self.id for a in record.acks)
            ack = self._ack = PendingAck(record.version, detail="found serving it", sent=said)
        if ack.sent:
            return True
        try:
            self.line.ack(
                record.version,
                self.id,
                verified=ack.verified,
                pause_ms=ack.pause_ms,
                detail=ack.detail,
                trace=ack.trace,
            )
        except Unavailable:
            return False
        self._ack = msgspec.structs.replace(ack, sent=True)
        return True

    def _waiting(
        self, reason: str, error: WeightlineError | None, engine: EngineDescription | None = None
    ) -> float:
        self._say(
            "waiting",
            once=(reason,),
            reason=reason,
            label=engine.label if engine else None,
            error=error.to_dict() if error else None,
        )
        if error is None:
            return LOOK
        self._failures += 1
        return BACKOFF[min(self._failures - 1, 2)]

    def _say(
        self,
        event: str,
        *,
        record: VersionRecord | None = None,
        once: tuple[Any, ...] | None = None,
        **fields: Any,
    ) -> None:
        key = None if once is None else (event, *once)
        if key is not None and key == self._said:
            return
        self._said = key
        if self._on_event is not None:
            base = {
                "event": event,
                "engine": self.id,
                "version": record.version if record else None,
                "label": record.label if record else None,
                "have": None,
            }
            self._on_event(base | fields)


def _round(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)
