"""Where the tensors of a safetensors file or a sharded Hugging Face folder lie, without reading them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightline.codec.dtypes import SUPPORTED, Bits, bits_dtype, nbytes_of
from weightline.errors import FormatError, InvalidInput
from weightline.types import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""The limit that safetensors itself sets."""


class Located(NamedTuple):
    """One tensor in a file."""

    spec: TensorSpec
    path: Path
    offset: int


def _broken(path: Path, what: str) -> FormatError:
    return FormatError(f"{path}: {what}", hint="the file is no safetensors file, or damaged")


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begins, and its header. Raises `FormatError` or `InvalidInput`."""
    try:
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            head = handle.read(8)
            if len(head) < 8:
                raise _broken(path, f"{size} bytes are too few")
            (length,) = struct.unpack("<Q", head)
            if length > min(MAX_HEADER, size - 8):
                raise _broken(path, f"its header declares {length} bytes")
            table = json.loads(handle.read(length))
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {path}", hint="check the path") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise _broken(path, "its header is no JSON") from None
    if not isinstance(table, dict):
        raise _broken(path, "its header is no JSON object")
    return 8 + length, table


def tensors_in(path: Path) -> dict[str, Located]:
    """The tensors of one file, in the order of their data."""
    begin, table = read_header(path)
    size = path.stat().st_size
    found = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(side) for side in entry["shape"])
            first, last = (int(x) for x in entry["data_offsets"])
        except (TypeError, KeyError, ValueError):
            raise _broken(path, f"tensor {name!r} is not described") from None
        if dtype not in SUPPORTED:
            raise InvalidInput(
                f"{path}: tensor {name!r} has dtype {dtype}", hint=f"use {', '.join(sorted(SUPPORTED))}"
            )
        spec = TensorSpec(name, dtype, shape)
        if min(shape, default=0) < 0 or first < 0 or last - first != nbytes_of(spec) or begin + last > size:
            raise _broken(path, f"tensor {name!r} does not lie where it says")
        found[name] = Located(spec, path, begin + first)
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


def shards_of(place: Path) -> list[Path]:
    """The safetensors files of a file or folder, in order. Raises `InvalidInput` when there is none."""
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise InvalidInput(f"there is no file or folder {place}", hint="check the path")
    index = place / INDEX_NAME
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise _broken(index, "it is no index of shards") from None
        if any("/" in name or name.startswith(".") for name in names):
            raise _broken(index, "it names files outside its folder")
        return [place / name for name in names]
    shards = sorted(place.glob("*.safetensors"))
    if not shards:
        raise InvalidInput(
            f"{place} holds no safetensors files", hint="name a Hugging Face folder or a safetensors file"
        )
    return shards


def locate(place: Path) -> dict[str, Located]:
    """Every tensor of a file or folder. Raises `InvalidInput` for a name in two shards."""
    found: dict[str, Located] = {}
    for shard in shards_of(place):
        for name, located in tensors_in(shard).items():
            if name in found:
                raise InvalidInput(f"{place}: tensor {name!r} is in two shards", hint="mend the folder")
            found[name] = located
    return found


class Reader:
    """Reads element ranges of located tensors with bounded memory; safe to use from several threads."""

    def __init__(self, tensors: Mapping[str, Located]) -> None:
        self._tensors = tensors
        self._files: dict[Path, int] = {}
        for path in {located.path for located in tensors.values()}:
            self._files[path] = os.open(path, os.O_RDONLY)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def read(self, name: str, start: int, elements: int) -> Bits:
        """Bits of some elements. Raises `FormatError` when the file has become shorter."""
        located = self._tensors[name]
        out: Bits = np.empty(elements, bits_dtype(located.spec.dtype))
        view = out.data.cast("B") if elements else memoryview(b"")
        at = located.offset + start * out.itemsize
        done = 0
        while done < len(view):
            got = os.preadv(self._files[located.path], [view[done:]], at + done)
            if got <= 0:
                raise _broken(located.path, "it became shorter while it was read")
            done += got
        return out
