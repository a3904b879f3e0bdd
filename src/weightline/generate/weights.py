"""The weights that the engine computes with, addressed by name and by bit.

Every name the engine can take (parameters, persistent buffers, tied aliases, and the per-expert names of
fused expert tensors) is a window onto live storage. A refit writes new bits through the window, or puts
other memory behind the storage; the model's tensor objects stay in either case. At start each tensor of the
model folder is compared with its window, bit by bit; a name whose window does not hold what the folder holds
is not offered for refits.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec import Struct

from weightline import codec
from weightline.errors import InvalidInput, WeightlineError
from weightline.generate.widen import Bits, narrow, widen, widens
from weightline.types import TensorSpec

if TYPE_CHECKING:
    from weightline.generate.model import LoadedModel

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXPERTS = re.compile(r"^(?P<stem>.+\.experts)\.(?P<part>gate_up_proj|down_proj)$")


class Memory(Struct, frozen=True, eq=False):
    """What the values of one storage lie in."""

    values: torch.Tensor
    bits: Bits
    """Writable view of `values`, flat, C order, unsigned integers of its width."""


class Storage:
    """All tensors of the model that are one piece of memory (tied names), and that memory. `owner` is the
    name that stands for them.
    """

    def __init__(self, owner: str, tensor: torch.Tensor) -> None:
        self.owner = owner
        self.tensors = [tensor]
        self.memory = memory_of(tensor.detach())

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return int(self.memory.bits.nbytes)

    @property
    def alone(self) -> bool:
        """Nothing else lies in the allocation, so nothing else is left behind when it is exchanged."""
        return all(t.untyped_storage().nbytes() == self.nbytes for t in self.tensors)

    def fresh(self) -> Memory:
        """Memory of the same kind, uninitialised. Raises `MemoryError` or `RuntimeError`."""
        return memory_of(torch.empty_like(self.memory.values))

    def use(self, memory: Memory) -> None:
        """The model computes with `memory` from now on: every tensor object stays, only what it points to
        changes, so whoever holds the object (a tied head) follows.
        """
        for tensor in self.tensors:
            tensor.data = memory.values.reshape(tensor.shape)
        self.memory = memory

    def uses(self, memory: Memory) -> bool:
        """Every tensor of the model points to `memory`, and so do the windows."""
        at = memory.values.data_ptr()
        return self.memory is memory and all(t.data_ptr() == at for t in self.tensors)


def memory_of(values: torch.Tensor) -> Memory:
    """The memory of a contiguous tensor in host memory."""
    width = values.element_size()
    # A scalar has no dimension to view through; reshape of a contiguous tensor is a view.
    return Memory(values, values.reshape(-1).view(_INT[width]).numpy().view(f"u{width}"))


class Window(Struct, frozen=True, eq=False):
    """One name and the part of a storage behind it."""

    name: str
    storage: Storage
    dtype: str
    """Live dtype."""
    shape: tuple[int, ...]
    start: int
    """First element within the storage."""
    size: int
    """Elements."""

    @property
    def owner(self) -> str:
        """The name that stands for the whole storage; tied names share it."""
        return self.storage.owner

    @property
    def bits(self) -> Bits:
        """Writable view of the live values, flat, C order."""
        return self.within(self.storage.memory)

    def within(self, memory: Memory) -> Bits:
        """The same part of other memory of this storage."""
        return memory.bits[self.start : self.start + self.size]

    @property
    def region(self) -> tuple[str, int, int]:
        """Owner, first element, one past the last."""
        return self.owner, self.start, self.start + self.size


class Undo(Struct, frozen=True, eq=False):
    """What was live before a write: in the stored dtype where that is exact (as small as the delta), else
    as it was.
    """

    window: Window
    index: Bits | None
    bits: Bits
    dtype: str


class LiveWeights:
    """All windows, what dtype each storage was last written in, and the digests that are known to hold."""

    def __init__(self, model: LoadedModel) -> None:
        self.lock = threading.RLock()
        """Held while weights are written, and while one tensor is read for a digest."""
        self.writes = 0
        """Counts writes, so that a reader over many tensors can tell that they are of one version."""
        self.windows: dict[str, Window] = {}
        self.aliases: dict[str, str] = {}
        self.stored: dict[str, str] = {}
        """Owner -> dtype that was last written to it; at first the folder's."""
        self.carried: dict[tuple[str, int, int], str] = {}
        """Region -> additive digest in the stored dtype, proved by a full computation or carried over
        proved changes.
        """
        self.unproved: set[str] = set()
        """Names in the folder whose live tensor holds something else (the model transforms them, or has no
        such tensor).
        """
        self._find_windows(model)
        self._prove(model)

    # Names.

    def _find_windows(self, model: LoadedModel) -> None:
        tensors: dict[str, torch.Tensor] = dict(model.module.state_dict(keep_vars=True))
        storages: dict[tuple[int, int], Storage] = {}
        for name in sorted(tensors, key=lambda n: n not in model.stored):  # stable: names of the folder first
            tensor = tensors[name]
            key = (tensor.data_ptr(), tensor.numel())
            if key not in storages:
                storages[key] = _storage(name, tensor)
            elif all(tensor is not t for t in storages[key].tensors):
                storages[key].tensors.append(tensor)
            if storages[key].owner != name:
                self.aliases[name] = storages[key].owner
        for name, tensor in tensors.items():
            storage = storages[tensor.data_ptr(), tensor.numel()]
            dtype = codec.parse_dtype(str(tensor.dtype))
            self.windows[name] = Window(name, storage, dtype, tuple(tensor.shape), 0, tensor.numel())
        for name in tuple(tensors):
            for part in _expert_parts(self.windows[name]):
                if part.name in model.stored and part.name not in self.windows:
                    self.windows[part.name] = part

    def _prove(self, model: LoadedModel) -> None:
        """Compare every tensor of the folder with its window; note its dtype and digest."""
        from safetensors import safe_open

        by_file: dict[Any, list[str]] = defaultdict(list)
        for name, path in model.files.items():
            by_file[path].append(name)
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as opened:
                for name in names:
                    if not self._prove_one(model.stored[name], lambda name=name: opened.get_tensor(name)):
                        self.unproved.add(name)
        for owner in {w.owner for w in self.windows.values()} - set(self.stored):
            self.stored[owner] = self.windows[owner].dtype
        for name in self.unproved:
            self.windows.pop(name, None)

    def _prove_one(self, spec: TensorSpec, read: Any) -> bool:
        window = self.windows.get(spec.name)
        if window is None or window.shape != spec.shape or not widens(spec.dtype, window.dtype):
            return False
        if self.stored.setdefault(window.owner, spec.dtype) != spec.dtype:
            return False
        bits = codec.bits_of(read())
        if not np.array_equal(widen(bits, spec.dtype, window.dtype), window.bits):
            return False
        self.carried[window.region] = codec.digest_of(bits)
        return True

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every name that can be written, in the live dtype."""
        return tuple(
            TensorSpec(name=w.name, dtype=w.dtype, shape=w.shape) for _, w in sorted(self.windows.items())
        )

    def uncovered(self, windows: Iterable[Window]) -> list[str]:
        """Owners of which some element lies in none of `windows`."""
        covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for window in windows:
            owner, start, stop = window.region
            covered[owner].append((start, stop))
        missing = []
        for owner in sorted({w.owner for w in self.windows.values()}):
            end = 0
            for start, stop in sorted(covered[owner]):
                if start > end:
                    break
                end = max(end, stop)
            if end < self._size(owner):
                missing.append(owner)
        return missing

    def holding(self, digests: Mapping[str, str]) -> list[Window]:
        """The windows among `digests` that are known to have the digest named there already."""
        return [
            window
            for name, digest in digests.items()
            if (window := self.windows.get(name)) and self.carried.get(window.region) == digest
        ]

    def _size(self, owner: str) -> int:
        if owner in self.windows:
            return int(self.windows[owner].size)
        return max(w.start + w.size for w in self.windows.values() if w.owner == owner)

    # Bits.

    def write(
        self, window: Window, index: Bits | None, bits: Bits, stored: str, live_bits: Bits | None = None
    ) -> Undo:
        """Write stored bits at flat elements `index` (None: all) and return what was there. The caller
        holds `lock`.
        """
        undo = self.read(window, index, self.stored[window.owner])
        self.writes += 1
        wide = widen(bits, stored, window.dtype) if live_bits is None else live_bits
        if index is None:
            window.bits[:] = wide
        else:
            window.bits[index] = wide
        return undo

    def read(self, window: Window, index: Bits | None, stored: str) -> Undo:
        """A copy of the live elements `index` (None: all), in `stored` where that is exact."""
        live = window.bits.copy() if index is None and stored == window.dtype else window.bits
        live = live if index is None else live[index]
        small = narrow(live, window.dtype, stored)
        if small is None:
            return Undo(window, index, live.copy() if index is None else live, window.dtype)
        return Undo(window, index, small, stored)

    def restore(self, undo: Undo) -> None:
        """Put old bits back and read them back. Raises `WeightlineError` when they are not there
        afterwards. The caller holds `lock`.
        """
        wide = widen(undo.bits, undo.dtype, undo.window.dtype)
        self.writes += 1
        if undo.index is None:
            undo.window.bits[:] = wide
        else:
            undo.window.bits[undo.index] = wide
        found = undo.window.bits if undo.index is None else undo.window.bits[undo.index]
        if not np.array_equal(found, wide):
            raise WeightlineError(
                f"{undo.window.name}: old bits did not come back", hint="refit the engine in full"
            )

    def exchange(self, storage: Storage, memory: Memory) -> None:
        """Put other memory behind a storage. The caller holds `lock`, and no step is in flight."""
        self.writes += 1
        storage.use(memory)

    # Digests.

    def forget_digests(self, windows: Iterable[Window]) -> None:
        """Digests of regions that share elements with `windows` (none overlaps another) hold no more."""
        touched: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for window in windows:
            owner, start, stop = window.region
            touched[owner].append((stop, start))
        for parts in touched.values():
            parts.sort()
        for region in tuple(self.carried):
            parts = touched.get(region[0], [])
            first = bisect_right(parts, region[1], key=lambda part: part[0])  # the first that ends behind it
            if first < len(parts) and parts[first][1] < region[2]:
                del self.carried[region]

    def digests(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Digests by name, recomputed in full, one tensor at a time: writes get in between; see `writes`.

        Raises `InvalidInput` for a name that is not there, or for a tensor that holds values its stored
        dtype cannot.
        """
        wanted = sorted(self.windows) if names is None else list(names)
        unknown = [n for n in wanted if n not in self.windows]
        if unknown:
            raise InvalidInput(f"no tensor named {', '.join(unknown)}", hint="`describe` lists the names")
        found: dict[str, str] = {}
        seen: dict[tuple[str, int, int], str] = {}
        for name in wanted:
            window = self.windows[name]
            if window.region not in seen:
                with self.lock:
                    digest = full_digest(window.bits, window.dtype, self.stored[window.owner])
                if digest is None:
                    raise InvalidInput(
                        f"{name} holds values that {self.stored[window.owner]} cannot hold",
                        hint="its weights were changed in place by something else; refit the engine in full",
                    )
                seen[window.region] = digest
            found[name] = seen[window.region]
        return found


