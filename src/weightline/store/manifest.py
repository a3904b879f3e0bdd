"""Manifests: what a version folder holds, and the digest of every tensor of the version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from weightline.core.ledger import FORMAT
from weightline.errors import FormatError
from weightline.types import TensorSpec

MANIFEST = "manifest.json"
DELTA = "delta.safetensors"
ATTACHMENTS = "attachments"
VERSIONS = "versions"

Role = Literal["anchor", "index", "delta", "model_file", "attachment"]


class TensorEntry(Struct, frozen=True, gc=False):
    """One tensor of a version."""

    spec: TensorSpec
    digest: str
    """Additive digest of its bits (`codec.digest_of`)."""


class Blob(Struct, frozen=True):
    """One file of a version folder."""

    name: str
    """Below the folder."""
    nbytes: int
    sha256: str
    role: Role


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies in a version folder. Its SHA-256 stands in the log entry and, with run and version, names the
    weights.
    """

    format: int = FORMAT
    run: str
    version: int | None = None
    """Not in the file: a number is given by the log alone. Filled in by `Store.manifest`."""
    base: int | None
    step: int | None
    complete: bool
    """All tensors are listed. In the file of a delta only the changed ones are; `Store.manifest` adds the
    inherited.
    """
    tensors: tuple[TensorEntry, ...]
    blobs: tuple[Blob, ...]
    weights_digest: str
    """`codec.weights_digest` over all tensors, inherited ones included."""
    raw_nbytes: int
    elements: int
    changed: int
    attachments: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}
    created_at: float

    def named(self, role: Role) -> tuple[Blob, ...]:
        """The blobs of one role."""
        return tuple(blob for blob in self.blobs if blob.role == role)


_ENCODER = msgspec.json.Encoder(order="deterministic")
_DECODER = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """The manifest as it lies in the folder."""
    return _ENCODER.encode(manifest) + b"\n"


def decode(data: bytes, *, where: str) -> Manifest:
    """The inverse of `encode`. Raises `FormatError` that names `where`."""
    try:
        manifest = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise FormatError(
            f"{where} is not a manifest: {error}", hint="run `weightline verify` on the store"
        ) from None
    if manifest.format != FORMAT:
        raise FormatError(
            f"{where} has format {manifest.format}; this build reads format {FORMAT}",
            hint="upgrade weightline",
        )
    return manifest


def digest_of(data: bytes) -> str:
    """SHA-256 of an encoded manifest."""
    return hashlib.sha256(data).hexdigest()


def weights_digest_of(table: Mapping[str, TensorEntry]) -> str:
    """`codec.weights_digest` of a whole version, fit for 100,000 tensors: one hash over one text."""
    shapes: dict[tuple[int, ...], str] = {}
    lines = []
    for name in sorted(table):
        spec, digest = table[name].spec, table[name].digest
        shape = shapes.get(spec.shape)
        if shape is None:
            shape = shapes[spec.shape] = ",".join(map(str, spec.shape))
        lines.append(f"{name}\0{spec.dtype}\0{shape}\0{digest}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()
