"""A folder that behaves like NFS, runs full, or has no hard links."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightline.errors import InvalidInput, StorageFull, Unavailable
from weightline.store.disk import Disk
from weightline.store.place import Missing
from weightline.store.place_local import LocalPlace


def fails(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, code: int, *, times: int = 1) -> list[str]:
    """`target.name` fails `times` times with `code`; gives the list of its calls."""
    real: Callable[..., Any] = getattr(target, name)
    calls: list[str] = []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(str(args[0]))
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    monkeypatch.setattr(target, name, failing)
    return calls


def test_a_link_whose_answer_was_lost_and_that_was_sent_again_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a LINK whose answer got lost; the server then says EEXIST to whoever made the name."""
    real = os.link

    def twice(source: Any, target: Any) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", twice)
    place = LocalPlace(tmp_path)
    assert place.put_if_absent("log/1", b"mine") == "created"
    assert place.put_if_absent("log/1", b"yours") == "exists"
    assert place.read("log/1") == b"mine"
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["1"]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT], ids=errno.errorcode.get)
def test_a_stale_handle_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    place = LocalPlace(tmp_path)
    place.put("head.json", b"1")
    for name, act in (
        ("read_bytes", lambda: place.read("head.json")),
        ("stat", lambda: place.size("head.json")),
    ):
        with monkeypatch.context() as patch:
            calls = fails(patch, Path, name, code)
            assert act() in (b"1", 1)
            assert len(calls) == 2


def test_a_handle_that_stays_stale_is_unavailable_and_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = LocalPlace(tmp_path)
    place.put("head.json", b"1")
    fails(monkeypatch, Path, "read_bytes", errno.ESTALE, times=9)
    with pytest.raises(Unavailable, match=r"head\.json"):
        place.read("head.json")


def test_a_file_that_is_not_there_is_missing_after_a_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fails(monkeypatch, Path, "read_bytes", errno.ENOENT, times=9)
    with pytest.raises(Missing):
        LocalPlace(tmp_path).read("head.json")
    assert len(calls) == 2


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_system_without_hard_links_is_refused_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fails(monkeypatch, os, "link", code, times=99)
    with pytest.raises((InvalidInput, Unavailable), match=str(tmp_path)) as caught:
        LocalPlace(tmp_path).probe()
    assert isinstance(caught.value, InvalidInput)
    assert "hard links" in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_creates_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LocalPlace(tmp_path)
    for verb in (place.put_if_absent, place.put):
        with monkeypatch.context() as patch:
            fails(patch, os, "fsync", errno.ENOSPC)
            with pytest.raises(StorageFull, match="pins"):
                verb("pins/1", b"x")
        assert place.size("pins/1") is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_error_after_the_link_is_lost_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LocalPlace(tmp_path)
    place.put("log/0", b"")
    fails(monkeypatch, Disk, "fsync_folder", errno.EIO)
    assert place.put_if_absent("log/1", b"mine") == "lost"
    assert place.read("log/1") == b"mine"


def test_names_and_bytes_are_durable_before_the_answer(tmp_path: Path) -> None:
    steps: list[str] = []
    place = LocalPlace(tmp_path, Disk(steps.append))
    assert place.put_if_absent("log/1", b"x") == "created"
    ours = [step.split()[0] for step in steps if "log" not in step or "folder" in step]
    assert ours[-4:] == ["create", "fsync", "link", "fsync"]


def test_readers_see_the_old_or_the_new_and_nothing_else(tmp_path: Path) -> None:
    place, stop, seen = LocalPlace(tmp_path), threading.Event(), set()
    place.put("head.json", b"0" * 5000)

    def read() -> None:
        while not stop.is_set():
            seen.add(bytes(set(place.read("head.json"))))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 60):
        place.put("head.json", bytes([48 + number % 10]) * 5000)
    stop.set()
    thread.join()
    assert seen
    assert all(len(content) == 1 for content in seen)
