"""A whole store in every kind of place: commit, read, rewind, retention, races, damage."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from s3_world import CONTAINER, FaultProxy
from weightline.errors import ConflictError, Unavailable, WriterFenced
from weightline.service import connect
from weightline.store import Store
from weightline.store import owner as owners
from weightline.store.place import Place

Weights = dict[str, Any]


def policy(version: int) -> Weights:
    rng = np.random.default_rng(0)
    embed = rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16)
    embed.reshape(-1).view(np.uint16)[version] ^= version
    return {"embed.weight": embed, "norm.weight": np.ones(8, np.float32)}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


@pytest.fixture
def opened(place: Place, tmp_path: Path) -> Callable[..., Store]:
    """`opened(host)`: a handle of another host's process on one store in the place under test."""

    def open_(host: str = "one", **options: Any) -> Store:
        root = Path(place.url) if Path(place.url).is_absolute() else tmp_path / host
        return Store.open(root, place=place, create=True, **options)

    return open_


def test_what_one_host_commits_another_reads_bit_exactly(opened: Callable[..., Store]) -> None:
    writer, reader = opened("one").writer(), opened("two")
    for version in range(1, 5):
        record = writer.commit(policy(version), step=version, attachments={"opt": b"adam %d" % version})
        assert record.version == version
    assert reader.refresh() == 4
    for version in range(1, 5):
        assert same(reader.load(version), policy(version))
        assert reader.attachments(version)["opt"].read_bytes() == b"adam %d" % version
    assert reader.verify(deep=True).ok
    assert reader.recover().version == 4


def test_a_zombie_is_fenced_and_has_published_nothing(opened: Callable[..., Store]) -> None:
    old = opened("one").writer()
    old.commit(policy(1))
    opened("two").writer().commit(policy(2))
    with pytest.raises(WriterFenced):
        old.commit(policy(3))
    assert opened("three").latest() == 2


def test_of_writers_that_race_each_version_has_one(opened: Callable[..., Store]) -> None:
    opened("zero").writer().commit(policy(0))
    writers = [opened(str(number)).writer() for number in range(4)]
    begin, won, lost = threading.Barrier(4), [], []

    def run(number: int) -> None:
        begin.wait()
        try:
            won.append(writers[number].commit(policy(number + 1)).version)
        except ConflictError as error:
            lost.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) + len(lost) == 4
    assert sorted(won) == list(range(2, 2 + len(won)))
    assert won
    assert opened("last").latest() == 1 + len(won)


def test_a_repeated_commit_is_the_same_version(opened: Callable[..., Store]) -> None:
    first = opened("one").writer().commit(policy(1), commit_id="c")
    again = opened("two").writer().commit(policy(1), commit_id="c")
    assert (again.version, again.digest) == (first.version, first.digest)


def test_retention_deletes_and_a_leased_version_stays(opened: Callable[..., Store]) -> None:
    store = opened("one")
    writer = store.writer()
    for version in range(1, 6):
        writer.commit(policy(version), anchor=True)
    lease = opened("two").lease([2], "reader", 3600)
    for _ in range(2):
        store.collect(max_versions=1, grace=0)
    left = [r.version for r in store.versions() if not r.retired]
    assert 2 in left
    assert 5 in left
    assert same(opened("two").load(2), policy(2))
    gone = next(r.folder for r in store.versions() if r.retired)
    assert [item.key for item in store.place.list(gone)] == []
    store.release(lease)


