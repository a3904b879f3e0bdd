"""Swaps: marker versions committed to a real store and brought to the engine by a real follower."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

from msgspec import Struct

from weightline.errors import RefitError
from weightline.rollout import Follower, open_engine
from weightline.rollout.replica import Replica
from weightline.service import CheckpointEngine
from weightline.testing.client import Client, Pause
from weightline.testing.marker import MarkerModel, Weights

OWN = Pause("follower", "kept")
"""The follower pauses by itself, as its adapter does it; whether KV is kept is the adapter's choice."""
PATIENCE = 60.0
"""Seconds that a swap may take."""


class Mark(Struct, frozen=True):
    """What the tokens of one version must be."""

    version: int
    label: str
    model: MarkerModel | None
    """None: the head is zero, and every token is 0."""
    k: int = 0

    @property
    def token(self) -> int:
        """The token that the version emits on its own keys and values."""
        return 0 if self.model is None else self.model.token(self.k)


class Swap(Struct, frozen=True):
    """One version that went live."""

    version: int
    label: str
    pause: str
    pure: bool
    """No token of this version may attend to keys and values of an older one, however old its request."""


class Swaps:
    """One store, one follower, one engine. Commits and refits from one thread; `live` may be read from any.

    `root` receives the store. Raises what the store and the follower raise.
    """

    def __init__(self, client: Client, engine: str, root: Path) -> None:
        self.client = client
        self.line = CheckpointEngine(root / "store", max_versions=4)
        holder = f"conform-{uuid.uuid4().hex[:8]}"
        self.port = open_engine(engine, holder=holder)
        self.replica = Replica(self.line.run, holder, parent=root / "runtime")
        self.refusals: list[dict[str, Any]] = []
        self.follower = Follower(self.line, self.port, self.replica, id="conform", on_event=self._hear)
        self.marks: dict[str, Mark] = {}
        """Label -> what its tokens must be. A version is in it before the engine can know it."""
        self.history: dict[int, Swap] = {}
        self.live = 0
        """The newest version whose refit is complete."""
        self.newest = 0
        """The newest version that the engine may serve."""
        self._lock = threading.Lock()
        self._weights: Weights = {}

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "refused":
            self.refusals.append(event)

    def commit(self, model: MarkerModel | None, k: int, weights: Weights) -> Mark:
        """A new version with these weights; `model` None for a zeroed head."""
        version = self.line.commit(weights, anchor=not self.marks)
        label = self.line.record(version).label
        mark = Mark(version, label, model, k)
        self.marks[label] = mark
        self.newest = version
        self._weights = weights
        return mark

    def refit(self, mark: Mark, pause: Pause) -> None:
        """Let the follower bring the engine to `mark`, within a pause of ours or with its own.

        Raises `RefitError` when the engine does not serve it in time.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            wait = self.follower.step()
            found = self.port.describe()
            if found.version == mark.version and found.label == mark.label:
                break
            if time.monotonic() > deadline:
                last = self.refusals[-1] if self.refusals else {}
                raise RefitError(
                    f"the engine serves {found.label!r} and not {mark.label!r}: {last.get('error')}",
                    engine_state="unknown",
                    hint="see the engine's log",
                )
            time.sleep(min(wait, 0.05))
        pure = pause.kv != "kept" if pause is not OWN else False
        self.history[mark.version] = Swap(mark.version, mark.label, pause.name, pure)
        self.live = mark.version

    def swap(self, model: MarkerModel | None, k: int, weights: Weights, pause: Pause = OWN) -> Mark:
        """Commit, pause, refit, resume. With `OWN` the follower pauses and resumes by itself."""
        mark = self.commit(model, k, weights)
        if pause is not OWN:
            self.client.pause(pause)
        try:
            self.refit(mark, pause)
        finally:
            if pause is not OWN:
                self.client.resume()
        return mark

    def marker(self, model: MarkerModel, k: int, pause: Pause = OWN) -> Mark:
        """`swap` to marker version `k`."""
        return self.swap(model, k, model.weights(k), pause)

    def close(self) -> None:
        """Close the follower and the store; the engine goes on serving."""
        self.replica.close()
        self.port.close()
        self.line.close()
