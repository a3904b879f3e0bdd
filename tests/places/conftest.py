"""Every kind of place, made anew for a test. `PLACES` is what the contract suites run over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weightline.store.place import Place
from weightline.store.place_local import LocalPlace
from weightline.store.place_memory import MemoryPlace

PLACES = ("local", "memory")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield LocalPlace(tmp_path / "root")
    else:
        yield MemoryPlace("test", tmp_path / "files")
