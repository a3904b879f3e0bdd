"""Names of dtypes and the way from an array of any layout to its bits and back.

The codec never interprets a value: every element is an unsigned integer of 8, 16, 32 or 64 bits in C order
of the tensor.
Names are those of safetensors.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightline.errors import InvalidInput
from weightline.types import TensorSpec

Bits = npt.NDArray[Any]
"""1-D array of uint8, uint16, uint32 or uint64, C order, native little-endian."""


class _Kind(NamedTuple):
    numpy: str
    """Attribute of numpy or, failing that, of ml_dtypes."""
    width: int
    """Bytes an element."""
    aliases: tuple[str, ...]


_KINDS: dict[str, _Kind] = {
    "BOOL": _Kind("bool_", 1, ("bool",)),
    "U8": _Kind("uint8", 1, ("uint8",)),
    "I8": _Kind("int8", 1, ("int8",)),
    "U16": _Kind("uint16", 2, ("uint16",)),
    "I16": _Kind("int16", 2, ("int16", "short")),
    "U32": _Kind("uint32", 4, ("uint32",)),
    "I32": _Kind("int32", 4, ("int32", "int")),
    "U64": _Kind("uint64", 8, ("uint64",)),
    "I64": _Kind("int64", 8, ("int64", "long")),
    "F16": _Kind("float16", 2, ("float16", "half")),
    "BF16": _Kind("bfloat16", 2, ("bfloat16",)),
    "F32": _Kind("float32", 4, ("float32", "float")),
    "F64": _Kind("float64", 8, ("float64", "double")),
    "F8_E4M3": _Kind("float8_e4m3fn", 1, ("float8_e4m3fn",)),
    "F8_E5M2": _Kind("float8_e5m2", 1, ("float8_e5m2",)),
    "C64": _Kind("complex64", 8, ("complex64", "cfloat")),
}
SUPPORTED: frozenset[str] = frozenset(_KINDS)
_ALIASES: dict[str, str] = {alias: name for name, kind in _KINDS.items() for alias in kind.aliases}
_UINT: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def _refuse(what: str) -> InvalidInput:
    return InvalidInput(
        f"dtype {what} cannot be stored in safetensors",
        hint="use one of " + ", ".join(sorted(SUPPORTED)),
    )


@functools.lru_cache(maxsize=256)
def parse_dtype(dtype: object) -> str:
    """The safetensors name of a numpy, ml_dtypes or torch dtype, or of a name of one ("torch.bfloat16" ->
    "BF16").

    Raises `InvalidInput` for what safetensors cannot hold.
    """
    if isinstance(dtype, str) and dtype in _KINDS:
        return dtype
    if isinstance(dtype, np.dtype):
        text = dtype.name
    elif isinstance(dtype, type):
        try:
            text = np.dtype(dtype).name
        except TypeError:
            raise _refuse(dtype.__name__) from None
    else:
        text = str(dtype)
    name = _ALIASES.get(text.removeprefix("torch.").removeprefix("numpy."))
    if name is None:
        raise _refuse(text)
    return name


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a safetensors name (bf16 and fp8 through `ml_dtypes`). Raises `InvalidInput` for an
    unknown name."""
    kind = _KINDS.get(name)
    if kind is None:
        raise _refuse(repr(name))
    scalar = getattr(np, kind.numpy, None)
    if scalar is None:
        import ml_dtypes

        scalar = getattr(ml_dtypes, kind.numpy)
    dtype: np.dtype[Any] = np.dtype(scalar)
    return dtype


def width_of(name: str) -> int:
    """Bytes an element of the safetensors dtype `name`. Raises `InvalidInput` for an unknown name."""
    kind = _KINDS.get(name)
    if kind is None:
        raise _refuse(repr(name))
    return kind.width


def bits_dtype(name: str) -> np.dtype[Any]:
    """The unsigned integer dtype that holds the bits of one element of `name`."""
    dtype: np.dtype[Any] = _UINT[width_of(name)]
    return dtype


