"""torch tensors in, torch tensors out, through every door."""

from __future__ import annotations

import pytest
import torch
from service_world import bits

pytestmark = pytest.mark.torch


def tensors():
    torch.manual_seed(0)
    embed = torch.randn(8, 4).to(torch.bfloat16)
    return {
        "embed": embed,
        "head": embed,
        "turned": torch.randn(4, 6).t(),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
        "odd": torch.tensor([0x7FC01234, -0x80000000], dtype=torch.int32).view(torch.float32),
        "flag": torch.tensor(True),
    }


def raw(weights):
    return {
        name: (value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, value in weights.items()
    }


def test_torch_tensors_come_back_bit_for_bit(line):
    weights = tensors()
    line.commit(weights)
    loaded = line.load(1, like="torch")
    assert raw(loaded) == raw(weights)
    weights["embed"][0, 0] += 1
    line.commit(weights)
    delta = line.fetch_delta(2)
    assert set(delta.changed) == {"embed", "head"}
    delta.apply_(loaded)
    assert raw(loaded) == raw(weights)


def test_a_background_commit_of_parameters_is_the_snapshot_of_the_call(line):
    model = torch.nn.Linear(4, 4)
    expected = raw(model.state_dict())
    future = line.commit_async(dict(model.named_parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert future.result(30) == 1
    assert raw(line.load(1, like="torch")) == expected
    assert bits(line.load(1))["bias"][0] == "float32"
