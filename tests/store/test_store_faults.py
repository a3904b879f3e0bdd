"""What crashes, full disks, rot and rivals leave: the old version or the new one, never an error."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from store_child import weights as child_weights

from weightline.errors import (
    FormatError,
    IntegrityError,
    StorageFull,
    Unavailable,
    VersionGone,
    WriterFenced,
)
from weightline.store import Store
from weightline.store.staging import OWNER

CHILD = Path(__file__).parent / "store_child.py"


def _child(root: Path, commits: int, kill_at: int = 0, first: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHILD), str(root), str(commits), str(kill_at), str(first)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _fork(root: Path, first: int, kill_at: int) -> int:
    """One commit in a forked child that kills itself at the step; gives the wait status."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        seen = 0

        def on_step(_: str) -> None:
            nonlocal seen
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        store = Store.open(root, create=True, on_step=on_step)
        store.writer().commit(child_weights(first), attachments={"opt": bytes([first])}, anchor=first == 2)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.faults
@pytest.mark.parametrize("committed", [0, 1], ids=["first", "anchor_and_delta"])
def test_a_trainer_killed_at_any_durable_step_leaves_old_or_new(
    tmp_path: Path, committed: int, same: Any
) -> None:
    base = tmp_path / "base"
    if committed:
        assert _child(base, committed).returncode == 0
    kill_at, status = 1, 1
    while status != 0:
        root = tmp_path / f"kill-{kill_at}"
        if committed:
            shutil.copytree(base, root)
            Store.open(root).adopt_copy()
        status = _fork(root, committed + 1, kill_at)
        assert status in (0, signal.SIGKILL)
        store = Store.open(root, create=True)
        assert store.damage is None
        newest = store.latest() or 0
        assert newest in (committed, committed + 1)
        for version in range(1, newest + 1):
            assert same(store.load(version), child_weights(version))
        # The next trainer goes on under the next number, and the sweeper leaves what is alive.
        store.sweep()
        record = store.writer().commit(child_weights(newest + 1))
        assert record.version == newest + 1
        assert same(store.load(newest + 1), child_weights(newest + 1))
        assert len(list((root / "versions").iterdir())) == newest + 1
        report = store.verify()
        assert (report.ok, report.notes) == (True, ())
        store.close()
        shutil.rmtree(root)
        kill_at += 1
    assert kill_at > 15


@pytest.mark.faults
def test_a_real_trainer_killed_and_started_again(tmp_path: Path, same: Any) -> None:
    steps = int(_child(tmp_path / "count", 3).stdout.split()[-1])
    done = _child(tmp_path / "s", 3, kill_at=steps - 4)
    assert done.returncode == -signal.SIGKILL
    assert "killed at" in done.stdout
    store = Store.open(tmp_path / "s")
    newest = store.latest() or 0
    assert newest >= 2
    acknowledged = [line.split() for line in done.stdout.splitlines() if line.startswith("committed")]
    for _, version, k in acknowledged:
        assert same(store.load(int(version)), child_weights(int(k)))
    again = _child(tmp_path / "s", 2, first=newest + 1)
    assert again.returncode == 0, again.stderr
    assert store.refresh() == newest + 2
    store.sweep()
    assert store.verify(deep=True).ok


@pytest.mark.faults
def test_two_racing_trainers_leave_one_line(tmp_path: Path, same: Any) -> None:
    Store.open(tmp_path / "s", create=True).close()
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(tmp_path / "s"), "8", "0", str(first)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in (1, 101)
    ]
    outputs = [child.communicate(timeout=60) for child in children]
    store = Store.open(tmp_path / "s")
    acknowledged = {}
    for child, (out, err) in zip(children, outputs, strict=True):
        assert child.returncode == 0 or "WriterFenced" in err or "ConflictError" in err, err
        for line in out.splitlines():
            if line.startswith("committed"):
                _, version, k = line.split()
                assert version not in acknowledged
                acknowledged[version] = int(k)
    assert sorted(map(int, acknowledged)) == list(range(1, len(acknowledged) + 1))
    assert store.latest() == len(acknowledged)
    assert any(child.returncode == 0 for child in children)
    for version, k in acknowledged.items():
        assert same(store.load(int(version)), child_weights(k))
    epochs = [record.epoch for record in store.versions()]
    assert epochs == sorted(epochs)
    store.sweep()
    assert store.verify(deep=True).ok


# Disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def file_limit() -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if nbytes is None else nbytes, hard))

    yield limit
    limit(None)


@pytest.mark.faults
def test_a_full_disk_is_typed_and_the_same_call_works_afterwards(
    store: Store, file_limit: Any, same: Any
) -> None:
    import numpy as np

    writer = store.writer()
    small, big = {"w": np.zeros(16, np.uint8)}, {"w": np.zeros(100_000, np.uint8)}
    writer.commit(small)
    file_limit(50_000)
    with pytest.raises(StorageFull, match="no room to write") as caught:
        writer.commit(big, anchor=True, commit_id="big")
    file_limit(None)
    assert caught.value.retryable
    assert store.refresh() == 1
    assert len(list((store.root / "versions").iterdir())) == 1
    assert writer.commit(big, anchor=True, commit_id="big").version == 2
    assert same(store.load(2), big)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "kind"), [(28, StorageFull), (27, StorageFull), (30, Unavailable), (5, Unavailable)]
)
def test_a_disk_that_fails_at_any_step_is_typed_and_leaves_nothing(
    tmp_path: Path, number: int, kind: Any, same: Any
) -> None:
    fail_at, seen, failed = 0, 0, True

    def on_step(step: str) -> None:
        nonlocal seen
        seen += 1
        if seen == fail_at and "head.json" not in step:
            raise OSError(number, os.strerror(number), step)

    store = Store.open(tmp_path / "s", create=True, on_step=on_step)
    writer = store.writer()
    writer.commit(child_weights(1))
    version = 1
    while failed:
        fail_at, seen, before = fail_at + 1, 0, version
        options = {"commit_id": f"c{fail_at}", "attachments": {"opt": b"1"}, "anchor": fail_at % 2 == 0}
        try:
            version = writer.commit(child_weights(version + 1), **options).version
        except kind:
            seen = -1000
            newest = store.refresh()
            # Only a failure after the link leaves it open whether the version is there; repeating tells.
            assert newest in (before, before + 1)
            version = writer.commit(child_weights(before + 1), **options).version
        failed = seen < 0 or seen >= fail_at
        assert version == before + 1
        assert same(store.load(version), child_weights(version))
        assert len(list((store.root / "versions").iterdir())) == version
    assert fail_at > 10
    assert store.verify(deep=True).ok


def test_a_failed_hint_is_no_failure(tmp_path: Path) -> None:
    def on_step(step: str) -> None:
        if "head.json" in step:
            raise OSError(28, "No space left on device")

    store = Store.open(tmp_path / "s", create=True, on_step=on_step)
    assert store.writer().commit(child_weights(1)).version == 1
    assert Store.open(tmp_path / "s").latest() == 1


# Rot --------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(store: Store) -> Store:
    writer = store.writer()
    for k in (1, 2, 3):
        writer.commit(child_weights(k))
    return store


