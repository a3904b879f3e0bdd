"""The block index of the log: few reads at a cold start, right whatever becomes of it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightline.codec import weights_digest
from weightline.core import ledger
from weightline.core.ledger import Entry, FenceEntry, LedgerState, RetireEntry, VersionEntry, YankEntry
from weightline.store import Store
from weightline.store.index import SMALLEST, blocks
from weightline.store.log import Log
from weightline.store.manifest import TensorEntry, weights_digest_of
from weightline.store.place_local import LocalPlace
from weightline.store.place_memory import MemoryPlace
from weightline.types import TensorSpec


class Counting(MemoryPlace):
    """Counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.calls: Counter[str] = Counter()

    def read(self, key: str) -> bytes:
        self.calls["read"] += 1
        return super().read(key)

    def list(self, prefix: str, *, after: str = "") -> Any:
        self.calls["list"] += 1
        return super().list(prefix, after=after)


def _version(number: int) -> VersionEntry:
    return VersionEntry(
        write_id=f"{number:032x}", epoch=1, at=1e9 + number, version=number, parent=number - 1 or None,
        base=number - 1 or None, step=number, label=f"{number}@{number:08x}", stored="anchor",
        digest=f"{number:064x}", folder=f"versions/{number:032x}", commit_id=f"{number:032x}", nbytes=1000,
        delta_nbytes=10, raw_nbytes=1000, changed=5, elements=500, weights_digest=f"{number:064x}",
    )  # fmt: skip


def _fill(place: Any, entries: int) -> LedgerState:
    """A log of a fence, versions, and a yank or retirement here and there."""
    state = LedgerState("run")
    for seq in range(1, entries + 1):
        entry: Entry
        if seq == 1:
            entry = FenceEntry(write_id="f", epoch=1, at=0.0, writer="t")
        elif seq % 50 == 0:
            entry = YankEntry(write_id=str(seq), epoch=1, at=0.0, version=len(state), reason="bad")
        elif seq % 1000 == 1:
            entry = RetireEntry(
                write_id=str(seq), epoch=1, at=0.0, versions=(len(state) - 500,), reason="room"
            )
        else:
            entry = _version(len(state) + 1)
        state._take(seq, entry)
        place.put(f"log/{seq:020d}.json", ledger.encode(entry))
    return state


def _read(log: Log) -> LedgerState:
    return list(log.on_from(LedgerState("run")))[-1]


def test_a_cold_start_over_100_000_entries_reads_at_most_20_objects() -> None:
    place = Counting()
    state = _fill(place, 100_003)
    Log(place, "run").index.write(state.seq)
    place.put("head.json", b'{"seq":100003}')
    place.calls.clear()
    read = _read(Log(place, "run"))
    assert (read.seq, len(read)) == (state.seq, len(state))
    assert (read.retired, read.yanked) == (state.retired, state.yanked)
    assert read.version(77_777) == state.version(77_777)
    assert place.calls["read"] <= 20
    assert place.calls["list"] == 1


@given(st.integers(0, 1 << 17))
def test_blocks_cover_any_length_with_few_objects(entries: int) -> None:
    found = blocks(entries)
    covered = 0
    for first, last in found:
        assert first == covered + 1
        size = last - first + 1
        assert size & (size - 1) == 0
        assert (first - 1) % size == 0
        covered = last
    assert entries - SMALLEST < covered <= entries
    # run.json, head.json, the blocks, what is left and the probe of the next one.
    assert len(found) + (entries - covered) <= 18


def test_a_longer_log_costs_new_blocks_only_and_the_smaller_ones_go() -> None:
    place = Counting()
    log = Log(place, "run")
    for entries in (100, 164, 255, 256, 300):
        state = _fill(place, entries)
        log.index.write(entries)
        assert log.index.present() == blocks(entries)
        assert _read(Log(place, "run")).seq == state.seq
    assert log.index.write(300) == []


@pytest.mark.faults
@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "other run"])
def test_a_damaged_index_costs_time_and_nothing_else(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    place = Counting()
    state = _fill(place, 300)
    log = Log(place, "run")
    log.index.write(300)
    key = log.index.key(1, 256)
    data = place.read(key)
    if damage == "delete":
        place.delete(key)
    elif damage == "other run":
        data = data.replace(b'"run":"run"', b'"run":"nur"')
        place.put(key, data)
    else:
        place.put(key, data[:-20] + (b"" if damage == "cut" else b"x" * 20))
    read = _read(Log(place, "run"))
    assert (read.seq, len(read)) == (state.seq, len(state))
    assert ("passed over" in caplog.text) == (damage != "delete")


@pytest.mark.faults
def test_entries_are_put_back_from_the_index(store: Store, weights: Any, changed: Any, same: Any) -> None:
    writer = store.writer()
    for k in range(1, 9):
        writer.commit(changed(weights, k, seed=k))
    store.collect()
    assert store.log.index.present() == [(1, 8)]
    kept = {seq: store.log.path(seq).read_bytes() for seq in (2, 3, 5)}
    store.log.path(2).unlink()
    store.log.path(3).write_bytes(b"")
    store.log.path(5).write_bytes(kept[5].replace(b'"version":4', b'"version":3'))
    fresh = Store.open(store.root)
    assert fresh.damage is None
    assert same(fresh.load(8), changed(weights, 8, seed=8))
    found = fresh.verify().problems
    assert sorted((p.kind, p.version) for p in found) == [("gap", 1), ("torn_entry", 2), ("torn_entry", 4)]
    assert fresh.verify(repair=True).ok
    for seq, data in kept.items():
        assert store.log.path(seq).read_bytes() == data


def test_10_000_versions_open_in_a_second_at_a_kilobyte_each(tmp_path: Path) -> None:
    made = Store.open(tmp_path / "s", create=True)
    made.close()
    entries, memory = 10_300, MemoryPlace()
    state = _fill(memory, entries)
    log = Log(memory, made.run)
    log.index.write(entries)
    # What a cold start reads; the entries beneath the index are not looked at.
    place = LocalPlace(tmp_path / "s")
    for item in memory.list("index"):
        place.put(item.key, memory.read(item.key))
    assert len(state) > 10_000
    store = Store.open(tmp_path / "s")
    store.catalog.index()
    store.close()
    size = (tmp_path / "s" / "catalog.sqlite").stat().st_size
    assert size / len(state) <= 1024
    best = 10.0
    for _ in range(3):
        began = time.perf_counter()
        opened = Store.open(tmp_path / "s")
        opened.catalog.index()
        best = min(best, time.perf_counter() - began)
        assert opened.latest() == len(state)
        opened.close()
    assert best < 1.0


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8), st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20
    )
)
def test_the_digest_of_a_version_is_that_of_the_codec(tensors: dict[str, tuple[int, int]]) -> None:
    table = {
        name: TensorEntry(TensorSpec(name, "BF16", (3,) * sides), f"{digest:032x}")
        for name, (digest, sides) in tensors.items()
    }
    expected = weights_digest((entry.spec, entry.digest) for entry in table.values())
    assert weights_digest_of(table) == expected
