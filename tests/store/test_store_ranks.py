"""One version from several ranks: all of it or nothing, in ranges that any rank may own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from weightline.codec import spec_of
from weightline.errors import ConflictError, IntegrityError, InvalidInput, Unavailable
from weightline.store import Rank, Receipt, Shard, Store, commit_ranks

WORLD = 3


def _shards(weights: Any, rank: int, world: int = WORLD) -> dict[str, Shard]:
    """Each tensor cut in `world` flat ranges, as FSDP cuts it; small ones belong to rank 0."""
    out = {}
    for name, array in weights.items():
        flat = array.reshape(-1)
        if flat.size < world:
            cuts = [0] + [flat.size] * world
        else:
            cuts = [flat.size * k // world for k in range(world + 1)]
        if cuts[rank] < cuts[rank + 1]:
            out[name] = Shard(spec_of(name, array), cuts[rank], flat[cuts[rank] : cuts[rank + 1]])
    return out


def _stage(ranks: list[Rank], weights: Any, commit_id: str, step: int | None = None) -> list[Receipt]:
    return [r.stage(_shards(weights, k), commit_id=commit_id, step=step) for k, r in enumerate(ranks)]


@pytest.fixture
def ranks(store: Store) -> list[Rank]:
    return [Rank(Store.open(store.root), k, WORLD) for k in range(WORLD)]


def test_versions_appear_whole_and_bit_exact(
    store: Store, ranks: list[Rank], weights: Any, changed: Any, same: Any
) -> None:
    writer = store.writer()
    for step in (1, 2, 3):
        now = changed(weights, 5 * step, seed=step)
        receipts = _stage(ranks, now, f"s{step}", step)
        # From the second on only what changed is written.
        assert {receipt.base for receipt in receipts} == {step - 1 or None}
        assert store.refresh() == (step - 1 or None)
        record = commit_ranks(writer, store, commit_id=f"s{step}", world=WORLD, step=step)
        assert (record.version, record.step) == (step, step)
        assert same(store.load(step), now)
    assert len(list((store.root / "versions").iterdir())) == 3
    assert list((store.root / "ranks").rglob("*.json")) == []
    assert store.verify(deep=True).ok
    # A repeated publish is the same version.
    assert commit_ranks(writer, store, commit_id="s3", world=WORLD, step=3).version == 3


@pytest.mark.faults
def test_a_rank_that_dies_leaves_the_version_unpublished_and_is_swept(
    store: Store, ranks: list[Rank], weights: Any, same: Any
) -> None:
    writer = store.writer()
    for number in (0, 2):
        pid = os.fork()
        if pid == 0:  # pragma: no cover - the child
            Rank(Store.open(store.root), number, WORLD).stage(_shards(weights, number), commit_id="a")
            os._exit(0)
        os.waitpid(pid, 0)
    with pytest.raises(Unavailable, match="rank 1 of 3 did not stage"):
        commit_ranks(writer, store, commit_id="a", world=WORLD, timeout=0)
    assert store.refresh() is None
    assert len(store.sweep()) == 2
    assert list((store.root / "ranks").rglob("*.json")) == []
    _stage(ranks, weights, "a")
    assert commit_ranks(writer, store, commit_id="a", world=WORLD).version == 1
    assert same(store.load(1), weights)


def test_the_publisher_waits_for_a_late_rank(store: Store, ranks: list[Rank], weights: Any) -> None:
    for number in (0, 1):
        ranks[number].stage(_shards(weights, number), commit_id="a")

    def pause(_: float) -> None:
        ranks[2].stage(_shards(weights, 2), commit_id="a")

    record = commit_ranks(store.writer(), store, commit_id="a", world=WORLD, pause=pause)
    assert record.version == 1


def test_parts_that_do_not_belong_together_are_refused(
    store: Store, ranks: list[Rank], weights: Any, changed: Any
) -> None:
    writer = store.writer()
    _stage(ranks, weights, "a", 1)
    with pytest.raises(ConflictError, match="staged step 1"):
        commit_ranks(writer, store, commit_id="a", world=WORLD, step=2)
    commit_ranks(writer, store, commit_id="a", world=WORLD, step=1)
    _stage(ranks, changed(weights), "b")
    writer.commit(changed(weights, 2))
    with pytest.raises(ConflictError, match="staged against version 1, the newest is 2"):
        commit_ranks(writer, store, commit_id="b", world=WORLD)
    assert store.refresh() == 2


def test_overlaps_and_gaps_are_refused(store: Store, weights: Any) -> None:
    writer, one, two = store.writer(), Rank(store, 0, 2), Rank(store, 1, 2)
    array = weights["embed.weight"]
    spec, flat = spec_of("embed.weight", array), array.reshape(-1)
    one.stage({"embed.weight": Shard(spec, 0, flat[:70])}, commit_id="a")
    two.stage({"embed.weight": Shard(spec, 60, flat[60:])}, commit_id="a")
    with pytest.raises(InvalidInput, match="ranks 0 and 1 both own element 60 of"):
        commit_ranks(writer, store, commit_id="a", world=2)
    two.stage({"embed.weight": Shard(spec, 80, flat[80:])}, commit_id="a")
    with pytest.raises(InvalidInput, match=r"no rank owns all of 'embed.weight'"):
        commit_ranks(writer, store, commit_id="a", world=2)
    with pytest.raises(InvalidInput, match="covers elements 100 to 228 of 128"):
        one.stage({"embed.weight": Shard(spec, 100, flat)}, commit_id="a")
    with pytest.raises(InvalidInput, match="rank 2 of 2"):
        Rank(store, 2, 2)
    assert store.refresh() is None


@pytest.mark.faults
def test_a_damaged_part_is_never_published(store: Store, ranks: list[Rank], weights: Any) -> None:
    receipt = [rank.stage(_shards(weights, k), commit_id="a") for k, rank in enumerate(ranks)][1]
    path = Path(store.root / receipt.folder / "part.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"part\.safetensors"):
        commit_ranks(store.writer(), store, commit_id="a", world=WORLD)
    assert store.refresh() is None
