"""A place that is a folder of a local or network file system.

Nothing rests on `flock`. Over NFS an answer may get lost and a call be sent again, so a `link` that says
"exists" is believed only when the file that is there is not our own (`Disk.put_if_absent`); and a file that
is replaced or listed from a stale cache gives ESTALE or ENOENT once, so reads are tried twice.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from weightline.errors import IntegrityError, InvalidInput, Unavailable
from weightline.store.disk import Disk, draft_name, failure, sha256_of, typed
from weightline.store.place import (
    LAST,
    Listed,
    Missing,
    Outcome,
    below,
    check_key,
    files_of,
    hidden,
    missing,
    probe,
)

logger = logging.getLogger(__name__)

_STALE = {errno.ESTALE, errno.ENOENT}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV}
_NEVER_MADE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES, *_NO_LINKS}
"""After one of these the object is certainly not there, unless it can be seen."""

T = TypeVar("T")


class LocalPlace:
    """See `Place`. `disk` performs and announces every durable step."""

    poll_s = 0.02
    degraded = ""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root.absolute()
        self.disk = disk or Disk()

    @property
    def url(self) -> str:
        return str(self.root)

    def free(self) -> int | None:
        existing = self.root
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        with _read_of(str(existing)):
            return shutil.disk_usage(existing).free

    def skew(self) -> float:
        return 0.0

    def path(self, key: str) -> Path:
        """Where an object lies."""
        return self.root / check_key(key)

    def put_if_absent(self, key: str, data: bytes) -> Outcome:
        path = self.path(key)
        try:
            return (
                "created" if self._in_folder(path, lambda: self.disk.put_if_absent(path, data)) else "exists"
            )
        except OSError as error:
            if error.errno in _NEVER_MADE and not os.path.lexists(path):
                raise failure(str(path), error) from error
            logger.warning("no answer from writing %s: %s", path, error)
            return "lost"

    def put(self, key: str, data: bytes) -> None:
        path = self.path(key)
        with typed(str(path)):
            self._in_folder(path, lambda: self.disk.replace(path, data))

    def read(self, key: str) -> bytes:
        path = self.path(key)
        return self._reading(key, path.read_bytes)

    def size(self, key: str) -> int | None:
        path = self.path(key)
        try:
            return self._reading(key, path.stat).st_size
        except Missing:
            return None

    def list(self, prefix: str, *, after: str = "") -> Iterator[Listed]:
        start = self.path(prefix) if prefix else self.root
        begin = below(prefix)
        with _read_of(str(start)):
            found = [item for item in self._walk(start, begin) if item.key > after]
        return iter(sorted(found))

    def delete(self, key: str) -> None:
        path = self.path(key)
        with typed(str(path)):
            self.disk.on_step(f"unlink {path.name}")
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def delete_folder(self, prefix: str) -> None:
        self.delete(f"{prefix}/{LAST}")
        path = self.path(prefix)
        with typed(str(path)):
            self.disk.remove_tree(path)

    def upload(self, prefix: str, folder: Path, same: Mapping[str, str] = {}) -> None:
        target = self.path(prefix)
        with typed(str(target)):
            if target.exists() and target.samefile(folder):
                return
            folders = {target}
            for key, source in files_of(folder):
                path = target / key
                known = self.path(same[key]) if key in same else None
                self._in_folder(path, partial(self._copy, source, path, known))
                folders.add(path.parent)
            for made in sorted(folders, reverse=True):
                if made.exists():
                    self.disk.fsync_folder(made)

    def file(self, key: str, *, nbytes: int, sha256: str) -> Path:  # noqa: ARG002  the reader of the map checks it
        size = self.size(key)
        if size is None:
            raise missing(self.url, key)
        if size != nbytes:
            raise IntegrityError(
                f"{self.path(key)} has {size} bytes instead of {nbytes}",
                hint="run `weightline verify` on the store; take another version until it is repaired",
            )
        return self.path(key)

    def probe(self) -> None:
        try:
            probe(self)
        except Unavailable as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _NO_LINKS:
                raise InvalidInput(
                    f"{self.root} has no hard links ({cause.strerror}): two writers would not notice",
                    hint="put the store on a file system with hard links (ext4, xfs, btrfs, tmpfs, NFS)",
                ) from error
            raise

    def _copy(self, source: Path, path: Path, known: Path | None = None) -> None:
        draft = path.with_name(draft_name())
        try:
            if not self._linked(source, known, draft):
                self.disk.copy_new(source, draft)
            self.disk.on_step(f"rename {path.name}")
            draft.replace(path)
        finally:
            with suppress(OSError):
                draft.unlink()

    def _linked(self, source: Path, known: Path | None, draft: Path) -> bool:
        """Could `draft` become a second name of `known`, which has the bytes of `source`?"""
        try:
            if known is None or not known.is_file() or sha256_of(known) != sha256_of(source):
                return False
            self.disk.on_step(f"link {draft.name}")
            os.link(known, draft)
            return True
        except OSError:
            return False

    def _in_folder(self, path: Path, act: Callable[[], T]) -> T:
        """`act`, which writes `path`; once more if its folder was not there."""
        try:
            return act()
        except FileNotFoundError:
            if path.parent.is_dir():
                raise
        self._make_folders(path.parent)
        return act()

    def _make_folders(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folders(folder.parent)
            with suppress(FileExistsError):
                self.disk.make_folder(folder)

    def _reading(self, key: str, act: Callable[[], T]) -> T:
        with _read_of(str(self.root / key)):
            try:
                return act()
            except OSError as error:
                if error.errno not in _STALE:
                    raise
            try:
                return act()
            except (FileNotFoundError, NotADirectoryError):
                raise missing(self.url, key) from None

    def _walk(self, folder: Path, begin: str) -> Iterator[Listed]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if hidden(entry.name):
                continue
            try:
                if entry.is_dir():
                    yield from self._walk(Path(entry.path), f"{begin}{entry.name}/")
                elif entry.is_file():
                    yield Listed(begin + entry.name, entry.stat().st_size)
            except FileNotFoundError:
                continue


@contextmanager
def _read_of(what: str) -> Iterator[None]:
    """Turns an `OSError` of reading into `Unavailable`."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"cannot read {what}: {error.strerror or error}",
            hint="check that the disk is mounted and healthy",
        ) from error
