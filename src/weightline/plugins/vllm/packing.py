"""Parameters that the engine stores permuted: the permutation is learned from the engine's own packing code.

vLLM's CPU experts are packed block by block (one expert a block) after loading. Packing moves elements and
computes nothing, so it can be asked: pack a block whose elements are their own numbers, and read off where
each of them went. Whether the live storage really is that permutation of the checkpoint is for the proof.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from weightline.plugins.bits import SIGNED
from weightline.plugins.places import Packing

_learned: dict[tuple[Any, ...], Packing | None] = {}


def learn(module: Any, attribute: str) -> Packing | None:
    """The packing of `module.attribute`, or None when there is none that can be learned."""
    if attribute not in ("w13_weight", "w2_weight"):
        return None
    experts = getattr(
        getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None
    )
    isa = getattr(experts, "isa", None)
    weight = getattr(module, attribute)
    if isa is None or getattr(experts, "_use_zentorch", False) or weight.ndim != 3:
        return None
    key = (isa, weight.dtype, tuple(weight.shape[1:]))
    if key not in _learned:
        _learned[key] = _ask(weight, isa)
    return _learned[key]


def _ask(weight: torch.Tensor, isa: str) -> Packing | None:
    import vllm._custom_ops as ops

    pack = getattr(ops, "cpu_prepack_moe_weight", None)
    if pack is None:
        return None
    block = weight.shape[1] * weight.shape[2]
    width = weight.element_size()
    number = torch.arange(block, dtype=torch.int64)
    found = torch.zeros(block, dtype=torch.int64)
    # A number goes through in pieces as wide as an element, as raw bits: packing never looks at values.
    for shift in range(0, 32, 8 * width):
        piece = (number >> shift).to(SIGNED[width]) if width < 4 else number.to(SIGNED[width])
        coded = piece.view(weight.dtype).reshape(1, *weight.shape[1:])
        packed = pack(coded.contiguous(), isa).reshape(-1)
        if packed.numel() != block:
            return None
        found |= (packed.view(SIGNED[width]).to(torch.int64) & ((1 << (8 * min(width, 4))) - 1)) << shift
    source = found.numpy()
    if not np.array_equal(np.sort(source), np.arange(block)):
        return None
    order = np.empty(block, np.int64)
    order[source] = np.arange(block)
    return Packing(block, order)