def is_torch(array: object) -> bool:
    """Whether `array` is a torch tensor; never imports torch (a tensor cannot exist before it is
    imported)."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


def count_of(spec: TensorSpec) -> int:
    """Elements of a tensor (1 for 0-dim)."""
    total = 1
    for side in spec.shape:
        total *= side
    return total


def nbytes_of(spec: TensorSpec) -> int:
    """Raw bytes of a tensor."""
    return count_of(spec) * width_of(spec.dtype)


def check_name(name: object) -> None:
    """Raise `InvalidInput` for a tensor name that is not a string or cannot be written as UTF-8."""
    if not isinstance(name, str):
        raise InvalidInput(f"tensor name {name!r} is a {type(name).__name__}", hint="name tensors by strings")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            f"tensor name {name!r} is not valid UTF-8", hint="rename the tensor; it holds a lone surrogate"
        ) from None


def _check_plain(name: str, array: Any) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidInput(
            f"tensor {name!r} is a masked array, whose mask would be lost",
            hint="pass array.filled(value), and the mask as a tensor of its own if it matters",
        )
    if getattr(array, "is_nested", False):
        raise InvalidInput(
            f"tensor {name!r} is a nested tensor without one shape",
            hint="pass its parts as tensors of their own, or pad it: torch.nested.to_padded_tensor",
        )


def spec_of(name: str, array: Any) -> TensorSpec:
    """Name, dtype and shape of a numpy array (or scalar) or torch tensor. Raises `InvalidInput` that names
    the tensor: for a name that no file can hold, and for what is more or less than one dense array (masked
    arrays, nested tensors)."""
    check_name(name)
    if not (isinstance(array, np.ndarray | np.generic) or is_torch(array)):
        raise InvalidInput(
            f"tensor {name!r} is a {type(array).__name__}, not a numpy array or torch tensor",
            hint="pass numpy.ndarray or torch.Tensor values",
        )
    _check_plain(name, array)
    try:
        dtype = parse_dtype(array.dtype)
    except InvalidInput as error:
        raise InvalidInput(f"tensor {name!r}: {error.message}", hint=error.hint) from None
    return TensorSpec(name, dtype, tuple(int(side) for side in array.shape))


def specs_of(weights: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """`spec_of` for each tensor, by name."""
    return {name: spec_of(name, array) for name, array in weights.items()}


def torch_flat(tensor: Any) -> Any:
    """The tensor's bits as a flat torch tensor of a signed integer dtype (uint8 for one byte), where it
    lives."""
    import torch

    if hasattr(tensor, "full_tensor"):
        raise InvalidInput(
            "a DTensor holds only a part of its elements here",
            hint="pass tensor.full_tensor() or the local shards",
        )
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        raise InvalidInput(
            f"a {'nested' if tensor.is_nested else tensor.layout} tensor has no dense bits",
            hint="pass a dense tensor",
        )
    if tensor.device.type == "meta":
        raise InvalidInput("a tensor on the meta device has no bits", hint="materialise the weights first")
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(signed)


def bits_of(array: Any) -> Bits:
    """The bits of a numpy array or torch tensor: 1-D, C order of the tensor, native little-endian unsigned
    integers.

    complex64 gives uint64. A view of the memory where the layout allows it, else a copy; a tensor on a GPU
    is copied to the host.
    Raises `InvalidInput` for a dtype that safetensors cannot hold.
    """
    if is_torch(array):
        width = width_of(parse_dtype(array.dtype))
        return np.asarray(torch_flat(array).cpu().numpy()).view(_UINT[width])
    if not isinstance(array, np.ndarray | np.generic):
        raise InvalidInput(
            f"{type(array).__name__} is not a numpy array or torch tensor",
            hint="pass numpy.ndarray or torch.Tensor values",
        )
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidInput("the mask of a masked array would be lost", hint="pass array.filled(value)")
    array = np.asarray(array)
    dtype = array.dtype
    width = width_of(parse_dtype(dtype if dtype.isnative else dtype.newbyteorder("=")))
    if not dtype.isnative:
        # byteswap moves bytes and never looks at values; complex64 is two floats, swapped one by one.
        array = array.byteswap().view(dtype.newbyteorder("="))
    if not (array.flags.c_contiguous and array.flags.aligned):
        array = np.array(array, order="C", copy=True, subok=False)
    return np.asarray(array.reshape(-1)).view(_UINT[width])


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array's elements begin."""
    memory: Any = array
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a quarter of the time of the other way
    except (TypeError, ValueError):  # read-only, empty, or of a dtype that is no buffer
        address: int = array.__array_interface__["data"][0]
        return address


