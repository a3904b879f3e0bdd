"""Modules that are not plain: their weights go through the engine's own loaders, whole modules at a time.

What is loaded is proved at the door: the digest of every tensor that the loader is given. From outside, a
packed module can only be asked what it answers (`loading`). The way back is the same way with the tensors of
the version before, which the follower maps from its host's replica; a server that was never refitted has them
in its model folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightline.plugins import sums
from weightline.plugins.bits import SIGNED, TORCH, Bits, holds, width
from weightline.plugins.exchange import Refused, WholeTensor, map_bits
from weightline.plugins.folder import Stored
from weightline.plugins.groups import Group, grouped, homes, owners_of
from weightline.plugins.kind import Kind
from weightline.plugins.places import Place

__all__ = ["WholeModules", "WholePlan", "homes"]


@dataclass(eq=False)
class WholePlan:
    """What a refit loads. `old` is None when nobody has the weights that are live."""

    groups: list[Group]
    new: dict[str, torch.Tensor]
    old: dict[str, torch.Tensor] | None
    lanes: dict[str, sums.Lanes]
    before: dict[str, sums.Lanes]
    """What was loaded before this refit, filled by its commit."""

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.new.values())


class WholeModules:
    """The groups of one model, and what their loaders were last given."""

    def __init__(self, kind: Kind, model: Any, where: Mapping[str, set[str]]) -> None:
        self.kind, self.model, self.homes = kind, model, where
        self.derived: dict[int, str] = {}
        """See `proof.derived`: id of a module -> path of the module that made tensors from its weights."""
        self.groups: list[Group] = []
        self.given: dict[str, sums.Lanes] = {}
        """Digest of what each tensor's loader was last given; at first, of the model folder."""
        self._folder: dict[str, Stored] = {}
        self._loader = kind.loader(model)

    def group(self, places: Mapping[str, Place], stored: Mapping[str, Stored]) -> None:
        """Put every place that may not be written directly into a group, if its loaders can be used."""
        refused = [place.name for place in places.values() if place.refusal]
        owners, stubborn = owners_of(self.kind, self.model, self.derived)
        for group in grouped(self.model, refused, self.homes, owners):
            for owner in sorted(group.owners & stubborn):
                group.refusal = f"{owner} keeps tensors made from it, and has no way to make them again"
            reason = group.refusal or self._loader.missing or self._misfit(group, places)
            if reason:
                for name in group.names:
                    place = places[name]
                    place.refusal = place.refusal or reason
                continue
            self.groups.append(group)
            for name in group.names:
                place = places[name]
                place.group = len(self.groups) - 1
                place.refusal = place.refusal or "it goes with a module that takes no changes"
                self._folder[name] = stored[name]
                self.given[name] = sums.of_range(stored[name].bits(), 0)

    def _misfit(self, group: Group, places: Mapping[str, Place]) -> str:
        for name in sorted(group.names):
            place = places.get(name)
            if place is None or place.lossy:
                return f"{name} cannot be held exactly, and goes with it" if place else f"{name} has no home"
            dtypes = self._loader.dtypes(group)
            if dtypes and not any(holds(dtype, place.stored) for dtype in dtypes):
                return (
                    f"{name}: stored as {place.stored}, none of {', '.join(sorted(dtypes))} holds it exactly"
                )
        return ""

    def plan(
        self,
        entries: Iterable[WholeTensor],
        places: Mapping[str, Place],
        aliases: Mapping[str, str],
        *,
        full: bool,
    ) -> WholePlan | None:
        """Everything that a refit loads, mapped and digested; nothing is loaded. `full`: the refit must bring
        every group. Raises `Refused` that lists every miss."""
        wanted: dict[str, WholeTensor] = {}
        for entry in entries:
            owner = aliases.get(entry.name, entry.name)
            if wanted.setdefault(owner, replace(entry, name=owner)).digest != entry.digest:
                raise Refused(
                    f"{entry.name} and {owner} are one tensor in this engine, but differ in the version"
                )
        if full:
            groups = [group for group in self.groups if not group.names & wanted.keys()]
            if groups:
                raise Refused(f"a full refit without {', '.join(sorted(groups[0].names)[:4])}: they go whole")
        if not wanted:
            return None
        misses = [miss for entry in wanted.values() if (miss := self._miss(entry, places.get(entry.name)))]
        numbers = sorted({places[n].group for n in wanted if n in places} - {None}, key=str)
        groups = [self.groups[number] for number in numbers if number is not None]
        for group in groups:
            misses += [f"{name} (missing: it goes with {sorted(group.names & wanted.keys())[0]})"
                       for name in sorted(group.names - wanted.keys())]  # fmt: skip
        if misses:
            raise Refused(
                f"{len(misses)} tensors cannot be loaded: {'; '.join(misses)}",
                hint=f'see docs/engines/{self.kind.name}.md, "What is refused"',
            )
        new, lanes = {}, {}
        for entry in wanted.values():
            bits = map_bits(Path(entry.path), entry.dtype, _count(entry.shape))
            lanes[entry.name] = self._digested(entry.path, bits, entry.digest)
            new[entry.name] = _as_tensor(bits, entry.dtype, entry.shape)
        return WholePlan(groups, new, self._before(wanted), lanes, {})

    def _miss(self, entry: WholeTensor, place: Place | None) -> str:
        if place is None:
            return f"{entry.name} (the model has no such tensor)"
        if place.group is None:
            return f"{entry.name} ({place.refusal or 'it is plain: changes are enough'})"
        if place.shape != entry.shape:
            return f"{entry.name} (shape {list(entry.shape)}, in the engine {list(place.shape)})"
        if place.stored != entry.dtype:
            return f"{entry.name} (stored as {entry.dtype}, the engine was loaded from {place.stored})"
        return ""

    @staticmethod
    def _digested(path: str, bits: Bits, digest: str) -> sums.Lanes:
        lanes = sums.of_range(bits, 0)
        if sums.render(lanes) != digest:
            raise Refused(f"{path}: its bytes are not those of the version", kind="integrity")
        return lanes

    def _before(self, wanted: Mapping[str, WholeTensor]) -> dict[str, torch.Tensor] | None:
        """The tensors that are live now, for the way back; None when nobody has them."""
        found = {}
        for name, entry in wanted.items():
            if entry.old_path is not None and entry.old_digest is not None:
                if sums.render(self.given[name]) != entry.old_digest:
                    raise Refused(
                        f"{name}: the engine was given other bytes than the version that it says it serves",
                        state="unknown",
                        hint="it is refitted in full",
                    )
                bits = map_bits(Path(entry.old_path), entry.dtype, _count(entry.shape))
                self._digested(entry.old_path, bits, entry.old_digest)
            else:
                bits = self._folder[name].bits()
                if sums.of_range(bits, 0) != self.given[name]:
                    return None
                bits = np.array(bits)
            found[name] = _as_tensor(bits, entry.dtype, entry.shape)
        return found

    def load(self, plan: WholePlan) -> None:
        """Bring the modules to the new weights. Raises: the modules are in an unknown state then."""
        self._loader.load(plan.groups, plan.new)

    def load_back(self, plan: WholePlan) -> None:
        """Bring the modules to the weights of before. Raises `Refused("unknown")`."""
        if plan.old is None:
            raise Refused("nobody has the weights that were live before", state="unknown")
        self._loader.load(plan.groups, plan.old)

    def commit(self, plan: WholePlan) -> None:
        """What was loaded is what counts from now on."""
        plan.before = {name: self.given[name] for name in plan.lanes}
        self.given.update(plan.lanes)

    def uncommit(self, plan: WholePlan) -> None:
        """After `load_back` of a committed plan."""
        self.given.update(plan.before)


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _as_tensor(bits: Bits, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    signed = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
    return torch.from_numpy(signed).view(SIGNED[width(dtype)]).view(TORCH[dtype]).reshape(shape)
