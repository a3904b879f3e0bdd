"""Errors that come once and go: a stale handle, a name that a cache does not know yet, a short read."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from weightline.store import Store

pytestmark = pytest.mark.faults


@pytest.fixture
def three(store: Store, weights: Any, changed: Any) -> Store:
    writer = store.writer()
    for k in (1, 2, 3):
        writer.commit(changed(weights, k, seed=k), anchor=k == 1)
    return store


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_an_error_that_comes_once_is_not_seen(
    three: Store, number: int, monkeypatch: pytest.MonkeyPatch, weights: Any, changed: Any, same: Any
) -> None:
    failed: set[str] = set()
    read = Path.read_bytes

    def once(path: Path) -> None:
        if str(three.root) in str(path) and path.suffix and str(path) not in failed:
            failed.add(str(path))
            raise OSError(number, "once", str(path))

    def read_bytes(path: Path) -> bytes:
        once(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    fresh = Store.open(three.root)
    assert fresh.latest() == 3
    assert same(fresh.load(3), changed(weights, 3, seed=3))
    assert len(failed) > 5


def test_a_short_read_that_comes_once_is_not_seen(
    three: Store, monkeypatch: pytest.MonkeyPatch, weights: Any, changed: Any, same: Any
) -> None:
    cut: set[str] = set()
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        data = read(path)
        if ("log" in path.parts or path.name == "manifest.json") and str(path) not in cut:
            cut.add(str(path))
            return data[: len(data) // 2]
        return data

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    fresh = Store.open(three.root)
    assert fresh.damage is None
    assert same(fresh.load(3), changed(weights, 3, seed=3))
    assert len(cut) >= 5
