"""The port to where a store's bytes lie: a folder, an S3-compatible store, two folders, or memory.

Everything above speaks in keys below one root. Whatever a place is made of, `put_if_absent` is the only verb
that two writers may race on: one of them creates the object, whole and durable, and the other is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from weightline.errors import InvalidInput, Unavailable
from weightline.store.disk import PROBE, draft_name

Outcome = Literal["created", "exists", "lost"]
"""`created`: by this call, durable. `exists`: something is there, not by this call (or by a try of it whose
answer got lost below us: compare write ids). `lost`: nobody can tell; read it back or repeat the call."""

FIRST = "owner.json"
"""Of a folder that is uploaded, this file goes first: what is left half way says whose it was."""
LAST = "manifest.json"
"""Of a folder that is uploaded, this file goes last: where it is, everything is."""


class Missing(LookupError):
    """There is no object under that key. Whoever asked knows what that means, and says it."""


class Listed(Struct, frozen=True, order=True):
    """One object of a listing."""

    key: str
    nbytes: int


class Place(Protocol):
    """One root and the objects below it. Keys are `/`-separated; safe to use from any thread.

    Every verb raises `Unavailable` when the place does not answer (`StorageFull` without room) and
    `InvalidInput` for a key that cannot be. A verb that raises may be repeated: none leaves half an object.
    """

    poll_s: float
    """How often it is asked for news where nobody rings, in seconds: each time costs one request."""

    degraded: str
    """Why a loss would cost more now than it should; empty when all is well."""

    @property
    def url(self) -> str:
        """How the place is called in messages and in `connect`; without secrets."""

    def free(self) -> int | None:
        """Bytes that may still be written; None where there is no such bound."""

    def skew(self) -> float:
        """Seconds by which the clock of the place is ahead of this host's; 0 where they are the same."""

    def put_if_absent(self, key: str, data: bytes) -> Outcome:
        """Create a small object, durable before it answers `created`. An error that is raised means: not
        created.
        """

    def put(self, key: str, data: bytes) -> None:
        """Give a small object a new content, atomically and durably; the last writer wins."""

    def read(self, key: str) -> bytes:
        """A whole small object. Raises `Missing`."""

    def size(self, key: str) -> int | None:
        """Bytes of an object; None when there is none."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[Listed]:
        """The objects below the folder `prefix` ("" is everything), behind the key `after`, by code points.

        Objects that come or go meanwhile may or may not be in it. Names that begin with a dot are not.
        """

    def delete(self, key: str) -> None:
        """Delete an object; one that is gone already is fine."""

    def delete_folder(self, prefix: str) -> None:
        """Delete everything below a folder, `manifest.json` first: what is half gone does not look whole."""

    def upload(self, prefix: str, folder: Path, same: Mapping[str, str] = {}) -> None:
        """Copy a complete local folder, durable before it returns. Repeated, it ends in the same objects.

        `same`: name in the folder -> key of an object that is there and has the same bytes, which the place
        may take instead of sending them. An object that is gone or another by then is not taken.
        """

    def file(self, key: str, *, nbytes: int, sha256: str) -> Path:
        """A local file with the bytes of an object, to be mapped and never written to.

        On a folder it is the object itself, of which only the size was looked at; else a copy that was
        checked against `sha256`. Raises `Missing`, `IntegrityError`.
        """

    def probe(self) -> None:
        """Raises `InvalidInput` unless this place refuses to create an object a second time."""


def check_key(key: str) -> str:
    """The key, if it is one: relative, without empty parts, `.` or `..`. Raises `InvalidInput`."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
        raise InvalidInput(f"{key!r} is no key of an object", hint="use names separated by single slashes")
    return key


def below(prefix: str) -> str:
    """What the keys below the folder `prefix` begin with."""
    return f"{check_key(prefix)}/" if prefix else ""


def hidden(key: str) -> bool:
    """Is a part of the key a name that listings leave out (drafts, probes)?"""
    return any(part.startswith(".") for part in key.split("/"))


def files_of(folder: Path) -> list[tuple[str, Path]]:
    """(key below the folder, file) of everything in it but for hidden files; the owner first, the manifest
    last.
    """
    found = sorted(
        (path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file()
    )
    return sorted(
        ((key, path) for key, path in found if not hidden(key)),
        key=lambda file: (file[0] != FIRST, file[0] == LAST),
    )


def missing(url: str, key: str) -> Missing:
    """The error for a key under which there is nothing."""
    return Missing(f"{key} is missing in {url}")


def probe(place: Place) -> None:
    """`Place.probe` in terms of the other verbs: two creates of one name, and what is there then."""
    key = f"log/{draft_name(PROBE)}"
    try:
        first, second = _create(place, key, b"1"), _create(place, key, b"2")
        kept = place.read(key)
    finally:
        place.delete(key)
    if first != "created" or second != "exists" or kept != b"1":
        raise InvalidInput(
            f"{place.url} does not refuse to create an object a second time ({first}, {second}): "
            "two writers would overwrite each other's versions",
            hint="use a place with conditional writes: a folder with hard links, or S3 with If-None-Match",
        )


def _create(place: Place, key: str, data: bytes) -> Outcome:
    """`put_if_absent` whose lost answers are cleared up by a look, so that a bad line is not taken for a bad
    place.
    """
    outcome = place.put_if_absent(key, data)
    for _ in range(3):
        if outcome != "lost":
            return outcome
        try:
            return "created" if place.read(key) == data else "exists"
        except Missing:
            outcome = place.put_if_absent(key, data)
    raise Unavailable(f"{place.url} gave no answer to a probe", hint="check the connection, then retry")
