"""Format 1: a golden store opens bit for bit; other formats, runs and copies are each told by name."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightline.errors import ConflictError, FormatError, InvalidInput, StoreNotFound
from weightline.store import Store

GOLDEN = Path(__file__).parent / "golden" / "format-1"


def golden_weights(k: int) -> dict[str, np.ndarray]:
    """Version k of the golden store, by arithmetic alone."""
    array = (np.arange(96, dtype=np.uint32) * 2654435761 >> 8).astype(np.uint16).reshape(12, 8)
    array[k % 12] ^= np.uint16(k)
    return {"a.weight": array, "b.bias": np.full(4, k, np.float32)}


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "s")
    return tmp_path / "s"


def test_the_golden_store_opens_bit_for_bit(golden: Path, same: Any) -> None:
    store = Store.open(golden)
    assert store.run == "c0ffee000001"
    assert store.damage is None
    assert store.latest() == 5
    for version in (1, 2, 3, 4, 5):
        assert same(store.load(version), golden_weights(version))
    assert store.recover().attachments["opt"].read_bytes() == b"state of step 40"
    assert [r.version for r in store.versions() if r.yanked] == [5]
    assert set(store.state.thinned) == {3}
    assert store.log.index.present() == [(1, 8)]
    assert store.verify(deep=True).ok
    store.close()


def test_a_copied_store_is_read_and_not_written_until_it_is_adopted(golden: Path, same: Any) -> None:
    store = Store.open(golden)
    assert store.copied
    with pytest.raises(ConflictError, match="is a copy of run c0ffee000001"):
        store.writer()
    assert store.adopt_copy() == "c0ffee000001"
    assert not store.copied
    record = store.writer().commit(golden_weights(6))
    assert (record.version, record.parent) == (6, 5)
    assert same(Store.open(golden).load(6), golden_weights(6))
    with pytest.raises(InvalidInput, match="is no copy"):
        store.adopt_copy(fork=True)


def test_a_copy_beside_its_original_gets_a_run_of_its_own(golden: Path) -> None:
    store = Store.open(golden)
    run = store.adopt_copy(fork=True)
    assert run != "c0ffee000001"
    assert store.latest() == 5
    assert store.writer().commit(golden_weights(6)).version == 6
    assert Store.open(golden).run == run


def test_a_fresh_place_has_no_store_and_another_run_is_told(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="there is no store"):
        Store.open(tmp_path / "fresh")
    made = Store.open(tmp_path / "fresh", create=True)
    assert made.latest() is None
    assert not made.copied
    # A second run in the same place goes on with the run that is there, unless it says which one it wants.
    assert Store.open(tmp_path / "fresh", create=True).run == made.run
    with pytest.raises(ConflictError, match=f"holds run {made.run}, not mine"):
        Store.open(tmp_path / "fresh", create=True, run="mine")


def test_a_store_that_took_the_place_of_another_is_noticed(tmp_path: Path) -> None:
    old = Store.open(tmp_path / "s", create=True)
    writer = old.writer()
    writer.commit(golden_weights(1))
    shutil.rmtree(tmp_path / "s")
    new = Store.open(tmp_path / "s", create=True)
    for k in (1, 2, 3):
        new.writer().commit(golden_weights(k))
    with pytest.raises(ConflictError, match="holds another store now"):
        old.refresh()
    with pytest.raises(ConflictError, match="holds another store now"):
        writer.commit(golden_weights(4))
    assert new.refresh() == 3


@pytest.mark.parametrize("number", [0, 2, 99])
def test_another_format_is_refused_by_name(golden: Path, number: int) -> None:
    (golden / "run.json").write_text(f'{{"format":{number},"run":"old","created_at":0.0}}')
    with pytest.raises(FormatError, match=f"has format {number}; this build reads format 1") as caught:
        Store.open(golden)
    assert caught.value.hint


def _small(root: Path) -> Path:
    """A store with one file of each kind that carries truth, all of them small."""
    store = Store.open(root, create=True)
    writer = store.writer()
    writer.commit({"w": np.arange(8, dtype=np.uint8)}, attachments={"opt": b"state"})
    writer.commit({"w": np.arange(1, 9, dtype=np.uint8)}, step=2)
    store.yank(1, "bad")
    store.pin(1)
    store.lease([2], "engine-0", ttl=1e9)
    store.log.index.write(store.state.seq)
    store.close()
    return root


_ALL = [pytest.param(1, marks=pytest.mark.soak), pytest.param(8, marks=pytest.mark.faults)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("masks", _ALL, ids=["every bit", "every byte"])
def test_any_flipped_byte_of_any_file_that_carries_truth_is_found(tmp_path: Path, masks: int) -> None:
    """Every byte of every file; "every byte" flips one bit in turn, "every bit" each of the eight."""
    root = _small(tmp_path / "s")
    hints = {"head.json", "anchor-wanted.json", "owner.json"}
    checked, kinds = 0, set()
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        if path.name in hints or path.name.startswith("catalog.sqlite"):
            continue
        path.chmod(0o644)
        whole = path.read_bytes()
        for at, bit in ((at, bit) for at in range(len(whole)) for bit in range(8)):
            if masks == 8 and bit != at % 8:
                continue
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([whole[at] ^ 1 << bit]))
            try:
                found = Store.open(root).verify().problems
            except FormatError:
                found = (path,)  # run.json: not even opened
            assert found, f"bit {bit} of byte {at} of {path.relative_to(root)}"
            checked += 1
        path.write_bytes(whole)
        kinds.add(path.relative_to(root).parts[0] if path.parent != root else path.name)
    assert kinds == {"index", "leases", "log", "pins", "place.json", "run.json", "versions"}
    assert checked > 4000
    assert Store.open(root).verify(deep=True).ok


@pytest.mark.faults
def test_a_damaged_anchor_is_made_again_from_its_chain(store: Store, same: Any) -> None:
    writer = store.writer()
    for k in (1, 2, 3):
        writer.commit(golden_weights(k), anchor=k == 3)
    path = store.root / store.record(3).folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert [p.kind for p in store.verify().problems] == ["blob"]
    assert any("version 3 again" in line for line in store.repair())
    assert path.read_bytes() == whole
    path.unlink()
    assert store.verify(repair=True).ok
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(whole).digest()
    # Nothing rests beneath the first: it is told, not made up.
    first = store.root / store.record(1).folder / "model.safetensors"
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    report = store.verify(repair=True)
    assert {p.version for p in report.problems} >= {1}


def _make(root: Path) -> None:
    """Makes the golden store: `python tests/store/test_store_format.py FOLDER`; for a new format only."""
    from weightline.store import owner as owners
    from weightline.store import run as runs
    from weightline.store.place_local import LocalPlace

    owners._host = lambda: "golden/pid:[1]"  # type: ignore[assignment]
    owners._boot = lambda: "0"  # type: ignore[assignment]
    root.mkdir(parents=True)
    place = LocalPlace(root)
    place.put_if_absent("run.json", runs.encode(runs.Run(1, "c0ffee000001", 1.0)))
    runs.settle(place, "c0ffee000001")
    store = Store.open(root, create=True, clock=lambda: 2.0)
    writer = store.writer()
    for k in (1, 2, 3, 4, 5):
        attachments = {"opt": b"state of step 40"} if k == 4 else {}
        options = {"step": 10 * k, "anchor": k in (3, 5), "commit_id": f"c{k}"}
        writer.commit(golden_weights(k), attachments=attachments, **options)
    store.yank(5, "golden")
    store.thin((3,), "anchor", "golden")
    store.collect(grace=0, hold_after_rebuild=0)
    store.close()
    for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
        (root / name).unlink(missing_ok=True)


if __name__ == "__main__":
    import sys

    _make(Path(sys.argv[1]))
