"""Machine instructions that numba does not offer by itself: arrays over addresses, and counting of bits.
Imported late."""

# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types
from numba.extending import intrinsic


@intrinsic
def as_pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """An integer as a void pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@intrinsic
def trailing_zeros(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
    """Index of the lowest set bit of a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        import llvmlite.ir as ir

        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def leading_zeros(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
    """Zero bits above the highest set bit of a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        import llvmlite.ir as ir

        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@nb.njit(cache=True, nogil=True)
def over(address: Any, count: Any, dtype: Any) -> Any:
    """An array of `count` elements at an address."""
    return nb.carray(as_pointer(np.uint64(address)), count, dtype)
