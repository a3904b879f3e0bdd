"""What the plugins of all engines share about their hosts: the few questions whose answers differ by engine.

Everything else under `plugins/` (places, proofs, writes, sessions) is the same code in every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from weightline.plugins.groups import Group
    from weightline.plugins.places import Packing


class Loader(Protocol):
    """The engine's own way to load some whole modules again."""

    missing: str
    """Why this engine cannot; empty when it can."""

    def dtypes(self, group: Group) -> set[str]:
        """safetensors names of the dtypes into which the loaders of `group` write; empty when unknown."""
        ...

    def load(self, groups: list[Group], tensors: Mapping[str, torch.Tensor]) -> None:
        """Bring the modules of `groups` to `tensors`, which must be all of their names, and ask them.

        Raises `Refused("unknown")`: the modules then hold neither the old nor the new weights for sure."""
        ...


class Kind(Protocol):
    """One engine's own modules, as far as refits must know them."""

    name: str
    """"vllm", "sglang"."""

    def loader(self, model: Any) -> Loader:
        """For modules that take no changes."""
        ...

    def packing(self, module: Any, attribute: str) -> Packing | None:
        """How the engine permuted `module.attribute` after loading; None when it did not."""
        ...

    def deferred(self, module: Any) -> bool:
        """The engine processes this module after all others: it may keep products of the weights below it."""
        ...

    def is_embedding(self, module: Any) -> bool:
        """A lookup table (not an output head)."""
        ...

    def is_norm(self, module: Any) -> bool:
        """A normalisation with a weight of one dimension."""
        ...

    def route(self, module: Any, x: torch.Tensor, expert: int) -> torch.Tensor:
        """The answer of `module`'s experts to `x` (one token) when only `expert` is chosen."""
        ...


class Door(Protocol):
    """The engine's own front door, for the plugin itself: only there a rollback falls between two steps and a
    resume is possible. `url`: the base URL that the follower gave. Every call may be repeated; all raise
    `OSError`."""

    def ask(self, url: str, request: Mapping[str, Any]) -> None:
        """Carry `request` to the plugin."""
        ...

    def finish(self, url: str) -> None:
        """End the engine's own update session, if it has one open."""
        ...

    def label(self, url: str) -> str:
        """The label that new tokens carry."""
        ...

    def set_label(self, url: str, label: str) -> None:
        """Set it."""
        ...

    def resume(self, url: str) -> None:
        """Let generation go on."""
        ...
