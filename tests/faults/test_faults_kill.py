"""Real trainers that commit, rewind and clean, killed at a random moment, again and again, on one store."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_faults_crash import same, weights

from weightline.store import Store

ROUNDS = [pytest.param(12, marks=pytest.mark.faults), pytest.param(300, marks=pytest.mark.soak)]


def _train(root: Path, acknowledged: Path, number: int) -> None:  # pragma: no cover - the child
    """Commits until it is killed; says so in a file before it goes on."""
    rng = random.Random(number)
    store = Store.open(root, create=True)
    store.sweep()
    writer = store.writer()
    if store.latest() and rng.random() < 0.3:
        writer.resume_from(store.recover().version)
    with acknowledged.open("a") as said:
        while True:
            k = rng.randrange(1, 60_000)
            options: dict[str, Any] = {"anchor": rng.random() < 0.3, "attachments": {"opt": b"%d" % k}}
            record = writer.commit(weights(k), step=k, **options)
            said.write(f"{record.version} {k}\n")
            said.flush()
            if rng.random() < 0.2:
                store.collect(max_versions=3, grace=0, hold_after_rebuild=0)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_trainers_killed_at_any_moment_lose_nothing_that_was_acknowledged(
    rounds: int, tmp_path: Path
) -> None:
    root, acknowledged = tmp_path / "s", tmp_path / "acknowledged"
    acknowledged.touch()
    rng = random.Random(rounds)
    for number in range(rounds):
        before = len(acknowledged.read_bytes().splitlines())
        pid = os.fork()
        if pid == 0:  # pragma: no cover - the child
            try:
                _train(root, acknowledged, number)
            finally:
                os._exit(1)
        _wait_for_lines(acknowledged, before + rng.randrange(4))
        time.sleep(rng.uniform(0, 0.05))  # the random moment itself, not a wait for something
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "a trainer failed before it was killed"
        _check(root, acknowledged)
    store = Store.open(root)
    store.sweep()
    assert len(store.state) > rounds // 4
    report = store.verify(deep=True)
    assert (report.problems, report.notes) == ((), ())


def _wait_for_lines(path: Path, count: int) -> None:
    until = time.monotonic() + 60
    while len(path.read_bytes().splitlines()) < count:
        assert time.monotonic() < until, "the trainer commits nothing"
        time.sleep(0.002)


def _check(root: Path, acknowledged: Path) -> None:
    if not (root / "run.json").exists():
        return
    store = Store.open(root)
    assert store.damage is None
    said = [tuple(map(int, line.split())) for line in acknowledged.read_text().splitlines()]
    versions = [version for version, _ in said]
    assert len(set(versions)) == len(versions), "a number was given twice"
    for version, k in said:
        assert store.record(version).step == k
    for version in range(max(1, len(store.state) - 3), len(store.state) + 1):
        if version not in store.state.retired:
            assert same(store.load(version), weights(store.record(version).step or 0))
    if len(store.state):
        recovered = store.recover()
        assert recovered.attachments["opt"].read_bytes() == b"%d" % (recovered.step or 0)
    store.close()
