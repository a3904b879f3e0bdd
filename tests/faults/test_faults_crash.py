"""A power loss before every durable step of all that writes, on a real folder whose un-fsynced bytes and
names are lost: what is left is the old state or the new one, and work goes on from it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from faults_power import MODES, Crash, Disk, crash_at

from weightline.codec import spec_of
from weightline.errors import WeightlineError
from weightline.store import Rank, Shard, Store, commit_ranks

pytestmark = pytest.mark.faults


def weights(k: int) -> dict[str, np.ndarray]:
    array = np.zeros((64, 64), np.uint16)
    array[0, :8] = k
    return {"w": array, "v": np.full(3, k % 256, np.uint8)}


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.fixture(autouse=True)
def no_real_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double stands for the disk; the real one need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Expected:
    """What the versions of a scenario hold."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}

    def commit(self, store: Store, k: int, **options: Any) -> int:
        version = store.writer().commit(weights(k), commit_id=f"c{k}", step=k, **options).version
        self.values[version] = k
        return version


def _clock() -> float:
    return 1_000_000.0


def _prepare(root: Path, expected: Expected) -> None:
    store = Store.open(root, create=True, clock=_clock)
    expected.commit(store, 1, attachments={"opt": b"1"})
    expected.commit(store, 2)
    expected.commit(store, 3, anchor=True, attachments={"opt": b"3"})
    expected.commit(store, 4)
    expected.commit(store, 5, anchor=True, attachments={"opt": b"5"})
    store.collect(hold_after_rebuild=0)  # writes the index
    store.close()


# What is done until the power fails. Each takes a store that was opened with the crash in it.


def _commit(store: Store) -> None:
    store.writer().commit(weights(6), commit_id="c6", step=6, anchor=True, attachments={"opt": b"5"})


def _ranks(store: Store) -> None:
    now = weights(6)
    for k in range(2):
        half = now["w"].reshape(-1)[k * 2048 : (k + 1) * 2048]
        shards = {"w": Shard(spec_of("w", now["w"]), k * 2048, half)}
        if k == 0:
            shards["v"] = Shard(spec_of("v", now["v"]), 0, now["v"])
        Rank(store, k, 2).stage(shards, commit_id="c6", step=6)
    commit_ranks(store.writer(), store, commit_id="c6", world=2, step=6, timeout=0)


def _rewind(store: Store) -> None:
    store.yank(5, "bad")
    assert store.recover().version == 3
    store.writer().commit(weights(6), commit_id="c6", step=6)


def _retire(store: Store) -> None:
    store.collect(max_versions=1, grace=0, hold_after_rebuild=0)


def _thin(store: Store) -> None:
    store.collect(max_versions=2, grace=0, hold_after_rebuild=0)


def _repair(store: Store) -> None:
    store.repair()


def _catalogue(store: Store) -> None:
    for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
        (store.root / name).unlink(missing_ok=True)
    store.catalog.index()
    assert store.collect(max_versions=1, grace=0).held


def _detach(store: Store) -> None:
    budget = sum(r.nbytes for r in store.versions()) + 1
    assert store.collect(disk_budget=budget, grace=0, hold_after_rebuild=0).decision.detach
    store.collect(disk_budget=budget, grace=0, hold_after_rebuild=0)


def _damaged_head(store: Store) -> None:
    """Version 5 is lost under a running trainer: its next commit is an anchor that rests on nothing."""
    writer = store.writer()
    writer.head()
    (store.root / store.record(5).folder / "model.safetensors").unlink()
    assert writer.commit(weights(6), commit_id="c6", step=6, attachments={"opt": b"5"}).base is None


def _keep(store: Store) -> None:
    store.pin(4)
    store.lease([5], "engine-0", ttl=60)
    store.unpin(4)
    store.sweep()


def _damage(root: Path) -> None:
    """Before a repair: an anchor that has a delta beside it, the entry of version 2, the hint."""
    store = Store.open(root)
    path = root / store.record(3).folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store.log.path(3).unlink()
    (root / "head.json").write_bytes(b"")
    store.close()


ACTS: dict[str, tuple[Callable[[Store], None], int]] = {
    "commit": (_commit, 12),
    "ranks": (_ranks, 25),
    "recover_and_go_on": (_rewind, 10),
    "retire": (_retire, 6),
    "thin": (_thin, 3),
    "repair": (_repair, 6),
    "catalogue": (_catalogue, 3),
    "pins_and_leases": (_keep, 6),
    "detach": (_detach, 3),
    "damaged_head": (_damaged_head, 10),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ACTS)
