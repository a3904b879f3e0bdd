"""The torch face: the same deltas and digests as on the host, on whatever device the tensors live."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest_codec import DTYPES, array_of, changed, random_bits, same_bits

from weightline import codec
from weightline.codec import device
from weightline.errors import IntegrityError, InvalidInput

pytestmark = pytest.mark.torch


def tensor_of(bits, dtype):
    name = codec.numpy_dtype(dtype).name
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[bits.itemsize]
    raw = torch.from_numpy(bits.copy().view(signed))
    return raw.view({"bool": torch.bool, "complex64": torch.complex64}.get(name, getattr(torch, name)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_diff_digest_apply_and_undo_equal_those_of_the_host(dtype, monkeypatch):
    monkeypatch.setattr(device, "CHUNK", 257)
    bits = random_bits(dtype, 1000, 1)
    after = changed(bits, 0.1, 2)
    if dtype == "BOOL":
        bits, after = bits & 1, (bits & 1) ^ (np.arange(1000) % 9 == 0).astype(np.uint8)
    old, new = tensor_of(bits, dtype), tensor_of(after, dtype)
    assert device.digest_of(old) == codec.digest_of(bits)
    delta = device.diff({"w": old}, {"w": new})
    host = codec.diff({"w": array_of(bits, dtype, (1000,))}, {"w": array_of(after, dtype, (1000,))})
    assert np.array_equal(delta.change("w").index, host.change("w").index)
    assert (delta.change("w").digest, delta.change("w").base_digest) == (
        host.change("w").digest,
        host.change("w").base_digest,
    )
    target = old.clone()
    undo = device.apply_(delta, {"w": target})
    assert same_bits(target, new)
    assert undo.digests["w"] == codec.digest_of(after)
    undo.restore()
    assert same_bits(target, old)


def test_a_device_delta_is_written_at_level_fast(tmp_path):
    bits = random_bits("BF16", 5000, 1)
    old, new = tensor_of(bits, "BF16"), tensor_of(changed(bits, 0.01, 2, 1), "BF16")
    codec.write_delta(device.diff({"w": old}, {"w": new}), tmp_path / "d", level="fast")
    target = old.clone()
    codec.read_delta(tmp_path / "d").apply_({"w": target})
    assert same_bits(target, new)


def test_a_wrong_base_or_shape_is_refused_before_the_first_write():
    old, new = torch.zeros(8), torch.ones(8)
    delta = device.diff({"w": old}, {"w": new})
    wrong = torch.full((8,), 3.0)
    with pytest.raises(IntegrityError):
        device.apply_(delta, {"w": wrong})
    with pytest.raises(IntegrityError):
        device.apply_(delta, {"w": old}, digests={"w": "0" * 32})
    with pytest.raises(InvalidInput, match="'w'"):
        device.apply_(delta, {"w": torch.zeros(9)})
    with pytest.raises(InvalidInput, match="contiguous"):
        device.apply_(delta, {"w": torch.zeros(8, 2)[:, 0]})
    assert (wrong == 3).all()
    device.apply_(codec.full({"w": np.full(8, 5, np.float32)}), {"w": wrong}).restore()
    assert (wrong == 3).all()


def test_a_base_that_differs_only_where_nothing_changes_is_refused_on_the_device():
    old, new = torch.zeros(100), torch.zeros(100)
    new[5] = 1
    delta = device.diff({"w": old}, {"w": new})
    target = torch.full((100,), 7.0)
    target[5] = 0
    kept = target.clone()
    with pytest.raises(IntegrityError, match="'w'"):
        device.apply_(delta, {"w": target})
    assert torch.equal(target, kept)
