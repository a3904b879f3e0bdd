"""tests/service/test_service_contract.py at the doors to an S3 store and to a mirror."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_contract import load, suite_of

from s3_world import CONTAINER, FaultProxy

SERVICE = Path(__file__).parents[1] / "service"
sys.path.insert(0, str(SERVICE))

from service_world import Door, ServerProcess, model, moved  # noqa: E402

import weightline as wl  # noqa: E402
from weightline.store import Store  # noqa: E402

OF_FOLDERS = {"test_versions_that_rest_on_each_other_are_leased_only_while_they_are_read"}
globals().update(suite_of(load("test_service_contract", SERVICE), "line", "door", without=OF_FOLDERS))


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A short folder: sockets take 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="wl-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def s3_url(s3: FaultProxy, tmp_path: Path) -> str:
    return f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"


@pytest.fixture(
    params=[
        "s3 embedded",
        pytest.param("s3 connect", marks=pytest.mark.soak),
        pytest.param("s3 unix", marks=pytest.mark.faults),
        pytest.param("mirror embedded", marks=pytest.mark.faults),
        pytest.param("mirror unix", marks=pytest.mark.soak),
    ]
)
def door(request: pytest.FixtureRequest, tmp_path: Path, runtime_dir: Path) -> Iterator[Door]:
    """Every door in turn, to an empty store."""
    place, kind = request.param.split()
    if place == "s3":
        url = request.getfixturevalue("s3_url")
    else:
        url = f"mirror:{tmp_path / 'a'},{tmp_path / 'b'}?cache={tmp_path / 'host'}"
    with ServerProcess(url, runtime_dir) as process:
        if kind == "unix":
            door = Door(kind, url, process.start().url)
        else:
            wl.CheckpointEngine(url).close()
            door = Door(kind, url, url)
        yield door
        door.close()


@pytest.fixture
def line(door: Door) -> Any:
    """One handle at every door."""
    return door.open()


def test_versions_are_leased_only_while_they_are_read(line: Any) -> None:
    line.commit(model())
    line.commit(moved(model()))
    line.load(2)
    line.fetch_delta(2)
    store = Store.open(line.address)
    assert list(store.place.list("leases")) == []
    store.close()
