"""Which tensors and modules go together where a module is not plain.

A group is the smallest set of Hugging Face tensors and leaf modules that belong together: every tensor whose
loader writes into one of the modules, every module that one of the tensors goes to, and modules that keep
tensors of their own made from these (absorbed MLA). A group is loaded completely or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from weightline.plugins.bits import TORCH
from weightline.plugins.kind import Kind

Specs = Iterable[tuple[str, str, tuple[int, ...]]]


@dataclass(eq=False)
class Group:
    """What goes together. `refusal`: why even its own loaders cannot be used; empty when they can."""

    names: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    """Modules above that keep tensors made from these; they make them again after the load."""
    twins: set[str] = field(default_factory=set)
    """Modules that share a parameter with these and are not loaded themselves (a tied head)."""
    refusal: str = ""


@torch.no_grad()
def homes(model: Any, tensors: Specs) -> dict[str, set[str]]:
    """Hugging Face name -> paths of the leaf modules that its loader goes to; nothing is loaded.

    Every parameter's loader is replaced by one that notes who called, for one run of the model's own
    `load_weights` over meta tensors, a name at a time. A name that the model refuses has no home.
    """
    found: dict[str, set[str]] = {}
    asking = [""]

    def noting(path: str) -> Callable[..., bool]:
        def note(*_args: Any, **_kwargs: Any) -> bool:
            found.setdefault(asking[0], set()).add(path)
            return True

        return note

    with contextlib.ExitStack() as undo:
        seen: set[int] = set()
        for path, module in model.named_modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    undo.callback(_replace_loader(tensor, noting(path)))
        for name, dtype, shape in tensors:
            asking[0] = name
            # A name that its model refuses is refused by name later; here it only has no home.
            with contextlib.suppress(Exception):
                model.load_weights(iter(((name, torch.empty(shape, dtype=TORCH[dtype], device="meta")),)))
    return found


def _replace_loader(tensor: torch.Tensor, loader: Callable[..., bool]) -> Callable[[], None]:
    before = getattr(tensor, "weight_loader", None)
    tensor.weight_loader = loader  # type: ignore[attr-defined]

    def back() -> None:
        if before is None:
            del tensor.weight_loader  # type: ignore[attr-defined]
        else:
            tensor.weight_loader = before  # type: ignore[attr-defined]

    return back


def owners_of(kind: Kind, model: Any, derived: Mapping[int, str]) -> tuple[dict[str, str], set[str]]:
    """Module path -> path of the module above that processes or keeps what is made from its weights; and
    those of the latter that the engine has no hook for to do it again.

    `derived`: see `proof.derived`. An attention that the engine processes after all others counts whether
    or not it made anything: it may look at the weights of the modules below it.
    """
    path_of = {id(module): path for path, module in model.named_modules()}
    owners = {path_of[key]: owner for key, owner in derived.items() if path_of[key] != owner}
    hooked = set()
    for path, module in model.named_modules():
        if kind.deferred(module):
            hooked.add(path)
            for below in module.modules():
                if below is not module:
                    owners[path_of[id(below)]] = path
    return owners, set(owners.values()) - hooked


def grouped(
    model: Any, wanted: Iterable[str], where: Mapping[str, set[str]], owners: Mapping[str, str]
) -> list[Group]:
    """The groups that hold all of `wanted`. `where`: see `homes`; `owners`: module path -> path of the module
    above that keeps tensors made from it."""
    by_module: dict[str, set[str]] = {}
    for name, paths in where.items():
        for path in paths:
            by_module.setdefault(path, set()).add(name)
    siblings: dict[str, set[str]] = {}
    for path, owner in owners.items():
        siblings.setdefault(owner, set()).add(path)
    groups: list[Group] = []
    done: set[str] = set()
    for first in wanted:
        if first in done:
            continue
        group, open_names = Group(), [first]
        while open_names:
            name = open_names.pop()
            if name in group.names:
                continue
            group.names.add(name)
            for path in where.get(name, ()):
                near = {path}
                if path in owners:
                    group.owners.add(owners[path])
                    near |= siblings[owners[path]]
                for module in near:
                    if by_module.get(module):
                        group.modules.add(module)
                        open_names += by_module[module]
        group.owners -= group.modules
        if not group.modules:
            group.refusal = "its loader goes to no module"
        done |= group.names
        groups.append(group)
    _find_twins(model, groups)
    return groups


def _find_twins(model: Any, groups: list[Group]) -> None:
    holders: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(path)
    for group in groups:
        for path in group.modules:
            for parameter in model.get_submodule(path)._parameters.values():
                group.twins |= holders.get(id(parameter), set())
        group.twins -= group.modules
