from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weightline.errors import InvalidInput, VersionGone, VersionNotFound
from weightline.store import Store, TraceEvent
from weightline.types import Ack


@pytest.fixture
def weights() -> Any:
    """Large enough that a delta is much smaller than an anchor."""
    return {"embed.weight": np.zeros((256, 64), ml_dtypes.bfloat16)}


@pytest.fixture
def six(store: Store, weights: Any, changed: Any) -> Store:
    """Anchors at 1, 3 and 5, deltas between."""
    writer = store.writer()
    for k in range(1, 7):
        writer.commit(changed(weights, k, seed=k), anchor=k % 2 == 1)
    return store


def _there(store: Store) -> list[int]:
    return [r.version for r in store.versions() if (store.root / r.folder).exists()]


def test_what_goes_is_announced_then_deleted_after_the_grace_period(
    six: Store, clock: Any, weights: Any, changed: Any, same: Any
) -> None:
    report = six.collect(max_versions=1, grace=60)
    assert (report.retired, report.deleted) == ((1, 2, 3, 4), ())
    assert _there(six) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(VersionGone):
        six.load(2)
    clock.now += 59
    assert six.collect(max_versions=1, grace=60).deleted == ()
    clock.now += 2
    assert six.collect(max_versions=1, grace=60).deleted == (1, 2, 3, 4)
    assert _there(six) == [5, 6]
    for version in (5, 6):
        assert same(six.load(version), changed(weights, version, seed=version))
    assert [r.version for r in six.versions() if r.retired] == [1, 2, 3, 4]
    assert six.verify(deep=True).ok
    # Its number is never free again.
    assert six.writer().commit(weights).version == 7


def test_every_decision_is_explained(six: Store) -> None:
    report = six.collect(max_versions=1, dry_run=True)
    assert report.held == "dry run"
    assert _there(six) == [1, 2, 3, 4, 5, 6]
    assert six.state.retired == {}
    assert {e.version: e.keep for e in report.decision.explained} == {
        1: False, 2: False, 3: False, 4: False, 5: True, 6: True,
    }  # fmt: skip
    assert all(e.why for e in report.decision.explained)


def test_a_disk_budget_lets_an_anchor_go_before_a_version(
    six: Store, same: Any, weights: Any, changed: Any
) -> None:
    sizes = {r.version: r.nbytes for r in six.versions()}
    assert six.collect(disk_budget=sum(sizes.values()), grace=0).thinned == ()
    report = six.collect(disk_budget=sum(sizes.values()) - 1, grace=0)
    assert (report.retired, report.thinned) == ((), (3,))
    assert not (six.root / six.record(3).folder / "model.safetensors").exists()
    fresh = Store.open(six.root)
    for version in range(1, 7):
        assert same(fresh.load(version), changed(weights, version, seed=version))
    assert fresh.verify(deep=True).ok
    assert six.collect(disk_budget=sizes[5] + sizes[6], grace=0).retired == (1, 2, 3, 4)


def test_a_reader_whose_anchor_goes_meanwhile_takes_the_way_that_is_left(
    six: Store, same: Any, weights: Any, changed: Any
) -> None:
    reader = Store.open(six.root)
    six.thin((3,), "anchor", "room")
    (six.root / six.record(3).folder / "model.safetensors").unlink()
    assert same(reader.load(4), changed(weights, 4, seed=4))


def test_attachments_count_and_go_before_versions(store: Store, weights: Any) -> None:
    writer = store.writer()
    for k in (1, 2, 3):
        writer.commit(weights, attachments={"opt": bytes([k]) * 100_000})
    held = sum(r.nbytes for r in store.versions())
    report = store.collect(disk_budget=held + 250_000, grace=0)
    assert (report.retired, report.decision.detach) == ((), (1,))
    with pytest.raises(VersionGone, match="attachments of version 1"):
        store.attachments(1)
    assert store.recover().version == 3
    assert store.verify(deep=True).ok
    # What recover() gives stays, whatever the bounds.
    assert store.collect(disk_budget=1, grace=0).decision.detach == (2,)
    assert store.recover().attachments["opt"].read_bytes() == b"\3" * 100_000


def test_an_anchor_that_retention_waits_for_is_made_by_the_next_commit(
    store: Store, weights: Any, changed: Any
) -> None:
    writer = store.writer()
    for k in range(1, 5):
        writer.commit(changed(weights, k, seed=k))
    budget = sum(r.nbytes for r in store.versions()) - 1
    assert store.explain_retention(disk_budget=budget).anchor_wanted
    store.collect(disk_budget=budget, grace=0)
    assert writer.commit(weights).kind == "anchor"
    assert writer.commit(changed(weights, 9)).kind == "delta"
    assert store.collect(disk_budget=budget, grace=0).deleted == (1, 2, 3, 4)


