"""Proofs, made once before the engine serves: a module is plain only when it was shown to be.

Two things are shown for every module whose parameters a refit would write to:

- *it computes with the live storage*: its own forward code is run on a small input before and after the sign
  of some elements is flipped in place; the answer must follow, and come back when they are flipped back. A
  packed copy (oneDNN, AMX, Marlin, absorbed MLA) does not follow. Modules with no probe here are not plain.
- *the storage holds what the checkpoint holds*: every element of every Hugging Face tensor, bit by bit
  (`LiveWeights.prove`). A layout that was changed after loading does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weightline.plugins.kind import Kind


def modules_of(model: torch.nn.Module) -> dict[int, list[tuple[str, torch.nn.Module, str]]]:
    """Storage address -> every (module path, module, attribute) that holds it: tied parameters have
    several."""
    found: dict[int, list[tuple[str, torch.nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.numel() and not tensor.is_meta:
                key = tensor.untyped_storage().data_ptr()
                found.setdefault(key, []).append((path, module, attribute))
    return found


def why_not_alive(kind: Kind, module: torch.nn.Module, attribute: str) -> str:
    """Empty when the module was shown to compute with the live storage of `attribute`; else the reason."""
    name = type(module).__name__
    probe = _probe_for(kind, module, attribute)
    if probe is None:
        return f"{name}.{attribute} has no probe: it may process its weights after loading"
    try:
        with torch.no_grad():
            for part, run in probe:
                if not _follows(part, run):
                    return f"{name} does not compute with its live {attribute} (packed after loading)"
    except Exception as error:  # noqa: BLE001  the probe drives code of all kinds; what fails is not proved
        return f"{name}.{attribute}: its probe failed ({type(error).__name__}: {error})"
    return ""


def _follows(part: torch.Tensor, run: Callable[[], torch.Tensor]) -> bool:
    """Does `run`'s answer follow a change of sign of `part`, and come back?"""
    old = part.clone()
    try:
        if not bool(old.any()):
            # Zeros have no sign to flip. Nothing serves yet, so a value may stand in for the probe.
            part.fill_(0.5)
        before = run().clone()
        part.neg_()
        flipped = run().clone()
    finally:
        part.copy_(old)
    return not torch.equal(before, flipped)


_Probe = Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]


def _probe_for(kind: Kind, module: Any, attribute: str) -> _Probe | None:
    method = getattr(module, "quant_method", None)
    tensor = getattr(module, attribute)
    if attribute in ("w13_weight", "w2_weight") and hasattr(method, "apply"):
        return _experts(kind, module, tensor)
    if attribute == "weight" and tensor.ndim == 2:
        if kind.is_embedding(module):
            return _embedding(module, method, tensor)
        if hasattr(method, "apply"):
            return _linear(module, method, tensor)
    if attribute == "bias" and tensor.ndim == 1 and hasattr(method, "apply"):
        return _bias(module, method, tensor)
    if attribute in ("weight", "bias") and tensor.ndim == 1 and kind.is_norm(module):
        return _norm(module, tensor)
    return None


def _ends(count: int) -> tuple[int, ...]:
    return (0,) if count == 1 else (0, count - 1)


def _linear(module: Any, method: Any, weight: torch.Tensor) -> _Probe:
    for row in _ends(weight.shape[0]):
        part = weight.data[row]
        # The signs of the row itself make its dot product the sum of its magnitudes: never lost in rounding.
        x = torch.where(part < 0, -1.0, 1.0).to(weight.dtype)[None]
        yield part, functools.partial(_applied, module, method, x, row)


def _bias(module: Any, method: Any, bias: torch.Tensor) -> _Probe:
    x = torch.zeros(1, module.weight.shape[1], dtype=module.weight.dtype, device=bias.device)
    yield bias.data, lambda: method.apply(module, x, module.bias)


def _embedding(module: Any, method: Any, weight: torch.Tensor) -> _Probe:
    for row in _ends(weight.shape[0]):
        ids = torch.tensor([row], device=weight.device)
        yield weight.data[row], functools.partial(method.embedding, module, ids)


def _norm(module: Any, tensor: torch.Tensor) -> _Probe:
    ramp = torch.arange(1, tensor.shape[0] + 1, device=tensor.device) % 7 + 1
    x = ramp.to(tensor.dtype)[None]
    yield tensor.data, lambda: module(x.clone())


def _experts(kind: Kind, module: Any, weight: torch.Tensor) -> _Probe:
    experts, hidden = weight.shape[0], module.w2_weight.shape[1]
    for expert in _ends(experts):
        x = torch.linspace(-1, 1, hidden, dtype=torch.float32, device=weight.device).to(weight.dtype)[None]
        yield weight.data[expert], functools.partial(kind.route, module, x, expert)


def _applied(module: Any, method: Any, x: torch.Tensor, row: int) -> torch.Tensor:
    answer: torch.Tensor = method.apply(module, x, None)[0, row]
    return answer


def derived(model: torch.nn.Module) -> dict[int, tuple[str, str]]:
    """Modules (by id) whose weights another module turned into tensors of its own after loading: the reason,
    and the path of the one that did.

    Absorbed MLA is the example: the attention keeps products of `kv_b_proj`'s weight as plain attributes,
    and never looks at the weight again while `kv_b_proj` itself still does. A tensor that is neither
    parameter nor buffer, of two dimensions or more, makes every module below its owner suspect.
    """
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*model.parameters(), *model.buffers())
        if not tensor.is_meta
    }
    found: dict[int, tuple[str, str]] = {}
    for path, module in model.named_modules():
        for holder in (module, getattr(module, "impl", None), getattr(module, "quant_method", None)):
            for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                if (
                    isinstance(value, torch.Tensor)
                    and value.is_floating_point()
                    and value.ndim >= 2
                    and value.untyped_storage().data_ptr() not in own
                ):
                    reason = f"{type(module).__name__} {path} keeps {name}, derived after loading"
                    for below in module.modules():
                        found.setdefault(id(below), (reason, path))
    return found
