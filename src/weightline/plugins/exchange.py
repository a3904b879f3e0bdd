"""The two kinds of file that a follower and a plugin exchange: refit files in, answers out.

A refit file is one safetensors file whose tensors are a few pooled streams: `index` (int64, flat C-order
indexes in the Hugging Face tensors) and `bits.1`, `bits.2`, `bits.4`, `bits.8` (unsigned integers by element
width). Its metadata key `weightline.refit` is a JSON list that says, tensor by tensor, what lies where:

    {"name", "dtype", "shape", "digest", "index": first | null, "bits": first, "count"}

`index` null: the whole tensor. An answer is a small JSON file, written under another name and renamed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

KEY = "weightline.refit"
OWNER = "owner.json"
"""A follower's runtime folder holds a file of this name; answers are written to no other folder."""
MAX_HEADER = 1 << 28
_DTYPES = {"I64": np.int64, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64}
BY_WIDTH = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


class Refused(Exception):
    """A typed no, in the form that the follower turns into one of its errors.

    `kind`: "refit", "conflict", "invalid_input" or "integrity"; `state`: what the engine serves ("old",
    "new", "unknown").
    """

    def __init__(self, message: str, *, kind: str = "refit", state: str = "old", hint: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.state, self.hint = kind, message, state, hint

    def to_dict(self) -> dict[str, Any]:
        """As it crosses to the follower."""
        fields = {"kind": self.kind, "message": self.message, "hint": self.hint}
        if self.kind == "refit":
            fields["engine_state"] = self.state
        return fields


@dataclass(frozen=True)
class Change:
    """New bits of one tensor, in its stored dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    index: npt.NDArray[np.int64] | None
    bits: npt.NDArray[Any]


@dataclass(frozen=True)
class WholeTensor:
    """One tensor of a module that takes no changes, in full: its bits lie alone in a mapped file, in the
    stored dtype. `old`: the same of the version that is live, for the way back."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    path: str
    old_path: str | None
    old_digest: str | None

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> WholeTensor:
        """From a request. Raises `KeyError`, `TypeError`, `ValueError`."""
        fields = {key: entry[key] for key in ("name", "dtype", "digest", "path", "old_path", "old_digest")}
        return cls(shape=tuple(int(n) for n in entry["shape"]), **fields)


def map_bits(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    """The bits of one tensor's file, mapped privately. Raises `Refused` when it is not `count` elements."""
    from weightline.plugins.bits import UNSIGNED, width

    kind = np.dtype(UNSIGNED[width(dtype)])
    if count == 0:
        return np.empty(0, kind)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: cannot be mapped ({error})", kind="integrity") from None
    if len(data) != count * kind.itemsize:
        raise Refused(f"{path}: {len(data)} bytes, not {count * kind.itemsize}", kind="integrity")
    return np.frombuffer(data, kind)


def write_refit(path: Path, changes: list[Change]) -> tuple[int, str]:
    """Write `path` (temporary name, rename); returns its size in bytes and its SHA-256."""
    entries: list[dict[str, Any]] = []
    streams: dict[str, list[npt.NDArray[Any]]] = {}
    sizes: dict[str, int] = {}

    def put(stream: str, array: npt.NDArray[Any]) -> int:
        at = sizes.get(stream, 0)
        streams.setdefault(stream, []).append(array)
        sizes[stream] = at + array.size
        return at

    for change in changes:
        entries.append(
            {
                "name": change.name,
                "dtype": change.dtype,
                "shape": list(change.shape),
                "digest": change.digest,
                "index": None if change.index is None else put("index", change.index),
                "bits": put(f"bits.{change.bits.itemsize}", change.bits),
                "count": int(change.bits.size),
            }
        )
    header: dict[str, Any] = {"__metadata__": {KEY: json.dumps(entries, separators=(",", ":"))}}
    # Wide elements first, so that every stream starts aligned.
    order = sorted(sizes, key=lambda name: (-streams[name][0].itemsize, name))
    at = 0
    for name in order:
        size = sizes[name] * streams[name][0].itemsize
        dtype = "I64" if name == "index" else BY_WIDTH[int(name[5:])]
        header[name] = {"dtype": dtype, "shape": [sizes[name]], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    total = hashlib.sha256()
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("wb") as out:
            for piece in (struct.pack("<Q", len(text)), text):
                total.update(piece)
                out.write(piece)
            for name in order:
                for array in streams[name]:
                    data = np.ascontiguousarray(array).view(np.uint8).data
                    total.update(data)
                    out.write(data)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return at + len(text) + 8, total.hexdigest()


def read_refit(path: Path, sha256: str) -> list[Change]:
    """Map a refit file; its arrays are views of the mapping. Raises `Refused` for any damage."""

    def broken(why: str) -> Refused:
        return Refused(f"{path}: {why}", kind="integrity", hint="the follower writes it anew by itself")

    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise broken(f"cannot be mapped ({error})") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise broken("its bytes are not those that the follower wrote")
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        entries = json.loads(header["__metadata__"][KEY])
        streams = {
            name: _stream(data, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"
        }
        return [_change(entry, streams) for entry in entries]
    except (KeyError, TypeError, ValueError, struct.error, IndexError) as error:
        raise broken(f"not a refit file ({error!r})") from None


def _stream(data: mmap.mmap, start: int, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    first, last = entry["data_offsets"]
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if first < 0 or last < first or start + last > len(data) or (last - first) % dtype.itemsize:
        raise ValueError("a stream lies outside the file")
    return np.frombuffer(data, dtype, (last - first) // dtype.itemsize, start + first)


def _change(entry: Mapping[str, Any], streams: Mapping[str, npt.NDArray[Any]]) -> Change:
    from weightline.plugins.bits import width

    name, dtype, shape = str(entry["name"]), str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
    count, size = int(entry["count"]), int(np.prod(shape, dtype=np.int64))
    bits = _slice(streams, f"bits.{width(dtype)}", int(entry["bits"]), count)
    index = None if entry["index"] is None else _slice(streams, "index", int(entry["index"]), count)
    if index is None:
        if count != size:
            raise ValueError(f"{name}: {count} of {size} elements")
    elif count and not (index[0] >= 0 and index[-1] < size and bool((index[1:] > index[:-1]).all())):
        raise ValueError(f"{name}: indexes are not ascending within 0..{size - 1}")
    return Change(name, dtype, shape, str(entry["digest"]), index, bits)


def _slice(streams: Mapping[str, npt.NDArray[Any]], name: str, at: int, count: int) -> npt.NDArray[Any]:
    if count == 0:
        return np.empty(0, np.int64 if name == "index" else np.dtype(_DTYPES[BY_WIDTH[int(name[5:])]]))
    part = streams[name][at : at + count]
    if at < 0 or part.size != count:
        raise ValueError(f"stream {name} is too short")
    return part


def write_answer(path: Path, answer: Mapping[str, Any]) -> None:
    """Write an answer where the follower waits for it. Raises `ValueError` for a folder that is no follower's
    runtime folder, `OSError`."""
    if not (path.parent / OWNER).is_file():
        raise ValueError(f"{path.parent} is not a follower's runtime folder")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(answer, separators=(",", ":")))
    draft.rename(path)
