"""The relative threshold: which changes of floats are large enough to be sent. Off by default; everything
else compares bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightline.codec.dtypes import Bits, numpy_dtype

_FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})


def keep(dtype: str, old: Bits, new: Bits, threshold: float) -> npt.NDArray[Any]:
    """Mask of the changes to send: not |new - old| <= threshold * |old|, in float64.

    A change from or to NaN or infinity is always sent, where the plain rule |new - old| > threshold * |old|
    would miss it; so is every
    change of a dtype that is no real float. -0.0 against +0.0 is not sent.
    """
    if dtype not in _FLOATS:
        return np.ones(old.shape, np.bool_)
    before = old.view(numpy_dtype(dtype)).astype(np.float64)
    after = new.view(numpy_dtype(dtype)).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        small = np.abs(after - before) <= threshold * np.abs(before)
    finite = np.isfinite(before) & np.isfinite(after)
    return ~(small & finite)
