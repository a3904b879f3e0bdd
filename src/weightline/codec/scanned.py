"""Changes that stay pooled over many tensors, as the kernels give them: 4 bytes and two elements for each
change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from weightline.codec.coding import R_HITS, R_OFFSET, Segment
from weightline.codec.delta import TensorChange
from weightline.types import TensorSpec


class Scanned:
    """What `diff` found, or what a coded file decodes to. Old bits are known."""

    level = "absolute"

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        segments: Sequence[Segment],
        digests: Mapping[str, tuple[str, str]],
        encoded: str | None = None,
    ) -> None:
        self.segments = segments
        self.ordinals = {spec.name: at for at, spec in enumerate(specs)}
        """The tensor that a segment's pieces mean by a number."""
        self.digests = digests
        """Name -> digest before and after, of the tensors that changed."""
        self.encoded = encoded
        """Level at which the segments carry their coded form."""
        self.specs: Mapping[str, TensorSpec] = {spec.name: spec for spec in specs if spec.name in digests}
        self.elements = sum(int(segment.rows[:, R_HITS].sum()) for segment in segments)

    @cached_property
    def _places(self) -> dict[int, list[tuple[int, int]]]:
        """Segment and row of each chunk with changes, by tensor."""
        places: dict[int, list[tuple[int, int]]] = {}
        for s, segment in enumerate(self.segments):
            for r in np.flatnonzero(segment.rows[:, R_HITS]).tolist():
                places.setdefault(segment.pieces[r].tensor, []).append((s, r))
        return places

    def measure(self, base: int | None, version: int | None) -> int:
        """Bytes of the file at the level it was made for."""
        if self.encoded is not None:
            from weightline.codec.recoding import coded_nbytes

            return coded_nbytes(self, base, version)
        from weightline.codec.layout import absolute_nbytes

        return absolute_nbytes((self.change(name) for name in self.specs), base, version)

    def count(self, name: str) -> int:
        places = self._places.get(self.ordinals[name], [])
        return sum(int(self.segments[s].rows[r, R_HITS]) for s, r in places)

    def change(self, name: str) -> TensorChange:
        index, was, now = [], [], []
        for s, r in self._places.get(self.ordinals[name], []):
            segment = self.segments[s]
            first = int(segment.rows[r, R_OFFSET])
            last = first + int(segment.rows[r, R_HITS])
            index.append(segment.pos[first:last].astype(np.int64) + segment.pieces[r].start)
            was.append(segment.was[first:last])
            now.append(segment.now[first:last])
        before, after = self.digests[name]
        if len(index) == 1:
            return TensorChange(self.specs[name], index[0], now[0], after, before, was[0])
        joined = (np.concatenate(parts) for parts in (index, now, was))
        places, bits, old = joined
        return TensorChange(self.specs[name], places, bits, after, before, old)
