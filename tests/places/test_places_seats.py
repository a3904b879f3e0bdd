"""Seats: one server, one cleaner a store, over hosts; and the clock that all hosts share."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from s3_world import CONTAINER, FaultProxy

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))

from service_world import ServerProcess, until

import weightline as wl
from weightline.errors import Unavailable
from weightline.service.cleaner import Cleaner
from weightline.service.presence import AlreadyServing, ServerLock, seat_of
from weightline.store import Store
from weightline.store import owner as owners
from weightline.store.leases import Leases
from weightline.store.object import ObjectPlace
from weightline.store.place import Place
from weightline.store.place_clock import PlaceClock
from weightline.store.seat import Seat

Make = Callable[..., ObjectPlace]


class Clock:
    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        return self.at


def held_elsewhere(place: Place, seat: Seat) -> None:
    """Rewrite the seat's holder as a process of another host: nobody here can tell whether it lives."""
    key = [item.key for item in place.list("seats")][-1]
    holder = msgspec.json.decode(place.read(key))
    holder["by"]["host"] = "elsewhere/pid:[1]"
    place.put(key, msgspec.json.encode(holder))


def test_a_seat_has_one_holder_until_its_time_is_up_or_it_is_given_back(place: Place) -> None:
    clock = Clock()
    one, two = (Seat(place, "server", ttl=30, now=clock) for _ in range(2))
    assert one.take("unix:///one") is None
    holder = two.take()
    assert holder is not None
    assert (holder.by, holder.about) == (owners.this_process(), "unix:///one")
    clock.at += 20
    assert one.renew("unix:///new")
    clock.at += 20
    assert two.take().about == "unix:///new"  # type: ignore[union-attr]
    one.release()
    assert two.take() is None
    assert not one.renew()
    held_elsewhere(place, two)
    clock.at += 31
    assert one.take() is None
    assert not two.renew()
    two.release()
    assert two.take() is not None
    assert len(list(place.list("seats"))) == 1


def test_a_seat_of_a_dead_process_of_this_host_is_free_at_once(place: Place) -> None:
    seat = Seat(place, "server", ttl=1e6, now=Clock())
    assert seat.take() is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    key = next(item.key for item in place.list("seats"))
    holder = msgspec.json.decode(place.read(key))
    holder["by"]["pid"] = gone.pid
    place.put(key, msgspec.json.encode(holder))
    assert Seat(place, "server", ttl=1, now=Clock()).take() is None


