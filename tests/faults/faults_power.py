"""A double of a disk that loses what was not fsynced: it remembers, at every fsync, what is durable then.

Nothing of the store is replaced: `os.fsync` is wrapped, so whatever writes, the codec included, is seen.
A power loss gives a new folder as a disk might hold it afterwards:

- "nothing": only fsynced bytes under only fsynced names, the least that may be left;
- "names": names reached the disk without the fsync of their folder, bytes that were not fsynced did not (the
  classic empty file after a crash);
- "everything": all of it, as when only the process dies.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Mode = Literal["nothing", "names", "everything"]
MODES: tuple[Mode, ...] = ("nothing", "names", "everything")


class Crash(BaseException):
    """The process is gone. Not an `Exception`: nothing may handle it."""


class Disk:
    """What is durable below `root`: `with Disk(root) as disk` around the code under test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._open: list[int] = []
        self._fsync = os.fsync
        self.fsyncs = 0
        self._settle(root)

    def __enter__(self) -> Disk:
        os.fsync = self._seen  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync = self._fsync
        for fd in self._open:
            os.close(fd)

    def after(self, mode: Mode, to: Path) -> Path:
        """The folder after a power loss now."""
        if mode == "everything":
            shutil.copytree(self.root, to)
        else:
            self._rebuild(self.root.stat().st_ino, self.root, mode, to)
        return to

    def _seen(self, fd: int) -> None:
        self.fsyncs += 1
        self._fsync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        self._remember(path, os.fstat(fd))

    def _remember(self, path: Path, info: os.stat_result) -> None:
        if info.st_ino not in self._bytes and info.st_ino not in self._names:
            # Held open, so that its number is not given to another file.
            self._open.append(os.open(path, os.O_RDONLY))
        if stat.S_ISDIR(info.st_mode):
            self._names[info.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._bytes[info.st_ino] = path.read_bytes()

    def _settle(self, path: Path) -> None:
        """All that is there at the beginning is durable."""
        for folder, _, names in os.walk(path):
            for name in names:
                self._remember(Path(folder, name), Path(folder, name).stat())
            self._remember(Path(folder), Path(folder).stat())

    def _rebuild(self, inode: int, now: Path | None, mode: Mode, to: Path) -> None:
        to.mkdir()
        names = dict(self._names.get(inode, {}))
        if mode == "names" and now is not None and now.is_dir():
            names |= {entry.name: entry.inode() for entry in os.scandir(now)}
        for name, child in names.items():
            here = now / name if now is not None and (now / name).exists() else None
            if child in self._names or (here is not None and here.is_dir() and here.stat().st_ino == child):
                self._rebuild(child, here, mode, to / name)
            else:
                (to / name).write_bytes(self._bytes.get(child, b""))


def crash_at(number: int, disk: Callable[[], Disk], to: Callable[[Mode], Path]) -> Callable[[str], None]:
    """An `on_step` that keeps the disk as a power loss before step `number` leaves it, and crashes there."""
    seen = 0

    def on_step(_: str) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            for mode in MODES:
                disk().after(mode, to(mode))
            raise Crash

    return on_step
