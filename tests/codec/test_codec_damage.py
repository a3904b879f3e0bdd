"""Coded files whose checks are right and whose tables lie: what a broken or foreign writer would leave."""

from __future__ import annotations

import numpy as np
import pytest
from conftest_codec import array_of, changed, random_bits, same_bits

from weightline import codec
from weightline.codec import backend, container, kernels, native, tables
from weightline.errors import FormatError, IntegrityError, InvalidInput

LEVELS = ("fast", "dense")
COLUMNS = 11
EDGES = (0, 1, 2, 3, 4, 24, 25, 31, 63, 64, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40)


@pytest.fixture(params=["numba", "c"])
def engine(request, monkeypatch):
    chosen = native if request.param == "c" else kernels
    monkeypatch.setattr(backend, "engine", lambda: chosen)
    return chosen


def opened(path):
    mapped = container.Mapped(path, verify=True)
    streams = {name: mapped.stream(name).tobytes() for name in ("coded", "tables", "index")}
    return streams, tables.bytes_to_columns(streams["tables"], COLUMNS, str(path))


def sealed(path, streams, columns, level):
    streams = streams | {"tables": tables.columns_to_bytes(columns)}
    sizes = {name: len(data) for name, data in streams.items()}
    container.write_streams(path, sizes, {name: [data] for name, data in streams.items()}, level)


def a_step(dtype, count=20_000):
    bits = random_bits(dtype, count, 3)
    if dtype == "BF16":
        values = np.random.default_rng(3).normal(size=count) * 0.05
        bits = codec.bits_of(values.astype(codec.numpy_dtype("BF16"))).copy()
    moved = changed(bits, 0.02, 5, 2)
    return {"w": array_of(bits, dtype, (count,))}, {"w": array_of(moved, dtype, (count,))}


@pytest.mark.parametrize("dtype", ["F16", "F8_E4M3", "F8_E5M2", "I16", "C64"])
@pytest.mark.parametrize("level", LEVELS)
def test_classes_of_contexts_that_the_dtype_does_not_have_are_refused(dtype, level, engine, tmp_path):
    old, new = a_step(dtype)
    codec.write_delta(codec.diff(old, new, level=level), tmp_path / "d", level=level)
    streams, columns = opened(tmp_path / "d")
    last = len(columns[4]) - 1
    columns[5][last] += 256 - int(columns[4].sum() + columns[5][last]) - 1  # up to context 255
    sealed(tmp_path / "d", streams, columns, level)
    target = {"w": old["w"].copy()}
    with pytest.raises(FormatError, match="contexts"):
        codec.read_delta(tmp_path / "d").apply_(target)
    assert same_bits(target["w"], old["w"])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F32", "U8"])
@pytest.mark.parametrize("level", LEVELS)
def test_tables_that_lie_never_get_through(dtype, level, engine, tmp_path):
    old, new = a_step(dtype)
    codec.write_delta(codec.diff(old, new, level=level), tmp_path / "d", level=level)
    streams, right = opened(tmp_path / "d")
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        columns = [column.copy() for column in right]
        for _ in range(int(rng.integers(1, 4))):
            column = columns[int(rng.integers(COLUMNS))]
            near = int(column[at]) ^ 1 if (at := int(rng.integers(column.size))) % 2 else None
            column[at] = near if near is not None else EDGES[int(rng.integers(len(EDGES)))]
        sealed(tmp_path / "e", streams, columns, level)
        target = {"w": old["w"].copy()}
        try:
            codec.read_delta(tmp_path / "e").apply_(target)
        except (FormatError, IntegrityError, InvalidInput):
            refused += 1
            assert same_bits(target["w"], old["w"])
        else:
            assert same_bits(target["w"], new["w"])
    assert refused > 20
