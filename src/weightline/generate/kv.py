"""Key-value storage: one preallocated row per running sequence, behind transformers' own `Cache` interface.

Per layer, keys and values are [rows, kv_heads, max_model_len, head_dim]. Active rows are contiguous from 0,
so a decode step hands attention plain views, never a gathered copy; a leaving sequence's row is filled by
moving another row into it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Placement:
    """Where the next forward pass writes and reads; shared by all layers. Set by `SlotCache.for_prefill`
    and `for_decode`.
    """

    __slots__ = ("count", "extent", "positions", "row", "rows", "start")

    def __init__(self) -> None:
        self.row = 0
        self.start = 0
        self.count = 0
        self.extent = 0
        self.rows: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Rows of one layer. Allocated at the first update, when heads and head size are known."""

    is_sliding = False

    def __init__(self, rows: int, length: int, placement: Placement) -> None:
        super().__init__()
        self.rows, self.length, self.placement = rows, length, placement
        self.keys: torch.Tensor
        self.values: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Zeros: a masked position has weight 0, and 0 times an uninitialised NaN would still be NaN.
        Untouched pages cost nothing.
        """

        def allocate(states: torch.Tensor) -> torch.Tensor:
            return states.new_zeros((self.rows, states.shape[1], self.length, states.shape[3]))

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values ([batch, kv_heads, new, head_dim]) at their places; return views of all
        that attention may need.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.placement
        if at.rows is None:
            stop = at.start + key_states.shape[2]
            self.keys[at.row, :, at.start : stop] = key_states[0]
            self.values[at.row, :, at.start : stop] = value_states[0]
            return self.keys[at.row : at.row + 1, :, :stop], self.values[at.row : at.row + 1, :, :stop]
        self.keys[at.rows, :, at.positions] = key_states[:, :, 0]
        self.values[at.rows, :, at.positions] = value_states[:, :, 0]
        return self.keys[: at.count, :, : at.extent], self.values[: at.count, :, : at.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) of the pass under way. The engine gives its own 4-D masks; transformers asks all
        the same.
        """
        at = self.placement
        return (at.start + query_length if at.rows is None else at.extent), 0

    def get_seq_length(self) -> int:
        """Positions before the pass under way."""
        return self.placement.start

    def get_max_length(self) -> int:
        """Context positions that a row holds."""
        return self.length


class SlotCache(Cache):  # type: ignore[misc]
    """All layers' rows, and the two kinds of pass over them."""

    def __init__(self, layers: int, rows: int, length: int) -> None:
        self.placement = Placement()
        super().__init__(layers=[SlotLayer(rows, length, self.placement) for _ in range(layers)])

    def for_prefill(
        self, row: int, start: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The next pass computes positions `start` to `start + count` of one row. Returns its additive mask
        [1, 1, count, start + count].
        """
        at = self.placement
        at.row, at.start, at.count, at.extent, at.rows, at.positions = (
            row,
            start,
            1,
            start + count,
            None,
            None,
        )
        mask = torch.full((count, start + count), -torch.inf, dtype=dtype, device=device)
        return mask.triu_(start + 1)[None, None]

    def for_decode(self, positions: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The next pass computes position `positions[row]` of rows 0 to n-1. Returns its additive mask [n,
        1, 1, max(positions) + 1].
        """
        at = self.placement
        at.positions = torch.tensor(positions, device=device)
        at.rows = torch.arange(len(positions), device=device)
        at.count, at.extent = len(positions), max(positions) + 1
        at.start = at.extent - 1
        beyond = torch.arange(at.extent, device=device)[None] > at.positions[:, None]
        mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)
        return mask[:, None, None]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row to another, in every layer."""
        for layer in self.layers:
            if layer.is_initialized and length:
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]

    def clear_row(self, row: int) -> None:
        """Zero one row: it held values that are not finite."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[row].zero_()
                layer.values[row].zero_()

    def read_row(self, row: int, start: int, stop: int) -> torch.Tensor:
        """A copy of keys and values at some positions of one row: [layers, 2, kv_heads, positions,
        head_dim].
        """
        pairs = [torch.stack((x.keys[row, :, start:stop], x.values[row, :, start:stop])) for x in self.layers]
        return torch.stack(pairs)

    def write_row(self, row: int, kept: torch.Tensor) -> None:
        """Put such copies back at the first positions of a row."""
        for layer, (keys, values) in zip(self.layers, kept, strict=True):
            layer.keys[row, :, : kept.shape[-2]] = keys
            layer.values[row, :, : kept.shape[-2]] = values
