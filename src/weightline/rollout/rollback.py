"""One engine back to an older version, to stay there: `weightline rollback`.

The hold is written to the engine first, where all its followers see it. From then on a follower that runs
brings the engine back by itself, and this process does the same work beside it: whoever opens the session
first does it, the other one finds it done.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from weightline.errors import InvalidInput, RefitError, VersionNotFound, WeightlineError, from_dict
from weightline.rollout.engines import open_engine
from weightline.rollout.engines.base import EnginePort, Hold, HoldingPort
from weightline.rollout.follower import Follower
from weightline.rollout.replica import Replica
from weightline.rollout.target import check_pin, live_version, servable

if TYPE_CHECKING:
    from weightline.service.line import Line
    from weightline.types import VersionRecord


class RollbackReport(Struct, frozen=True, kw_only=True):
    """Where an engine stands after a rollback."""

    engine: str
    before: int | None
    """The version that it served; None when it served none of this run."""
    version: int | None
    label: str
    held: bool
    """Followers leave it there."""
    total_ms: float


def rollback(
    line: Line,
    engine: EnginePort | str,
    *,
    to: int | None = None,
    id: str = "engine-0",
    runtime_dir: Path | None = None,
    timeout: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
) -> RollbackReport:
    """Bring the engine to version `to` (default: the newest servable one below what it serves) and hold it.

    `engine`: a port, or `KIND=URL`. `id` names the subscriber in the acknowledgement; `timeout` is in
    seconds. Raises `InvalidInput` (this kind cannot be held; `to` is yanked), `VersionNotFound` (nothing
    below), `VersionGone`, `Unavailable`, `RefitError` when the engine did not get there in time: the hold
    that was there before is put back then.
    """
    name = engine if isinstance(engine, str) else "port"
    holder = f"rollback-{uuid.uuid4().hex}"
    port = open_engine(engine, holder=holder, runtime_dir=runtime_dir) if isinstance(engine, str) else engine
    try:
        return _rolled_back(line, port, name, to, id, runtime_dir, timeout, clock)
    finally:
        if isinstance(engine, str):
            port.close()


def release(line: Line, engine: str, *, runtime_dir: Path | None = None) -> RollbackReport:
    """Let the followers of `engine` (`KIND=URL`) move it again. Raises `InvalidInput`, `Unavailable`."""
    began = time.monotonic()
    holder = f"rollback-{uuid.uuid4().hex}"
    port = open_engine(engine, holder=holder, runtime_dir=runtime_dir)
    try:
        _holding(port).set_hold(None)
        found = port.describe()
    finally:
        port.close()
    live = live_version(found, line.run, line.versions())
    took = (time.monotonic() - began) * 1e3
    return RollbackReport(
        engine=engine, before=live, version=live, label=found.label, held=False, total_ms=round(took, 1)
    )


def _holding(port: EnginePort) -> HoldingPort:
    if not isinstance(port, HoldingPort):
        raise InvalidInput(
            "this kind of engine cannot remember a hold",
            hint="stop its follower and start it with --at VERSION",
        )
    return port


def _rolled_back(
    line: Line,
    port: EnginePort,
    name: str,
    to: int | None,
    id: str,
    runtime_dir: Path | None,
    timeout: float,
    clock: Callable[[], float],
) -> RollbackReport:
    holding, began = _holding(port), clock()
    engine, versions = port.describe(), line.versions()
    before = live_version(engine, line.run, versions)
    target = to if to is not None else _below(versions, before, engine.label)
    check_pin(next((record for record in versions if record.version == target), None), target)
    refusals: list[WeightlineError] = []

    def on_event(event: dict[str, Any]) -> None:
        if event.get("error"):
            refusals.append(from_dict(event["error"]))

    replica = Replica(line.run, f"rollback-{id}", parent=runtime_dir)
    try:
        holding.set_hold(Hold(line.run, target))
        follower = Follower(line, port, replica, id=id, at=target, on_event=on_event)
        try:
            _until_it_serves(follower, line.record(target).label, began + timeout, refusals, clock)
        except BaseException:
            holding.set_hold(engine.hold)
            raise
    finally:
        replica.close()
    took = (clock() - began) * 1e3
    return RollbackReport(
        engine=name,
        before=before,
        version=target,
        label=line.record(target).label,
        held=True,
        total_ms=round(took, 1),
    )


def _below(versions: Sequence[VersionRecord], live: int | None, label: str) -> int:
    if live is None:
        raise VersionNotFound(
            f"the engine serves {label!r}, no version of this run: nothing to step back from",
            hint="name the version: --to VERSION",
        )
    below = [record.version for record in versions if record.version < live and servable(record)]
    if not below:
        raise VersionNotFound(f"no version below {live} is kept", hint="see `weightline log`")
    return max(below)


def _until_it_serves(
    follower: Follower,
    label: str,
    deadline: float,
    refusals: list[WeightlineError],
    clock: Callable[[], float],
) -> None:
    wait = threading.Event()
    while True:
        delay = follower.step()
        engine = follower.port.describe()
        if (engine.run, engine.version, engine.label) == (follower.line.run, follower.at, label) and not (
            engine.quarantined
        ):
            return
        if clock() > deadline:
            cause = refusals[-1].message if refusals else f"it serves {engine.label!r}"
            raise RefitError(
                f"the engine did not come back to version {follower.at}: {cause}",
                engine_state="unknown",
                hint="`weightline check` tells what it serves",
            )
        wait.wait(min(delay, 0.5))