def from_bits(bits: Bits, spec: TensorSpec) -> npt.NDArray[Any]:
    """The inverse of `bits_of`: a view of `bits` with the tensor's dtype and shape. Raises `InvalidInput`
    when the count differs."""
    if bits.dtype != bits_dtype(spec.dtype) or bits.size != count_of(spec):
        raise InvalidInput(
            f"tensor {spec.name!r}: {bits.size} {bits.dtype} do not make {spec.dtype}{list(spec.shape)}",
            hint="pass the bits of the whole tensor",
        )
    return bits.reshape(-1).view(numpy_dtype(spec.dtype)).reshape(spec.shape)


def plain_bits(array: Any, spec: TensorSpec) -> Bits | None:
    """A flat writable view of a numpy array that is just what `spec` says, native and in C order; None for
    anything that needs a closer look (`spec_of`, `writable_bits`)."""
    native, unsigned = _plain_dtypes(spec.dtype)
    if type(array) is not np.ndarray or array.shape != spec.shape or array.dtype != native:
        return None
    if not array.flags.carray:  # contiguous in C order, aligned, writable
        return None
    return array.reshape(-1).view(unsigned)


@functools.cache
def _plain_dtypes(name: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
    return numpy_dtype(name), bits_dtype(name)


def writable_bits(name: str, array: Any) -> tuple[npt.NDArray[Any], bool]:
    """A writable view of a tensor's own memory as unsigned integers, and whether that view is flat.

    Flat views are 1-D in C order; others have the tensor's shape (strided, Fortran, reversed; perhaps
    big-endian) and are written
    by coordinates. Raises `InvalidInput` for memory that cannot be written element by element.
    """
    if is_torch(array):
        if array.device.type != "cpu":
            raise InvalidInput(
                f"tensor {name!r} lives on {array.device}",
                hint="use codec.device.apply_ for tensors on a GPU",
            )
        import torch

        if array.is_conj() or array.is_neg() or array.layout != torch.strided:
            raise InvalidInput(
                f"tensor {name!r} is a lazy or sparse view", hint="pass the tensor that owns the memory"
            )
        width = width_of(parse_dtype(array.dtype))
        signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        view = array.detach()
        flat = view.is_contiguous()
        view = (view.reshape(-1) if flat else view).view(signed)
        out = np.asarray(view.numpy()).view(_UINT[width])
    else:
        if not isinstance(array, np.ndarray):
            raise InvalidInput(
                f"tensor {name!r} is a {type(array).__name__} and cannot be written",
                hint="pass numpy or torch arrays",
            )
        width = array.dtype.itemsize
        flat = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
        if not array.dtype.isnative and array.dtype.kind == "c":
            raise InvalidInput(f"tensor {name!r} is big-endian complex64", hint="apply to a native array")
        unsigned = _UINT[width] if array.dtype.isnative else _UINT[width].newbyteorder("S")
        out = (array.reshape(-1) if flat else array).view(unsigned)
    if not out.flags.writeable or (
        not flat and any(st == 0 and n > 1 for st, n in zip(out.strides, out.shape, strict=True))
    ):
        raise InvalidInput(
            f"tensor {name!r} is read-only or broadcast", hint="apply to an array that owns its memory"
        )
    return out, flat