def test_an_unchanged_attachment_takes_no_room_and_outlives_the_older_version(
    store: Store, weights: Any
) -> None:
    writer = store.writer()
    data = {"opt": b"o" * 50_000, "rng": b"1"}
    writer.commit(weights, attachments=data)
    writer.commit(weights, attachments=data | {"rng": b"2"}, anchor=True)
    old, new = store.attachments(1), store.attachments(2)
    assert old["opt"].samefile(new["opt"])
    assert not old["rng"].samefile(new["rng"])
    assert store.collect(max_versions=1, grace=0).deleted == (1,)
    assert store.recover().attachments["opt"].read_bytes() == data["opt"]
    assert store.verify(deep=True).ok


def test_pins_and_leases_keep_a_version_and_its_chain(six: Store, clock: Any) -> None:
    six.pin(2)
    lease = six.lease([4], "engine-0", ttl=100)
    assert six.collect(max_versions=1, grace=0).retired == ()
    six.unpin(2)
    assert six.collect(max_versions=1, grace=0).deleted == (1, 2)
    clock.now += 101
    assert six.collect(max_versions=1, grace=0).deleted == (3, 4)
    six.release(lease)
    assert _there(six) == [5, 6]


def test_a_lease_that_came_just_before_the_announcement_still_holds(six: Store) -> None:
    # The reader's lease is there, and the retirement that was decided before it is announced after it.
    lease = six.lease([2], "engine-0", ttl=1000)
    six.retire([1, 2], "room")
    assert six.collect(grace=0).deleted == ()
    assert _there(six)[:2] == [1, 2]
    six.release(lease)
    assert six.collect(grace=0).deleted == (1, 2)


def test_a_lease_that_came_too_late_says_so(six: Store) -> None:
    reader = Store.open(six.root)
    six.retire([1, 2], "room")
    with pytest.raises(VersionGone, match="retired"):
        reader.lease([2], "engine-0", ttl=10)
    with pytest.raises(VersionGone, match="retired"):
        reader.pin(2)
    assert list((six.root / "leases").glob("*.json")) == []
    assert list((six.root / "pins").glob("*.json")) == []
    with pytest.raises(VersionNotFound):
        reader.lease([99], "engine-0", ttl=10)
    with pytest.raises(InvalidInput, match="lease of 0 seconds"):
        reader.lease([5], "engine-0", ttl=0)


def test_what_recovery_goes_back_to_stays(store: Store, weights: Any) -> None:
    writer = store.writer()
    writer.commit(weights, attachments={"opt": b"1"})
    for _ in range(3):
        writer.commit(weights, anchor=True)
    store.collect(max_versions=1, grace=0)
    assert _there(store) == [1, 4]
    assert store.recover().attachments["opt"].read_bytes() == b"1"


def test_a_lease_outlives_every_process(six: Store) -> None:
    six.lease([2], "engine-0", ttl=1000)
    other = Store.open(six.root, clock=six.clock)
    assert other.collect(max_versions=1, grace=0).retired == (3, 4)


def test_a_deletion_that_fails_is_tried_again(six: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    real = shutil.rmtree

    def fail(path: Any) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "rmtree", fail)
    report = six.collect(max_versions=1, grace=0)
    assert report.deleted == ()
    assert len(report.failed) == 4
    monkeypatch.setattr(shutil, "rmtree", real)
    assert six.collect(max_versions=1, grace=0).deleted == (1, 2, 3, 4)


def test_a_yanked_version_says_so(six: Store) -> None:
    six.yank(4, "reward hacking")
    assert [r.version for r in Store.open(six.root).versions() if r.yanked] == [4]
    with pytest.raises(VersionNotFound):
        six.yank(99)


# Catalogue --------------------------------------------------------------------------------------------------


def test_acks_and_traces_are_kept_over_restarts(six: Store) -> None:
    six.ack(Ack(subscriber="engine-0", version=5, verified="live", pause_ms=3.5))
    six.ack(Ack(subscriber="engine-0", version=6))
    six.ack(Ack(subscriber="engine-1", version=6))
    six.trace(TraceEvent(version=6, stage="applied", at=2.0, subscriber="engine-0"))
    six.trace(TraceEvent(version=6, stage="fetched", at=1.0, subscriber="engine-0"))
    other = Store.open(six.root)
    (ack,) = other.record(5).acks
    assert (ack.subscriber, ack.verified, ack.pause_ms, ack.at) == ("engine-0", "live", 3.5, six.clock())
    assert {a.subscriber for a in other.record(6).acks} == {"engine-0", "engine-1"}
    assert [(s.name, s.version) for s in other.subscribers()] == [("engine-0", 6), ("engine-1", 6)]
    steps = [(e.stage, e.subscriber) for e in other.events(6)]
    assert steps[:2] == [("fetched", "engine-0"), ("applied", "engine-0")]
    assert steps[2:5] == [("commit", ""), ("staged", ""), ("published", "")]
    assert sorted(steps[5:]) == [("acknowledged", "engine-0"), ("acknowledged", "engine-1")]
    with pytest.raises(VersionNotFound):
        other.ack(Ack(subscriber="x", version=99))
    other.close()


