"""Is the newest version still whole on disk? Asked by a running writer before it puts a delta on top of it.

A writer holds the bits of the newest version in memory, so nothing else would tell it that the files are
damaged, and every later delta would rest on a version that no engine can load. Each look costs one `stat` a
file of the chain; a file that is not as it was is read again. Rot that leaves size and time alone is found by
reading a piece of the chain at each look, in turn.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from weightline.core.plan import chain
from weightline.errors import IntegrityError
from weightline.store.disk import sha256_of
from weightline.store.manifest import MANIFEST, Blob, Role
from weightline.store.mirror import MirrorPlace
from weightline.store.staging import is_here

if TYPE_CHECKING:
    from weightline.store.store import Store

PIECE = 256 << 10
"""Bytes that one look reads again: well below a millisecond of SHA-256 on a current CPU."""

FILES = 8
"""Files that one look reads at most."""

_Mark = tuple[int, int, int]


class Kept(Struct, frozen=True):
    """One file that the newest version rests on."""

    key: str
    nbytes: int
    sha256: str


def kept(folder: str, blobs: Iterable[Blob], role: Role, manifest: tuple[int, str]) -> list[Kept]:
    """The files of a version that a chain needs: blobs of one role, and the manifest (bytes, SHA-256)."""
    files = [Kept(f"{folder}/{blob.name}", blob.nbytes, blob.sha256) for blob in blobs if blob.role == role]
    return [*files, Kept(f"{folder}/{MANIFEST}", *manifest)]


class HeadWatch:
    """The files of one chain, on this host's disks: those of a folder, or of both halves of a mirror (one
    whole copy of a file will do). Object stores look after their bytes themselves: nothing is watched there.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._roots: list[Path] = []
        if is_here(store):
            self._roots = [store.root]
        elif isinstance(store.place, MirrorPlace):
            self._roots = [half.root for half in store.place.halves]
        self._files: list[Kept] = []
        self._seen: dict[str, _Mark] = {}
        self._turn = 0
        self._at = 0
        self._sha = hashlib.sha256()

    def begin(self, version: int | None, *, trusted: bool = False) -> None:
        """Watch what `version` rests on; None: nothing. `trusted`: its files were checked a moment ago; else
        the next look reads all of them.
        """
        self._files, self._seen = [], {}
        self._next(0)
        if version is None or not self._roots:
            return
        state = self._store.state
        for at in chain(state, version):
            entry = state.version(at)
            role: Role = "anchor" if state.holds_anchor(at) else "delta"
            key = f"{entry.folder}/{MANIFEST}"
            size = self._store.place.size(key) or 0
            blobs = self._store.reading.stored(at).blobs
            # Of a mirror one half was checked, whichever it was.
            self.add(
                kept(entry.folder, blobs, role, (size, entry.digest)),
                trusted=trusted and len(self._roots) == 1,
            )

    def add(self, files: list[Kept], *, alone: bool = False, trusted: bool = True) -> None:
        """A version was put on top; `alone`: it rests on nothing else."""
        if not self._roots:
            return
        if alone:
            self._files, self._seen = [], {}
            self._next(0)
        self._files += files
        for file in files if trusted else ():
            for path in self._paths(file):
                if (mark := _mark(path)) is not None and mark[1] == file.nbytes:
                    self._seen[path] = mark

    def look(self) -> None:
        """Raises `IntegrityError` naming the file that is not what it was."""
        for file in self._files:
            if not self._whole(file):
                raise IntegrityError(
                    f"{self._roots[0] / file.key}, on which the newest version rests, is damaged or missing",
                    hint="run `weightline verify`; versions from here on do not rest on it",
                )
        self._read_on()

    def _whole(self, file: Kept) -> bool:
        for path in self._paths(file):
            mark = _mark(path)
            if mark is None or mark[1] != file.nbytes:
                continue
            if self._seen.get(path) == mark:
                return True
            try:
                if sha256_of(Path(path)) == file.sha256:
                    self._seen[path] = mark
                    return True
            except OSError:
                continue  # a file that cannot be read is of no use to a reader either
        return False

    def _read_on(self) -> None:
        """Read the next piece of the chain; a file that turns out to be another is judged in full."""
        left = PIECE
        for _ in range(min(FILES, len(self._files))):
            file = self._files[self._turn]
            path = next((p for p in self._paths(file) if p in self._seen), None)
            data = _piece(path, self._at, left) if path is not None else b""
            self._sha.update(data)
            self._at += len(data)
            left -= len(data)
            if self._at < file.nbytes and data:
                return None
            right = self._sha.hexdigest() == file.sha256
            self._next((self._turn + 1) % len(self._files))
            if path is not None and not right:
                del self._seen[path]
                return self.look()
            if left <= 0:
                return None
        return None

    def _paths(self, file: Kept) -> list[str]:
        return [f"{root}/{file.key}" for root in self._roots]

    def _next(self, turn: int) -> None:
        self._turn, self._at, self._sha = turn, 0, hashlib.sha256()


def _mark(path: str) -> _Mark | None:
    try:
        stat = os.stat(path)  # noqa: PTH116 - hundreds of them at each commit
    except OSError:
        return None
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _piece(path: str, at: int, nbytes: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            file.seek(at)
            return file.read(nbytes)
    except OSError:
        return b""
