"""Starts one child of the demo so that it cannot outlive the demo: `python -I -S launch.py PARENT_PID
COMMAND...`.

Run as a file, with the standard library only, and replaced by COMMAND (same process id). On Linux the kernel
then kills the child when its parent dies, however it dies. Nothing runs between fork and exec (no
`preexec_fn`), so a threaded parent is safe. The kernel means the parent's *thread*: the thread that starts
the children must live as long as they do.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"launch: prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the request was made: the signal will never come
        sys.exit("launch: the demo is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
