"""The index of a coded delta file: its tensors, and the digests before and after."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from weightline.codec.coding import (
    CHUNK_LOG2,
)
from weightline.codec.container import pack_index
from weightline.types import TensorSpec

CHECK = 4
"""Leading bytes of each tensor's digests in the index; one hash over all of them in full stands beside."""


class CodedRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One changed tensor in the index of a coded file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    """Elements changed."""
    base_check: bytes
    """First CHECK bytes of the additive digest before."""
    check: bytes
    """The same afterwards."""


class CodedIndex(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The index of a coded file, as a MessagePack array."""

    base: int | None
    version: int | None
    chunk_log2: int
    base_check: bytes
    """`hash_digests` of the digests before, of all changed tensors."""
    check: bytes
    """The same afterwards."""
    tensors: tuple[CodedRecord, ...]


def hash_digests(digests: Mapping[str, str]) -> bytes:
    """16 bytes over name and digest of several tensors: SHA-256 of `name NUL digest LF`, sorted by name,
    cut."""
    lines = "".join(f"{name}\0{digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).digest()[:16]


def make_index(
    specs: Iterable[TensorSpec], counts: Mapping[str, int], digests: Mapping[str, tuple[str, str]],
    level: str, base: int | None, version: int | None,
) -> bytes:  # fmt: skip
    """The packed index stream."""
    records = tuple(
        CodedRecord(
            spec.name, spec.dtype, spec.shape, counts[spec.name],
            bytes.fromhex(digests[spec.name][0])[:CHECK], bytes.fromhex(digests[spec.name][1])[:CHECK],
        )
        for spec in specs
    )  # fmt: skip
    before = hash_digests({name: pair[0] for name, pair in digests.items()})
    after = hash_digests({name: pair[1] for name, pair in digests.items()})
    index = CodedIndex(base, version, CHUNK_LOG2[level], before, after, records)
    return pack_index(msgspec.msgpack.encode(index))
