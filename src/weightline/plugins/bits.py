"""dtypes by their safetensors names, and the way between a stored dtype and the wider one that an engine
holds it in. Bits only: a conversion is exact or it is reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bits = npt.NDArray[Any]

TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in TORCH.items()}
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element width -> the integer dtype that torch indexes well on every device."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
HOLDS = {
    "BF16": ("F8_E4M3", "F8_E5M2"),
    "F16": ("F8_E4M3", "F8_E5M2"),
    "F32": ("BF16", "F16", "F8_E4M3", "F8_E5M2"),
    "F64": ("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"),
}
"""Live dtype -> other stored dtypes of which it represents every value exactly."""


def width(name: str) -> int:
    """Bytes an element."""
    return TORCH[name].itemsize


def holds(live: str, stored: str) -> bool:
    """Can `live` hold every value of `stored`?"""
    return live == stored or stored in HOLDS.get(live, ())


def _cast(bits: Bits, source: str, target: str) -> Bits:
    tensor = torch.from_numpy(bits.view(_numpy_signed(bits.itemsize))).view(TORCH[source])
    wide = tensor.to(TORCH[target]).view(SIGNED[width(target)])
    return np.asarray(wide.numpy()).view(UNSIGNED[width(target)])


def _numpy_signed(size: int) -> Any:
    return {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[size]


def widen(bits: Bits, stored: str, live: str) -> Bits:
    """Bits in the live dtype. A copy unless the dtypes are the same."""
    if stored == live:
        return bits
    if (stored, live) == ("BF16", "F32"):
        return bits.astype(np.uint32) << np.uint32(16)
    return _cast(np.ascontiguousarray(bits), stored, live)


def narrow(bits: Bits, live: str, stored: str) -> tuple[Bits, bool]:
    """Bits in the stored dtype, and whether every value narrows exactly."""
    if stored == live:
        return bits, True
    if (live, stored) == ("F32", "BF16"):
        return (bits >> np.uint32(16)).astype(np.uint16), not bool((bits & np.uint32(0xFFFF)).any())
    narrowed = _cast(np.ascontiguousarray(bits), live, stored)
    return narrowed, bool((_cast(narrowed, stored, live) == bits).all())
