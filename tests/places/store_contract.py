"""The store's own tests (tests/store), to be run once more on every place that is not a folder.

They open the same store again by its root; here that root is the folder of this host, and `Store.open` is
told which place belongs to it.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weightline.store import Store
from weightline.store.mirror import MirrorPlace
from weightline.store.place import Place
from weightline.store.place_memory import MemoryPlace

FOLDER = Path(__file__).parents[1] / "store"


def load(name: str, folder: Path = FOLDER) -> ModuleType:
    """A module of tests/store (or `folder`), for these tests alone."""
    spec = importlib.util.spec_from_file_location(f"contract_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def suite_of(module: ModuleType, *fixtures: str, without: set[str]) -> dict[str, Any]:
    """The module's tests that take one of `fixtures`, but for those that look for files below the root."""
    found = {
        name: value
        for name, value in vars(module).items()
        if name.startswith("test_") and set(fixtures) & set(inspect.signature(value).parameters)
    }
    assert without <= set(found), "a test of that name is not there any more"
    return {name: value for name, value in found.items() if name not in without}


_fixtures = load("conftest")
clock, weights, changed, same = (getattr(_fixtures, n) for n in ("clock", "weights", "changed", "same"))


@pytest.fixture(params=("memory", "mirror", "s3"))
def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    place: Place
    if request.param == "memory":
        place = MemoryPlace("test", tmp_path / "blobs")
    elif request.param == "mirror":
        place = MirrorPlace((tmp_path / "half-a", tmp_path / "half-b"), create=True)
    else:
        place = request.getfixturevalue("object_place")()
    root, real = tmp_path / "store", Store.open

    def open_(where: Any, **options: Any) -> Store:
        return real(where, place=place, **options) if Path(where) == root else real(where, **options)

    monkeypatch.setattr(Store, "open", staticmethod(open_))
    opened = Store.open(root, create=True, clock=clock)
    yield opened
    opened.close()
