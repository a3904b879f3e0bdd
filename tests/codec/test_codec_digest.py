"""The additive digest: order, parts, fused rows, wider dtypes, and that it notices every change."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from conftest_codec import DTYPES, array_of, random_bits, tensors
from hypothesis import given
from hypothesis import strategies as st

from weightline import codec
from weightline.codec import backend, kernels, native
from weightline.errors import InvalidInput
from weightline.types import TensorSpec

MASK = (1 << 64) - 1


def constant(lane, letter):
    text = f"weightline digest lane {lane} {letter}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") | 1


def reference(bits, start=0):
    """The definition in plain Python integers."""
    lanes = []
    for lane in (0, 1):
        a, b, s, c = (constant(lane, letter) for letter in "ABSC")
        total = 0
        for i, value in enumerate(bits.tolist(), start):
            x = (i * a + s + value * b) & MASK
            x = ((x ^ (x >> 32)) * c) & MASK
            total = (total + (x ^ (x >> 32))) & MASK
        lanes.append(f"{total:016x}")
    return "".join(lanes)


@pytest.fixture(params=[kernels, native], ids=["numba", "c"])
def engine(request, monkeypatch):
    monkeypatch.setattr(backend, "engine", lambda: request.param)


@given(tensors(), st.integers(0, 2**40))
def test_the_kernels_compute_the_definition(engine, case, start):
    _, _, bits = case
    assert codec.digest_of(bits, start=start) == reference(bits, start)
    order = np.random.default_rng(0).permutation(bits.size)
    assert codec.digest_at(order + start, bits[order]) == reference(bits, start)


def test_the_digest_of_known_bits_never_changes():
    bits = np.arange(1000, dtype=np.uint16) * np.uint16(65)
    assert codec.digest_of(bits) == reference(bits) == GOLDEN
    assert codec.digest_of(np.empty(0, np.uint16)) == "0" * 32


GOLDEN = "b4833e555b2383ea89cee3a8bdb0dc73"


@given(tensors(), st.integers(0, 2**32))
def test_an_update_equals_the_recomputation(case, seed):
    dtype, _, bits = case
    rng = np.random.default_rng(seed)
    index = np.sort(rng.choice(bits.size, rng.integers(0, bits.size + 1), replace=False)).astype(np.int64)
    new = bits.copy()
    new[index] = random_bits(dtype, index.size, seed)
    assert codec.digest_update(codec.digest_of(bits), index, bits[index], new[index]) == codec.digest_of(new)


def test_every_single_change_of_bits_and_every_swap_is_noticed():
    bits = np.arange(256, dtype=np.uint8)
    base = codec.digest_of(bits)
    seen = {base}
    for i in range(256):
        for flip in range(8):
            other = bits.copy()
            other[i] ^= 1 << flip
            seen.add(codec.digest_of(other))
    for i in range(255):
        other = bits.copy()
        other[[i, i + 1]] = other[[i + 1, i]]
        seen.add(codec.digest_of(other))
    assert len(seen) == 1 + 256 * 8 + 255


def test_lanes_are_spread_evenly_over_single_bit_differences():
    rng = np.random.default_rng(5)
    index = rng.integers(0, 1 << 33, 4000)
    low, high = (rng.integers(0, 65536, 4000).astype(np.uint16) for _ in range(2))
    ones = np.zeros(128)
    for i, a, b in zip(index, low, high, strict=True):
        gap = codec.difference(
            codec.digest_at(np.array([i]), np.array([a])), codec.digest_at(np.array([i]), np.array([b]))
        )
        ones += np.array([int(bit) for bit in f"{int(gap, 16):0128b}"])
    assert (np.abs(ones / 4000 - 0.5) < 0.06).all()


def test_rows_of_a_fused_matrix_give_the_digests_of_their_tensors():
    rng = np.random.default_rng(0)
    q, k, v = (rng.integers(0, 65536, (rows, 24)).astype(np.uint16) for rows in (32, 8, 8))
    fused = np.concatenate([q, k, v])
    for tensor, first in ((q, 0), (k, 32), (v, 40)):
        rows = np.arange(tensor.shape[0])
        got = codec.digest_rows(fused[first : first + rows.size].reshape(-1), rows, 24)
        assert got == codec.digest_of(tensor.reshape(-1))
    shuffled = rng.permutation(32)
    assert codec.digest_rows(q[shuffled].reshape(-1), shuffled, 24) == codec.digest_of(q.reshape(-1))


def test_columns_of_a_row_parallel_matrix_combine_to_its_digest():
    full = np.random.default_rng(0).integers(0, 65536, (32, 24)).astype(np.uint16)
    rows = np.arange(32)
    parts = [
        codec.digest_rows(np.ascontiguousarray(full[:, a:b]).reshape(-1), rows, 24, first=a)
        for a, b in ((0, 7), (7, 23), (23, 24))
    ]
    assert codec.combine(parts) == codec.digest_of(full.reshape(-1))
    assert codec.digest_rows(np.empty(0, np.uint16), np.empty(0, np.int64), 24) == "0" * 32
    with pytest.raises(InvalidInput, match="rows of at most"):
        codec.digest_rows(full.reshape(-1), rows, 24, first=1)


def test_parts_of_a_tensor_add_up():
    bits = random_bits("BF16", 1000, 1)
    parts = [codec.digest_of(bits[a:b], start=a) for a, b in ((700, 1000), (0, 300), (300, 700))]
    assert codec.combine(parts) == codec.digest_of(bits)
    assert codec.difference(codec.digest_of(bits), parts[0]) == codec.digest_of(bits[:700])


@pytest.mark.parametrize("stored", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("wide", ["F32", "F64"])
def test_a_wider_copy_has_the_digest_of_the_stored_tensor(stored, wide):
    bits = random_bits(stored, 512, 2)
    array = array_of(bits, stored, (512,))
    with np.errstate(invalid="ignore"):  # the cast of a signalling NaN
        finite = np.isfinite(array.astype(np.float64))
    array, bits = array[finite], bits[finite]
    held = array.astype(codec.numpy_dtype(wide))
    assert codec.digest_of(codec.narrow(held, stored)) == codec.digest_of(bits)


def test_a_value_that_does_not_narrow_exactly_is_refused():
    with pytest.raises(InvalidInput, match="not exact in BF16"):
        codec.narrow(np.array([1.0, 1.0001], np.float32), "BF16")
    with pytest.raises(InvalidInput, match="does not narrow"):
        codec.narrow(np.zeros(2, np.float16), "F32")
    same = np.array([1.0001], np.float32)
    assert np.array_equal(codec.narrow(same, "F32"), codec.bits_of(same))


def test_the_weights_digest_ignores_order_and_sees_everything_else():
    a, b = TensorSpec("a", "BF16", (2, 3)), TensorSpec("b", "F32", ())
    one = codec.weights_digest([(a, "0" * 32), (b, "1" * 32)])
    assert one == codec.weights_digest([(b, "1" * 32), (a, "0" * 32)])
    others = [
        [(a, "0" * 32)],
        [(a, "1" * 32), (b, "1" * 32)],
        [(TensorSpec("a", "BF16", (3, 2)), "0" * 32), (b, "1" * 32)],
        [(TensorSpec("a", "F16", (2, 3)), "0" * 32), (b, "1" * 32)],
    ]
    assert len({one, *map(codec.weights_digest, others)}) == 5


@pytest.mark.parametrize("digest", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32])
def test_what_is_no_digest_is_refused(digest):
    with pytest.raises(InvalidInput, match="not a tensor digest"):
        codec.digest_update(digest, np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.uint8))


def test_threads_give_the_same_digest():
    bits = random_bits("BF16", 3 * (1 << 20) + 17, 4)
    try:
        codec.set_threads(1)
        one = codec.digest_of(bits)
        codec.set_threads(3)
        assert codec.digest_of(bits) == one
    finally:
        codec.set_threads(None)


def test_all_widths_have_kernels():
    assert {codec.width_of(name) for name in DTYPES} == {1, 2, 4, 8}
    assert codec.warm() >= 0.0
