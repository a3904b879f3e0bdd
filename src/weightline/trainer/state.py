"""Everything a trainer needs to go on bit for bit, in one safetensors file: masters, optimizer, scheduler,
RNGs, position.

The file is an attachment of a version (by the name `ATTACHMENT`). Tensors lie in it as tensors; the rest is
JSON in the header's metadata, under `weightline.trainer`. There is no pickle anywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from weightline.errors import FormatError, InvalidInput
from weightline.trainer.archive import Archive, write_archive
from weightline.trainer.names import live_tensors
from weightline.trainer.tree import flatten, unflatten

ATTACHMENT = "trainer"
FORMAT = 1
_KEY = "weightline.trainer"


class TrainerState(Struct, frozen=True, kw_only=True):
    """What `load_state` put back, and what it hands to the caller."""

    step: int
    position: Any
    """The data position that was saved: any tree of numbers, strings, lists and dicts."""
    parts: tuple[str, ...]
    """What the file holds: see `saved_parts`."""


def save_state(
    path: Path,
    *,
    step: int,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    rng: bool = True,
    generators: Mapping[str, Any] | None = None,
    position: Any = None,
) -> int:
    """Write the state to `path` (new name, fsync, rename) and return its size in bytes.

    `model`: its tensors are the masters, in the dtypes they train in. `optimizer` and `scheduler`: anything
    with `state_dict()` of numbers, strings and tensors. `rng`: the global generators of torch (CPU and every
    CUDA device), numpy and Python. `generators`: more of them by name (`torch.Generator`,
    `numpy.random.Generator` or `random.Random`). Memory: the file is streamed, so no more than one tensor is
    copied at a time. Raises `InvalidInput` for a state that holds other objects, `StorageFull`.
    """
    tree: dict[str, Any] = {}
    if model is not None:
        tree["masters"] = live_tensors(model, adapters=True)
    if optimizer is not None:
        tree["optimizer"] = optimizer.state_dict()
    if scheduler is not None:
        tree["scheduler"] = scheduler.state_dict()
    if rng:
        tree["rng"] = _global_rng()
    if generators:
        tree["generators"] = {name: _generator_state(name, g) for name, g in generators.items()}
    tree["position"] = position
    arrays: dict[str, Any] = {}
    nodes: dict[str, Any] = {}
    for part, value in tree.items():
        nodes[part], found = flatten(value, where=part)
        arrays.update(found)
    text = json.dumps({"format": FORMAT, "step": step, "tree": nodes}, allow_nan=False, separators=(",", ":"))
    return write_archive(path, arrays, {_KEY: text})


def saved_parts(path: Path) -> tuple[str, ...]:
    """What a state file holds, of "masters", "optimizer", "scheduler", "rng", "generators", "position".
    Raises `FormatError`."""
    with Archive(path) as archive:
        return tuple(sorted(_read_tree(archive)[1]))


def load_state(
    path: Path,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    rng: bool = True,
    generators: Mapping[str, Any] | None = None,
) -> TrainerState:
    """Put back what `save_state` wrote, into the same kind of objects, bit for bit.

    All of it is read and checked against `model` and `generators` before the first of them is changed. Raises
    `FormatError` for a file that is no state or is damaged, and `InvalidInput` when a part that is asked for
    is not in it or does not fit.
    """
    with Archive(path) as archive:
        step, nodes = _read_tree(archive)
        wanted = {"masters": model, "optimizer": optimizer, "scheduler": scheduler, "generators": generators}
        for part, target in wanted.items():
            if target is not None and part not in nodes:
                raise InvalidInput(
                    f"{path}: holds no {part}", hint=f"it was saved without; resume without {part}"
                )
        masters = (
            _matching(archive, nodes["masters"], live_tensors(model, adapters=True))
            if model is not None
            else {}
        )
        rest = {part: node for part, node in nodes.items() if part != "masters"}
        references = _References(archive)
        tree = {part: unflatten(node, references) for part, node in rest.items()}
        for name in generators or {}:
            if name not in tree["generators"]:
                raise InvalidInput(f"{path}: holds no generator {name!r}", hint="resume without it")
        if optimizer is not None:  # it checks its own shape: before anything else is changed
            _load_optimizer(optimizer, tree["optimizer"], path)
        for name, tensor in masters.items():  # streamed: one tensor at a time
            tensor.copy_(archive.read(_reference(nodes["masters"][name])))
    if scheduler is not None:
        scheduler.load_state_dict(tree["scheduler"])
    for name, generator in (generators or {}).items():
        _set_generator(generator, tree["generators"][name])
    if rng and "rng" in tree:
        _set_global_rng(tree["rng"])
    return TrainerState(step=step, position=tree.get("position"), parts=tuple(sorted(nodes)))


class _References(Mapping[str, Any]):
    """Reads a tensor of the archive when it is asked for."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def __getitem__(self, name: str) -> Any:
        return self._archive.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._archive.specs

    def __iter__(self) -> Any:
        return iter(self._archive.specs)

    def __len__(self) -> int:
        return len(self._archive.specs)


def _read_tree(archive: Archive) -> tuple[int, dict[str, Any]]:
    damaged = "it is not a state that this version of weightline can read"
    try:
        data = json.loads(archive.metadata[_KEY])
        found, step, nodes = data["format"], int(data["step"]), data["tree"]
    except (KeyError, ValueError, TypeError) as error:
        raise FormatError(f"{archive.path}: no trainer state in it", hint=damaged) from error
    if found != FORMAT or not isinstance(nodes, dict):
        raise FormatError(f"{archive.path}: trainer state of format {found}, not {FORMAT}", hint=damaged)
    return step, nodes


def _reference(node: Any) -> str:
    return str(node["$tensor"])


def _matching(archive: Archive, nodes: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    from weightline.codec import parse_dtype

    missing, unknown = sorted(tensors.keys() - nodes.keys()), sorted(nodes.keys() - tensors.keys())
    if missing or unknown:
        raise InvalidInput(
            f"{archive.path}: masters of another model: missing {missing[:5]}, unknown {unknown[:5]}",
            hint="resume with the model that the state was saved from",
        )
    for name, tensor in tensors.items():
        dtype, shape, _ = archive.specs[_reference(nodes[name])]
        if (dtype, shape) != (parse_dtype(tensor.dtype), tuple(tensor.shape)):
            raise InvalidInput(
                f"{archive.path}: master {name} is {dtype} {list(shape)}, "
                f"the model has {parse_dtype(tensor.dtype)} {list(tensor.shape)}",
                hint="load the model in the dtype and size it was trained in",
            )
    return tensors


def _load_optimizer(optimizer: Any, state: dict[str, Any], path: Path) -> None:
    import torch

    try:
        optimizer.load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise InvalidInput(
            f"{path}: state of another optimizer: {error}",
            hint="resume with the optimizer and the parameter groups that were saved",
        ) from error
    # torch casts state to its parameter's dtype on load; where the optimizer keeps another one, that would
    # change bits.
    parameters = [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
    for index, saved in state.get("state", {}).items():
        if not isinstance(index, int) or index >= len(parameters) or not isinstance(saved, dict):
            continue
        live = optimizer.state[parameters[index]]
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


def _global_rng() -> dict[str, Any]:
    import numpy as np
    import torch

    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def _set_global_rng(state: dict[str, Any]) -> None:
    import numpy as np
    import torch

    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def _generator_state(name: str, generator: Any) -> Any:
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state()
    raise InvalidInput(
        f"generator {name!r}: a {type(generator).__name__} has no state that can be read",
        hint="give a torch.Generator, a numpy.random.Generator or a random.Random",
    )


def _set_generator(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
