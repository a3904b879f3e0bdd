"""The follower: keeps a live engine on the newest version of a line, one refit at a time."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightline.rollout.check import CheckReport, check
from weightline.rollout.engines import open_engine
from weightline.rollout.follower import Follower
from weightline.rollout.rollback import RollbackReport, release, rollback

__all__ = [
    "CheckReport",
    "Follower",
    "RollbackReport",
    "check",
    "follow",
    "open_engine",
    "release",
    "rollback",
]


def follow(
    store_url: str,
    engine: str,
    *,
    id: str,
    at: int | None = None,
    hold: bool = False,
    runtime_dir: Path | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Keep the engine `KIND=URL` on the newest version of the store until `stop` is set.

    `at` pins it to one version; `hold` forbids moves by itself. `on_event` receives plain dicts with the keys
    `event` ("refit", "refused", "waiting", "ready"), `engine` (the id), `version`, `label`, `have`, and for a
    refit `elements`, `nbytes`, `pause_ms`, `total_ms`, `phases` (milliseconds). `runtime_dir` must be a
    folder that the engine sees under the same path.

    A refit in progress when `stop` is set is completed or rolled back first. Raises `InvalidInput` (unknown
    engine kind, bad URL), `StoreNotFound`, `Unavailable` (the store does not answer at start), and for `at`
    `VersionNotFound` or `VersionGone`.
    """
    from weightline.rollout.replica import Replica
    from weightline.rollout.target import check_pin
    from weightline.service import connect

    port = open_engine(engine, holder=f"{id}-{uuid.uuid4().hex}", runtime_dir=runtime_dir)
    try:
        line = connect(store_url)
        try:
            if at is not None:
                check_pin(line.record(at), at)
            replica = Replica(line.run, id, parent=runtime_dir)
            try:
                Follower(line, port, replica, id=id, at=at, hold=hold, on_event=on_event, stop=stop).run()
            finally:
                replica.close()
        finally:
            line.close()
    finally:
        port.close()
