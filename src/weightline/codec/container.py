"""The file around a delta's streams: one safetensors file whose tensors are a few pooled byte streams and a
binary index.

docs/codec.md specifies it. This module knows headers, stream checks, atomic writing and mapping; what the
streams mean is `layout`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from weightline.codec.dtypes import Bits
from weightline.errors import FormatError, IntegrityError, InvalidInput

FORMAT = "weightline.delta"
FORMAT_VERSION = 1
INDEX = "index"
STREAMS = ("whole", "positions", "values", "coded", "tables", INDEX)
"""Names of the streams in file order, `weightline.` before each; those that are empty are left out."""
ALIGN = 64
MAX_HEADER = 1 << 16
"""Bytes of the largest header that a delta file can have; a longer one is refused unread."""
HELD = 256 << 20
"""Bytes up to which a file is read instead of mapped: whoever cuts it short, or a disk that fails, can then
not kill a process that holds it (a mapping would: SIGBUS).
"""
MAX_INFLATE = 1032
"""The most that DEFLATE expands: a declared size beyond it lies."""
_UNCHECKED = "whole"
"""The stream whose bytes are covered by the digests of its tensors instead of a check of its own."""


def check_of(data: Any) -> str:
    """Check of a stream: the first 16 bytes of its SHA-256, hex."""
    return hashlib.sha256(data).hexdigest()[:32]


def header_of(sizes: Mapping[str, int], checks: Mapping[str, str], level: str) -> bytes:
    """The file's first bytes. A function of the sizes and checks alone, so that a reader refuses any other
    header."""
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "level": level}
    metadata |= {f"check.{name}": checks[name] for name in sizes if name != _UNCHECKED}
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, size in sizes.items():
        table[f"weightline.{name}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def header_nbytes(sizes: Mapping[str, int], level: str) -> int:
    """Length of `header_of`, which does not depend on the checks."""
    return len(header_of(sizes, dict.fromkeys(sizes, "0" * 32), level))


def pack_index(data: bytes) -> bytes:
    """The index as it lies in the file: u32 plain length, then DEFLATE (zlib)."""
    return struct.pack("<I", len(data)) + zlib.compress(data, 9)


def unpack_index(data: bytes, where: str) -> bytes:
    """The inverse. Raises `FormatError`; never takes more memory than the stream can hold."""
    if len(data) < 4:
        raise broken(where, "its index is cut short")
    (length,) = struct.unpack("<I", data[:4])
    if length > MAX_INFLATE * len(data):
        raise broken(where, f"its index declares {length} bytes, more than {len(data)} can hold")
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(data[4:], length + 1)
    except zlib.error as error:
        raise broken(where, f"its index does not inflate ({error})") from None
    if len(plain) != length or not inflate.eof or inflate.unused_data:
        raise broken(where, "its index is not as long as it says")
    return plain


def broken(where: str, what: str) -> FormatError:
    return FormatError(f"delta file {where}: {what}", hint="the file is damaged or no delta; fetch it again")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A binary file under a temporary name beside `path`, fsynced and renamed to it at the end; removed
    after an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        handle = temporary.open("xb")
    except FileNotFoundError:
        raise InvalidInput(f"there is no folder {path.parent}", hint="create it first") from None
    try:
        with handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_streams(
    path: Path, sizes: Mapping[str, int], pieces: Mapping[str, Iterable[Any]], level: str
) -> int:
    """Write a delta file: the pieces of each stream in turn, which must add up to `sizes`. Returns its
    bytes."""
    sizes = {name: sizes[name] for name in STREAMS if sizes.get(name)}
    checks: dict[str, str] = {}
    with replacing(path) as handle:
        handle.write(header_of(sizes, dict.fromkeys(sizes, "0" * 32), level))
        for name, size in sizes.items():
            check = hashlib.sha256()
            written = 0
            for piece in pieces[name]:
                view = memoryview(piece).cast("B") if memoryview(piece).nbytes else memoryview(b"")
                handle.write(view)
                if name != _UNCHECKED:
                    check.update(view)
                written += view.nbytes
            if written != size:
                raise InvalidInput(
                    f"stream {name} has {written} bytes instead of {size}",
                    hint="the weights changed while they were written",
                )
            checks[name] = check.hexdigest()[:32]
        handle.seek(0)
        handle.write(header_of(sizes, checks, level))
    return header_nbytes(sizes, level) + sum(sizes.values())


class Mapped:
    """A delta file, in memory or (above `HELD`) mapped. Its streams are read-only uint8 arrays over it."""

    def __init__(self, path: Path, *, verify: bool) -> None:
        self.path = path
        where = str(path)
        try:
            with path.open("rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                if size < 8:
                    raise broken(where, f"{size} bytes are no safetensors file")
                mapped: bytes | mmap.mmap = b""
                if size <= HELD:
                    mapped = handle.read()
                    size = len(mapped)
                else:
                    mapped = mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise InvalidInput(f"there is no file {where}", hint="check the path") from None
        except IsADirectoryError:
            raise InvalidInput(f"{where} is a folder, not a delta file", hint="name the file") from None
        self.nbytes = size
        data = np.frombuffer(mapped, np.uint8)
        begin, sizes, checks, self.level = _parse_header(data, where)
        self.streams: dict[str, Bits] = {}
        at = begin
        for name, length in sizes.items():
            self.streams[name] = data[at : at + length]
            at += length
        checked = [name for name in sizes if name != _UNCHECKED] if verify else [INDEX]
        for name in checked:
            if check_of(self.streams[name]) != checks[name]:
                raise IntegrityError(
                    f"delta file {where}: stream {name} differs from its check",
                    hint="the file is damaged; fetch it again",
                )
        self.index = unpack_index(self.streams[INDEX].tobytes(), where)

    def stream(self, name: str) -> Bits:
        """A stream; empty when the file has none of that name."""
        return self.streams.get(name, np.empty(0, np.uint8))


def _parse_header(data: Bits, where: str) -> tuple[int, dict[str, int], dict[str, str], str]:
    """Start of the streams, their sizes and their checks. Raises `FormatError`."""
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(MAX_HEADER, data.size - 8):
        raise broken(where, f"its header declares {length} bytes")
    raw = data[: 8 + length].tobytes()
    try:
        table = msgspec.json.decode(raw[8:], type=dict[str, dict[str, Any]])
        metadata = table.pop("__metadata__")
        found, version = str(metadata["format"]), int(metadata["format_version"])
        level = str(metadata["level"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError):
        raise broken(where, "its header is not that of a delta") from None
    if found != FORMAT:
        raise broken(where, f"its format is {found!r}, not {FORMAT!r}")
    if version != FORMAT_VERSION:
        raise FormatError(
            f"delta file {where}: format version {version}, this Weightline reads {FORMAT_VERSION}",
            hint="upgrade weightline to read newer files",
        )
    sizes: dict[str, int] = {}
    checks: dict[str, str] = {}
    for name in STREAMS:
        entry = table.get(f"weightline.{name}")
        if entry is None:
            continue
        shape = entry.get("shape")
        if not (isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and shape[0] > 0):
            raise broken(where, f"stream {name} has no plain length")
        sizes[name] = shape[0]
        checks[name] = str(metadata.get(f"check.{name}", ""))
    if INDEX not in sizes or header_of(sizes, checks, level) != raw:
        raise broken(where, "its header is not the one its streams have")
    if 8 + length + sum(sizes.values()) != data.size:
        raise broken(where, f"{data.size} bytes instead of {8 + length + sum(sizes.values())}")
    return 8 + length, sizes, checks, level
