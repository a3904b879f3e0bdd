"""Runtime folders: named with their run, swept when their follower is dead, gone when it ends."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import psutil
import pytest

from weightline.errors import InvalidInput, StorageFull
from weightline.rollout.replica import OWNER, Owner, Replica, sweep


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def planted(parent, name, **changes):
    folder = parent / name
    folder.mkdir(parents=True)
    me = psutil.Process()
    owner = Owner("run", "f", os.uname().nodename, me.pid, me.create_time())
    (folder / OWNER).write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, **changes)))
    (folder / "1-2.safetensors").write_bytes(b"x")
    return folder


def test_a_runtime_folder_is_named_with_its_run_and_gone_after_the_end(tmp_path):
    replica = Replica("0123456789abcdef", "engine/0 ü", parent=tmp_path / "run")
    assert replica.folder.name.startswith("follow-0123456789abcdef-engine_0__-")
    replica.close()
    replica.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_leftovers_of_dead_followers_are_swept_at_start(tmp_path):
    dead = planted(tmp_path, "follow-a", pid=dead_pid())
    reused = planted(tmp_path, "follow-b", started=1.0)
    Replica("run", "f", parent=tmp_path).close()
    assert not dead.exists()
    assert not reused.exists()


def test_what_lives_or_is_somebody_elses_is_left_alone(tmp_path):
    kept = [
        planted(tmp_path, "follow-alive"),
        planted(tmp_path, "follow-other-host", host="another-pod", pid=dead_pid()),
        planted(tmp_path, "other", pid=dead_pid()),
    ]
    (tmp_path / "follow-without-owner").mkdir()
    (tmp_path / "follow-garbled").mkdir()
    (tmp_path / "follow-garbled" / OWNER).write_bytes(b"{")
    (tmp_path / "follow-file").write_bytes(b"")
    elsewhere = planted(tmp_path / "elsewhere", "x", pid=dead_pid())
    (tmp_path / "follow-link").symlink_to(elsewhere)
    assert sweep(tmp_path) == []
    assert all(folder.exists() for folder in kept)
    assert (elsewhere / OWNER).exists()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidInput, match="file") as error:
        Replica("run", "f", parent=tmp_path / "file" / "run")
    assert "--runtime-dir" in error.value.hint


def test_a_full_disk_is_reported_and_leaves_no_file(rig, monkeypatch):
    import weightline.codec

    def full_disk(delta, path, *, level="absolute"):
        path.write_bytes(b"torn")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weightline.codec, "write_delta", full_disk)
    rig.put_at(1)
    follower = rig.follower()
    assert follower.step() > 0
    (event,) = rig.events
    assert (event["event"], event["error"]["kind"]) == ("refused", StorageFull.kind)
    assert [p.name for p in follower.replica.folder.iterdir()] == [OWNER]
    assert rig.engine.version == 1
    monkeypatch.undo()
    rig.settle(follower, 4)
