"""Folders, sockets and ports of a demo run, and what is refused before anything starts."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest

from weightline.demo import run_demo
from weightline.demo.places import Places, Ports
from weightline.demo.supervisor import committed_in
from weightline.errors import InvalidInput
from weightline.store import Store


def test_a_temporary_run_leaves_nothing() -> None:
    places = Places(None)
    (places.run / "store").mkdir()
    places.remove()
    places.remove()
    assert not places.run.exists()
    assert not places.runtime.exists()


def test_a_failed_temporary_run_leaves_its_logs_only() -> None:
    places = Places(None)
    for folder in (places.logs, places.store):
        folder.mkdir()
    (places.logs / "a.log").write_text("why")
    (places.run / "trainer.json").write_text("{}")
    places.remove(keep_logs=True)
    try:
        assert [p.name for p in places.run.iterdir()] == ["logs"]
        assert (places.logs / "a.log").read_text() == "why"
    finally:
        places.remove()


def test_a_given_folder_is_kept_and_made(tmp_path: Path) -> None:
    places = Places(tmp_path / "new" / "run")
    places.remove()
    assert places.run.is_dir()
    assert not places.runtime.exists()


def test_a_deep_run_folder_has_a_short_socket(tmp_path: Path) -> None:
    places = Places(tmp_path / ("x" * 60) / ("y" * 60))
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(places.socket))
    finally:
        places.remove()


@pytest.mark.parametrize("deep", [False, True])
def test_a_long_temporary_folder_is_not_used_for_sockets(
    deep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("z" * 100 if deep else "z")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    places = Places(tmp_path / "run")
    try:
        assert len(str(places.socket)) <= 100
        assert places.runtime.is_relative_to(folder) == (not deep and len(str(folder)) < 80)
    finally:
        places.remove()


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(InvalidInput, match=r"already holds precious\.txt"):
        run_demo(model="tiny", dir=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_a_file_as_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be used as the run folder"):
        run_demo(model="tiny", dir=tmp_path / "file")


@pytest.mark.parametrize("fields", [{"engines": 0}, {"steps": 0}, {"model": "/no/such/model"}])
def test_bad_arguments_are_refused_before_anything_is_made(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        run_demo(**{"model": "tiny", "dir": tmp_path / "run", **fields})  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_ports_are_held_for_a_server_that_names_them() -> None:
    ports = Ports(8)
    try:
        assert len(set(ports.numbers)) == 8
        for number in ports.numbers:
            with socket.socket() as plain, pytest.raises(OSError, match="in use"):
                plain.bind(("127.0.0.1", number))  # without SO_REUSEADDR: an accident
            with socket.create_server(("127.0.0.1", number)) as server, socket.socket() as client:
                client.connect(("127.0.0.1", number))
                server.accept()[0].close()
        with socket.socket() as any_port:
            any_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            any_port.bind(("127.0.0.1", 0))
            assert any_port.getsockname()[1] not in ports.numbers
    finally:
        ports.close()


def test_the_versions_that_a_stopped_demo_tells_are_those_of_the_store(tmp_path: Path) -> None:
    assert committed_in(tmp_path / "store") is None
    store = Store.open(tmp_path / "store", create=True)
    try:
        assert committed_in(tmp_path / "store") == 0
        writer = store.writer()
        for value in (1.0, 2.0):
            writer.commit({"w": np.full(3, value, np.float32)})
        assert committed_in(tmp_path / "store") == 2
    finally:
        store.close()
    assert committed_in(tmp_path / "store") == 2
    (tmp_path / "file").write_text("x")
    assert committed_in(tmp_path / "file") is None
