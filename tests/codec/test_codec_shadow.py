"""The fused cast: the same bits as a cast and a diff, in one pass."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from conftest_codec import same_bits
from hypothesis import given
from hypothesis import strategies as st

from weightline import codec
from weightline.codec import backend, kernels, native
from weightline.codec.coding import R_HITS, Piece, rows_of
from weightline.errors import InvalidInput


@pytest.fixture(params=[kernels, native], ids=["numba", "c"])
def engine(request, monkeypatch):
    monkeypatch.setattr(backend, "engine", lambda: request.param)


def masters(seed, count=3001):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(count,)).astype(np.float32) * 0.05,
        "v": rng.normal(size=(7, 9)).astype(np.float32),
    }


@pytest.mark.parametrize("level", ["absolute", "fast", "dense"])
def test_a_refresh_equals_cast_and_diff(engine, level, tmp_path):
    weights = masters(1)
    shadow = codec.Shadow(weights)
    before = {name: array.copy() for name, array in shadow.weights.items()}
    for step in range(3):
        weights = {name: array * np.float32(1 + 3e-4) for name, array in weights.items()}
        delta = shadow.refresh(weights, level=level)
        after = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}
        assert all(same_bits(shadow.weights[name], after[name]) for name in after)
        direct = codec.diff(before, after)
        assert delta.elements == direct.elements > 0
        codec.write_delta(delta, tmp_path / f"{level}{step}", level=level)
        codec.read_delta(tmp_path / f"{level}{step}").apply_(before)
        assert all(same_bits(before[name], after[name]) for name in after)
        assert shadow.digests == {
            name: codec.digest_of(codec.bits_of(array)) for name, array in after.items()
        }
    assert shadow.refresh(weights, level=level).changed == ()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_any_fp32_bits_are_rounded_to_nearest_even(values):
    bits = np.array(values, np.uint32)
    for kernel in (kernels, native):
        shadow = np.zeros(bits.size, np.uint16)
        rows = rows_of([Piece(0, 0, bits.size, shadow.ctypes.data, bits.ctypes.data)])
        room = np.empty(bits.size, np.uint32), shadow.copy(), shadow.copy()
        assert kernel.cast(rows, *room, np.zeros((1, 2), np.uint64)) == 1
        with np.errstate(invalid="ignore"):
            expected = bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        assert np.array_equal(shadow, expected)


@pytest.mark.parametrize("odd", [0.0, 0.001, 0.5], ids=["plain", "some odd", "half odd"])
def test_long_runs_with_subnormals_and_nan_among_them_are_rounded_alike(odd):
    rng = np.random.default_rng(4)
    bits = (rng.standard_normal(9001) * 0.05).astype(np.float32).view(np.uint32)
    at = np.flatnonzero(rng.random(bits.size) < odd)
    strange = np.array(
        [0x0000_0001, 0x8000_7FFF, 0x007F_FFFF, 0x7F80_0001, 0xFFC1_2345, 0x7F80_0000], np.uint32
    )
    bits[at] = rng.choice(strange, at.size)
    with np.errstate(invalid="ignore"):
        expected = bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    for kernel in (kernels, native):
        shadow = np.zeros(bits.size, np.uint16)
        rows = rows_of([Piece(0, 0, bits.size, shadow.ctypes.data, bits.ctypes.data)])
        pos, was, now = np.empty(bits.size, np.uint32), shadow.copy(), shadow.copy()
        kernel.cast(rows, pos, was, now, np.zeros((1, 2), np.uint64))
        assert np.array_equal(shadow, expected)
        hits = int(rows[0, R_HITS])
        assert np.array_equal(pos[:hits], np.flatnonzero(expected))
        assert np.array_equal(now[:hits], expected[pos[:hits]])


def test_other_dtypes_and_shapes_are_refused_before_anything_changes():
    weights = masters(2)
    with pytest.raises(InvalidInput, match="'w' is F64"):
        codec.Shadow({"w": weights["w"].astype(np.float64)})
    shadow = codec.Shadow(weights)
    before = dict(shadow.digests)
    with pytest.raises(InvalidInput, match="missing 'v'"):
        shadow.refresh({"w": weights["w"] + 1})
    assert shadow.digests == before


@pytest.mark.parametrize("level", ["fast", "dense"])
def test_a_refresh_of_everything_is_not_larger_than_the_weights(engine, level, tmp_path):
    rng = np.random.default_rng(1)
    shadow = codec.Shadow({"w": rng.normal(size=50_000).astype(np.float32)})
    before = {name: array.copy() for name, array in shadow.weights.items()}
    weights = {"w": rng.integers(0, 0x7F7F_FFFF, 50_000).astype(np.uint32).view(np.float32)}
    delta = shadow.refresh(weights, level=level)
    nbytes = codec.write_delta(delta, tmp_path / "d", level=level)
    codec.read_delta(tmp_path / "d").apply_(before)
    assert same_bits(before["w"], weights["w"].astype(ml_dtypes.bfloat16))
    assert nbytes <= 2 * 50_000 * (1 if level == "fast" else 1.07) + 1024
