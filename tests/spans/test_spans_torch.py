"""The torch face: the same numbers as tensors."""

from __future__ import annotations

import pytest
import torch

import weightline as wl

pytestmark = pytest.mark.torch

LABELS = {"1@aa": 1, "2@bb": 2}
SPANS = [
    [{"version": "1@aa", "start": 0, "end": 3}, {"version": "2@bb", "start": 3, "end": 5}],
    [],
    [{"version": "2@bb", "start": 0, "end": 2}],
]


def test_tensors_hold_what_the_arrays_hold() -> None:
    batch = wl.spans.batch(SPANS)
    versions = wl.spans.per_token(batch, LABELS, like="torch")
    assert torch.equal(versions, torch.tensor([1, 1, 1, 2, 2, 2, 2]))
    assert torch.equal(wl.spans.staleness(batch, 2, LABELS, like="torch"), 2 - versions)
    keep = wl.spans.mask(batch, LABELS, now=2, at_most=0, like="torch", device="cpu")
    assert keep.dtype == torch.bool
    assert torch.equal(keep, versions == 2)


def test_a_mask_trains_the_tokens_it_keeps_and_no_other() -> None:
    batch = wl.spans.batch(SPANS)
    logprobs = torch.zeros(batch.tokens, requires_grad=True)
    (logprobs * wl.spans.mask(batch, LABELS, versions=[2], like="torch")).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_split_slices_tensors_without_a_copy() -> None:
    batch = wl.spans.batch(SPANS)
    logprobs = torch.arange(batch.tokens, dtype=torch.float32)
    found = wl.spans.split(batch, LABELS, outputs={"logprobs": logprobs})
    assert [(s.output, s.start, s.end) for s in found[2]] == [(0, 3, 5), (2, 0, 2)]
    part = found[2][0].values["logprobs"]
    assert part.untyped_storage().data_ptr() == logprobs.untyped_storage().data_ptr()
    assert part.tolist() == [3.0, 4.0]
