"""The catalogue while it is open: what breaks is rebuilt at once or said, and costs acks and traces only."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightline.errors import Unavailable
from weightline.service import acks
from weightline.store import Store, TraceEvent
from weightline.store.catalog import TRACED
from weightline.types import Ack

pytestmark = pytest.mark.faults


def _files(path: Path) -> list[Path]:
    return [path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")]


def _noise(path: Path) -> None:
    for file in _files(path)[:2]:
        size = max(4096, file.stat().st_size)
        with file.open("r+b") as opened:
            opened.write(os.urandom(size))


def _emptied(path: Path) -> None:
    for file in _files(path)[:2]:
        os.truncate(file, 0)


def _deleted(path: Path) -> None:
    for file in _files(path):
        file.unlink(missing_ok=True)


def _replaced(path: Path) -> None:
    _deleted(path)
    sqlite3.connect(path).close()
    path.write_bytes(os.urandom(9000))


@pytest.fixture
def served(store: Store, weights: Any, changed: Any) -> Store:
    writer = store.writer()
    for k in range(3):
        writer.commit(changed(weights, k), step=k, anchor=True)
    store.ack(Ack(subscriber="engine-0", version=2))
    return store


@pytest.mark.parametrize("break_it", [_noise, _emptied, _deleted, _replaced], ids=lambda f: f.__name__)
@pytest.mark.parametrize("verb", ["ack", "commit", "read"])
def test_a_catalogue_that_breaks_while_it_is_open_is_rebuilt_at_once_and_said(
    served: Store,
    weights: Any,
    changed: Any,
    same: Any,
    clock: Any,
    caplog: pytest.LogCaptureFixture,
    break_it: Callable[[Path], None],
    verb: str,
) -> None:
    before = [(r.version, r.digest) for r in served.versions()]
    break_it(served.catalog.path)
    if break_it is _noise:
        # SQLite does not look at its file again while nobody writes to it: another handle finds it out.
        assert Store.open(served.root, clock=clock).subscribers() == []
    if verb == "ack":
        served.ack(Ack(subscriber="engine-1", version=3))
    elif verb == "commit":
        assert served.writer().commit(changed(weights, 9)).version == 4
    assert [(r.version, r.digest) for r in served.versions()][:3] == before
    served.catalog.index()
    assert str(served.catalog.path) in caplog.text
    assert [s.name for s in served.subscribers()] == (["engine-1"] if verb == "ack" else [])
    with sqlite3.connect(served.catalog.path) as connection:
        assert connection.execute("SELECT count(*) FROM versions").fetchone() == (len(served.state),)
    connection.close()
    # Who serves what is not known: nothing is deleted until leases had time to be renewed.
    assert "rebuilt" in served.collect(max_versions=1, grace=0).held
    assert served.state.retired == {}
    clock.now += 599
    assert served.collect(max_versions=1, grace=0).held
    clock.now += 2
    assert served.collect(max_versions=1, grace=0).deleted == tuple(range(1, len(served.state)))
    assert same(Store.open(served.root).load(3 if verb != "commit" else 4), served.load(len(served.state)))


@pytest.fixture
def no_room_in_files() -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_catalogue_without_room_is_said_and_does_not_keep_retention_from_making_room(
    served: Store, weights: Any, changed: Any, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = served.catalog._open()
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    writer, version = served.writer(), 3
    for k in range(60):
        version = writer.commit(changed(weights, 2 + k), metadata={"note": "x" * 400}).version
    assert version == 63
    assert "not up to date" in caplog.text

    def acknowledge() -> None:
        for k in range(200):
            acks.note(served, Ack(subscriber=f"engine-{k}", version=version, detail="x" * 300))

    with pytest.raises(Unavailable, match="could not be kept"):
        acknowledge()
    assert served.record(version).version == 63
    report = served.collect(max_versions=1, grace=0)
    assert report.held == ""
    assert report.retired


def test_nothing_is_deleted_where_a_lost_catalogue_cannot_be_made_anew(
    served: Store, no_room_in_files: Any
) -> None:
    _deleted(served.catalog.path)
    no_room_in_files()
    fresh = Store.open(served.root)
    report = fresh.collect(max_versions=1, grace=0)
    assert report.held
    assert fresh.state.retired == {}


def test_traces_of_old_versions_go_and_a_step_is_noted_once(served: Store) -> None:
    def applied(version: int, at: float) -> TraceEvent:
        return TraceEvent(version=version, stage="applied", at=at, subscriber="engine-0")

    served.trace(applied(1, 1.0), applied(1, 2.0))
    served.trace(applied(1, 3.0))
    assert [e.at for e in served.events(1) if e.stage == "applied"] == [1.0]
    served.trace(applied(1 + TRACED, 9.0))
    assert served.events(1) == []