def test_of_many_that_race_for_a_seat_one_sits(place: Place) -> None:
    seats = [Seat(place, "cleaner", ttl=60, now=Clock()) for _ in range(8)]
    begin, won = threading.Barrier(8), []

    def run(seat: Seat) -> None:
        begin.wait()
        won.append(seat.take() is None)

    threads = [threading.Thread(target=run, args=(seat,)) for seat in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 1


def test_a_damaged_seat_is_nobodys(place: Place) -> None:
    place.put("seats/server/000000000007.json", b"not json")
    seat = Seat(place, "server", ttl=60, now=Clock())
    assert seat.take() is None
    assert seat.renew()


def test_a_seat_whose_answers_get_lost_is_taken_once(s3: FaultProxy, object_place: Make) -> None:
    place = object_place()
    s3.inject("lose", "PUT", "seats", times=2)
    assert Seat(place, "server", ttl=60, now=Clock()).take() is None
    assert Seat(place, "server", ttl=60, now=Clock()).take() is not None


@pytest.mark.parametrize("ahead", [-7200.0, 0.0, 7200.0])
def test_hosts_whose_clocks_differ_by_hours_agree_on_a_lease(
    s3: FaultProxy, object_place: Make, ahead: float, caplog: pytest.LogCaptureFixture
) -> None:
    import time

    def skewed() -> float:
        return time.time() + ahead

    prefix = f"skew-{ahead:g}"
    place, theirs = object_place(prefix, clock=skewed), object_place(prefix, "other")
    mine = PlaceClock(place, skewed)
    assert abs(mine() - time.time()) < 4
    assert ("this host's clock is" in caplog.text) == bool(ahead)
    reader, cleaner = Leases(place, mine), Leases(theirs, PlaceClock(theirs))
    lease = reader.take([3], "engine", 120)
    assert cleaner.leased() == {3: "engine"}
    assert abs(lease.expires_at - time.time() - 120) < 8
    old = Leases(place, lambda: mine() - 200).take([4], "dead", 120)
    assert cleaner.leased() == {3: "engine"}
    assert place.size(f"leases/{old.id}.json") is None
    assert [item.key for item in place.list("")] == [f"leases/{lease.id}.json"]


def test_a_clock_that_jumps_back_makes_leases_longer_and_nothing_else(place: Place) -> None:
    clock = Clock()
    store = Leases(place, clock)
    lease = store.take([1], "engine", 60)
    clock.at -= 86400
    assert store.leased() == {1: "engine"}
    store.renew(lease, 60)
    clock.at += 61
    assert store.leased() == {}


def test_a_place_that_cannot_tell_the_time_leaves_it_to_this_host(
    s3: FaultProxy, object_place: Make, caplog: pytest.LogCaptureFixture
) -> None:
    place = object_place(retries=0)
    s3.inject("drop", times=9)
    clock = PlaceClock(place, Clock())
    with caplog.at_level(logging.WARNING):
        assert clock() == 1_000_000.0
    assert "this host's is used" in caplog.text


def test_one_cleaner_at_a_time_cleans_whichever_host_it_is_on(s3: FaultProxy, tmp_path: Path) -> None:
    url = f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache="
    wl.CheckpointEngine(f"{url}{tmp_path / 'one'}").close()
    store = Store.open(f"{url}{tmp_path / 'one'}")
    other = seat_of(store, "cleaner", 900.0)
    assert other is not None
    assert other.take() is None
    settings: dict[str, Any] = {"max_versions": 1, "disk_budget": None, "interval": 60, "name": "test"}
    cleaner = Cleaner(f"{url}{tmp_path / 'two'}", **settings)
    assert not cleaner.clean()
    other.release()
    assert cleaner.clean()
    cleaner.close()


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="wl-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


def test_one_server_a_store_whichever_host_it_is_on(
    s3: FaultProxy, tmp_path: Path, runtime_dir: Path
) -> None:
    url = f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache="
    with ServerProcess(f"{url}{tmp_path / 'one'}", runtime_dir / "one") as server:
        listen = server.start().url
        # Another host has another folder, so the kernel's lock cannot tell.
        with ServerProcess(f"{url}{tmp_path / 'two'}", runtime_dir / "two") as second:
            refused = second.first_line()["error"]
            assert refused["kind"] == "already_serving"
            assert listen in refused["message"]
        server.kill()
        with ServerProcess(f"{url}{tmp_path / 'two'}", runtime_dir / "two") as second:
            assert second.start().facts["run"]


def test_a_server_that_was_replaced_while_it_slept_goes_down(
    s3: FaultProxy, tmp_path: Path, object_place: Make
) -> None:
    store = Store.open(tmp_path / "one", place=object_place("sleeps"), create=True)
    seat = seat_of(store, "server", 30.0)
    assert seat is not None
    lock = ServerLock.take(tmp_path / "one", seat)
    assert lock.keep()
    held_elsewhere(store.place, seat)
    late = Seat(store.place, "server", ttl=30, now=lambda: store.leases.now() + 60)
    assert late.take() is None
    assert not lock.keep()
    lock.release()
    with pytest.raises(AlreadyServing, match="serves this store"):
        ServerLock.take(tmp_path / "one", seat_of(store, "server", 30.0))
    s3.inject("drop", times=999)
    with pytest.raises(Unavailable):
        Seat(object_place("sleeps", retries=0), "server", ttl=1, now=Clock()).take()


def test_a_follower_of_a_server_on_s3_is_rung_and_goes_on_without_it(
    s3: FaultProxy, tmp_path: Path, runtime_dir: Path
) -> None:
    url = f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"
    weights = {"w": np.arange(64, dtype=np.float32)}

    def moved(version: int) -> dict[str, np.ndarray]:
        out = {"w": weights["w"].copy()}
        out["w"][:version] += version
        return out

    with ServerProcess(url, runtime_dir) as server:
        unix = server.start().url
        with wl.connect(unix, name="engine-0") as engine, wl.connect(unix) as trainer:  # type: ignore[attr-defined]
            assert engine.wait_for_update(timeout=0) is None
            until(lambda: engine.connected, "the bell")
            assert trainer.commit(moved(1), attachments={"opt": b"1"}) == 1
            assert engine.wait_for_update(timeout=30) == 1
            engine.ack(1, "engine-0")
            assert [(s.name, s.version) for s in engine.subscribers()] == [("engine-0", 1)]
            assert trainer.address == url
            server.kill()
            # Without a server: a trainer straight at the store, the follower polls it.
            with wl.connect(url) as direct:  # type: ignore[attr-defined]
                assert direct.commit(moved(2)) == 2
            assert engine.wait_for_update(timeout=30) == 2
            assert np.array_equal(engine.load(2)["w"], moved(2)["w"])
            assert engine.recover().attachments["opt"].read_bytes() == b"1"
            server.start()
            until(lambda: engine.connected, "the bell again")
            assert [a.subscriber for a in engine.record(1).acks] == ["engine-0"]


def test_a_trainer_that_dies_while_a_server_publishes_for_it_leaves_a_whole_version(
    s3: FaultProxy, tmp_path: Path, object_place: Make
) -> None:
    """Its upload belongs to a dead process by then: a sweeper must not take it away under the publisher."""
    place = object_place("dies")
    trainer = Store.open(tmp_path / "one", place=place, create=True)
    staged = trainer.writer().stage({"w": np.arange(4)})
    key = f"{staged.request.folder}/owner.json"
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = owners.encode(msgspec.structs.replace(owners.this_process(), pid=gone.pid))
    place.put(key, dead)
    (trainer.root / key).write_bytes(dead)
    server = Store.open(tmp_path / "two", place=place, create=True)
    swept: list[str] = []
    real = server._commit

    def commit(*arguments: Any) -> Any:
        swept.extend(Store.open(tmp_path / "three", place=place, create=True).sweep())
        return real(*arguments)

    server._commit = commit  # type: ignore[method-assign]
    request = msgspec.structs.replace(staged.request, epoch=None)
    assert server.publish_staged(request).record.version == 1
    assert swept == []
    assert np.array_equal(Store.open(tmp_path / "two", place=place).load(1)["w"], np.arange(4))
    # What was swept first is gone for the publisher too.
    again = trainer.writer().stage({"w": np.arange(4) + 1})
    place.put(f"{again.request.folder}/owner.json", dead)
    (trainer.root / again.request.folder / "owner.json").write_bytes(dead)
    assert server.sweep() == [again.request.folder]
    with pytest.raises(wl.WeightlineError):
        server.publish_staged(msgspec.structs.replace(again.request, epoch=None))
    assert server.refresh() == 1
    assert json.loads(place.read("run.json"))["run"] == server.run
