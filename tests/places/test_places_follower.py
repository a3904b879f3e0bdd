"""A follower's engine on stores that are not folders: it is brought along, and stays on the last good version
when one is lost, on both disks of a mirror or on S3.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_contract import load

import weightline as wl
from s3_world import CONTAINER, FaultProxy
from weightline.store import Store

ROLLOUT = Path(__file__).parents[1] / "rollout"
sys.path.insert(0, str(ROLLOUT))

from rollout_double import random_weights, stepped  # noqa: E402

Rig = load("conftest", ROLLOUT).Rig


@pytest.fixture(params=["s3", "mirror"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "mirror":
        return f"mirror:{tmp_path / 'a'},{tmp_path / 'b'}?cache={tmp_path / 'host'}"
    s3: FaultProxy = request.getfixturevalue("s3")
    return f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"


@pytest.fixture
def rigged(url: str, tmp_path: Path) -> Iterator[Callable[[int], Any]]:
    """`rigged(n)`: a rig over a store of n versions."""
    rigs = []

    def make(count: int) -> Any:
        line = wl.CheckpointEngine(url)
        versions, weights = {}, random_weights(0)
        for number in range(1, count + 1):
            weights = stepped(weights, number) if number > 1 else weights
            versions[line.commit(weights, step=number)] = weights
        rigs.append(Rig(line, versions, tmp_path))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
        rig.line.close()


def test_an_engine_is_brought_to_the_newest_version_and_along(rigged: Callable[[int], Any]) -> None:
    rig = rigged(3)
    follower = rig.follower()
    rig.settle(follower, 3)
    rig.versions[4] = stepped(rig.versions[3], 4)
    assert rig.line.commit(rig.versions[4]) == 4
    rig.settle(follower, 4)
    assert [ack.subscriber for ack in rig.line.record(4).acks] == ["engine-0"]


def test_an_engine_stays_on_the_last_good_version_when_one_is_lost(
    rigged: Callable[[int], Any], url: str, tmp_path: Path
) -> None:
    rig = rigged(2)
    follower = rig.follower()
    rig.settle(follower, 2)
    rig.versions[3] = stepped(rig.versions[2], 3)
    rig.line.commit(rig.versions[3])
    folder = rig.line.record(3).folder
    if url.startswith("mirror:"):
        for half in ("a", "b"):
            shutil.rmtree(tmp_path / half / folder)
    else:
        store = Store.open(url)
        store.place.delete_folder(folder)
        store.close()
    for _ in range(4):
        rig.clock.now += max(follower.step(), 0.01)
        rig.engine.tick()
    assert rig.engine.version == 2
    assert rig.engine.serving
    refused = rig.named("refused")[-1]
    assert (refused["version"], refused["error"]["kind"], refused["engine_state"]) == (3, "integrity", "old")
    rig.versions[4] = stepped(rig.versions[3], 4)
    with wl.CheckpointEngine(rig.line.address) as trainer:
        assert trainer.commit(rig.versions[4]) == 4
        assert trainer.record(4).kind == "anchor"
    rig.settle(follower, 4, looks=60)
