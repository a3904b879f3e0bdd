"""Exact widening and narrowing of bit patterns."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from weightline import codec
from weightline.generate.widen import narrow, widen, widens

FLOATS = ("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64")
PAIRS = [(s, w) for s, w in itertools.permutations(FLOATS, 2) if widens(s, w)]


def every_pattern(dtype: str) -> Any:
    """All bit patterns of a dtype of 8 or 16 bits; for wider ones the edges of each exponent."""
    width = codec.bits_dtype(dtype).itemsize * 8
    if width <= 16:
        return np.arange(2**width).astype(codec.bits_dtype(dtype))
    exponents = np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)
    mantissas = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], np.uint32)
    return (exponents | mantissas).reshape(-1)


def test_which_dtypes_widen_exactly() -> None:
    assert set(PAIRS) == {
        *((s, w) for s in ("F8_E4M3", "F8_E5M2") for w in ("F16", "BF16", "F32", "F64")),
        *((s, w) for s in ("F16", "BF16") for w in ("F32", "F64")),
        ("F32", "F64"),
    }
    assert all(widens(d, d) for d in (*FLOATS, "I64", "BOOL"))
    assert not widens("I8", "F32")
    assert not widens("I8", "I16")


@pytest.mark.parametrize(("stored", "live"), PAIRS)
def test_every_pattern_goes_there_and_back(stored: str, live: str) -> None:
    bits = every_pattern(stored)
    wide = widen(bits, stored, live)
    assert wide.dtype == codec.bits_dtype(live)
    assert np.unique(wide).size == bits.size, "two patterns with one image could not be told apart"
    back = narrow(wide, live, stored)
    assert back is not None
    assert np.array_equal(back, bits)


@pytest.mark.parametrize(("stored", "live"), PAIRS)
def test_values_are_the_same_numbers(stored: str, live: str) -> None:
    bits = every_pattern(stored)
    with np.errstate(invalid="ignore"):
        values = bits.view(codec.numpy_dtype(stored)).astype(np.float64)
        wide = widen(bits, stored, live).view(codec.numpy_dtype(live)).astype(np.float64)
    nan = np.isnan(values)
    assert np.array_equal(nan, np.isnan(wide))
    assert np.array_equal(values[~nan], wide[~nan])
    assert np.array_equal(np.signbit(values[~nan]), np.signbit(wide[~nan]))


@pytest.mark.parametrize("stored", ["F8_E4M3", "F8_E5M2", "F16", "BF16"])
@given(bits=arrays(np.uint32, 1, elements=st.integers(0, 2**32 - 1)))
def test_what_has_no_exact_image_is_never_narrowed(stored: str, bits: Any) -> None:
    images = widen(every_pattern(stored), stored, "F32")
    back = narrow(bits, "F32", stored)
    if bits[0] in images:
        assert back is not None
        assert widen(back, stored, "F32")[0] == bits[0]
    else:
        assert back is None


def test_one_bad_element_among_many_is_found() -> None:
    wide = widen(np.zeros((1 << 22) + 10, np.uint16), "BF16", "F32")
    wide[-1] = 1
    assert narrow(wide, "F32", "BF16") is None
