"""Durable operations on a local folder, and what their failures mean.

Every step that a crash could fall between is announced to `on_step` first: tests kill or fail the process
there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightline.errors import StorageFull, Unavailable
from weightline.store import owner as owners

OnStep = Callable[[str], None]
Chunk = bytes | bytearray | memoryview

NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
DRAFT, PROBE = ".draft-", ".probe-"
HIDDEN = (DRAFT, PROBE)
"""What names begin with under which something is being written, or tried, that nothing names."""
_COPY = 8 << 20
"""Bytes read at a time."""


def no_step(_: str) -> None:
    """`on_step` of ordinary use: nothing."""


@contextmanager
def typed(what: str) -> Iterator[None]:
    """Turns an `OSError` of writing `what` into `StorageFull` (no room) or `Unavailable` (anything else)."""
    try:
        yield
    except OSError as error:
        raise failure(what, error) from error


def failure(what: str, error: OSError) -> Unavailable:
    """The typed error for an `OSError` that came up while `what` was written."""
    if error.errno in NO_ROOM:
        return StorageFull(
            f"no room to write {what}: {error.strerror}",
            hint="free space (`weightline gc`) or raise the limit, and repeat the same call",
        )
    return Unavailable(
        f"cannot write {what}: {error.strerror or error}",
        hint="check that the disk is mounted, healthy and writable, then repeat the call",
    )


class Disk:
    """The durable verbs. Raises plain `OSError`; callers give it a meaning with `typed`."""

    def __init__(self, on_step: OnStep = no_step) -> None:
        self.on_step = on_step

    def write_new(self, path: Path, chunks: Iterable[Chunk]) -> tuple[int, str]:
        """Create `path`, which must not exist, write and fsync it; gives (bytes, SHA-256). Not visible to a
        crash.
        """
        sha, nbytes = hashlib.sha256(), 0
        self.on_step(f"create {path.name}")
        with path.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                sha.update(chunk)
                nbytes += len(chunk) if not isinstance(chunk, memoryview) else chunk.nbytes
            file.flush()
            self.on_step(f"fsync {path.name}")
            os.fsync(file.fileno())
        return nbytes, sha.hexdigest()

    def copy_new(self, source: Path, path: Path) -> tuple[int, str]:
        """`write_new` of the bytes of `source`."""
        with source.open("rb") as file:
            return self.write_new(path, iter(lambda: file.read(_COPY), b""))

    def link_instead(self, source: Path, path: Path) -> None:
        """Make `path`, whose bytes are those of `source`, a second name of that file, where that can be."""
        draft = self._draft(path)
        self.on_step(f"link {path.name}")
        with suppress(OSError):
            os.link(source, draft)
            draft.replace(path)

    def fsync_file(self, path: Path) -> None:
        """Make the bytes of an existing file durable."""
        self.on_step(f"fsync {path.name}")
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def fsync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        self.on_step(f"fsync folder {path.name}")
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_folder(self, path: Path) -> None:
        """Create a folder, which must not exist, durably."""
        self.on_step(f"mkdir {path.name}")
        path.mkdir()
        self.fsync_folder(path.parent)

    def put_if_absent(self, path: Path, data: bytes) -> bool:
        """Create `path` whole and durable, or leave what is there: False. `OSError` after the link means: ask
        again.

        Exclusive create would do for two writers, but not for a crash: it leaves a torn file under the real
        name.
        """
        draft = self._draft(path)
        try:
            self.write_new(draft, [data])
            self.on_step(f"link {path.name}")
            try:
                os.link(draft, path)
            except FileExistsError:
                # Over NFS a link whose answer got lost is sent again, and then meets itself.
                if not _same(draft, path):
                    # Whoever linked it may not have lived to make the name durable.
                    self.fsync_folder(path.parent)
                    return False
            self.fsync_folder(path.parent)
            return True
        finally:
            with suppress(OSError):
                draft.unlink()

    def replace(self, path: Path, data: bytes, *, durable: bool = True) -> None:
        """Give `path` a new content in one step: readers see the old or the new."""
        draft = self._draft(path)
        try:
            self.write_new(draft, [data])
            self.on_step(f"rename {path.name}")
            draft.replace(path)
        finally:
            with suppress(OSError):
                draft.unlink()
        if durable:
            self.fsync_folder(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder; one that is gone already is fine.

        It gets a hidden name of this process first: killed half way, it leaves a draft that is swept, and no
        folder that lost the file which said whose it was.
        """
        self.on_step(f"remove {path.name}")
        with suppress(FileNotFoundError):
            going = path
            if not path.name.startswith(HIDDEN):
                going = path.rename(path.with_name(draft_name()))
            try:
                shutil.rmtree(going)
            except OSError:
                with suppress(OSError):  # what is left keeps its name, so that it is tried again
                    going.rename(path)
                raise

    def _draft(self, path: Path) -> Path:
        return path.with_name(draft_name())


def draft_name(prefix: str = DRAFT) -> str:
    """A fresh hidden name that tells which process writes there."""
    return f"{prefix}{owners.tag()}-{uuid.uuid4().hex}"


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, by reading it (a mapped file that is cut short would kill the process)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
