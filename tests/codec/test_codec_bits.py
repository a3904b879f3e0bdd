"""Every dtype and layout becomes the right bits, and comes back."""

from __future__ import annotations

import numpy as np
import pytest
from conftest_codec import DTYPES, LAYOUTS, array_of, laid_out, random_bits, tensors
from hypothesis import given
from hypothesis import strategies as st

from weightline import codec
from weightline.errors import InvalidInput
from weightline.types import TensorSpec


@given(tensors(), st.sampled_from(LAYOUTS))
def test_bits_are_those_of_the_elements_in_c_order_whatever_the_layout(case, layout):
    dtype, shape, bits = case
    array = laid_out(array_of(bits, dtype, shape), layout)
    assert codec.spec_of("x", array) == TensorSpec("x", dtype, shape)
    got = codec.bits_of(array)
    assert got.ndim == 1
    assert got.dtype.isnative
    if layout == "big_endian" and array.dtype.byteorder == ">" and dtype in ("F16", "F32", "F64", "C64"):
        # astype to big-endian may quieten a signalling NaN: compare with what the array itself holds.
        expected = array.view(array.dtype.newbyteorder("<")).byteswap().reshape(-1)
        assert got.tobytes() == expected.tobytes()
    else:
        assert np.array_equal(got, bits)
    assert np.array_equal(codec.bits_of(codec.from_bits(got, codec.spec_of("x", array))), got)


def test_a_broadcast_array_has_each_element_once():
    row = array_of(random_bits("BF16", 5, 1), "BF16", (5,))
    wide = np.broadcast_to(row, (3, 5))
    assert np.array_equal(codec.bits_of(wide), np.tile(codec.bits_of(row), 3))


def test_an_unaligned_array_is_read_right():
    raw = np.frombuffer(b"x" + np.arange(9, dtype="<u4").tobytes(), np.uint8)
    assert np.array_equal(codec.bits_of(raw[1:].view("<u4")), np.arange(9))


def test_a_plain_array_is_a_view():
    array = np.zeros(4, np.float32)
    codec.bits_of(array)[0] = 0x3F800000
    assert array[0] == 1.0


@pytest.mark.parametrize("name", DTYPES)
def test_names_parse_to_themselves_and_from_numpy(name):
    assert codec.parse_dtype(name) == name
    assert codec.parse_dtype(codec.numpy_dtype(name)) == name
    assert codec.parse_dtype("torch." + codec.numpy_dtype(name).name) == name


@pytest.mark.parametrize(
    "array", [np.zeros(2, np.complex128), np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]")]
)
def test_what_safetensors_cannot_hold_is_refused_by_the_tensors_name(array):
    with pytest.raises(InvalidInput, match=r"'layer\.7'"):
        codec.spec_of("layer.7", array)
    with pytest.raises(InvalidInput):
        codec.diff({"layer.7": array}, {"layer.7": array})


def test_lists_and_unknown_names_are_refused():
    with pytest.raises(InvalidInput, match="'w' is a list"):
        codec.spec_of("w", [1.0])
    with pytest.raises(InvalidInput, match="F4"):
        codec.numpy_dtype("F4")
    with pytest.raises(InvalidInput):
        codec.from_bits(np.zeros(3, np.uint16), codec.spec_of("x", np.zeros(4, np.float16)))


@pytest.mark.parametrize("name", ["\udc80", "layer.\ud800.w"])
def test_a_name_that_is_no_utf8_is_refused(name):
    old, new = {name: np.zeros(3, np.float32)}, {name: np.ones(3, np.float32)}
    for act in (lambda: codec.diff(old, new), lambda: codec.full(new), lambda: codec.specs_of(new)):
        with pytest.raises(InvalidInput, match=r"\\ud(c8|80)0.* is not valid UTF-8"):
            act()
    with pytest.raises(InvalidInput, match="tensor name 5 is a int"):
        codec.specs_of({5: new[name]})


def test_a_masked_array_is_refused_since_its_mask_would_be_lost():
    masked = np.ma.masked_array(np.zeros(3, np.float32), mask=[True, False, True])
    for act in (lambda: codec.spec_of("w", masked), lambda: codec.full({"w": masked})):
        with pytest.raises(InvalidInput, match="'w' is a masked array"):
            act()
    with pytest.raises(InvalidInput, match="mask"):
        codec.bits_of(masked)
