"""Bits of a stored dtype in a wider live dtype, and back: exactly, NaN payloads and signed zeros included,
or not at all.

Everything here works on bit patterns with integer arithmetic. A floating-point conversion of the machine
would quiet signalling NaNs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from weightline.errors import InvalidInput

Bits = np.ndarray[Any, np.dtype[Any]]
"""1-D, unsigned integers of the dtype's width."""
_CHUNK = 1 << 22
"""Elements converted at a time: bounds the temporary memory to a few tens of MB."""

# IEEE-like layouts: (bits, exponent bits, mantissa bits).
_LAYOUT = {
    "F8_E5M2": (8, 5, 2),
    "F16": (16, 5, 10),
    "BF16": (16, 8, 7),
    "F32": (32, 8, 23),
    "F64": (64, 11, 52),
}
_WIDTH = {name: np.dtype(f"u{bits // 8}") for name, (bits, _, _) in _LAYOUT.items()} | {
    "F8_E4M3": np.dtype("u1")
}


def widens(stored: str, live: str) -> bool:
    """Whether every value of `stored` has an exact image in `live` (safetensors dtype names)."""
    if stored == live:
        return True
    if stored == "F8_E4M3":
        return live in ("F16", "BF16", "F32", "F64")
    if stored not in _LAYOUT or live not in _LAYOUT:
        return False
    (_, se, sm), (_, le, lm) = _LAYOUT[stored], _LAYOUT[live]
    return se <= le and sm <= lm and (se, sm) != (le, lm)


def widen(bits: Bits, stored: str, live: str) -> Bits:
    """Live bits of stored bits. Raises `InvalidInput` when `widens` is False."""
    if stored == live:
        return bits
    if not widens(stored, live):
        raise InvalidInput(
            f"{stored} does not widen exactly to {live}", hint="load the engine with a wider dtype"
        )
    if stored == "BF16" and live == "F32":
        return bits.astype(np.uint32) << np.uint32(16)
    if bits.dtype.itemsize == 1:
        return _table(stored, live)[bits]
    out = np.empty(bits.shape, _WIDTH[live])
    for start in range(0, bits.size, _CHUNK):
        out[start : start + _CHUNK] = _widen_ieee(bits[start : start + _CHUNK], stored, live)
    return out


def narrow(bits: Bits, live: str, stored: str) -> Bits | None:
    """Stored bits of live bits; None when some element has no exact image in `stored`."""
    if stored == live:
        return bits
    if stored == "BF16" and live == "F32":
        out = np.empty(bits.shape, np.uint16)
        for start in range(0, bits.size, _CHUNK):
            part = bits[start : start + _CHUNK]
            if (part & np.uint32(0xFFFF)).any():
                return None
            out[start : start + _CHUNK] = part >> np.uint32(16)
        return out
    if _WIDTH[stored].itemsize == 1:
        return _narrow_by_table(bits, live, stored)
    out = np.empty(bits.shape, _WIDTH[stored])
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK]
        small = _narrow_ieee(part, live, stored)
        if not np.array_equal(_widen_ieee(small, stored, live), part):
            return None
        out[start : start + _CHUNK] = small
    return out


def _widen_ieee(bits: Bits, stored: str, live: str) -> Bits:
    """Sign, exponent and mantissa moved to their new places; subnormals are normalised through an exact
    integer-to-float step.
    """
    (sb, se, sm), (lb, le, lm) = _LAYOUT[stored], _LAYOUT[live]
    wide = bits.astype(np.uint64)
    sign, rest = wide >> np.uint64(sb - 1), wide & np.uint64((1 << (sb - 1)) - 1)
    exponent, mantissa = rest >> np.uint64(sm), rest & np.uint64((1 << sm) - 1)
    bias = (1 << (le - 1)) - (1 << (se - 1))
    special = exponent == np.uint64((1 << se) - 1)
    out_exponent = np.where(special, np.uint64((1 << le) - 1), exponent + np.uint64(bias))
    out = (out_exponent << np.uint64(lm)) | (mantissa << np.uint64(lm - sm))
    tiny = exponent == 0
    if tiny.any():
        out[tiny] = _subnormal(mantissa[tiny], se, sm, le, lm)
    return ((sign << np.uint64(lb - 1)) | out).astype(_WIDTH[live])


