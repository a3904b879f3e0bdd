"""Mishaps that a stranger found: each leaves the store usable, and says what is wrong in one typed error."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightline.errors import (
    ConflictError,
    IntegrityError,
    InvalidInput,
    StorageFull,
    Unavailable,
    WriterFenced,
)
from weightline.service import CheckpointEngine, connect
from weightline.store import Store, staging
from weightline.store.disk import draft_name

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


def damage(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "hurt", ["delta.safetensors", "manifest.json", "attachments/optimizer.pt", "missing attachment"]
)
def test_recovery_passes_over_a_version_whose_files_are_damaged_and_says_so(
    store, weights, changed, hurt, caplog
):
    writer, large = store.writer(), {**weights, "big": np.zeros((400, 64), np.float16)}
    writer.commit(large, attachments={"optimizer.pt": b"one"}, step=1)
    record = writer.commit(changed(large), attachments={"optimizer.pt": b"two"}, step=2)
    if hurt == "missing attachment":
        (store.root / record.folder / "attachments" / "optimizer.pt").unlink()
    else:
        damage(store.root / record.folder / hurt)
    again = Store.open(store.root)
    found = again.recover()
    assert (found.version, found.step, found.passed_over) == (1, 1, (2,))
    assert found.attachments["optimizer.pt"].read_bytes() == b"one"
    assert "version 2 cannot be recovered" in caplog.text
    committed = again.writer().commit(large)
    assert (committed.version, committed.parent) == (3, 1)
    assert again.record(2).abandoned


def test_recovery_without_any_whole_version_tells_the_damage_of_the_newest(store, weights):
    writer = store.writer()
    for k in (b"one", b"two"):
        record = writer.commit(weights, attachments={"optimizer.pt": k})
        damage(store.root / record.folder / "attachments" / "optimizer.pt")
    with pytest.raises(IntegrityError, match=f"{record.folder}/attachments/optimizer.pt"):
        Store.open(store.root).recover()


def test_recovery_does_not_go_back_because_a_disk_does_not_answer(store, weights, changed, monkeypatch):
    writer = store.writer()
    writer.commit(weights, attachments={"optimizer.pt": b"one"})
    record = writer.commit(changed(weights), attachments={"optimizer.pt": b"two"})
    opened = Path.open

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if record.folder in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, *args, **kwargs)

    again = Store.open(store.root)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing)
        with pytest.raises(Unavailable):
            again.recover()
    assert again.recover().version == 2


@pytest.mark.parametrize("address", [None, 3, "a\0b", Path("a\0b")], ids=repr)
def test_an_address_that_is_no_path_is_refused(address):
    for door in (connect, CheckpointEngine):
        with pytest.raises(InvalidInput, match="no path or URL"):
            door(address)


def _in_a_process_that_is_killed(work: Callable[[], Any]) -> None:
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        work()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def test_drafts_of_a_killed_writer_are_notes_and_go_with_the_next_writer(store, weights):
    store.writer().commit(weights)
    folders = [store.root, *(store.root / name for name in ("log", "versions", "leases", "ranks/ab"))]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        for folder in folders:
            (folder / draft_name()).write_bytes(b"torn")
        (store.root / "versions" / draft_name()).mkdir()
        (store.root / "log" / draft_name(".probe-")).write_bytes(b"1")

    _in_a_process_that_is_killed(write)
    report = store.verify()
    assert (report.ok, report.problems, len(report.notes)) == (True, (), 7)
    live, foreign = store.root / "log" / draft_name(), store.root / "log" / ".draft-of-somebody"
    for path in (live, foreign):
        path.write_bytes(b"being written")
    Store.open(store.root).writer()
    assert {p for f in folders for p in f.glob(".*")} == {live, foreign}
    foreign_only = store.verify()
    assert (foreign_only.ok, foreign_only.notes) == (False, ())
    assert [problem.path for problem in foreign_only.problems] == [str(foreign)]


def test_a_staging_whose_removal_is_killed_half_way_is_swept(store, weights):
    store.writer().commit(weights)

    def give_up() -> None:
        staged = store.writer().stage(weights, attachments={"t": b"1"})
        removed = shutil.rmtree

        def half(path: Path) -> None:
            (path / "owner.json").unlink(missing_ok=True)
            for claim in path.glob(".claim*"):
                claim.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
            removed(path)

        shutil.rmtree = half
        staging.discard(staged.folder, store)

    _in_a_process_that_is_killed(give_up)
    assert folders(store) != named(store)
    report = store.verify()
    assert (report.problems, len(report.notes)) == ((), 1)
    Store.open(store.root).writer()
    assert folders(store) == named(store)


def test_a_staging_that_a_living_process_sweeps_or_publishes_is_no_problem(store, weights, changed):
    staged = store.writer().stage(weights)
    assert staged.folder is not None
    source = staging._claimable(staged.folder)
    assert source is not None
    assert staging._claim(staged.folder, source) is not None
    report = store.verify()
    assert (report.problems, report.notes) == ((), ())


def test_a_commit_id_that_is_given_to_another_commit_is_refused(store, weights, changed):
    writer = store.writer()
    first = writer.commit(weights, commit_id="c", step=1, label="one", attachments={"t": b"1"})
    again = [{}, {"step": 1}, {"label": "one"}, {"attachments": {"t": b"1"}}]
    for options in again:
        for door in (writer, Store.open(store.root).writer()):
            assert door.commit(weights, commit_id="c", **options) == first
    other = [{"step": 2}, {"label": "two"}, {"attachments": {"u": b"1"}}, {"step": 0}]
    for options in other:
        for door in (writer, Store.open(store.root).writer()):
            with pytest.raises(ConflictError, match="commit_id 'c' names another commit already: version 1"):
                door.commit(weights, commit_id="c", **options)
    with pytest.raises(ConflictError, match="other weights"):
        writer.commit(changed(weights), commit_id="c")
    assert (store.latest(), folders(store)) == (1, named(store))


def test_a_commit_id_of_a_version_that_is_gone_still_names_it(store, weights, changed):
    writer = store.writer()
    writer.commit(weights, commit_id="c")
    writer.commit(changed(weights), anchor=True)
    store.retire([1], "room")
    store.collect(grace=0, hold_after_rebuild=0)
    assert writer.commit(weights, commit_id="c").version == 1
    with pytest.raises(ConflictError, match="other weights"):
        writer.commit(changed(weights, seed=9), commit_id="c")


def test_two_requests_of_one_commit_id_that_differ_are_told_apart_at_the_log(store, weights):
    first = store.writer().stage(weights, commit_id="c", step=1)
    second = Store.open(store.root).writer().stage(weights, commit_id="c", step=2)
    server = Store.open(store.root)
    assert server.publish_staged(first.request).record.version == 1
    with pytest.raises(ConflictError, match="has step 1, not 2"):
        server.publish_staged(second.request)
    assert folders(server) == named(server)
