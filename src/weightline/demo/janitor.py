"""Cleans up after a demo that was killed: `python -I -S janitor.py`, commands on stdin, standard library
only.

The demo holds the write end of the janitor's stdin and writes lines to it: `pid N` (a child was started),
`remove PATH` (a folder that must not stay), `keep PATH` (it may stay after all). End of input means that the
demo is gone, in whatever way: the children that still run are killed, the folders removed, and the janitor
ends. It runs in a session of its own, so a signal to the demo's process group does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys

_GRACE = 5.0


class _Process:
    """A child of the demo, named by a handle that cannot come to mean another process where the system has
    such handles.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.handle is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def wait(self) -> None:
        """Until it is gone, or a few seconds: its files can be removed only then."""
        if self.handle is not None:
            select.select([self.handle], [], [], _GRACE)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes: list[_Process] = []
    folders: list[str] = []
    for line in sys.stdin:
        verb, _, value = line.rstrip("\n").partition(" ")
        if verb == "pid":
            with contextlib.suppress(ProcessLookupError):  # it was quick
                processes.append(_Process(int(value)))
        elif verb == "remove":
            folders.append(value)
        elif verb == "keep" and value in folders:
            folders.remove(value)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
