"""Mishaps that a stranger found: each leaves the store usable, and says what is wrong in one typed error."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightline.errors import IntegrityError, InvalidInput, StorageFull, WriterFenced
from weightline.store import Store, staging

Weights = dict[str, Any]


def folders(store: Store) -> set[str]:
    return {f"versions/{path.name}" for path in (store.root / "versions").iterdir()}


def named(store: Store) -> set[str]:
    return {record.folder for record in store.versions()}


@pytest.mark.parametrize("step", [-1, 2**63, 10**20, True, "7"], ids=str)
def test_a_step_that_cannot_be_stored_is_refused_before_anything_is_written(store, weights, step):
    with pytest.raises(InvalidInput, match="step"):
        store.writer().commit(weights, step=step)
    assert (store.latest(), folders(store)) == (None, set())
    assert store.writer().commit(weights, step=2**63 - 1).version == 1


def test_a_catalogue_that_fails_does_not_fail_a_commit(store, weights, monkeypatch, caplog):
    def broken() -> None:
        raise OverflowError("too large for SQLite")

    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "index", broken)
        assert store.writer().commit(weights).version == 1
    assert "not up to date" in caplog.text
    assert store.writer().commit(weights).version == 2


@pytest.mark.parametrize(
    "options",
    [
        {"attachments": {"t": 3}},
        {"attachments": {"t": None}},
        {"attachments": {"a\0b": b""}},
        {"attachments": {"a/b": b""}},
        {"metadata": {1: 2}},
        {"metadata": {"loss": float("nan")}},
    ],
    ids=str,
)
def test_options_that_cannot_be_stored_are_refused(store, weights, options):
    with pytest.raises(InvalidInput):
        store.writer().commit(weights, **options)
    assert folders(store) == set()


@pytest.mark.parametrize("root", ["a\0b", None, 3], ids=repr)
def test_a_root_that_is_no_path_is_refused(root):
    with pytest.raises(InvalidInput, match="is no path"):
        Store.open(root, create=True)


def test_a_log_without_its_run_is_never_given_a_new_one(store, weights):
    store.writer().commit(weights)
    (store.root / "run.json").unlink()
    with pytest.raises(IntegrityError, match=r"run\.json"):
        Store.open(store.root, create=True)
    assert not (store.root / "run.json").exists()


def test_a_full_disk_does_not_keep_what_filled_it(store, weights, changed, monkeypatch):
    writer = store.writer()
    writer.commit(weights)
    write = Path.write_bytes

    def no_room(path: Path, data: bytes) -> int:
        if path.name.startswith(staging._CLAIMER):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", no_room)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(store.disk, "write_new", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(StorageFull):
            writer.commit(changed(weights))
    assert folders(store) == named(store)
    assert writer.commit(changed(weights)).version == 2


@pytest.mark.parametrize("damaged", ["delta.safetensors", "manifest.json"])
@pytest.mark.parametrize("anchor", [True, False])
def test_whole_weights_can_be_committed_on_a_damaged_head(
    store, weights: Weights, changed: Callable[..., Weights], damaged, anchor, caplog
):
    writer = store.writer()
    large = {**weights, "embed.weight": np.zeros((400, 64), np.float16)}
    writer.commit(large)
    record = writer.commit({**large, "scale": np.array(0.25, np.float32)})
    path = store.root / record.folder / damaged
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    again = Store.open(store.root)
    committed = again.writer().commit(large, anchor=anchor)
    assert (committed.version, committed.kind, committed.base, committed.parent) == (3, "anchor", None, 2)
    assert "stands on its own" in caplog.text
    assert again.load(3)["scale"] == np.float32(0.5)
    with pytest.raises(IntegrityError):
        Store.open(store.root).load(2)


def test_a_fenced_commit_leaves_no_folder_whoever_publishes_it(store, weights, changed):
    server = Store.open(store.root)
    old = store.writer(publish=server.publish_staged)
    old.commit(weights)
    Store.open(store.root).writer().commit(changed(weights))
    with pytest.raises(WriterFenced):
        old.commit(changed(weights, seed=5))
    assert folders(store) == named(Store.open(store.root))