def _blob(store: Store, version: int, name: str) -> Path:
    return store.root / store.record(version).folder / name


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.faults
@pytest.mark.parametrize(("version", "name"), [(1, "model.safetensors"), (2, "delta.safetensors")])
def test_every_flipped_byte_of_a_blob_is_noticed(three: Store, version: int, name: str) -> None:
    path = _blob(three, version, name)
    size = path.stat().st_size
    for at in range(0, size, max(1, size // 25)):
        _flip(path, at)
        with pytest.raises(IntegrityError, match=name):
            three.load(3)
        report = three.verify()
        assert {(p.kind, p.version) for p in report.problems} >= {("blob", version)}
        _flip(path, at)
    assert three.verify(deep=True).ok


@pytest.mark.faults
@pytest.mark.parametrize(("version", "name"), [(1, "model.safetensors"), (2, "delta.safetensors")])
def test_a_file_that_is_cut_short_does_not_kill_the_reader(three: Store, version: int, name: str) -> None:
    path = _blob(three, version, name)
    whole = path.read_bytes()
    for length in (0, 7, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(IntegrityError, match="bytes instead of"):
            three.load(3)
    path.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        three.load(3)
    path.write_bytes(whole)
    assert three.verify(deep=True).ok


def test_a_changed_manifest_is_noticed(three: Store) -> None:
    path = _blob(three, 2, "manifest.json")
    path.write_bytes(path.read_bytes().replace(b'"step":null', b'"step":12345'))
    fresh = Store.open(three.root)
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        fresh.load(2)
    assert [(p.kind, p.version) for p in fresh.verify().problems] == [("manifest", 2), ("chain", 3)]
    assert fresh.load(1)["v"][0] == 1


def test_a_reader_keeps_its_arrays_when_the_version_goes(three: Store, same: Any) -> None:
    held = three.load(1)
    shutil.rmtree(three.root / three.record(1).folder)
    assert same(held, child_weights(1))


def test_writing_to_loaded_arrays_changes_no_file(three: Store, same: Any) -> None:
    three.load(1)["w"][...] = 77
    assert same(Store.open(three.root).load(1), child_weights(1))


@pytest.mark.faults
@pytest.mark.parametrize("cut", [0, 1, 40, -2])
def test_a_torn_entry_stops_writers_and_not_readers_of_what_came_before(
    three: Store, cut: int, same: Any
) -> None:
    path = three.log.path(4)
    path.write_bytes(path.read_bytes()[:cut])
    fresh = Store.open(three.root)
    assert isinstance(fresh.damage, FormatError)
    assert fresh.latest() == 2
    assert same(fresh.load(2), child_weights(2))
    with pytest.raises(FormatError, match="00004"):
        fresh.writer()
    assert fresh.verify().problems[0].kind == "torn_entry"


@pytest.mark.faults
@pytest.mark.parametrize("seq", [1, 3, 4])
def test_a_missing_entry_is_never_written_again(three: Store, seq: int) -> None:
    lost = three.log.path(seq)
    kept = lost.read_bytes()
    lost.unlink()
    fresh = Store.open(three.root)
    assert isinstance(fresh.damage, IntegrityError)
    with pytest.raises(IntegrityError, match="is missing"):
        fresh.writer()
    assert "gap" in {p.kind for p in fresh.verify().problems}
    assert not lost.exists()
    lost.write_bytes(kept)
    assert Store.open(three.root).latest() == 3


@pytest.mark.faults
@pytest.mark.parametrize("content", [None, b"", b'{"seq":1}', b"noise", b'{"seq":"x"}'])
def test_the_hint_may_be_lost_old_or_damaged(three: Store, content: bytes | None) -> None:
    path = three.root / "head.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    fresh = Store.open(three.root)
    assert fresh.latest() == 3
    assert fresh.writer().commit(child_weights(4)).version == 4


def test_drafts_of_a_crash_are_no_entries(three: Store) -> None:
    (three.root / "log" / ".draft-0").write_bytes(b'{"kind":')
    fresh = Store.open(three.root)
    assert fresh.latest() == 3
    assert [p.kind for p in fresh.verify().problems] == ["draft"]


def test_a_zombie_is_fenced_and_leaves_nothing(three: Store) -> None:
    old = Store.open(three.root).writer()
    old.commit(child_weights(4))
    staged = old.stage(child_weights(5))
    Store.open(three.root).writer().commit(child_weights(6))
    with pytest.raises(WriterFenced, match="epoch 2 of this writer is over"):
        old.publish(staged)
    assert three.refresh() == 5
    assert len(list((three.root / "versions").iterdir())) == 5


# Stagings ---------------------------------------------------------------------------------------------------


def test_the_staging_of_a_live_process_is_left_alone(three: Store) -> None:
    staged = three.writer().stage(child_weights(9))
    assert Store.open(three.root).sweep() == []
    assert staged.folder is not None
    assert staged.folder.is_dir()


def _dead_staging(store: Store) -> Path:
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child
        Store.open(store.root).writer().stage(child_weights(9))
        os._exit(0)
    os.waitpid(pid, 0)
    named = {record.folder for record in store.versions()}
    (folder,) = (f for f in (store.root / "versions").iterdir() if f"versions/{f.name}" not in named)
    return folder


@pytest.mark.faults
def test_the_staging_of_a_dead_process_is_swept(three: Store) -> None:
    folder = _dead_staging(three)
    report = three.verify()
    assert (report.ok, [note.kind for note in report.notes]) == (True, ["leftover"])
    assert three.sweep() == [f"versions/{folder.name}"]
    assert not folder.exists()
    assert three.verify().ok


@pytest.mark.faults
@pytest.mark.parametrize("owner", [b"", b"{", b'{"host":"elsewhere","boot":"b","pid":1,"started":"1"}'])
def test_a_staging_whose_owner_nobody_can_judge_is_left_alone(three: Store, owner: bytes) -> None:
    folder = _dead_staging(three)
    (folder / OWNER).write_bytes(owner)
    assert three.sweep() == []
    assert folder.is_dir()


@pytest.mark.faults
def test_a_staging_of_the_dead_can_be_published_and_is_then_safe(three: Store, same: Any) -> None:
    staged = three.writer().stage(child_weights(4))
    assert staged.folder is not None
    # As after the death of the client whose request a server holds.
    owner = (staged.folder / OWNER).read_bytes()
    (staged.folder / OWNER).write_bytes(owner.replace(b'"started":"', b'"started":"9'))
    server = Store.open(three.root)
    assert server.publish_staged(staged.request).record.version == 4
    assert three.sweep() == []
    assert same(three.load(4), child_weights(4))


@pytest.mark.faults
def test_what_was_swept_cannot_be_published(three: Store) -> None:
    staged = three.writer().stage(child_weights(4))
    assert staged.folder is not None
    owner = (staged.folder / OWNER).read_bytes()
    (staged.folder / OWNER).write_bytes(owner.replace(b'"started":"', b'"started":"9'))
    assert len(three.sweep()) == 1
    with pytest.raises(Unavailable, match="is gone"):
        Store.open(three.root).publish_staged(staged.request)
    assert three.refresh() == 3


def test_a_repeated_publish_request_is_answered_alike(three: Store) -> None:
    staged = three.writer().stage(child_weights(4))
    server = Store.open(three.root)
    first, second = server.publish_staged(staged.request), server.publish_staged(staged.request)
    assert first == second
    assert not first.repeated


def test_a_request_cannot_name_a_folder_outside(three: Store) -> None:
    import msgspec

    from weightline.errors import InvalidInput

    staged = three.writer().stage(child_weights(4))
    for folder in ("../x", "versions/../log", "log", "versions/a/b", "/tmp"):
        with pytest.raises(InvalidInput, match="not a staging"):
            three.publish_staged(msgspec.structs.replace(staged.request, folder=folder))


def test_a_staging_that_was_changed_is_not_published(three: Store) -> None:
    writer = three.writer()
    staged = writer.stage(child_weights(4))
    assert staged.folder is not None
    (staged.folder / "manifest.json").write_bytes(b"{}")
    with pytest.raises(IntegrityError, match="not the one to commit"):
        writer.publish(staged)
    assert three.refresh() == 3


def test_gone_means_gone(three: Store) -> None:
    three.writer().commit(child_weights(4), anchor=True)
    reader = Store.open(three.root)
    three.retire([1, 2, 3], "room")
    three.collect(grace=0, hold_after_rebuild=0)
    with pytest.raises(VersionGone):
        reader.load(2)
    assert reader.load(4)["v"][0] == 4