def test_a_lost_answer_at_every_put_ends_in_one_version_or_the_same_one_repeated(
    s3: FaultProxy, tmp_path: Path
) -> None:
    url = f"s3://{CONTAINER}/lost?endpoint={s3.endpoint}&cache={tmp_path / 'cache'}"
    writer = Store.open(url, create=True).writer()
    writer.commit(policy(0), commit_id="0")
    s3.calm()
    writer.commit(policy(1), commit_id="1")
    puts = sum(method in ("PUT", "POST") for method, _ in s3.seen)
    assert puts >= 3
    for number in range(puts):
        s3.calm()
        s3.inject("lose", "PUT", after=number)
        assert writer.commit(policy(2 + number), commit_id=str(2 + number)).version == 3 + number
    for kind in ("503", "drop"):
        s3.calm()
        s3.latency = 0.002
        s3.inject(kind, times=3, after=2)  # type: ignore[arg-type]
        newest = writer.commit(policy(40), commit_id=kind).version
    s3.calm()
    reader = Store.open(url.replace(str(tmp_path / "cache"), str(tmp_path / "other")))
    assert reader.latest() == newest == 2 + puts + 2
    assert reader.verify(deep=True).ok


def test_connect_opens_an_s3_store_without_a_server(s3: FaultProxy, tmp_path: Path) -> None:
    url = f"s3://{CONTAINER}/line?endpoint={s3.endpoint}&cache="
    Store.open(f"{url}{tmp_path / 'one'}", create=True).close()
    with connect(f"{url}{tmp_path / 'one'}") as trainer, connect(f"{url}{tmp_path / 'two'}") as engine:  # type: ignore[attr-defined]
        assert trainer.commit(policy(1)) == 1
        assert engine.wait_for_update(timeout=30) == 1
        trainer.commit(policy(2))
        assert engine.wait_for_update(timeout=30) == 2
        assert engine.fetch_delta(2).version == 2
        assert same(engine.load(2), policy(2))


def test_a_cold_start_reads_few_objects(s3: FaultProxy, tmp_path: Path) -> None:
    url = f"s3://{CONTAINER}/cold?endpoint={s3.endpoint}&cache="
    writer = Store.open(f"{url}{tmp_path / 'one'}", create=True).writer()
    for version in range(6):
        writer.commit(policy(version))
    s3.calm()
    assert Store.open(f"{url}{tmp_path / 'two'}").latest() == 6
    assert len(s3.seen) <= 20


def test_a_dead_writers_staging_is_swept_and_a_live_ones_never(opened: Callable[..., Store]) -> None:
    writer = opened("one").writer()
    writer.commit(policy(1))
    dead, alive = writer.stage(policy(2)), writer.stage(policy(3))
    store = opened("one")
    gone = subprocess.Popen(["true"])
    gone.wait()
    key = f"{dead.request.folder}/owner.json"
    owner = msgspec.structs.replace(owners.decode(store.place.read(key)), pid=gone.pid)
    store.place.put(key, owners.encode(owner))
    if (store.root / key).exists():
        (store.root / key).write_bytes(owners.encode(owner))
    assert opened("one").sweep() == [dead.request.folder]
    assert opened("two").sweep() == []
    assert [item.key for item in store.place.list(dead.request.folder)] == []
    assert writer.publish(alive).version == 2
    assert same(opened("two").load(2), policy(3))


def test_a_server_that_dies_at_any_request_of_a_commit_leaves_the_old_or_the_new_version(
    s3: FaultProxy, object_place: Callable[..., Place], tmp_path: Path
) -> None:
    place = object_place("dies-at-a-request", retries=0)
    trainer = Store.open(tmp_path / "one", place=place, create=True).writer()
    trainer.commit(policy(0), commit_id="0")
    s3.calm()
    trainer.commit(policy(1), commit_id="1")
    requests, newest = len(s3.seen), 2
    assert requests >= 6
    for number in range(requests):
        s3.calm()
        s3.inject("drop", times=9999, after=number)
        commit_id = f"at {number}"
        with contextlib.suppress(Unavailable):
            trainer.commit(policy(2 + number), commit_id=commit_id)
        s3.calm()
        reader = Store.open(tmp_path / "two", place=object_place("dies-at-a-request", "other"), create=True)
        assert reader.latest() in (newest, newest + 1)
        assert same(reader.load(newest), policy(1 + number))
        newest = trainer.commit(policy(2 + number), commit_id=commit_id).version
        assert newest == 3 + number
    assert reader.refresh() == newest
    assert reader.verify(deep=True).ok
