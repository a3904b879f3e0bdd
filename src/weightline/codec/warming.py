"""Every numba kernel once at every width, so that none compiles inside a pause."""

from __future__ import annotations

import numpy as np

from weightline.codec import kernels
from weightline.codec.coding import K_FIELDS, MAX_CLASSES, T_FIELDS, Kind, Piece, rows_of


def exercise() -> None:
    """Compile the kernels, or load them from numba's cache."""
    for width in (1, 2, 4, 8):
        _at_width(np.dtype(f"u{width}"))
    master, shadow = np.zeros(8, np.uint32), np.zeros(8, np.uint16)
    rows = rows_of([Piece(0, 0, 8, shadow.ctypes.data, master.ctypes.data)])
    kernels.cast(rows, np.zeros(8, np.uint32), shadow.copy(), shadow.copy(), np.zeros((1, 2), np.uint64))


def _at_width(dtype: np.dtype[np.unsignedinteger]) -> None:
    old, new = np.zeros(64, dtype), np.zeros(64, dtype)
    new[3] = 1
    lanes, index = np.zeros((1, 2), np.uint64), np.array([3])
    kernels.digest_range(old, 0, lanes[0])
    kernels.digest_at(index, 0, new[:1], lanes[0])
    kernels.gather(old, index, new[:1].copy())
    kernels.scatter(old.copy(), index, new[:1])
    pos, was, now = np.zeros(64, np.uint32), old.copy(), old.copy()
    for dense in (False, True):
        rows = rows_of([Piece(0, 0, 64, old.ctypes.data, new.ctypes.data)])
        kernels.scan(rows, pos, was, now, lanes)
        chunks, classes = np.zeros((1, T_FIELDS), np.int64), np.zeros((MAX_CLASSES, K_FIELDS), np.int64)
        out, sizes = np.zeros(4096, np.uint64), np.zeros(2, np.int64)
        kernels.encode(rows, pos, was, now, Kind(0, 0, 0), dense, chunks, classes, out, sizes)
        back = rows_of([Piece(0, 0, 64, old.ctypes.data, out.ctypes.data)])
        kernels.decode(back, chunks, classes, Kind(0, 0, 0), False, 64, pos, was, now, lanes)
        kernels.write(back, pos, now)