def test_a_power_loss_before_any_step_leaves_old_or_new(name: str, tmp_path: Path) -> None:
    act, at_least = ACTS[name]
    expected, base = Expected(), tmp_path / "base"
    _prepare(base, expected)
    if name == "repair":
        _damage(base)
    number, crashed = 0, True
    while crashed:
        number += 1
        root, left = tmp_path / f"at-{number}", tmp_path / f"left-{number}"
        shutil.copytree(base, root)
        Store.open(root).adopt_copy()
        left.mkdir()
        with Disk(root) as disk:
            on_step = crash_at(number, lambda: disk, lambda mode, left=left: left / mode)  # type: ignore[misc]
            try:
                act(Store.open(root, clock=_clock, on_step=on_step))
                crashed = False
                for mode in MODES:
                    disk.after(mode, left / mode)
            except Crash:
                pass
        for mode in MODES[:2] if crashed else MODES[:1]:
            catalogue = left / mode / "catalog.sqlite"
            old = catalogue.exists() and catalogue.read_bytes() == (base / "catalog.sqlite").read_bytes()
            if name == "catalogue" and not old:
                # Who serves what is not known: nothing is deleted, whenever the rebuild was cut short.
                assert Store.open(left / mode, clock=_clock).collect(max_versions=1, grace=0).held
            _check(
                left / mode, expected, repaired=name != "repair" or not crashed, lost=name == "damaged_head"
            )
        shutil.rmtree(root)
        shutil.rmtree(left)
    assert number > at_least, "there are fewer steps to crash at than there should be"


def _check(root: Path, expected: Expected, *, repaired: bool, lost: bool) -> None:
    """The invariants of a store that somebody finds after a power loss."""
    opened = Store.open(root)
    opened.adopt_copy()
    opened.close()
    store = Store.open(root, clock=_clock)
    if not repaired:
        store.repair()
    assert store.damage is None
    newest = store.latest() or 0
    assert newest in (5, 6), "what was committed before the crash is there"
    for record in store.versions():
        k = expected.values.get(record.version, 6)
        assert (record.step, record.commit_id) == (k, f"c{k}")
        if not record.retired and not (lost and record.version == 5):
            assert same(store.load(record.version), weights(k))
    if not lost or newest == 6:
        assert same(store.load(newest), weights(newest))
    recovered = store.recover()
    assert recovered.attachments["opt"].read_bytes() in (b"5", b"3")
    assert same(recovered.weights(), weights(recovered.step or 0))
    # Repeating the commit whose answer was lost gives exactly one version of it, and the next number follows.
    record = store.writer().commit(weights(6), commit_id="c6", step=6)
    assert record.version == 6
    assert store.writer().commit(weights(7), commit_id="c7", step=7).version == 7
    assert same(store.load(7), weights(7))
    if record.parent != 5:
        assert store.state.abandoned == {4, 5}
    assert {problem.version for problem in store.verify(deep=True).problems} <= ({5} if lost else set())
    store.close()


def test_a_power_loss_while_a_store_is_made_leaves_one_that_can_be_made(tmp_path: Path) -> None:
    number, crashed = 0, True
    while crashed:
        number += 1
        root, left = tmp_path / f"at-{number}", tmp_path / f"left-{number}"
        root.mkdir()
        left.mkdir()
        with Disk(root) as disk:
            on_step = crash_at(number, lambda: disk, lambda mode, left=left: left / mode)  # type: ignore[misc]
            try:
                Store.open(root, create=True, on_step=on_step)
                crashed = False
            except Crash:
                for mode in MODES:
                    store = Store.open(left / mode, create=True)
                    if store.copied:
                        store.adopt_copy()
                    assert store.writer().commit(weights(1)).version == 1
                    store.close()
    assert number > 4


def test_what_an_error_leaves_open_is_told_as_an_error(tmp_path: Path) -> None:
    """A step that fails for good is a typed error and no crash: the double itself must not hide that."""
    store = Store.open(tmp_path / "s", create=True)
    store.writer().commit(weights(1))

    def on_step(step: str) -> None:
        raise OSError(5, "Input/output error", step)

    broken = Store.open(tmp_path / "s", on_step=on_step)
    with pytest.raises(WeightlineError):
        broken.writer().commit(weights(2))
    assert store.refresh() == 1


def test_the_double_loses_what_was_not_fsynced(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with Disk(root) as disk:
        (root / "lost").write_bytes(b"1")
        with (root / "torn").open("wb") as file:
            file.write(b"2")
            file.flush()
            os.fsync(file.fileno())
        nothing, names = disk.after("nothing", tmp_path / "n"), disk.after("names", tmp_path / "m")
    assert list(nothing.iterdir()) == []
    assert (names / "lost").read_bytes() == b""
    assert (names / "torn").read_bytes() == b"2"
