"""A state tree (numbers, strings, lists, dicts, tensors) as JSON plus named arrays, and back, bit for bit. No
pickle.

JSON has neither tuples, nor keys that are not strings, nor NaN, nor tensors: each is written as an object
with one key that begins with "$", and a dict that has such a key itself is written in the long form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weightline.errors import FormatError, InvalidInput


def flatten(tree: Any, *, where: str) -> tuple[Any, dict[str, Any]]:
    """The tree with every tensor and numpy array replaced by a reference, and the arrays by name.

    Raises `InvalidInput`, naming the place below `where`, for anything but None, bool, int, float, str, list,
    tuple, dict, `torch.Tensor`, `numpy.ndarray` and numpy scalars.
    """
    arrays: dict[str, Any] = {}
    return _flatten(tree, where, arrays), arrays


def unflatten(node: Any, arrays: Mapping[str, Any]) -> Any:
    """The inverse. `arrays` holds `torch.Tensor`s; what was numpy comes back as numpy. Raises
    `FormatError`."""
    if isinstance(node, list):
        return [unflatten(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    special = [key for key in node if key.startswith("$")]
    if not special:
        return {key: unflatten(value, arrays) for key, value in node.items()}
    if len(node) != 1:
        raise FormatError(f"state: {sorted(node)} is not a node of a state tree", hint="restore the file")
    key, value = special[0], node[special[0]]
    match key:
        case "$tuple":
            return tuple(unflatten(item, arrays) for item in value)
        case "$dict":
            return {unflatten(k, arrays): unflatten(v, arrays) for k, v in value}
        case "$float":
            return float(value)
        case "$tensor" | "$numpy" | "$scalar":
            return _array(key, value, arrays)
    raise FormatError(f"state: unknown node {key!r}", hint="the file was written by a newer version: upgrade")


def _array(key: str, name: Any, arrays: Mapping[str, Any]) -> Any:
    if name not in arrays:
        raise FormatError(f"state: tensor {name!r} is missing", hint="restore the file")
    tensor = arrays[name]
    if key == "$tensor":
        return tensor
    array = tensor.numpy()
    return array if key == "$numpy" else array[()]


def _flatten(node: Any, where: str, arrays: dict[str, Any]) -> Any:
    import numpy as np
    import torch

    if node is None or isinstance(node, bool | str):
        return node
    if isinstance(node, torch.Tensor):
        return {"$tensor": _keep(node, where, arrays)}
    if isinstance(node, np.ndarray):
        return {"$numpy": _keep(_from_numpy(node, where), where, arrays)}
    if isinstance(node, np.generic):
        return {"$scalar": _keep(_from_numpy(np.asarray(node), where), where, arrays)}
    if type(node) is int:
        return node
    if type(node) is float:
        return node if math.isfinite(node) else {"$float": repr(node)}
    if isinstance(node, tuple):
        return {"$tuple": [_flatten(item, f"{where}.{i}", arrays) for i, item in enumerate(node)]}
    if isinstance(node, list):
        return [_flatten(item, f"{where}.{i}", arrays) for i, item in enumerate(node)]
    if isinstance(node, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in node):
            return {key: _flatten(value, f"{where}.{key}", arrays) for key, value in node.items()}
        return {"$dict": [[_key(k, where), _flatten(v, f"{where}.{k}", arrays)] for k, v in node.items()]}
    raise InvalidInput(
        f"state {where}: a {type(node).__name__} cannot be saved",
        hint="numbers, strings, lists, dicts, tensors and numpy arrays can; keep other objects out of it",
    )


def _key(key: Any, where: str) -> Any:
    inside: dict[str, Any] = {}
    node = _flatten(key, f"{where}.keys", inside)
    if inside:
        raise InvalidInput(f"state {where}: a tensor is used as a key", hint="use numbers, strings or tuples")
    return node


def _keep(tensor: Any, where: str, arrays: dict[str, Any]) -> str:
    name = where
    while name in arrays:  # keys 1 and "1" of one dict come to the same place
        name += "'"
    arrays[name] = tensor
    return name


def _from_numpy(array: Any, where: str) -> Any:
    import numpy as np
    import torch

    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        raise InvalidInput(
            f"state {where}: numpy dtype {array.dtype} cannot be saved", hint="use a plain numeric dtype"
        )
    return torch.from_numpy(np.array(array, order="C", copy=True))
