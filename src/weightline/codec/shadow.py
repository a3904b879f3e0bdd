"""The trainer's fp32 -> bf16 cast, fused with compare, emit and refresh of the bf16 shadow: one pass over
the masters.

The shadow is what was sent last: 2 bytes a parameter, and no snapshot beside it. Scratch is a
batch a thread, touched as far as elements change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weightline.codec import backend, digest
from weightline.codec.coding import (
    CHUNK_LOG2,
    R_COUNT,
    R_HITS,
    R_NEW,
    R_OLD,
    Piece,
    Segment,
    batches,
    encode,
    kind_of,
    rows_of,
)
from weightline.codec.delta import Delta
from weightline.codec.diffing import check_options, require_same, sum_lanes
from weightline.codec.dtypes import Bits, address_of, bits_of, from_bits, specs_of
from weightline.codec.scanned import Scanned
from weightline.errors import InvalidInput
from weightline.types import TensorSpec

_U16, _U32 = np.dtype(np.uint16), np.dtype(np.uint32)
_KIND = kind_of("BF16")


class Shadow:
    """The bf16 form of fp32 master weights, kept up to date by `refresh`. Not thread-safe.

    Rounding is to nearest even; a NaN becomes the quiet NaN of its sign: what `ml_dtypes` and numpy do.
    """

    def __init__(self, masters: Mapping[str, Any]) -> None:
        """`masters`: name -> fp32 numpy array or torch CPU tensor. Raises `InvalidInput` for another
        dtype."""
        self._specs = self._narrow_specs(masters)
        self._bits: dict[str, Bits] = {}
        for name, array in masters.items():
            bits = np.zeros(bits_of(array).size, np.uint16)
            self._bits[name] = bits
        self.digests: dict[str, str] = {}
        """Additive digest of each tensor, carried along."""
        for name, array in masters.items():
            bits = bits_of(array)
            for piece in self._pieces(0, name, bits, "absolute"):
                self._cast([piece], "absolute")
            self.digests[name] = digest.digest_of(self._bits[name])

    @staticmethod
    def _narrow_specs(masters: Mapping[str, Any]) -> dict[str, TensorSpec]:
        specs = specs_of(masters)
        wrong = [f"{name!r} is {spec.dtype}" for name, spec in specs.items() if spec.dtype != "F32"]
        if wrong:
            raise InvalidInput(
                f"masters must be F32: {'; '.join(wrong)}", hint="diff other dtypes with codec.diff"
            )
        return {name: TensorSpec(name, "BF16", spec.shape) for name, spec in specs.items()}

    @property
    def weights(self) -> dict[str, Any]:
        """Name -> bf16 array: views of the shadow, which change with the next `refresh`."""
        return {name: from_bits(bits, self._specs[name]) for name, bits in self._bits.items()}

    def _pieces(self, ordinal: int, name: str, master: Bits, level: str) -> Iterator[Piece]:
        """The chunks of one tensor: `old` is the shadow's memory, `new` the masters'."""
        shadow, chunk = self._bits[name], 1 << CHUNK_LOG2[level]
        old, new = address_of(shadow), address_of(master)
        for start in range(0, shadow.size, chunk):
            yield Piece(ordinal, start, min(chunk, shadow.size - start), old + 2 * start, new + 4 * start)

    def _cast(self, batch: Sequence[Piece], level: str) -> Segment:
        """Cast, compare, emit and refresh a batch, and encode it when `level` asks for it."""
        rows, kernels = rows_of(batch), backend.engine()
        room = int(rows[:, R_COUNT].sum())
        pos = backend.scratch("pos", room, _U32)
        was, now = backend.scratch("was", room, _U16), backend.scratch("now", room, _U16)
        lanes = np.zeros((len(rows), 2), np.uint64)
        kernels.cast(rows, pos, was, now, lanes)
        hits = int(rows[:, R_HITS].sum())
        # From here on the new elements are those of the shadow.
        rows[:, R_NEW] = rows[:, R_OLD]
        segment = Segment(batch, rows, pos[:hits].copy(), was[:hits].copy(), now[:hits].copy(), lanes, None)
        if level == "absolute":
            return segment
        if level == "dense":
            # The encoder reads the old elements: they are put back for it, and the new ones are nowhere then.
            rows[:, R_NEW] = 0
            kernels.write(rows, segment.pos, segment.was)
        coded = encode(segment, _KIND, dense=level == "dense")
        if level == "dense":
            kernels.write(rows, segment.pos, segment.now)
        return segment._replace(coded=coded)

    def refresh(self, masters: Mapping[str, Any], *, level: str = "absolute") -> Delta:
        """Cast, compare, emit and bring the shadow up to date, in one pass; the delta is what changed since
        the last call.

        Raises `InvalidInput` (listing every mismatch) before anything is changed.
        """
        check_options(level, 0.0)
        require_same(self._specs, self._narrow_specs(masters))
        flat = {name: bits_of(masters[name]) for name in self._specs}
        names = list(self._specs)
        pieces = [
            piece
            for ordinal, name in enumerate(names)
            for piece in self._pieces(ordinal, name, flat[name], level)
        ]
        segments = list(backend.map_ordered(lambda batch: self._cast(batch, level), batches(pieces)))
        digests = {}
        for ordinal, gain in sorted(sum_lanes(segments).items()):
            name = names[ordinal]
            before = self.digests[name]
            self.digests[name] = digest.moved(before, gain)
            digests[name] = (before, self.digests[name])
        specs = list(self._specs.values())
        return Delta(Scanned(specs, segments, digests, None if level == "absolute" else level))