def _subnormal(mantissa: Bits, se: int, sm: int, le: int, lm: int) -> Bits:
    """Magnitude bits in the wide layout of `mantissa` * 2**(1 - bias - sm) in the narrow one."""
    if se == le:
        return mantissa << np.uint64(lm - sm)
    # A mantissa below 2**53 is exact as a float64, whose exponent says where its leading bit is.
    as_double = mantissa.astype(np.float64).view(np.uint64)
    power = (as_double >> np.uint64(52)).astype(np.int64) - 1023
    fraction = (as_double & np.uint64((1 << 52) - 1)) >> np.uint64(52 - lm)
    scale = 1 - ((1 << (se - 1)) - 1) - sm
    exponent = (power + scale + (1 << (le - 1)) - 1).astype(np.uint64)
    return np.where(mantissa == 0, np.uint64(0), (exponent << np.uint64(lm)) | fraction)


def _narrow_ieee(bits: Bits, live: str, stored: str) -> Bits:
    """The candidate in the narrow layout; right where an exact image exists, which the caller checks by
    widening it again.
    """
    (lb, le, lm), (sb, se, sm) = _LAYOUT[live], _LAYOUT[stored]
    wide = bits.astype(np.uint64)
    sign, rest = wide >> np.uint64(lb - 1), wide & np.uint64((1 << (lb - 1)) - 1)
    exponent = (rest >> np.uint64(lm)).astype(np.int64)
    mantissa = rest & np.uint64((1 << lm) - 1)
    shifted = exponent - ((1 << (le - 1)) - (1 << (se - 1)))
    top = (1 << se) - 1
    normal = np.where(exponent == (1 << le) - 1, top, np.clip(shifted, 0, top))
    out = (normal.astype(np.uint64) << np.uint64(sm)) | (mantissa >> np.uint64(lm - sm))
    below = (shifted <= 0) & (exponent != (1 << le) - 1)
    if below.any():
        # Subnormal in the narrow layout: the implicit leading bit becomes explicit, unless it was subnormal
        # in the wide one too.
        implicit = np.where(exponent[below] > 0, np.uint64(1 << lm), np.uint64(0))
        drop = lm - sm + np.where(exponent[below] > 0, 1 - shifted[below], -shifted[below] if se != le else 0)
        full = mantissa[below] | implicit
        out[below] = np.where(drop < 64, full >> np.clip(drop, 0, 63).astype(np.uint64), np.uint64(0))
    return ((sign << np.uint64(sb - 1)) | out).astype(_WIDTH[stored])


@cache
def _table(stored: str, live: str) -> Bits:
    """Live bits of all 256 patterns of an 8-bit dtype."""
    patterns = np.arange(256, dtype=np.uint8)
    if stored in _LAYOUT:
        return _widen_ieee(patterns, stored, live)
    import ml_dtypes

    # F8_E4M3 has one NaN a sign and no infinity, so a float conversion is exact everywhere but in the sign
    # of NaN, which is set by hand.
    values: Bits = patterns.view(ml_dtypes.float8_e4m3fn).astype(np.float32).view(np.uint32)
    nan = (patterns & 0x7F) == 0x7F
    values[nan] = (patterns[nan].astype(np.uint32) >> np.uint32(7) << np.uint32(31)) | np.uint32(0x7FC00000)
    if live == "F32":
        return values
    if live == "F64":
        return _widen_ieee(values, "F32", "F64")
    narrowed = narrow(values, "F32", live)
    if narrowed is None:
        raise InvalidInput(
            f"{stored} does not widen exactly to {live}", hint="load the engine with dtype float32"
        )
    return narrowed


def _narrow_by_table(bits: Bits, live: str, stored: str) -> Bits | None:
    table = _table(stored, live)
    order = np.argsort(table)
    ordered = table[order]
    out = np.empty(bits.shape, np.uint8)
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK]
        place = np.minimum(np.searchsorted(ordered, part), 255)
        if not np.array_equal(ordered[place], part):
            return None
        out[start : start + _CHUNK] = order[place]
    return out
