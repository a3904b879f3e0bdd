"""Cold starts, attachments that did not change, leases against retention: on every place, S3 counted."""

from __future__ import annotations

import contextlib
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from s3_world import CONTAINER, FaultProxy
from weightline.core import ledger
from weightline.errors import VersionGone, WeightlineError
from weightline.store import Store
from weightline.store.index import Index, blocks
from weightline.store.place import Place

Make = Callable[..., Any]
ENTRIES = 100_000


def weights(version: int) -> dict[str, np.ndarray]:
    out = np.zeros(256, np.uint16)
    out[:4] = version
    return {"w": out}


class Counted:
    """A place that counts the objects which are read from it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.read_keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def read(self, key: str) -> bytes:
        self.read_keys.append(key)
        return self._place.read(key)


@pytest.mark.faults
def test_a_cold_start_over_a_hundred_thousand_entries_reads_at_most_twenty_objects(
    place: Place, tmp_path: Path, s3: FaultProxy
) -> None:
    root = Path(place.url) if Path(place.url).is_absolute() else tmp_path / "one"
    store = Store.open(root, place=place, create=True)
    store.writer().commit(weights(1))
    first, entry = store.log.read(1), store.state.version(1)
    assert first is not None

    def line(seq: int) -> bytes:
        if seq == 1:
            return ledger.encode(first)
        version = seq - 1
        changed = {
            "version": version,
            "label": f"{version}@{version:08x}",
            "commit_id": f"c{version}",
            "write_id": f"w{version}",
            "folder": f"versions/{version:032x}",
        }
        base = version - 1 or None
        return ledger.encode(msgspec.structs.replace(entry, **changed, base=base, parent=base))

    Index(place, store.run, line).write(ENTRIES)
    for seq in range(blocks(ENTRIES)[-1][1] - 1, ENTRIES + 1):
        place.put(store.log.key(seq), line(seq))
    place.put("head.json", b'{"seq":%d}' % ENTRIES)
    store.close()
    s3.calm()
    counted = Counted(place)
    cold = Store.open(root if root != tmp_path / "one" else tmp_path / "cold", place=counted, create=True)  # type: ignore[arg-type]
    assert cold.latest() == ENTRIES - 1
    assert cold.record(77_777).label == f"77777@{77_777:08x}"
    assert 6 <= len(counted.read_keys) <= 20, counted.read_keys
    if place.url.startswith("s3:"):
        assert len(s3.seen) <= 30, s3.seen


def test_an_unchanged_attachment_is_not_sent_to_s3_again(
    s3: FaultProxy, object_place: Make, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "one", place=object_place("again"), create=True)
    writer = store.writer()
    data = np.random.default_rng(0).bytes(200_000)
    writer.commit(weights(1), attachments={"data": data, "opt": b"1"})
    s3.received = 0
    for version in (2, 3):
        writer.commit(weights(version), attachments={"data": data, "opt": b"%d" % version})
    assert s3.received < 100_000
    # Each version stands on its own: the older ones go, the newest keeps its bytes.
    for version in (1, 2):
        store.place.delete_folder(store.record(version).folder)
    reader = Store.open(tmp_path / "two", place=object_place("again", "two"), create=True)
    assert reader.attachments(3)["data"].read_bytes() == data
    assert reader.attachments(3)["opt"].read_bytes() == b"3"


@pytest.mark.parametrize("why", ["gone", "refused"])
def test_an_attachment_that_s3_cannot_copy_is_sent(
    s3: FaultProxy, object_place: Make, tmp_path: Path, why: str
) -> None:
    store = Store.open(tmp_path / "one", place=object_place(f"copy-{why}", retries=0), create=True)
    writer = store.writer()
    writer.commit(weights(1), attachments={"data": b"position"})
    if why == "gone":
        store.place.delete(f"{store.record(1).folder}/attachments/data")
    else:
        s3.refusal = (501, "NotImplemented", "")
        s3.inject("refuse", "PUT", "attachments/data", times=1)
    writer.commit(weights(2), attachments={"data": b"position"})
    assert store.attachments(2)["data"].read_bytes() == b"position"


@pytest.mark.faults
def test_retention_never_takes_what_a_reader_has_leased_however_they_race(
    place: Place, tmp_path: Path
) -> None:
    """No grace period, one anchor kept: only the lease and the second look at the log stand between."""
    root = Path(place.url) if Path(place.url).is_absolute() else None
    cleaner = Store.open(root or tmp_path / "cleaner", place=place, create=True)
    writer = cleaner.writer()
    writer.commit(weights(1), anchor=True)
    over, loaded, gone, wrong = threading.Event(), [], [], []

    def read(number: int) -> None:
        store = Store.open(root or tmp_path / str(number), place=place, create=True)
        while not over.is_set():
            version = max(1, (store.refresh() or 1) - number)
            try:
                lease = store.lease([version], f"reader-{number}", 60)
            except VersionGone:
                gone.append(version)
                continue
            try:
                if not np.array_equal(store.load(version)["w"], weights(version)["w"]):
                    wrong.append(version)
                loaded.append(version)
            except (WeightlineError, OSError) as error:
                wrong.append(repr(error))  # type: ignore[arg-type]
            finally:
                store.release(lease)
        store.close()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for version in range(2, 14):
            writer.commit(weights(version), anchor=True)
            cleaner.collect(max_versions=1, grace=0, hold_after_rebuild=0)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert loaded
    cleaner.collect(max_versions=1, grace=0, hold_after_rebuild=0)
    cleaner.collect(max_versions=1, grace=0, hold_after_rebuild=0)
    left = [record.version for record in cleaner.versions() if not record.retired]
    assert left == [13]
    assert {item.key.split("/")[1] for item in place.list("versions")} == {
        cleaner.record(13).folder.split("/")[1]
    }


def test_pins_and_leases_are_objects_that_every_host_sees_without_a_server(
    s3: FaultProxy, object_place: Make, tmp_path: Path
) -> None:
    one = Store.open(tmp_path / "one", place=object_place("pins"), create=True)
    two = Store.open(tmp_path / "two", place=object_place("pins", "two"), create=True)
    writer = one.writer()
    for version in range(1, 6):
        writer.commit(weights(version), anchor=True)
    two.refresh()
    two.pin(1)
    lease = two.lease([3], "engine", 60)
    for _ in range(2):
        one.collect(max_versions=1, grace=0, hold_after_rebuild=0)
    assert [r.version for r in one.versions() if not r.retired] == [1, 3, 5]
    two.release(lease)
    two.unpin(1)
    one.collect(max_versions=1, grace=0, hold_after_rebuild=0)
    assert [r.version for r in one.versions() if not r.retired] == [5]
    with pytest.raises(VersionGone):
        two.lease([3], "engine", 60)
    assert list(two.place.list("leases")) == []


def test_s3_is_asked_for_news_twice_a_second_and_not_fifty_times(s3: FaultProxy, tmp_path: Path) -> None:
    import weightline as wl

    url = f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"
    with wl.CheckpointEngine(url) as trainer:
        trainer.commit(weights(1))
    with wl.connect(url) as engine:  # type: ignore[attr-defined]
        assert engine.wait_for_update(timeout=30) == 1
        s3.calm()
        assert engine.wait_for_update(timeout=1.2) is None
        assert 2 <= len(s3.seen) <= 5


def test_the_cache_of_a_host_may_be_deleted_at_any_time(s3: FaultProxy, tmp_path: Path) -> None:
    import weightline as wl

    url = f"s3://{CONTAINER}/{uuid.uuid4().hex}?endpoint={s3.endpoint}&cache={tmp_path / 'host'}"
    with wl.CheckpointEngine(url) as trainer:
        for version in (1, 2):
            trainer.commit(weights(version), attachments={"opt": b"x"})
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(tmp_path / "host")
    with wl.CheckpointEngine(url) as trainer:
        assert np.array_equal(trainer.load(2)["w"], weights(2)["w"])
        assert trainer.commit(weights(3)) == 3
        assert trainer.recover().version == 2
