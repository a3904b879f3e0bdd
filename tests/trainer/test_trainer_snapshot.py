"""The snapshot rounds once, to nearest even, into buffers that are used again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightline.errors import InvalidInput
from weightline.trainer import CastPolicy, Snapshot

pytestmark = pytest.mark.torch


def cast(values: list[float], dtype: str) -> torch.Tensor:
    tensors = {"w": torch.tensor(values, dtype=torch.float32)}
    return Snapshot(tensors, CastPolicy(dtype)).take(tensors)["w"]


def bits16(tensor: torch.Tensor) -> list[int]:
    return [value & 0xFFFF for value in tensor.view(torch.int16).tolist()]


def test_bf16_rounds_to_nearest_even_and_keeps_signs() -> None:
    tie_down, tie_up = 1 + 2.0**-8, 1 + 3 * 2.0**-8
    values = [1 + 2.0**-9, tie_down, tie_up, -0.0, 1e-45, -1e-45, 70000.0, float("inf")]
    assert bits16(cast(values, "BF16")) == [0x3F80, 0x3F80, 0x3F82, 0x8000, 0x0000, 0x8000, 0x4789, 0x7F80]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_bf16_is_the_nearest_of_all_bit_patterns(patterns: list[int]) -> None:
    import numpy as np

    wide = torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32))
    tensors = {"w": wide}
    got = np.array(bits16(Snapshot(tensors, CastPolicy("BF16")).take(tensors)["w"]), dtype=np.uint32)
    for pattern, stored in zip(patterns, got.tolist(), strict=True):
        if (pattern & 0x7FFFFFFF) > 0x7F800000:
            assert stored & 0x7FFF > 0x7F80  # a NaN stays one
        else:
            assert stored == (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16


@pytest.mark.parametrize(
    ("dtype", "fits", "overflows"),
    [
        ("F16", 65519.0, 65520.0),
        ("F8_E5M2", 61439.0, 61440.0),
        ("F8_E4M3", 464.0, 464.5),
        ("F16", -7e4 + 6e4, -1e30),
    ],
)
def test_a_finite_value_that_does_not_fit_is_flagged(dtype: str, fits: float, overflows: float) -> None:
    assert torch.isfinite(cast([0.0, fits], dtype).float()).all()
    with pytest.raises(InvalidInput, match=f"tensor w: .* at element 1 overflows {dtype}"):
        cast([0.0, overflows], dtype)


def test_infinities_and_nans_of_the_source_are_no_overflow() -> None:
    stored = cast([float("inf"), float("-inf"), float("nan")], "F16").float()
    assert stored[0] == float("inf")
    assert stored[1] == float("-inf")
    assert stored[2].isnan()


def test_exceptions_keep_their_dtype_bit_for_bit_while_others_are_cast() -> None:
    bias = torch.linspace(6.817, 7.063, 238)
    tensors = {"mlp.gate.e_score_correction_bias": bias, "w": torch.randn(4), "steps": torch.tensor([3])}
    policy = CastPolicy("BF16", {"*.e_score_correction_bias": "F32"})
    taken = Snapshot(tensors, policy).take(tensors)
    assert torch.equal(taken["mlp.gate.e_score_correction_bias"], bias)
    assert taken["w"].dtype == torch.bfloat16
    assert taken["steps"].dtype == torch.int64


@pytest.mark.parametrize(
    "policy",
    [
        lambda: CastPolicy("float7"),
        lambda: CastPolicy("BF16", {"w": "x"}),
        lambda: CastPolicy("BF16", {"nope": "F32"}),
    ],
)
def test_policies_that_mean_nothing_are_refused(policy) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput):
        policy().resolve({"w": torch.zeros(1)})


def test_buffers_are_reused_and_do_not_follow_the_weights() -> None:
    weights = {"w": torch.ones(3), "t": torch.arange(6.0).reshape(2, 3).T}
    snapshot = Snapshot(weights, CastPolicy(None))
    first = snapshot.take(weights)
    address = first["w"].data_ptr()
    weights["w"].add_(1)
    assert first["w"].tolist() == [1, 1, 1]
    assert snapshot.take(weights)["w"].data_ptr() == address
    assert first["w"].tolist() == [2, 2, 2]
    assert first["t"].is_contiguous()
    assert torch.equal(first["t"], weights["t"])


@pytest.mark.parametrize(
    "changed", [{}, {"w": torch.ones(3), "v": torch.ones(1)}, {"w": torch.ones(4)}, {"w": torch.ones(1, 3)}]
)
def test_a_changed_model_is_refused_by_name(changed: dict[str, torch.Tensor]) -> None:
    snapshot = Snapshot({"w": torch.ones(3)}, CastPolicy())
    with pytest.raises(InvalidInput, match=r"w|v"):
        snapshot.take(changed)
