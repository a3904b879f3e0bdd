"""Plain safetensors files of any dtype, without torch: mapped for reading, streamed for writing.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without holes
(https://github.com/huggingface/safetensors, "Format"). Files are mapped copy-on-write: arrays may be written
to, the file never changes, and pages that nobody writes stay shared with every other reader.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from weightline.codec import SUPPORTED, count_of, nbytes_of, numpy_dtype, width_of
from weightline.codec.dtypes import Bits
from weightline.errors import FormatError, InvalidInput
from weightline.types import TensorSpec

MAX_HEADER = 100_000_000
"""A longer header can be written but no safetensors reader takes it."""
_RESERVED = "__metadata__"
_PIECE = 8 << 20

Array = npt.NDArray[Any]


class _Place(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(Struct, frozen=True):
    """What a file declares; checked against its size."""

    specs: dict[str, TensorSpec]
    begin: dict[str, int]
    """First byte of each tensor in the file."""
    metadata: dict[str, str]


def map_file(path: Path, *, held: bool = False) -> dict[str, Array]:
    """Name -> array over the mapped file, or (`held`) over a copy of it in memory, which nothing that happens
    to the file can hurt. Raises `FormatError` when it is cut short or not safetensors.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _read_header(file.read(8), file.read, size, path)
        if held:
            file.seek(0)
            data = np.fromfile(file, np.uint8, size)
            if data.size != size:
                raise _broken(path, f"it was cut short to {data.size} bytes while it was read")
        else:
            data = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), np.uint8)
    out: dict[str, Array] = {}
    for name, spec in header.specs.items():
        begin = header.begin[name]
        raw = data[begin : begin + nbytes_of(spec)]
        out[name] = raw.view(numpy_dtype(spec.dtype)).reshape(spec.shape)
    return out


def read_header(path: Path) -> Header:
    """The header alone. Raises `FormatError`."""
    with path.open("rb") as file:
        return _read_header(file.read(8), file.read, os.fstat(file.fileno()).st_size, path)


def _read_header(prefix: bytes, read: Callable[[int], bytes], size: int, path: Path) -> Header:
    if len(prefix) < 8:
        raise _broken(path, f"{size} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER, size - 8):
        raise _broken(path, f"its header declares {length} bytes, the file has {size}")
    try:
        table = msgspec.json.decode(read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(table.pop(_RESERVED, b"{}"), type=dict[str, str])
        places = {name: msgspec.json.decode(raw, type=_Place) for name, raw in table.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _broken(path, f"its header cannot be read ({error})") from None
    specs = {name: TensorSpec(name, place.dtype, place.shape) for name, place in places.items()}
    begin = {name: 8 + length + place.data_offsets[0] for name, place in places.items()}
    _check_places(path, places, specs, size - 8 - length)
    return Header(specs, begin, metadata)


def _check_places(
    path: Path, places: Mapping[str, _Place], specs: Mapping[str, TensorSpec], size: int
) -> None:
    at = 0
    for name, place in sorted(places.items(), key=lambda item: item[1].data_offsets):
        if place.dtype not in SUPPORTED:
            raise _broken(path, f"tensor {name!r} has dtype {place.dtype!r}, which cannot be stored")
        if any(side < 0 for side in place.shape):
            raise _broken(path, f"tensor {name!r} has shape {list(place.shape)}")
        first, last = place.data_offsets
        if first != at or last - first != nbytes_of(specs[name]):
            raise _broken(path, f"tensor {name!r} lies at {first}..{last}, which does not fit its shape")
        at = last
    if at != size:
        raise _broken(path, f"its tensors take {at} bytes, the file has {size}: it is cut short or grown")


def _broken(path: Path, what: str) -> FormatError:
    return FormatError(f"{path}: {what}", hint="the file is damaged or no safetensors file; write it again")


def order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The order in which tensors lie in a file: wide dtypes first, so that every one is aligned."""
    return sorted(specs, key=lambda spec: (-width_of(spec.dtype), spec.name))


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with these tensors, in `order`. Raises `InvalidInput` for a name that cannot
    be.
    """
    table: dict[str, Any] = {_RESERVED: dict(metadata)}
    at = 0
    for spec in order(specs):
        if spec.name == _RESERVED:
            raise InvalidInput(f"a tensor cannot be called {_RESERVED!r}", hint="rename it")
        end = at + nbytes_of(spec)
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise InvalidInput(
            f"{len(specs)} tensors need a header of {len(text)} bytes, more than {MAX_HEADER}",
            hint="use smaller shards",
        )
    return struct.pack("<Q", len(text)) + text


def stream(
    specs: Sequence[TensorSpec], bits: Callable[[str], Bits], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """A whole file, piece by piece; `bits` gives each tensor's bits when its turn comes."""
    yield memoryview(header_bytes(specs, metadata))
    for spec in order(specs):
        flat = bits(spec.name)
        if flat.size != count_of(spec) or flat.dtype.itemsize != width_of(spec.dtype):
            raise InvalidInput(f"tensor {spec.name!r} changed its size while it was written")
        raw = np.ascontiguousarray(flat).view(np.uint8).data if flat.size else memoryview(b"")
        for begin in range(0, raw.nbytes, _PIECE):
            yield raw[begin : begin + _PIECE]
