"""Deltas lie in a store relative to their base; what a reader gets is absolute and exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from weightline import codec
from weightline.errors import IntegrityError
from weightline.store import Store

Weights = dict[str, np.ndarray]


def big(seed: int = 0) -> Weights:
    import ml_dtypes

    rng = np.random.default_rng(seed)
    return {
        "embed.weight": (rng.standard_normal((300, 64)) * 0.02).astype(ml_dtypes.bfloat16),
        "b": np.ones(7),
    }


def bits(weights: Weights) -> dict[str, bytes]:
    return {name: codec.bits_of(array).tobytes() for name, array in weights.items()}


@pytest.fixture
def five(store: Store, changed: Callable[..., Weights]) -> list[Weights]:
    """Versions 1 to 5, each with a few hundred elements changed."""
    made = [big()]
    for k in range(1, 5):
        made.append(changed(made[-1], 200, seed=k))
    writer = store.writer()
    for weights in made:
        writer.commit(weights)
    return made


def stored_delta(store: Store, version: int) -> Path:
    return store.root / store.record(version).folder / "delta.safetensors"


def test_a_stored_delta_is_relative_and_smaller_than_index_and_value(store, five):
    delta = codec.read_delta(stored_delta(store, 3))
    assert delta.level == "fast"
    assert store.record(3).nbytes < 200 * 6


@pytest.mark.parametrize("order", [[2, 3, 4, 5], [5], [2, 5], [4, 3, 5], [3, 3]], ids=str)
def test_a_reader_gets_exact_absolute_values_in_any_order(store, five, order):
    have = 1
    for want in order:
        delta = store.fetch_delta(want, have)
        assert (delta.base, delta.version, delta.level) == (have, want, "absolute")
        held = {name: array.copy() for name, array in five[have - 1].items()}
        delta.apply_(held)
        assert bits(held) == bits(five[want - 1])
        have = want


def test_what_was_fetched_stays_as_it_was_when_more_is_fetched(store, five):
    first = store.fetch_delta(2)
    before = [(c.index.copy(), c.bits.copy()) for c in first.changes()]
    for version in (3, 4, 5):
        store.fetch_delta(version)
    after = [(c.index, c.bits) for c in first.changes()]
    assert all(
        np.array_equal(a, c) and np.array_equal(b, d) for (a, b), (c, d) in zip(before, after, strict=True)
    )


def test_a_flipped_byte_is_refused_and_the_next_fetch_is_right_again(store, five):
    path = stored_delta(store, 3)
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    reader = Store.open(store.root)
    reader.fetch_delta(2)
    with pytest.raises(IntegrityError, match=r"delta\.safetensors"):
        reader.fetch_delta(3)
    path.write_bytes(data)
    delta = reader.fetch_delta(5, 2)
    held = {name: array.copy() for name, array in five[1].items()}
    delta.apply_(held)
    assert bits(held) == bits(five[4])
    reader.close()


@pytest.mark.parametrize("level", ["absolute", "fast", "dense"])
def test_a_delta_file_of_any_level_can_be_committed(store, five, changed, tmp_path, level):
    new = changed(five[-1], 50, seed=9)
    file = tmp_path / "step.safetensors"
    codec.write_delta(codec.diff(five[-1], new), file, level=level, base=five[-1])
    record = store.writer().commit(file, commit_id="once")
    assert (record.version, record.changed) == (6, 50)
    assert bits(store.load(6)) == bits(new)
    assert store.writer().commit(file, commit_id="once").version == 6
