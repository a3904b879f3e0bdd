"""Addresses, listen options and socket paths: what is taken, and what a refusal says."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from weightline.errors import AlreadyServing, InvalidInput, StoreNotFound
from weightline.service import address
from weightline.service.presence import ServerInfo, ServerLock, clear_stale_socket, serving


@pytest.mark.parametrize(
    ("url", "scheme", "path"),
    [
        ("unix:///run/wl.sock", "unix", "/run/wl.sock"),
        ("unix:/run/wl.sock", "unix", "/run/wl.sock"),
        ("unix:///run/a%20b/wl.sock", "unix", "/run/a b/wl.sock"),
        ("file:///data/store", "file", "/data/store"),
        ("file://localhost/data/store", "file", "/data/store"),
        ("/data/st%20ore", "file", "/data/st%20ore"),
        ("/data/a:b", "file", "/data/a:b"),
    ],
)
def test_paths_are_read_from_urls(url, scheme, path):
    parsed = address.parse(url)
    assert (parsed.scheme, parsed.path) == (scheme, Path(path))


def test_a_relative_folder_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert address.parse("ckpt").path == tmp_path / "ckpt"
    assert address.parse(Path("s3:odd")).path == tmp_path / "s3:odd"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("grpc://127.0.0.1:7070", "127.0.0.1:7070"),
        ("grpc://[::1]:7070", "[::1]:7070"),
        ("unix:///a b/s", "unix:/a%20b/s"),
    ],
)
def test_targets_are_what_grpc_takes(url, target):
    assert address.parse(url).target == target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3://",
        "s3://key:secret@container/prefix",
        "mirror:/only/one",
        "http://host/x",
        "grpc://host",
        "grpc://host:port",
        "grpc://:70",
        "grpc://h:70000",
        "unix://",
        "unix:",
        "unix://run/wl.sock",
        "file://host/dir",
    ],
)
def test_an_address_that_cannot_be_is_refused_with_a_remedy(url):
    with pytest.raises(InvalidInput) as caught:
        address.parse(url)
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("host", ["0.0.0.0:70", "192.168.1.4:70", "example.org:70", "[::]:70", "*:70"])
def test_only_loopback_is_listened_on(host):
    with pytest.raises(InvalidInput, match=r"loopback|HOST:PORT"):
        address.loopback(host, what="--grpc")


@pytest.mark.parametrize("host", ["127.0.0.1:70", "127.9.9.9:70", "[::1]:70", "localhost:70"])
def test_loopback_is_taken(host):
    assert address.loopback(host, what="--grpc")[1] == 70


def test_a_socket_path_over_the_kernels_limit_is_refused_with_the_remedy(tmp_path):
    fits = "/" + "s" * (address.MAX_SOCKET_BYTES - 1)
    assert address.check_socket_path(Path(fits)) == Path(fits)
    with pytest.raises(InvalidInput, match="108 bytes; the limit is 107") as caught:
        address.check_socket_path(Path(fits + "s"))
    assert "--listen" in caught.value.hint
    # Bytes, not characters.
    with pytest.raises(InvalidInput):
        address.listen_path("unix:/" + "ß" * 60)


def test_the_limit_is_the_kernels(tmp_path):
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match="too long"):
        probe.bind("/tmp/" + "s" * (address.MAX_SOCKET_BYTES - 4))


def test_the_default_runtime_dir_is_short_and_of_its_store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one, two = (address.default_runtime_dir(Path(f"/{'deep/' * 40}{n}")) for n in "ab")
    assert one != two
    assert one.parent == tmp_path / "weightline"
    assert len(one.name) == 12
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert str(os.getuid()) in str(address.default_runtime_dir(Path("/a")))


def test_a_runtime_dir_that_everybody_may_write_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InvalidInput, match="written by everybody"):
        address.make_runtime_dir(folder)
    made = address.make_runtime_dir(tmp_path / "new" / "run")
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_stale_socket_is_removed_and_nothing_else_is(tmp_path):
    path = tmp_path / "wl.sock"
    clear_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    with pytest.raises(AlreadyServing, match=r"wl\.sock"):
        clear_stale_socket(path)
    listener.close()
    clear_stale_socket(path)
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(InvalidInput, match="not a socket"):
        clear_stale_socket(path)
    assert path.read_text() == "precious"


def test_one_lock_a_store_and_it_names_its_holder(tmp_path):
    assert serving(tmp_path) is None
    lock = ServerLock.take(tmp_path)
    with pytest.raises(AlreadyServing, match="starting"):
        ServerLock.take(tmp_path)
    info = ServerInfo(pid=7, started_at=1.0, run="r", listen="unix:///x/wl.sock", runtime_dir="/x")
    lock.announce(info)
    assert serving(tmp_path) == info
    with pytest.raises(AlreadyServing, match=r"process 7 .*unix:///x/wl\.sock"):
        ServerLock.take(tmp_path)
    lock.release()
    lock.release()
    assert serving(tmp_path) is None
    ServerLock.take(tmp_path).release()


def test_what_a_killed_server_left_behind_does_not_count(tmp_path):
    (tmp_path / "server.lock").write_text("")
    (tmp_path / "server.json").write_bytes(b'{"pid": 1, "torn')
    assert serving(tmp_path) is None
    ServerLock.take(tmp_path).release()


def test_a_lock_without_a_store_is_refused(tmp_path):
    with pytest.raises(StoreNotFound):
        ServerLock.take(tmp_path / "missing")
