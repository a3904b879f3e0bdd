"""Where each element of a Hugging Face tensor lives in the engine's parameters.

A place is a list of boxes: a box pairs a strided view of the (contiguous) Hugging Face tensor with a strided
view of a live parameter, exactly as the model's own weight loader copies one into the other. Fused q/k/v,
gate/up, experts, vocabulary padding and tensor-parallel shards are all boxes. A packed parameter (`Packing`)
adds a permutation of its storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from weightline.plugins.bits import NAMES, SIGNED, UNSIGNED, Bits

Index = npt.NDArray[np.int64]


class Misfit(Exception):
    """A view that cannot be inverted: several elements share one source, or strides overlap."""


@dataclass(frozen=True)
class Box:
    """Element (k0, k1, …) of `sizes` is element source + sum(k*source_strides) of the Hugging Face tensor and
    element target + sum(k*target_strides) of the parameter, both in flat C order. Dimensions are sorted by
    source stride, widest first, and merged as far as both sides allow."""

    parameter: str
    sizes: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]

    @property
    def count(self) -> int:
        return int(np.prod(self.sizes, dtype=np.int64))

    @property
    def dense(self) -> bool:
        """Its source elements are one contiguous run."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.source_strides), strict=True):
            if stride != expected:
                return False
            expected *= size
        return True


def make_box(
    parameter: str, sizes: tuple[int, ...], source: int, source_strides: tuple[int, ...], target: int,
    target_strides: tuple[int, ...],
) -> Box | None:  # fmt: skip
    """A box in normal form; None when it is empty. Raises `Misfit`."""
    if 0 in sizes:
        return None
    dims = [d for d in zip(source_strides, sizes, target_strides, strict=True) if d[1] != 1]
    if any(d[0] <= 0 or d[2] <= 0 for d in dims):
        raise Misfit("one element has several homes")
    dims.sort(key=lambda d: -d[0])
    merged: list[tuple[int, int, int]] = []
    for stride, size, out in reversed(dims):
        if merged:
            inner = merged[-1]
            if stride == inner[0] * inner[1] and out == inner[2] * inner[1]:
                merged[-1] = (inner[0], inner[1] * size, inner[2])
                continue
            if stride < (inner[0] * (inner[1] - 1) + 1):
                raise Misfit("overlapping strides")
        merged.append((stride, size, out))
    merged.reverse()
    if not merged:
        merged = [(1, 1, 1)]
    return Box(
        parameter,
        tuple(m[1] for m in merged),
        source,
        tuple(m[0] for m in merged),
        target,
        tuple(m[2] for m in merged),
    )


@dataclass(frozen=True, eq=False)
class Packing:
    """The engine stores blocks of `block` elements permuted: logical element r of a block lies at `order[r]`.
    The same for every block of the parameter."""

    block: int
    order: npt.NDArray[np.int64]

    def __call__(self, flat: Index) -> Index:
        return (flat // self.block) * self.block + self.order[flat % self.block]


@dataclass(eq=False)
class Live:
    """One live parameter or buffer. `flat` views its storage as integers, 1-D; pointers never change."""

    key: str
    tensor: torch.Tensor
    flat: torch.Tensor = field(init=False)
    dtype: str = field(init=False)
    packing: Packing | None = None

    def __post_init__(self) -> None:
        data = self.tensor.data
        if not data.is_contiguous() or data.is_meta:
            raise Misfit("its storage is not plain and contiguous")
        if data.dtype not in NAMES:
            raise Misfit(f"{data.dtype} has no safetensors name")
        self.dtype = NAMES[data.dtype]
        self.flat = data.view(-1).view(SIGNED[data.element_size()])

    def host(self, values: torch.Tensor) -> Bits:
        """Integers of this parameter as unsigned numpy bits (a view on a CPU)."""
        return np.asarray(values.cpu().numpy()).view(UNSIGNED[values.element_size()])


@dataclass(eq=False)
class Place:
    """Where one Hugging Face tensor lives. `stored` is the dtype that its bytes were last written in."""

    name: str
    stored: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    refusal: str = ""
    """Why it cannot be written directly; empty when it is proved plain."""
    lossy: bool = False
    """The refusal is about its dtype: no way in would be exact."""
    group: int | None = None
    """It goes with this group of whole modules, through the engine's loaders (`whole.Group`)."""

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def covered(self) -> int:
        return sum(box.count for box in self.boxes)

    def locate(self, index: Index) -> Iterator[tuple[str, Index, slice | Index]]:
        """(parameter, flat logical targets, which of `index` they are for), for ascending Hugging Face
        indexes. Elements that live on another rank are left out."""
        for box in self.boxes:
            if box.dense:
                first, last = np.searchsorted(index, (box.source, box.source + box.count))
                if first == last:
                    continue
                part: slice | Index = slice(int(first), int(last))
                yield box.parameter, _targets(box, index[part] - box.source)[0], part
            else:
                first, last = np.searchsorted(index, (box.source, box.source + _span(box)))
                if first == last:
                    continue
                targets, inside = _targets(box, index[first:last] - box.source)
                found = np.flatnonzero(inside) + int(first)
                if found.size:
                    yield box.parameter, targets[inside], found


def _span(box: Box) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, box.source_strides, strict=True))


def _targets(box: Box, offset: Index) -> tuple[Index, npt.NDArray[np.bool_]]:
    """Flat targets for offsets within the box's source span, and which of them are inside."""
    if len(box.sizes) == 1 and box.source_strides == (1,):
        return offset * box.target_strides[0] + box.target, np.ones(offset.size, np.bool_)
    rest = offset
    targets = np.full(offset.size, box.target, np.int64)
    inside = np.ones(offset.size, np.bool_)
    for size, stride, out in zip(box.sizes, box.source_strides, box.target_strides, strict=True):
        k = rest // stride
        inside &= k < size
        targets += k * out
        rest = rest - k * stride
    inside &= rest == 0
    return targets, inside


def sources(box: Box) -> Index:
    """Hugging Face indexes of all elements of a box, ascending."""
    total = np.zeros((1,), np.int64)
    for size, stride in zip(box.sizes, box.source_strides, strict=True):
        total = (total[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return total + box.source


def targets(box: Box) -> Index:
    """Flat logical targets of all elements of a box, in the order of `sources`."""
    total = np.zeros((1,), np.int64)
    for size, stride in zip(box.sizes, box.target_strides, strict=True):
        total = (total[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return total + box.target


def read_box(box: Box, live: Live) -> Bits:
    """Live bits of a box in the order of its sources. A view of the storage where it is one run of a plain
    parameter on a CPU, else a copy."""
    if live.packing is not None:
        return live.host(live.flat[torch.from_numpy(live.packing(targets(box))).to(live.flat.device)])
    if len(box.sizes) == 1 and box.target_strides == (1,):
        return live.host(live.flat[box.target : box.target + box.sizes[0]])
    view = torch.as_strided(live.flat, box.sizes, box.target_strides, live.flat.storage_offset() + box.target)
    return live.host(view.reshape(-1))
