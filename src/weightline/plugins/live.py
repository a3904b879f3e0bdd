"""The live weights by their Hugging Face names: places, proofs, reads, digests and the writes of a refit.

Nothing here waits for a lock: readers (`digest`, on a background thread while the engine serves) notice by a
generation counter that a write came between, and start over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weightline.plugins import bits as dtypes
from weightline.plugins import proof, sums, trace, whole
from weightline.plugins.bits import Bits
from weightline.plugins.exchange import Change, Refused
from weightline.plugins.folder import Stored
from weightline.plugins.kind import Kind
from weightline.plugins.places import Box, Index, Live, Misfit, Place, read_box, sources

CHUNK = 1 << 18
"""Elements compared or digested at a time."""


@dataclass(eq=False)
class Write:
    """New and old live bits of some elements of one parameter."""

    live: Live
    index: torch.Tensor | slice
    """Flat positions in the storage, int64; or one run of it."""
    new: torch.Tensor
    old: torch.Tensor

    def put(self, values: torch.Tensor) -> bool:
        """Write `values` and read them back; False when the storage does not hold them afterwards."""
        flat = self.live.flat
        if isinstance(self.index, slice):
            return torch.equal(flat[self.index].copy_(values), values)
        # scatter and gather: three times as fast as indexing on one CPU thread, and the same on a GPU.
        return torch.equal(flat.scatter_(0, self.index, values).gather(0, self.index), values)

    @property
    def elements(self) -> int:
        """How many elements it writes."""
        return self.new.numel()


@dataclass(eq=False)
class Planned:
    """What a refit does to one Hugging Face tensor."""

    place: Place
    stored: str
    lanes: sums.Lanes
    """Digest afterwards."""
    writes: list[Write]


class LiveWeights:
    """All places of one model. `prove()` must have run before the first `plan`."""

    def __init__(self, kind: Kind, model: Any, stored: list[Stored]) -> None:
        self.kind = kind
        self.generation = 0
        self.writing = 0
        self.stored = {tensor.name: tensor for tensor in stored}
        self.places: dict[str, Place] = {}
        self.aliases: dict[str, str] = {}
        self.carried: dict[str, sums.Lanes] = {}
        """Digest in the stored dtype, proved by a full computation or carried over verified writes."""
        self.proved = threading.Event()
        self._live: dict[str, Live] = {}
        specs = [(t.name, t.dtype, t.shape) for t in stored]
        traced = trace.trace_loaders(model, specs)
        self.whole = whole.WholeModules(kind, model, whole.homes(model, specs))
        self._refusals = self._open(model, traced)
        for tensor in stored:
            self._add(tensor, traced)
        self._find_aliases(model)

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Around every write: readers that overlap it start over."""
        self.generation += 1
        self.writing += 1
        try:
            yield
        finally:
            self.writing -= 1
            self.generation += 1

    # Places.

    def _open(self, model: Any, traced: trace.Trace) -> dict[str, str]:
        """A `Live` for every parameter that a loader writes to, and why some may not be written directly."""
        refusals = dict(traced.opaque)
        modules, derived = proof.modules_of(model), proof.derived(model)
        self.whole.derived = {key: owner for key, (_, owner) in derived.items()}
        by_key = {key: (address, data) for address, (key, data) in trace.storages(model).items()}
        for key in {box.parameter for boxes in traced.boxes.values() for box in boxes}:
            address, data = by_key[key]
            try:
                live = self._live[key] = Live(key, data)
            except Misfit as error:
                refusals.setdefault(key, str(error))
                continue
            for _, module, attribute in modules.get(address, []):
                live.packing = live.packing or self.kind.packing(module, attribute)
                reason = derived.get(id(module), ("", ""))[0] or proof.why_not_alive(
                    self.kind, module, attribute
                )
                if reason:
                    refusals.setdefault(key, reason)
        return refusals

    def _add(self, tensor: Stored, traced: trace.Trace) -> None:
        boxes = tuple(sorted(traced.boxes.get(tensor.name, []), key=lambda box: box.source))
        if not boxes and tensor.name not in traced.faults and tensor.name not in self.whole.homes:
            return  # the model's own loader passes it over: a name without a home
        place = Place(tensor.name, tensor.dtype, tensor.shape, boxes)
        reasons = [traced.faults.get(tensor.name, "")]
        if not boxes:
            reasons.append("its loader computes what it writes")
        reasons += [self._refusals.get(box.parameter, "") for box in boxes]
        if boxes and place.covered != place.count:
            reasons.append(f"its loader copies {place.covered} of {place.count} elements")
        for box in boxes:
            live = self._live.get(box.parameter)
            if live is not None and not dtypes.holds(live.dtype, tensor.dtype):
                reasons.append(f"stored as {tensor.dtype}, the engine's {live.dtype} cannot hold it exactly")
                place.lossy = True
        place.refusal = next((reason for reason in reasons if reason), "")
        self.places[tensor.name] = place

    def _find_aliases(self, model: Any) -> None:
        """Tied names: a parameter that the model knows under two names, of which the checkpoint has one."""
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = first.setdefault(id(parameter), name)
            if owner == name:
                continue
            for a, b in ((name, owner), (owner, name)):
                if a in self.places and b not in self.places:
                    self.aliases[b] = a

    def specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Every name that a version may have, its live dtype and its Hugging Face shape."""
        found: list[tuple[str, str, tuple[int, ...]]] = []
        for name, place in self.places.items():
            live = self._live.get(place.boxes[0].parameter) if place.boxes else None
            found.append((name, live.dtype if live else place.stored, place.shape))
        known = {spec[0]: spec for spec in found}
        return found + [(name, *known[owner][1:]) for name, owner in self.aliases.items()]

    def groups(self) -> dict[str, int]:
        """Names that go with whole modules -> number of their group; complete when `proved` is set."""
        found = {name: place.group for name, place in self.places.items() if place.group is not None}
        return found | {alias: found[name] for alias, name in self.aliases.items() if name in found}

    # Reading.

    def _pieces(self, place: Place) -> Iterator[tuple[int | Index, Bits, str]]:
        """(first index of a run, or indexes; live bits; live dtype), all elements once."""
        for box in place.boxes:
            live = self._live[box.parameter]
            whole = read_box(box, live)
            where = None if box.dense else sources(box)
            for at in range(0, whole.size, CHUNK):
                part = whole[at : at + CHUNK]
                yield (box.source + at if where is None else where[at : at + CHUNK]), part, live.dtype

    def digest(self, name: str) -> sums.Lanes:
        """Recomputed in full from the live storage, in the stored dtype.

        Raises `Refused` when a live value is none that the stored dtype has."""
        place = self.places[self.aliases.get(name, name)]
        if not all(box.parameter in self._live for box in place.boxes):
            raise Refused(f"{name}: {place.refusal}", hint="its live layout cannot be read")
        while True:
            while self.writing:
                time.sleep(0.005)
            began, exact, total = self.generation, True, sums.ZERO
            for where, part, dtype in self._pieces(place):
                narrowed, ok = dtypes.narrow(part, dtype, place.stored)
                exact = exact and ok
                lanes = (
                    sums.of_range(narrowed, where)
                    if isinstance(where, int)
                    else sums.of_elements(where, narrowed)
                )
                total = sums.add(total, lanes)
            if began == self.generation:
                break
        if not exact:
            raise Refused(
                f"{name}: a live value is no {place.stored} value", state="unknown", hint="refit it in full"
            )
        return total

    def prove(self) -> None:
        """Compare every place with the folder, bit by bit; what differs is not plain, and goes with whole
        modules if it can. Sets `proved`."""
        for place in self.places.values():
            if place.refusal:
                continue
            tensor = self.stored[place.name]
            expected, total = tensor.bits(), sums.ZERO
            for where, part, dtype in self._pieces(place):
                if isinstance(where, int):
                    want = expected[where : where + part.size]
                    total = sums.add(total, sums.of_range(want, where))
                else:
                    want = expected[where]
                    total = sums.add(total, sums.of_elements(where, want))
                if not np.array_equal(dtypes.widen(want, tensor.dtype, dtype), part):
                    place.refusal = "its live storage does not hold what the checkpoint holds"
                    break
            else:
                self.carried[place.name] = total
        self.whole.group(self.places, self.stored)
        for place in self.places.values():
            if place.group is not None:
                self.carried.pop(place.name, None)
        self.proved.set()

    # Planning.

    def plan(self, changes: list[Change]) -> list[Planned]:
        """Everything that `changes` write, validated and gathered; nothing is written. Raises `Refused` that
        lists every miss."""
        misses = [miss for change in changes if (miss := self._miss(change))]
        if misses:
            raise Refused(
                f"{len(misses)} tensors cannot be written: {'; '.join(misses)}",
                hint=f'see docs/engines/{self.kind.name}.md, "What is refused"',
            )
        done: dict[str, Change] = {}
        planned = []
        for change in changes:
            owner = self.aliases.get(change.name, change.name)
            twin = done.setdefault(owner, change)
            if twin is not change:
                if twin.digest != change.digest:
                    raise Refused(
                        f"{change.name} and {twin.name} are one tensor in this engine, "
                        "but differ in the version",
                        hint="serve a model with untied weights, or commit tied ones",
                    )
                continue
            planned.append(self._planned(change, self.places[owner]))
        return planned

    def _miss(self, change: Change) -> str:
        place = self.places.get(self.aliases.get(change.name, change.name))
        if place is None:
            return f"{change.name} (the model has no such tensor)"
        if place.refusal:
            return f"{change.name} ({place.refusal})"
        if place.shape != change.shape:
            return f"{change.name} (shape {list(change.shape)}, in the engine {list(place.shape)})"
        for box in place.boxes:
            live = self._live[box.parameter]
            if not dtypes.holds(live.dtype, change.dtype):
                why = f"stored as {change.dtype}, the engine's {live.dtype} cannot hold it exactly"
                return f"{change.name} ({why})"
        if change.index is not None and place.stored != change.dtype:
            return f"{change.name} (a delta in {change.dtype}, last written in {place.stored})"
        return ""

    def _planned(self, change: Change, place: Place) -> Planned:
        if change.index is None:
            lanes = sums.of_range(change.bits, 0)
            writes = [w for box in place.boxes for w in self._differences(change, box)]
        else:
            writes = [self._elements(change, *target) for target in place.locate(change.index)]
            lanes = self._carried_on(change, place, writes)
        if sums.render(lanes) != change.digest:
            raise Refused(
                f"{change.name}: after this refit its digest would be {sums.render(lanes)}, "
                f"the version says {change.digest}",
                state="old" if change.index is None else "unknown",
                hint="the engine holds other bytes than it says; it is refitted in full",
            )
        return Planned(place, change.dtype, lanes, [w for w in writes if w.elements])

    def _elements(self, change: Change, key: str, targets: Index, part: slice | Index) -> Write:
        live = self._live[key]
        where = targets if live.packing is None else live.packing(targets)
        index = torch.from_numpy(np.ascontiguousarray(where)).to(live.flat.device)
        new = dtypes.widen(change.bits[part], change.dtype, live.dtype)
        return Write(live, index, _tensor(new, live), live.flat.gather(0, index))

    def _differences(self, change: Change, box: Box) -> Iterator[Write]:
        """The elements of a box that a full tensor really changes."""
        live = self._live[box.parameter]
        whole = read_box(box, live)
        where = None if box.dense else sources(box)
        for at in range(0, whole.size, CHUNK):
            old = whole[at : at + CHUNK]
            index = (
                np.arange(box.source + at, box.source + at + old.size)
                if where is None
                else where[at : at + CHUNK]
            )
            new = dtypes.widen(change.bits[index[0] : index[-1] + 1] if where is None else change.bits[index],
                               change.dtype, live.dtype)  # fmt: skip
            changed = np.flatnonzero(new != old)
            if changed.size * 4 > old.size and live.packing is None and box.target_strides == (1,):
                run = slice(box.target + at, box.target + at + old.size)
                yield Write(live, run, _tensor(new, live), live.flat[run].clone())
            elif changed.size:
                hit = index[changed]
                piece = Change(change.name, change.dtype, change.shape, "", hit, change.bits[hit])
                yield from (self._elements(piece, *target) for target in _one(box).locate(hit))

    def _carried_on(self, change: Change, place: Place, writes: list[Write]) -> sums.Lanes:
        index, bits = change.index, change.bits
        if index is None:
            raise ValueError("a full tensor carries nothing on")
        total = self.carried.get(place.name)
        if total is None:
            total = self.carried[place.name] = self.digest(place.name)
        total = sums.add(total, sums.of_elements(index, bits))
        for write, (_, _, part) in zip(writes, place.locate(index), strict=True):
            old, exact = dtypes.narrow(write.live.host(write.old), write.live.dtype, place.stored)
            if not exact:
                raise Refused(
                    f"{change.name}: a live value is no {place.stored} value",
                    state="unknown",
                    hint="it is refitted in full",
                )
            total = sums.subtract(total, sums.of_elements(index[part], old))
        return total


def _one(box: Box) -> Place:
    return Place("", "", (), (box,))


def _tensor(bits: Bits, live: Live) -> torch.Tensor:
    signed = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
    return torch.from_numpy(np.array(signed, copy=True)).to(live.flat.device)
