"""Keeps one engine on the version it should serve: looks at the engine, looks at the store, refits, acknowledges, waits.

The engine's own description decides what is live, never the follower's memory. Each look (`step`) is complete in itself, so a follower can be
killed and started again at any point.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weightline.errors import (
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInput,
    RefitError,
    Unavailable,
    VersionGone,
    VersionNotFound,
    WeightlineError,
)
from weightline.rollout import mapping as names
from weightline.rollout.engines.base import EngineDescription, EnginePort, Refit
from weightline.rollout.refit import RefitOutcome, run_refit
from weightline.rollout.replica import RefitFile, Replica
from weightline.rollout.target import choose, live_version
from weightline.types import VersionRecord

if TYPE_CHECKING:
    from weightline.service.line import Line
    from weightline.store import Manifest

OnEvent = Callable[[dict[str, Any]], None]

LOOK = 1.0
"""Seconds between two looks at an engine that is up to date; a new version ends the wait at once."""
BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds to wait after the first, second, … failure in a row; the last one repeats."""
DELTA_FAILURES = 2
"""So many failures in a row with a delta, then the full version is tried."""


class _Plan(msgspec.Struct, frozen=True):
    record: VersionRecord
    have: int | None
    have_label: str | None
    manifest: Any
    mapping: dict[str, str]


