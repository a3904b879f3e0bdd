"""The newest version rots on disk under a running writer, which holds its bits: nothing is put on top."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightline.errors import IntegrityError
from weightline.store import Store, Writer
from weightline.store.head_watch import PIECE

pytestmark = pytest.mark.faults
Weights = dict[str, Any]


def large(k: int) -> Weights:
    array = np.arange(PIECE, dtype=np.uint16)
    array[k] ^= 1
    return {"w": array, "v": np.full(3, k % 256, np.uint8)}


@pytest.fixture
def writer(store: Store) -> Writer:
    writer = store.writer()
    for k in range(1, 4):
        writer.commit(large(k), step=k)
    return writer


def _hurt(path: Path, how: str) -> None:
    stat = path.stat()
    if how == "deleted":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "cut short":
        data = data[:-1]
    else:
        data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    if how == "flipped, times kept":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("how", ["flipped", "cut short", "deleted"])
@pytest.mark.parametrize(
    ("version", "name"),
    [(3, "delta.safetensors"), (2, "delta.safetensors"), (1, "model.safetensors"), (2, "manifest.json")],
)
@pytest.mark.parametrize("offer", ["all", "part"])
def test_a_running_writer_makes_an_anchor_when_what_the_next_version_would_rest_on_is_damaged(
    store: Store, writer: Writer, same: Any, caplog: Any, how: str, version: int, name: str, offer: str
) -> None:
    _hurt(store.root / store.record(version).folder / name, how)
    wanted = large(4)
    if offer == "all":
        record = writer.commit(wanted, step=4)
    else:
        record = writer.commit({"w": wanted["w"], "v": wanted["v"]}, step=4, partial=True)
    assert (record.version, record.parent, record.base, record.kind) == (4, 3, None, "anchor")
    assert name in str(writer.damaged)
    assert "becomes an anchor that stands on its own" in caplog.text
    fresh = Store.open(store.root)
    assert same(fresh.load(4), wanted)
    with pytest.raises(IntegrityError):
        fresh.load(3)
    # The line goes on with deltas, on top of what is whole.
    after = writer.commit(large(5), step=5)
    assert (after.kind, after.base, writer.damaged) == ("delta", 4, None)
    assert same(Store.open(store.root).load(5), large(5))


def test_rot_that_leaves_size_and_time_alone_is_found_within_a_turn(
    store: Store, writer: Writer, same: Any
) -> None:
    anchor = store.root / store.record(1).folder / "model.safetensors"
    _hurt(anchor, "flipped, times kept")
    turn = anchor.stat().st_size // PIECE + 2
    kinds = [writer.commit(large(4 + k), step=4 + k).kind for k in range(turn)]
    assert kinds.count("anchor") == 1
    assert same(Store.open(store.root).load(3 + turn), large(3 + turn))


def test_a_file_that_is_put_back_as_it_was_is_no_damage(store: Store, writer: Writer) -> None:
    folder = store.root / store.record(3).folder
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    assert writer.commit(large(4)).kind == "delta"
    assert writer.damaged is None


def test_what_retention_lets_go_of_is_no_damage(store: Store, writer: Writer, same: Any) -> None:
    writer.commit(large(4), anchor=True)
    writer.commit(large(5))
    store.collect(max_versions=1, grace=0, hold_after_rebuild=0)
    assert store.state.retired
    record = writer.commit(large(6))
    assert (record.kind, record.base, writer.damaged) == ("delta", 5, None)
    store.thin([4], "anchor", "by hand")  # nothing now: version 4 has lost the base of its delta
    assert writer.commit(large(7)).kind == "delta"
    assert same(Store.open(store.root).load(7), large(7))


@pytest.mark.parametrize("lost", ["one half", "both halves"])
def test_on_a_mirror_one_whole_half_will_do(tmp_path: Path, same: Any, lost: str) -> None:
    halves = [tmp_path / "one", tmp_path / "two"]
    url = f"mirror:{halves[0]},{halves[1]}?cache={tmp_path / 'cache'}"
    store = Store.open(url, create=True)
    writer = store.writer()
    writer.commit(large(1))
    record = writer.commit(large(2))
    for half in halves[: 1 if lost == "one half" else 2]:
        _hurt(half / record.folder / "delta.safetensors", "flipped")
    committed = writer.commit(large(3))
    assert committed.kind == ("delta" if lost == "one half" else "anchor")
    assert same(Store.open(url).load(3), large(3))
    store.close()
