"""Copies of objects on this host: by their SHA-256, checked, evicted when they grow too many."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from weightline.errors import IntegrityError
from weightline.store.disk import Chunk, Disk, sha256_of, typed

logger = logging.getLogger(__name__)

_STALE_DRAFT_S = 24 * 3600.0


class BlobCache:
    """A folder of verified blobs that several processes may share. Safe to use from any thread.

    What is evicted while somebody maps it keeps its bytes for them.
    """

    def __init__(self, folder: Path, *, limit: int | None = None) -> None:
        self.folder = folder
        self.limit = limit
        """Bytes to keep at most; None is no limit. One blob that is larger is kept all the same."""
        self._disk = Disk()
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self._checked: dict[str, tuple[int, int, int]] = {}

    def get(
        self, key: str, where: str, nbytes: int, sha256: str, fetch: Callable[[], Iterable[Chunk]]
    ) -> Path:
        """The file with that SHA-256; `fetch` gives its bytes, piece by piece, when it is not there yet.

        It has the name of the object `key`, for whoever copies it on. Raises `IntegrityError` that names the
        object and `where`, `StorageFull`, `Unavailable`.
        """
        path = self.folder / sha256[:2] / sha256 / key.rsplit("/", 1)[-1]
        with self._one_at_a_time(sha256), typed(str(path)):
            if not self._whole(path, nbytes, sha256):
                self._fill(f"{key} in {where}", path, nbytes, sha256, fetch)
            with suppress(OSError):
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        if self.limit is not None:
            self._evict(keep=path)
        return path

    def _one_at_a_time(self, sha256: str) -> threading.Lock:
        with self._lock:
            return self._busy.setdefault(sha256, threading.Lock())

    def _whole(self, path: Path, nbytes: int, sha256: str) -> bool:
        """Is the file there and right? It is hashed once a process: a crash may have left anything."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if self._checked.get(str(path)) == mark:
            return True
        if stat.st_size == nbytes and sha256_of(path) == sha256:
            self._checked[str(path)] = mark
            return True
        logger.warning("%s is damaged and is fetched again", path)
        path.unlink(missing_ok=True)
        return False

    def _fill(
        self, what: str, path: Path, nbytes: int, sha256: str, fetch: Callable[[], Iterable[Chunk]]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".draft-{uuid.uuid4().hex}")
        try:
            got = self._disk.write_new(draft, fetch())
            if got != (nbytes, sha256):
                raise IntegrityError(
                    f"{what}: {got[0]} bytes, SHA-256 {got[1][:12]}… instead of {nbytes}, {sha256[:12]}…",
                    hint="run `weightline verify` on the store; take another version until it is repaired",
                )
            draft.replace(path)
        finally:
            with suppress(OSError):
                draft.unlink()
        stat = path.stat()
        self._checked[str(path)] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def _evict(self, keep: Path) -> None:
        """Delete what was used longest ago until the limit holds. Never raises: a cache may be too large."""
        now = time.time()
        with self._lock, suppress(OSError):
            files = []
            for path in self.folder.glob("??/*/*"):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    young = path.name.startswith(".draft-") and stat.st_mtime > now - _STALE_DRAFT_S
                    if path != keep and not young:
                        files.append((stat.st_atime_ns, stat.st_size, path))
            total = keep.stat().st_size + sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total <= (self.limit or 0):
                    break
                path.unlink(missing_ok=True)
                total -= size