class Follower:
    """One follower of one engine. `run()` until `stop` is set; `step()` is one look, for tests and for callers with a loop of their own."""

    def __init__(
        self,
        line: Line,
        port: EnginePort,
        replica: Replica,
        *,
        id: str,  # noqa: A002 - the name users know
        at: int | None = None,
        hold: bool = False,
        rules: Mapping[str, str] | None = None,
        on_event: OnEvent | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`clock` and `sleep` (seconds) serve a refit; waits between looks end early when `stop` is set or a version comes."""
        self.line, self.port, self.replica = line, port, replica
        self.id, self.at, self.hold, self.rules = id, at, hold, rules
        self.stop = stop or threading.Event()
        self._on_event = on_event
        self._clock, self._sleep = clock, sleep
        self._failures = 0
        self._delta_failures = 0
        self._last_served: int | None = None
        self._seen: int | None = None
        self._pending_ack: dict[str, Any] | None = None
        self._pause_in_doubt: str | None = None
        self._said: tuple[Any, ...] | None = None

    # --- the loop ---

    def run(self) -> None:
        """Follow until `stop` is set. A refit in progress is completed or rolled back first.

        Raises what no waiting can mend: `InvalidInput` (not an engine of this kind), and for `at`: `VersionNotFound`, `VersionGone`.
        """
        while not self.stop.is_set():
            self._wait(self.step())

    def step(self) -> float:
        """One look at engine and store, and a refit when one is due. Returns the seconds after which to look again."""
        try:
            engine = self.port.describe()
        except Unavailable as error:
            return self._waiting("engine", error)
        try:
            versions = self.line.versions()
        except Unavailable as error:
            return self._waiting("store", error)
        self._seen = max((record.version for record in versions), default=None)
        live = live_version(engine, self.line.run, versions)
        if live is not None:
            self._last_served = live
        target = choose(versions, live, at=self.at, hold=self._last_served, held=self.hold)
        if target is None:
            return self._waiting("held" if self.hold and versions else "empty", None, engine=engine)
        record = next(r for r in versions if r.version == target)
        if live == target:
            return self._up_to_date(engine, record)
        return self._refit(engine, record, live, versions)

    def _wait(self, seconds: float) -> None:
        if self.stop.is_set():
            return
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
        if engine.paused and self._pause_in_doubt == engine.instance:
            # Our own lost pause came into force after all; the engine's bits and label agree, so it can simply go on.
            try:
                self.port.resume()
            except WeightlineError as error:
                return self._waiting("engine", error)
        self._pause_in_doubt = None
        self._acknowledge(record)
        if not engine.paused:
            self._say("ready", record=record, have=record.version, once=(record.version, engine.instance))
        else:
            self._say("waiting", record=record, have=record.version, once=("paused",), reason="paused")
        return LOOK

    # --- one refit ---

    def _refit(
        self, engine: EngineDescription, record: VersionRecord, live: int | None, versions: Sequence[VersionRecord]
    ) -> float:
        began = self._clock()
        have = live if self._delta_failures < DELTA_FAILURES else None
        phases: dict[str, float] = {}
        file: RefitFile | None = None
        try:
            plan = self._plan(engine, record, have)
            phases["plan"] = (self._clock() - began) * 1e3
            file = self._fetch(plan)
            phases["fetch"] = (self._clock() - began) * 1e3 - phases["plan"]
            refit = Refit(
                run=self.line.run,
                version=record.version,
                label=record.label,
                have=plan.have,
                have_label=plan.have_label,
                file=file.path,
                digests=file.digests,
            )
            foreign_pause = engine.paused and not engine.quarantined and self._pause_in_doubt != engine.instance
            outcome = run_refit(
                self.port, refit, own_pause=not foreign_pause, clock=self._clock, sleep=self._sleep
            )
            phases.update(outcome.phases)
            if outcome.pause_in_doubt:
                self._pause_in_doubt = engine.instance
            self._confirm(engine, record, outcome)
        except WeightlineError as error:
            return self._failed(error, record, live, have)
        finally:
            if file is not None:
                self.replica.discard(file)
        self._failures = self._delta_failures = 0
        self._pause_in_doubt = None
        self._last_served = record.version
        self._pending_ack = {
            "version": record.version,
            "verified": outcome.verified,
            "pause_ms": outcome.pause_ms,
            "detail": "paused by somebody else, who has to resume it" if foreign_pause else "",
        }
        acked = self._acknowledge(record)
        total = (self._clock() - began) * 1e3
        self._say(
            "refit",
            record=record,
            have=plan.have,
            elements=file.elements,
            nbytes=file.nbytes,
            pause_ms=_round(outcome.pause_ms),
            total_ms=_round(total),
            phases={name: _round(ms) for name, ms in phases.items()},
            verified=outcome.verified,
            acked=acked,
            uncovered=list(names.uncovered(plan.mapping, engine)),
        )
        return 0.0

    def _plan(self, engine: EngineDescription, record: VersionRecord, have: int | None) -> _Plan:
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
        return _Plan(record, have, engine.label if have is not None else None, manifest, mapping)

    def _fetch(self, plan: _Plan) -> RefitFile:
        manifest: Manifest = plan.manifest
        if plan.have is not None:
            return self.replica.delta_file(self.line, plan.record, plan.have, manifest, plan.mapping)
        return self.replica.full_file(self.line, plan.record, manifest, plan.mapping)

    def _confirm(self, before: EngineDescription, record: VersionRecord, outcome: RefitOutcome) -> None:
        """Raise unless the engine itself says that it serves `record`."""
        try:
            after = self.port.describe()
        except Unavailable as error:
            raise outcome.error or RefitError(error.message, engine_state="unknown", hint=error.hint) from None
        same = after.instance == before.instance and not after.quarantined
        if same and (after.run, after.version, after.label) == (self.line.run, record.version, record.label):
            return
        old = same and (after.run, after.version, after.label) == (before.run, before.version, before.label)
        cause = outcome.error
        message = cause.message if cause else f"the engine says that it serves {after.label!r}"
        where = f" (at {outcome.failed_verb})" if outcome.failed_verb else ""
        if isinstance(cause, ConflictError) and outcome.failed_verb == "prepare":
            raise cause
        raise RefitError(
            f"version {record.version} did not go live{where}: {message}",
            engine_state="old" if old else "unknown",
            hint=cause.hint if cause and cause.hint else "the follower tries again by itself",
        )

    def _failed(self, error: WeightlineError, record: VersionRecord, live: int | None, have: int | None) -> float:
        damaged = isinstance(error, VersionGone | IntegrityError | FormatError | InvalidInput | VersionNotFound)
        if have is not None:
            # A delta whose bytes are gone or broken will not mend by itself: go over to the full version at once.
            self._delta_failures = DELTA_FAILURES if damaged else self._delta_failures + 1
        delay = BACKOFF[min(self._failures, len(BACKOFF) - 1)]
        self._failures += 1
        state = error.engine_state if isinstance(error, RefitError) else "old"
        self._say(
            "refused",
            record=record,
            have=live,
            error=error.to_dict(),
            engine_state=state,
            retry_in=delay,
            full_next=self._delta_failures >= DELTA_FAILURES,
        )
        return delay

    # --- acks and events ---

    def _acknowledge(self, record: VersionRecord) -> bool:
        """Tell the line what the engine serves, once a version; False when that has to wait for the line."""
        ack = self._pending_ack
        if ack is None or ack["version"] != record.version:
            if any(a.subscriber == self.id for a in record.acks) or ack is not None and ack["version"] > record.version:
                return True
            ack = {"version": record.version, "detail": "found serving it"}
            self._pending_ack = ack
        if ack.get("sent"):
            return True
        try:
            self.line.ack(
                record.version,
                self.id,
                verified=ack.get("verified", "none"),
                pause_ms=ack.get("pause_ms"),
                detail=ack["detail"],
            )
        except Unavailable:
            return False
        ack["sent"] = True
        return True

    def _waiting(self, reason: str, error: WeightlineError | None, engine: EngineDescription | None = None) -> float:
        self._say(
            "waiting",
            once=(reason,),
            reason=reason,
            label=engine.label if engine else None,
            error=error.to_dict() if error else None,
        )
        if error is None:
            return LOOK
        delay = BACKOFF[min(self._failures, 2)]
        self._failures += 1
        return delay

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
