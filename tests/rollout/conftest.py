"""Stores, engines and followers for the tests of `weightline.rollout`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_double import Clock, Engine, Port, bit_equal, random_weights, stepped

from weightline.rollout.follower import Follower
from weightline.rollout.replica import Replica


class Rig:
    """One store with committed versions, one engine double, and followers on manual time."""

    def __init__(self, line: Any, versions: Mapping[int, Mapping[str, np.ndarray]], folder: Path) -> None:
        self.line, self.versions, self.folder = line, dict(versions), folder
        self.clock = Clock()
        self.engine = Engine(random_weights(99), self.clock)
        self.events: list[dict[str, Any]] = []
        self.replicas: list[Replica] = []

    def put_at(self, version: int) -> None:
        """Let the engine serve a version without a follower's doing."""
        for name, array in self.versions[version].items():
            self.engine.weights[name] = array.copy()
        for alias, owner in self.engine.aliases.items():
            self.engine.weights[alias] = self.engine.weights[owner]
        record = self.line.record(version)
        self.engine.label, self.engine.version, self.engine.run = record.label, version, self.line.run

    def follower(self, holder: str = "f", **options: Any) -> Follower:
        replica = Replica(self.line.run, holder, parent=self.folder)
        self.replicas.append(replica)
        return Follower(
            self.line,
            Port(self.engine, holder),
            replica,
            id="engine-0",
            on_event=self.events.append,
            clock=self.clock,
            sleep=self.clock.sleep,
            **options,
        )

    def settle(self, follower: Follower, version: int, looks: int = 12) -> None:
        """Let time pass until the engine serves `version`, bit by bit, and has no session left."""
        for _ in range(looks):
            self.clock.now += max(follower.step(), 0.01)
            self.engine.tick()
            if self.engine.version == version and self.engine.serving and self.engine.session is None:
                break
        assert self.engine.version == version, self.events
        assert self.engine.label == self.line.record(version).label
        assert self.engine.serving
        assert self.engine.session is None
        assert bit_equal(self.engine, self.versions[version])

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store with versions 1 to 4 and their weights; tests only read it (and acknowledge)."""
    from weightline.service import CheckpointEngine

    line = CheckpointEngine(tmp_path_factory.mktemp("committed") / "store")
    weights, versions = random_weights(1), {}
    for version in range(1, 5):
        assert line.commit(weights, step=version) == version
        versions[version] = weights
        weights = stepped(weights, version)
    yield line, versions
    line.close()


@pytest.fixture
def rig(committed: Any, tmp_path: Path) -> Any:
    rig = Rig(*committed, tmp_path / "run")
    yield rig
    rig.close()


@pytest.fixture
def own_rig(tmp_path: Path) -> Any:
    """A rig on a store of its own, empty at first; `rig.commit(weights)` adds a version."""
    from weightline.service import CheckpointEngine

    line = CheckpointEngine(tmp_path / "store")
    rig = Rig(line, {}, tmp_path / "run")

    def commit(weights: Mapping[str, np.ndarray], **options: Any) -> int:
        version = line.commit(weights, **options)
        rig.versions[version] = {name: array.copy() for name, array in weights.items()}
        return version

    rig.commit = commit  # type: ignore[attr-defined]
    yield rig
    rig.close()
    line.close()
