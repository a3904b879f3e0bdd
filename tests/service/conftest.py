"""Fixtures: a store, a running server, and the doors that one contract is held against."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_world import Door, ServerProcess

import weightline as wl


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A short folder: pytest's own would make sockets whose path is too long."""
    folder = Path(tempfile.mkdtemp(prefix="wl-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the store of a test lies."""
    return tmp_path / "store"


@pytest.fixture
def server(root: Path, runtime_dir: Path) -> Iterator[ServerProcess]:
    """A running server of the store."""
    with ServerProcess(root, runtime_dir) as process:
        yield process.start()


@pytest.fixture(params=["embedded", "file", "unix"])
def door(request: pytest.FixtureRequest, root: Path, runtime_dir: Path) -> Iterator[Door]:
    """Every door in turn, to an empty store."""
    kind = request.param
    if kind == "unix":
        with ServerProcess(root, runtime_dir) as process:
            door = Door(kind, root, process.start().url)
            yield door
            door.close()
        return
    wl.CheckpointEngine(root).close()
    door = Door(kind, root, f"file://{root}")
    yield door
    door.close()


@pytest.fixture
def line(door: Door) -> Any:
    """One handle at every door."""
    return door.open()