def _storage(owner: str, tensor: torch.Tensor) -> Storage:
    if not tensor.is_contiguous():
        raise InvalidInput(
            f"{owner} is not contiguous in memory", hint="this model's layout is not supported; report it"
        )
    return Storage(owner, tensor)


def _expert_parts(fused: Window) -> list[Window]:
    """Per-expert windows of a fused expert tensor, under the names that Hugging Face folders use.

    transformers keeps the experts of a layer as `gate_up_proj` [experts, 2 * inner, hidden] (gate rows
    first) and `down_proj` [experts, hidden, inner]; its folders name `experts.N.gate_proj.weight`,
    `up_proj` and `down_proj`.
    """
    found = _EXPERTS.match(fused.name)
    if found is None or len(fused.shape) != 3:
        return []
    experts, rows, columns = fused.shape
    names = ("gate_proj", "up_proj") if found["part"] == "gate_up_proj" else ("down_proj",)
    height = rows // len(names)
    parts = []
    for expert in range(experts):
        for i, part in enumerate(names):
            start = (expert * rows + i * height) * columns
            parts.append(
                Window(
                    name=f"{found['stem']}.{expert}.{part}.weight",
                    storage=fused.storage,
                    dtype=fused.dtype,
                    shape=(height, columns),
                    start=start,
                    size=height * columns,
                )
            )
    return parts


def full_digest(live: Bits, dtype: str, stored: str) -> str | None:
    """Additive digest in the stored dtype, from all live bits of a tensor; None when some element has no
    exact image there.
    """
    small = narrow(live, dtype, stored)
    return None if small is None else codec.digest_of(small)


def tied_names(aliases: Mapping[str, str]) -> dict[str, str]:
    """Alias -> owner, sorted, for `describe`."""
    return dict(sorted(aliases.items()))
