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


@intrinsic
def load64(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """The 8 bytes at an address, aligned or not, as a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        import llvmlite.ir as ir

        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.uint64), generate


@intrinsic
def ask(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """Have the line at an address brought into L2; any address will do. Returns 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        import llvmlite.ir as ir

        number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, kind, "llvm.prefetch.p0"
        )
        read, second, data = (ir.Constant(number, value) for value in (0, 2, 1))
        builder.call(prefetch, [builder.inttoptr(arguments[0], byte), read, second, data])
        return ir.Constant(number, 0)

    return types.int32(types.uint64), generate


@nb.njit(cache=True, nogil=True)
def over(address: Any, count: Any, dtype: Any) -> Any:
    """An array of `count` elements at an address."""
    return nb.carray(as_pointer(np.uint64(address)), count, dtype)
