"""Tensors in full, one copy on a host: made from the delta, shared, mended, removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightline import codec
from weightline.errors import IntegrityError, StorageFull
from weightline.rollout.host import FOLDER, HostTensors
from weightline.rollout.replica import Replica


@pytest.fixture
def host(committed, tmp_path):
    """(line, versions, a follower's handle, another one's); both followers live on one host."""
    line, versions = committed
    replicas = [Replica(line.run, name, parent=tmp_path) for name in ("a", "b")]
    yield line, versions, *(HostTensors(replica.folder) for replica in replicas)
    for replica in replicas:
        replica.close()


def _whole(line, follower, version, names, have=None):
    base = None if have is None else line.manifest(have)
    delta = None if have is None else line.fetch_delta(version, have=have)
    mapping = {entry.spec.name: f"engine.{entry.spec.name}" for entry in line.manifest(version).tensors}
    return follower.whole(line, line.manifest(version), names, mapping, base=base, delta=delta)


def _holds(path, array):
    return Path(path).read_bytes() == codec.bits_of(array).tobytes()


def _files(follower):
    return {path.name for path in follower.folder.iterdir() if path.name != ".lock"}


def test_the_files_hold_the_version_and_the_one_before(host):
    line, versions, follower, _ = host
    names = sorted(versions[1])[:3]
    for found in _whole(line, follower, 1, names):
        assert _holds(found.path, versions[1][found.name.removeprefix("engine.")])
        assert (found.old_path, found.old_digest) == (None, None)
    for version in (2, 3, 4):
        found = _whole(line, follower, version, names, have=version - 1)
        assert [tensor.name for tensor in found] == [f"engine.{name}" for name in names]
        for tensor in found:
            name = tensor.name.removeprefix("engine.")
            assert _holds(tensor.path, versions[version][name])
            assert _holds(tensor.old_path, versions[version - 1][name])
        assert _files(follower) == {Path(p).name for t in found for p in (t.path, t.old_path)}


def test_a_step_needs_the_delta_only_and_a_second_follower_nothing(host, monkeypatch):
    line, versions, follower, other = host
    names = sorted(versions[1])[:2]
    _whole(line, follower, 1, names)
    monkeypatch.setattr(type(line), "load", lambda *_a, **_k: pytest.fail("loaded the whole version"))
    mine = _whole(line, follower, 2, names, have=1)
    monkeypatch.setattr(HostTensors, "_write", lambda *_a: pytest.fail("made a file that is there"))
    theirs = _whole(line, other, 2, names, have=1)
    assert mine == theirs


def test_a_file_that_a_crash_damaged_is_made_anew_and_drafts_are_swept(host):
    line, versions, follower, _ = host
    name = sorted(versions[1])[0]
    (found,) = _whole(line, follower, 1, [name])
    whole = Path(found.path).read_bytes()
    for damage in (b"", whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
        Path(found.path).write_bytes(damage)
        (follower.folder / ".half-written").write_bytes(b"x")
        (again,) = _whole(line, follower, 1, [name])
        assert Path(again.path).read_bytes() == whole
        assert _files(follower) == {Path(again.path).name}


def test_what_another_follower_needs_stays_until_it_is_gone(host, tmp_path):
    line, versions, follower, other = host
    name = sorted(versions[1])[0]
    (first,) = _whole(line, other, 1, [name])
    _whole(line, follower, 3, [name])
    _whole(line, follower, 4, [name], have=3)
    assert Path(first.path).exists()
    for path in other.own.iterdir():
        path.unlink()
    other.own.rmdir()
    _whole(line, follower, 4, [name], have=3)
    assert not Path(first.path).exists()
    assert (tmp_path / FOLDER).is_dir()


def test_bytes_that_the_manifest_does_not_promise_are_not_handed_out(host, monkeypatch):
    line, versions, follower, _ = host
    name = sorted(versions[1])[0]
    monkeypatch.setattr(type(line), "load", lambda *_a, **_k: versions[2])
    with pytest.raises(IntegrityError, match="not those that the manifest promises"):
        _whole(line, follower, 1, [name])
    assert _files(follower) == set()


def test_a_full_disk_is_told_and_leaves_no_file(host, monkeypatch):
    line, versions, follower, _ = host

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StorageFull, match="No space left on device"):
        _whole(line, follower, 1, sorted(versions[1])[:1])
