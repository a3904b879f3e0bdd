"""Asks the model's own weight loaders where each Hugging Face tensor goes, without moving a byte.

The loaders run once over tensors of the meta device (names, shapes and dtypes of the checkpoint, no memory).
A dispatch mode swallows every write whose target is a live parameter and notes it: the view written to and
the view copied from are strides and offsets over known storages, so they say which element goes where. What
the mode cannot read (a value computed on the way, a write of another kind) marks the parameter as opaque.
Nothing here knows an architecture: stacked mappings, shard attributes, experts and padding are the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightline.plugins.bits import TORCH
from weightline.plugins.places import Box, Misfit, make_box

_ALIASING = ("aten::_to_copy", "aten::clone", "aten::contiguous", "aten::detach")
_PADDING = ("aten::fill_", "aten::zero_")


@dataclass
class Trace:
    """What the loaders did."""

    boxes: dict[str, list[Box]] = field(default_factory=dict)
    """Hugging Face name -> boxes."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Parameter -> what was done to it that is no plain copy."""
    faults: dict[str, str] = field(default_factory=dict)
    """Hugging Face name -> why its loader failed."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, live: Mapping[int, tuple[str, torch.Tensor]], sources: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.sources, self.trace = live, sources, Trace()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if func._schema.is_mutable:
            target = next((a for a in (*args, *kwargs.values()) if self._parameter(a)), None)
            if target is not None:
                self._write(name, target, args)
                return target
        elif name in _ALIASING and args and self._source(args[0]):
            return args[0].view(args[0].shape) if name != "aten::detach" else func(*args, **kwargs)
        return func(*args, **kwargs)

    def _parameter(self, value: Any) -> tuple[str, torch.Tensor] | None:
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return None
        return self.live.get(value.untyped_storage().data_ptr())

    def _source(self, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return None
        return self.sources.get(value.untyped_storage()._cdata)

    def _write(self, op: str, target: torch.Tensor, args: tuple[Any, ...]) -> None:
        found = self._parameter(target)
        if found is None or op in _PADDING:
            return
        key, whole = found
        origin = self._source(args[1]) if op == "aten::copy_" and len(args) > 1 else None
        if origin is None:
            self.trace.opaque[key] = f"its loader does {op} with a computed value"
            return
        source = args[1]
        try:
            source = source.expand(target.shape)
            box = make_box(
                key, tuple(target.shape), int(source.storage_offset()), source.stride(),
                int(target.storage_offset()) - int(whole.storage_offset()), target.stride(),
            )  # fmt: skip
        except (Misfit, RuntimeError) as error:
            self.trace.opaque[key] = f"its loader copies a view that has no inverse ({error})"
            return
        if box is not None:
            self.trace.boxes.setdefault(origin, []).append(box)


def storages(model: torch.nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Storage address -> the first name of the parameter or buffer that it belongs to, and its data."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            if tensor.numel() and not tensor.is_meta:
                found.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor.data))
    return found


@torch.no_grad()
def trace_loaders(model: Any, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Trace:
    """Run `model.load_weights` over meta tensors (name, safetensors dtype, shape); live values stay as they
    are."""
    wanted = {name: torch.empty(shape, dtype=TORCH[dtype], device="meta") for name, dtype, shape in tensors}
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in wanted.items()}
    held = {name: tensor.data for name, tensor in model.named_parameters()}
    watch = _Watch(storages(model), sources)
    with torch.device("cpu"), watch:
        try:
            model.load_weights(iter(wanted.items()))
        except Exception as error:  # noqa: BLE001  one name that the loader refuses must not hide all others
            watch.trace = Trace()
            _one_by_one(model, wanted, watch, error)
    for name, parameter in model.named_parameters():
        before = held.get(name)
        if before is None or parameter.data_ptr() != before.data_ptr():
            watch.trace.opaque[name] = "its loader rebinds it"
            if before is not None:
                parameter.data = before
    return watch.trace


def _one_by_one(model: Any, wanted: Mapping[str, torch.Tensor], watch: _Watch, error: Exception) -> None:
    for name, tensor in wanted.items():
        try:
            model.load_weights(iter(((name, tensor),)))
        except Exception as fault:  # noqa: BLE001  noted, and the name refused
            watch.trace.boxes.pop(name, None)
            watch.trace.faults[name] = f"the model's loader refuses it: {fault or error!r}"
