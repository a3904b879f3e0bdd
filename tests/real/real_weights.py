"""Weights of tiny models for tests on real engines: read, moved a little, marked by version, compared."""

from __future__ import annotations

from pathlib import Path

import torch


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def nudged(weights: dict[str, torch.Tensor], seed: int, fraction: float = 0.02) -> dict[str, torch.Tensor]:
    """Some elements of every tensor moved by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in weights.items():
        bits = tensor.clone().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        hit = torch.rand(bits.shape, generator=generator) < fraction
        bits.view(-1)[0] ^= 1
        bits[hit] ^= 1
        out[name] = bits.view(tensor.dtype)
    return out


def marked(weights: dict[str, torch.Tensor], k: int) -> dict[str, torch.Tensor]:
    """Version k: greedy decoding emits token k, whatever the prompt.

    Every token has one embedding and the layers add nothing to it, so the last hidden state is known; only
    row k of the head answers to it. All other tensors move as a training step moves them.
    """
    out = nudged(weights, k)
    for name, tensor in out.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    out["model.embed_tokens.weight"].fill_(1.0)
    out["model.norm.weight"].fill_(1.0)
    out["lm_head.weight"].zero_()
    out["lm_head.weight"][k] = 1.0
    return out


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Bits of every parameter and buffer."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())
    return [
        name
        for name, tensor in a.items()
        if tensor.shape != b[name].shape or not torch.equal(_raw(tensor), _raw(b[name]))
    ]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
