"""The copy that lets a trainer go on while its weights are committed: one pass over the bytes, ties kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_Key = tuple[Any, ...]


def snapshot(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> a copy that no later write to `weights` reaches, bit for bit (`numpy.ndarray` or CPU
    `torch.Tensor`).

    Tensors that are the same view of the same storage are copied once and stay tied. Peak: one copy of the
    weights. What is neither numpy nor torch is passed on as it is, for the commit to refuse by name.
    """
    # The originals are held until the end: a mapping that makes its arrays on access could else reuse an
    # address.
    seen: dict[_Key, tuple[Any, Any]] = {}
    return {name: _copied(value, seen) for name, value in weights.items()}


def _copied(value: Any, seen: dict[_Key, tuple[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        place = value.__array_interface__["data"][0]
        key: _Key = ("numpy", place, value.shape, value.strides, str(value.dtype))
        return _once(seen, key, value, lambda: np.array(value, copy=True, order="K", subok=False))
    if hasattr(value, "detach") and hasattr(value, "data_ptr"):
        key = (
            "torch",
            str(value.device),
            value.data_ptr(),
            tuple(value.shape),
            tuple(value.stride()),
            str(value.dtype),
        )
        # `.to("cpu")` of a CPU tensor is an alias; `copy=True` is what makes it a snapshot.
        return _once(seen, key, value, lambda: value.detach().to("cpu", copy=True))
    return value


def _once(seen: dict[_Key, tuple[Any, Any]], key: _Key, original: Any, copy: Callable[[], Any]) -> Any:
    if key not in seen:
        seen[key] = (original, copy())
    return seen[key][1]