@pytest.mark.faults
@pytest.mark.parametrize("damage", ["deleted", "noise", "cut", "emptied"])
def test_a_lost_catalogue_is_rebuilt_and_costs_acks_only(
    six: Store, damage: str, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    six.ack(Ack(subscriber="engine-0", version=5))
    six.close()
    path = six.root / "catalog.sqlite"
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    if damage == "deleted":
        path.unlink()
    elif damage == "noise":
        path.write_bytes(os.urandom(8192))
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TABLE acks")
        connection.close()
    fresh = Store.open(six.root, clock=clock)
    assert [r.version for r in fresh.versions()] == [1, 2, 3, 4, 5, 6]
    fresh.ack(Ack(subscriber="engine-1", version=6))
    assert [a.subscriber for a in fresh.record(6).acks] == ["engine-1"]
    fresh.catalog.index()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM versions").fetchone() == (6,)
    connection.close()
    if damage in ("deleted", "noise"):
        assert "rebuilt" in caplog.text
        # Who serves what is not known for a while, so nothing is deleted.
        assert fresh.collect(max_versions=1, grace=0).held
        clock.now += 601
        assert fresh.collect(max_versions=1, grace=0).deleted == (1, 2, 3, 4)
    fresh.close()


def test_a_catalogue_that_cannot_be_written_does_not_stop_a_commit(
    store: Store, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", fail)
    assert store.writer().commit(weights).version == 1
    assert [r.version for r in store.versions()] == [1]


# Checkout ---------------------------------------------------------------------------------------------------


def test_checkout_is_whole_or_not_there(
    six: Store, tmp_path: Path, weights: Any, changed: Any, same: Any
) -> None:
    six.checkout(4, tmp_path / "out")
    copy = Store.open(tmp_path / "copy", create=True)
    copy.writer().commit(tmp_path / "out")
    assert same(copy.load(1), changed(weights, 4, seed=4))
    copy.close()
    with pytest.raises(InvalidInput, match="exists already"):
        six.checkout(4, tmp_path / "out")
    with pytest.raises(InvalidInput, match="no folder"):
        six.checkout(4, tmp_path / "no" / "out")
    with pytest.raises(VersionNotFound):
        six.checkout(44, tmp_path / "none")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "out", "store"]


def test_model_files_follow_to_later_anchors_and_checkouts(
    store: Store, tmp_path: Path, weights: Any, changed: Any
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin", ".hidden"):
        (model / name).write_text(name)
    writer = store.writer()
    writer.commit(weights, model_files=model)
    writer.commit(changed(weights))
    writer.commit(changed(weights, 2), anchor=True)
    for version in (1, 2, 3):
        store.checkout(version, tmp_path / f"out{version}")
        assert sorted(p.name for p in (tmp_path / f"out{version}").iterdir()) == [
            "config.json", "model.safetensors", "tokenizer.json",
        ]  # fmt: skip
    (model / "config.json").write_text("new")
    writer.commit(changed(weights, 3), model_files=model)
    store.checkout(4, tmp_path / "out4")
    assert (tmp_path / "out4" / "config.json").read_text() == "new"


# Laggards ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ten(store: Store, weights: Any, changed: Any) -> list[Any]:
    """Versions 1 to 10, one element apart; version 6 has an anchor beside its delta."""
    writer, held = store.writer(), [{**weights, "big": np.zeros(4096, np.float32)}]
    for k in range(1, 11):
        held.append(changed(held[-1], 1, seed=k))
        writer.commit(held[-1], anchor=k == 6)
    return held


def test_a_laggard_that_is_leased_gets_one_squashed_delta_whatever_retention_does(
    store: Store, ten: list[Any], same: Any
) -> None:
    lease = store.lease([3], "subscriber:engine-0", ttl=100)
    store.collect(max_versions=1, grace=0, hold_after_rebuild=0)
    assert store.collect(max_versions=1, grace=0, hold_after_rebuild=0).failed == ()
    assert 3 not in store.state.retired
    reader = Store.open(store.root, clock=store.clock)
    delta = reader.fetch_delta(10, have=3)
    assert (delta.base, delta.version, delta.changed) == (3, 10, ("embed.weight",))
    # Last value wins: no element is told twice, though seven deltas lead there.
    assert delta.elements <= 7
    mine = {name: array.copy() for name, array in ten[3].items()}
    delta.apply_(mine)
    assert same(mine, ten[10])
    store.release(lease)


def test_a_laggard_whose_version_is_gone_is_served_the_whole(store: Store, ten: list[Any], same: Any) -> None:
    store.retire([1, 2, 3], "room")
    store.collect(grace=0, hold_after_rebuild=0)
    reader = Store.open(store.root, clock=store.clock)
    delta = reader.fetch_delta(10, have=3)
    assert (delta.base, delta.version) == (None, 10)
    mine = {name: array.copy() for name, array in ten[3].items()}
    delta.apply_(mine)
    assert same(mine, ten[10])


def test_retention_without_any_bound_keeps_every_delta(store: Store, ten: list[Any], same: Any) -> None:
    report = store.collect(grace=0, hold_after_rebuild=0)
    assert (report.retired, report.thinned, report.deleted) == ((), (), ())
    for version in range(1, 11):
        assert same(store.load(version), ten[version])
