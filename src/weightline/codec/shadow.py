"""The trainer's fp32 -> bf16 cast, fused with compare, emit and refresh of the bf16 shadow: one pass over
the masters.

The shadow is what was sent last: 2 bytes a parameter, and no snapshot beside it. Scratch is one chunk a
thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weightline.codec import backend, digest
from weightline.codec.coding import CHUNK_LOG2, R_HITS, Piece, Segment, encode, kind_of, pieces_of, rows_of
from weightline.codec.delta import Delta
from weightline.codec.diffing import check_options, require_same, sum_lanes
from weightline.codec.dtypes import Bits, bits_of, from_bits, specs_of
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
        for ordinal, (name, array) in enumerate(masters.items()):
            self._cast(ordinal, name, bits_of(array), "absolute")
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

    def _cast(self, ordinal: int, name: str, master: Bits, level: str) -> list[Segment]:
        shadow = self._bits[name]

        def work(piece: Piece) -> Segment:
            start, stop = piece.start, piece.start + piece.elements
            pos = backend.scratch("pos", piece.elements, _U32)
            was = backend.scratch("was", piece.elements, _U16)
            now = backend.scratch("now", piece.elements, _U16)
            kernels = backend.engine()
            hits = kernels.cast(master[start:stop], shadow[start:stop], pos, was, now)
            rows, lanes = rows_of([piece]), np.zeros((1, 2), np.uint64)
            rows[0, R_HITS] = hits
            pos, was, now = pos[:hits].copy(), was[:hits].copy(), now[:hits].copy()
            if hits:
                kernels.digest_moves(start, pos, was, now, lanes)
            segment = Segment([piece], rows, pos, was, now, lanes, None)
            if level == "absolute":
                return segment
            if level == "dense":
                # The encoder reads the old elements: they are put back for it.
                kernels.write(rows, pos, was)
            coded = encode(segment, _KIND, dense=level == "dense")
            if level == "dense":
                kernels.write(rows, pos, now)
            return segment._replace(coded=coded)

        pieces = pieces_of(ordinal, shadow, None, 1 << CHUNK_LOG2[level])
        return list(backend.map_ordered(work, pieces))

    def refresh(self, masters: Mapping[str, Any], *, level: str = "absolute") -> Delta:
        """Cast, compare, emit and bring the shadow up to date, in one pass; the delta is what changed since
        the last call.

        Raises `InvalidInput` (listing every mismatch) before anything is changed.
        """
        check_options(level, 0.0)
        require_same(self._specs, self._narrow_specs(masters))
        flat = {name: bits_of(masters[name]) for name in self._specs}
        names = list(self._specs)
        segments = [
            segment
            for ordinal, name in enumerate(names)
            for segment in self._cast(ordinal, name, flat[name], level)
        ]
        digests = {}
        for ordinal, gain in sorted(sum_lanes(segments).items()):
            name = names[ordinal]
            before = self.digests[name]
            self.digests[name] = digest.moved(before, gain)
            digests[name] = (before, self.digests[name])
        specs = list(self._specs.values())
        return Delta(Scanned(specs, segments, digests, None if level == "absolute" else level))
