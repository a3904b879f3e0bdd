"""Narrowing of a wider dtype to the stored one, exact or refused: how a live tensor held in fp32 is checked
against bf16 digests."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightline.codec import backend
from weightline.codec.dtypes import Bits, bits_dtype, bits_of, numpy_dtype, parse_dtype, width_of
from weightline.errors import InvalidInput

_FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})


def narrow_exactly(array: Any, dtype: str) -> Bits:
    """Bits in `dtype` of a float array or torch tensor of a wider dtype. Raises `InvalidInput` when a value
    does not narrow exactly."""
    have = parse_dtype(array.dtype)
    bits = bits_of(array)
    if have == dtype:
        return bits
    if have not in _FLOATS or dtype not in _FLOATS or width_of(have) <= width_of(dtype):
        raise InvalidInput(
            f"{have} does not narrow to {dtype}", hint="pass the stored dtype or a wider float"
        )
    out = np.empty(bits.size, bits_dtype(dtype))
    for start, stop in backend.ranges(bits.size):
        if not _narrow_chunk(bits[start:stop], have, out[start:stop], dtype):
            raise InvalidInput(
                f"a value of this {have} tensor is not exact in {dtype}",
                hint="it was changed after it was widened; refit it",
            )
    return out


def _narrow_chunk(wide: Bits, have: str, out: Bits, dtype: str) -> bool:
    if (have, dtype) == ("F32", "BF16"):
        out[:] = wide >> np.uint32(16)
        return not bool((wide & np.uint32(0xFFFF)).any())
    with np.errstate(all="ignore"):
        narrowed = wide.view(numpy_dtype(have)).astype(numpy_dtype(dtype))
        back = narrowed.astype(numpy_dtype(have)).view(wide.dtype)
    out[:] = narrowed.view(out.dtype)
    return bool((back == wide).all())
