"""The weights that the engine computes with, addressed by name and by bit.

Every name the engine can take (parameters, persistent buffers, tied aliases, and the per-expert names of
fused expert tensors) is a window onto live storage. Pointers never change: a refit writes new bits through
the window. At start each tensor of the model folder is compared with its window, bit by bit; a name whose
window does not hold what the folder holds is not offered for refits.
"""

from __future__ import annotations

import re
import threading
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


class Window(Struct, frozen=True, eq=False):
    """One name and the live storage behind it."""

    name: str
    owner: str
    """The name that stands for the whole storage; tied names share it."""
    dtype: str
    """Live dtype."""
    shape: tuple[int, ...]
    bits: Bits
    """Writable view of the live storage, flat, C order."""
    start: int
    """First element within the owner."""

    @property
    def region(self) -> tuple[str, int, int]:
        """Owner, first element, one past the last."""
        return self.owner, self.start, self.start + self.bits.size


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
        owners: dict[tuple[int, int], str] = {}
        for name in sorted(tensors, key=lambda n: n not in model.stored):  # stable: names of the folder first
            tensor = tensors[name]
            owner = owners.setdefault((tensor.data_ptr(), tensor.numel()), name)
            if owner != name:
                self.aliases[name] = owner
        for name, tensor in tensors.items():
            self.windows[name] = _window(name, self.aliases.get(name, name), tensor)
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
            return int(self.windows[owner].bits.size)
        return max(w.start + w.bits.size for w in self.windows.values() if w.owner == owner)

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
        live = window.bits if index is None else window.bits[index]
        small = narrow(live, window.dtype, stored)
        if small is None:
            return Undo(window, index, live.copy() if index is None else live, window.dtype)
        return Undo(window, index, small.copy() if small is window.bits else small, stored)

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

    # Digests.

    def forget_digests(self, window: Window) -> None:
        """Digests of regions that share elements with `window` no longer hold."""
        owner, start, stop = window.region
        for region in [r for r in self.carried if r[0] == owner and r[1] < stop and start < r[2]]:
            del self.carried[region]

    def full_digest(self, window: Window) -> str | None:
        """Additive digest in the stored dtype, from live bits; None when some element has no exact image
        there.
        """
        small = narrow(window.bits, window.dtype, self.stored[window.owner])
        return None if small is None else codec.digest_of(small)

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
                    digest = self.full_digest(window)
                if digest is None:
                    raise InvalidInput(
                        f"{name} holds values that {self.stored[window.owner]} cannot hold",
                        hint="its weights were changed in place by something else; refit the engine in full",
                    )
                seen[window.region] = digest
            found[name] = seen[window.region]
        return found


def _window(name: str, owner: str, tensor: torch.Tensor) -> Window:
    if not tensor.is_contiguous():
        raise InvalidInput(
            f"{name} is not contiguous in memory", hint="this model's layout is not supported; report it"
        )
    width = tensor.element_size()
    # A scalar has no dimension to view through; reshape of a contiguous tensor is a view.
    flat = tensor.detach().reshape(-1).view(_INT[width]).numpy()
    return Window(
        name=name,
        owner=owner,
        dtype=codec.parse_dtype(str(tensor.dtype)),
        shape=tuple(tensor.shape),
        bits=flat.view(f"u{width}"),
        start=0,
    )


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
                    owner=fused.owner,
                    dtype=fused.dtype,
                    shape=(height, columns),
                    bits=fused.bits[start : start + height * columns],
                    start=start,
                )
            )
    return parts


def tied_names(aliases: Mapping[str, str]) -> dict[str, str]:
    """Alias -> owner, sorted, for `describe`."""
    return dict(sorted(aliases.items()))
