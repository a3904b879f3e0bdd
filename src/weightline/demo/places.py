"""Where a demo run lives: its folder, its short runtime folder for sockets, and the ports it holds."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

from weightline.errors import InvalidInput, Unavailable

_SOCKET_PATH_LIMIT = 100
"""Bytes; the kernel's own limit for the path of a Unix socket is 107 on Linux and 103 on macOS."""


class Places:
    """The folders of one run. Nothing but the run folder that the user asked for outlives `remove`."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: where to keep the run (made when absent); None: a temporary one.

        Raises `InvalidInput` when `folder` already holds something or cannot be made.
        """
        self.temporary = folder is None
        if folder is None:
            self.run = Path(tempfile.mkdtemp(prefix="weightline-demo-"))
        else:
            self.run = folder.absolute()
            _claim(self.run)
        self.runtime = _short_folder()
        self.logs = self.run / "logs"
        self.store = self.run / "store"

    @property
    def socket(self) -> Path:
        """The server's Unix socket."""
        return self.runtime / "line.sock"

    def remove(self, *, keep_logs: bool = False) -> None:
        """Remove the runtime folder, and a temporary run folder (but its logs, when a failure points there).
        Idempotent.
        """
        shutil.rmtree(self.runtime, ignore_errors=True)
        if not self.temporary:
            return
        if not keep_logs:
            shutil.rmtree(self.run, ignore_errors=True)
            return
        for entry in self.run.iterdir():
            if entry == self.logs:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _claim(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = next(folder.iterdir(), None)
    except OSError as error:
        raise InvalidInput(
            f"{folder}: cannot be used as the run folder: {error.strerror}", hint="give --dir another folder"
        ) from error
    if occupied is not None:
        raise InvalidInput(
            f"{folder}: already holds {occupied.name}",
            hint="a demo starts its own run: give --dir a new or an empty folder",
        )


def _short_folder() -> Path:
    parents = [tempfile.gettempdir(), "/tmp"]
    for parent in parents:
        if len(os.fsencode(parent)) + len("/wl-12345678/line.sock") <= _SOCKET_PATH_LIMIT:
            return Path(tempfile.mkdtemp(prefix="wl-", dir=parent))
    raise InvalidInput(f"{parents[0]}: too long a path for Unix sockets", hint="set TMPDIR to a short path")


def model_cache() -> Path:
    """Where models that were made once are kept for the next run: `$XDG_CACHE_HOME/weightline/models`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weightline" / "models"


class Ports:
    """TCP ports of the loopback, free now and kept from being handed out to others until `close`.

    Each is bound but not listened on, with SO_REUSEADDR: the kernel then gives it to nobody who asks for any
    port, while a server that binds it by number with SO_REUSEADDR (as uvicorn does) gets it.
    """

    def __init__(self, count: int) -> None:
        self._held = contextlib.ExitStack()
        self.numbers: list[int] = []
        try:
            for _ in range(count):
                held = self._held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(("127.0.0.1", 0))
                self.numbers.append(int(held.getsockname()[1]))
        except OSError as error:
            self._held.close()
            raise Unavailable(
                f"no free port on 127.0.0.1: {error.strerror}", hint="end other servers, then try again"
            ) from error

    def close(self) -> None:
        """Let the ports go. Idempotent."""
        self._held.close()
