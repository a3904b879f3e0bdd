"""The records that cross layers: frozen, plain, without behaviour beyond their own fields.

dtype names are those of safetensors ("BF16", "F8_E4M3", …). Times are seconds since the Unix epoch. Digests
are lower-case hex.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from msgspec import Struct

from weightline.errors import InvalidInput

VersionKind = Literal["anchor", "delta"]
Verification = Literal["live", "loader_input", "none"]


class TensorSpec(Struct, frozen=True, order=True, gc=False):
    """Name, dtype and shape of one tensor, under its Hugging Face name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightVersionSpan(Struct, frozen=True):
    """Output tokens `start` (inclusive) to `end` (exclusive) were sampled by the weights `version`.

    Raises `InvalidInput` for a range that cannot be: a negative start, an end before the start, a version
    that is no string. An empty range may be, but is never in a canonical list (`core.spans`).
    """

    version: str
    start: int
    end: int

    def __post_init__(self) -> None:
        # type() and not isinstance: a bool is an int to Python and never a token number.
        if type(self.start) is not int or type(self.end) is not int or not 0 <= self.start <= self.end:
            raise InvalidInput(
                f"span [{self.start!r}, {self.end!r}) of label {self.version!r} is no range of tokens",
                hint="0 <= start <= end, in output tokens",
            )
        if not isinstance(self.version, str):
            raise InvalidInput(
                f"span [{self.start}, {self.end}): version is {self.version!r}, not a string",
                hint='the version of a span is a label like "7@3f9c2d1e", as the engine gave it',
            )


class Ack(Struct, frozen=True, kw_only=True):
    """A subscriber says that its engine serves a version, and how that was verified."""

    subscriber: str
    version: int
    verified: Verification = "none"
    at: float = 0.0
    pause_ms: float | None = None
    """How long the engine was paused for it, in milliseconds."""
    detail: str = ""


class VersionRecord(Struct, frozen=True, kw_only=True):
    """One committed version, as the log and its manifest tell it."""

    version: int
    seq: int
    """Number of the log entry; not the version."""
    parent: int | None
    """The version that training went on from (lineage)."""
    base: int | None
    """The version that the delta's bytes are against; None when there is no delta."""
    epoch: int
    step: int | None
    label: str
    kind: VersionKind
    """"anchor" when the whole weights are stored (a delta may lie beside them), else "delta"."""
    nbytes: int
    """Bytes stored for the weights of this version (anchor and delta; manifest and attachments apart)."""
    raw_nbytes: int
    """Bytes of the raw weights."""
    changed: int
    """Elements that differ from `base` (all of them when there is no base)."""
    elements: int
    digest: str
    """SHA-256 of the manifest: with run and version, the identity of these weights."""
    folder: str
    """Folder below the store's root."""
    committed_at: float
    commit_id: str
    metadata: dict[str, Any] = {}
    attachments: tuple[str, ...] = ()
    yanked: bool = False
    abandoned: bool = False
    retired: bool = False
    """The bytes are gone or going; `load` raises `VersionGone`."""
    acks: tuple[Ack, ...] = ()


class Problem(Struct, frozen=True):
    """One finding of `verify`."""

    kind: str
    version: int | None
    path: str
    hint: str


class VerifyReport(Struct, frozen=True):
    """What `verify` found; `ok` only when there is no problem."""

    ok: bool
    versions: int
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()
    """What lies there and harms nothing: drafts and stagings of dead processes, which are swept."""


class SpanDict(TypedDict):
    """`WeightVersionSpan` as it looks in JSON."""

    version: str
    start: int
    end: int
