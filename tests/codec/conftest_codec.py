"""Weights of every dtype and layout, and Hypothesis strategies for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from weightline import codec

settings.register_profile(
    "codec", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("codec")

DTYPES = sorted(codec.SUPPORTED)


def random_bits(dtype: str, count: int, seed: int) -> np.ndarray:
    """Random bits of any kind: NaN payloads, -0.0 and infinities come up by themselves in the narrow
    dtypes."""
    width = codec.width_of(dtype)
    rng = np.random.default_rng(seed)
    return np.frombuffer(rng.bytes(count * width), codec.bits_dtype(dtype)).copy()


def array_of(bits: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return codec.from_bits(bits, codec.spec_of("x", np.empty(shape, codec.numpy_dtype(dtype))))


def changed(bits: np.ndarray, density: float, seed: int, step: int | None = None) -> np.ndarray:
    """A copy in which about `density` of the elements have other bits (moved by up to `step`, else
    random)."""
    rng = np.random.default_rng(seed)
    out = bits.copy()
    at = np.flatnonzero(rng.random(bits.size) < density)
    if step is None:
        out[at] = random_bits_like(bits, at.size, seed + 1)
    else:
        moves = rng.integers(1, step + 1, at.size) * rng.choice([-1, 1], at.size)
        out[at] = out[at] + moves.astype(np.int64).astype(bits.dtype)
    return out


def random_bits_like(bits: np.ndarray, count: int, seed: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(count * bits.itemsize), bits.dtype).copy()


LAYOUTS = ("plain", "fortran", "strided", "reversed", "big_endian")


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """The same elements in another layout of memory."""
    if layout == "fortran" and array.ndim:
        return np.asfortranarray(array)
    if layout == "strided" and array.ndim:
        wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2 + 1), array.dtype)
        view = wide[..., 1 : 1 + 2 * array.shape[-1] : 2]
        view[...] = array
        return view
    if layout == "reversed" and array.ndim:
        flipped = np.ascontiguousarray(array[::-1])
        return flipped[::-1]
    if layout == "big_endian" and array.dtype.kind in "iufc" and array.dtype.isbuiltin == 1:
        return array.astype(array.dtype.newbyteorder(">"))
    return array


@st.composite
def tensors(draw: Any) -> tuple[str, tuple[int, ...], np.ndarray]:
    """dtype, shape and array in some layout, 0-dim and empty ones included."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    count = int(np.prod(shape, dtype=np.int64))
    bits = random_bits(dtype, count, draw(st.integers(0, 2**32)))
    return dtype, shape, bits


@pytest.fixture
def pair() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two versions of a small model: bf16, fp32 and fp8 tensors, one of them unchanged."""
    old, new = {}, {}
    plan = (
        ("a.weight", "BF16", (300, 70)),
        ("b.weight", "F32", (11, 13)),
        ("c", "F8_E4M3", (999,)),
        ("frozen", "BF16", (64, 64)),
    )
    for seed, (name, dtype, shape) in enumerate(plan):
        bits = random_bits(dtype, int(np.prod(shape)), seed)
        old[name] = array_of(bits, dtype, shape)
        new[name] = array_of(
            bits if name == "frozen" else changed(bits, 0.02, seed + 9, step=2), dtype, shape
        )
    return old, new


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(codec.bits_of(a), codec.bits_of(b)))
