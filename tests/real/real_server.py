"""A real engine's server in processes of its own: what all engines have in common."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil

VENV = Path(sys.prefix)
_LIBC = ctypes.CDLL(None)
START = 420.0
"""Seconds that a server may take to come up on a loaded machine."""


class RealServer(ABC):
    """One server process tree. A subclass knows its engine's command and routes.

    Answers of `generate` and `stream` have `token_ids`, `weight_versions` (spans) and `finish_reason`
    ("length", "abort", …), whatever the engine calls them.
    """

    kind: ClassVar[str]
    """Name of the engine in `--engine KIND=URL`."""

    def __init__(self, model: Path, log: Path, *flags: str, port: int | None = None) -> None:
        self.model, self.log, self.flags = model, log, flags
        self.address = port or _free_port()
        self.url = f"http://127.0.0.1:{self.address}"
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def environment(self) -> dict[str, str]: ...

    @abstractmethod
    def up(self) -> bool:
        """It answers requests."""

    @abstractmethod
    def port(self, query: str, **options: Any) -> Any:
        """The follower's engine port for this server."""

    @abstractmethod
    def label(self) -> str:
        """The label that the server itself tells."""

    @abstractmethod
    def paused(self) -> bool: ...

    @abstractmethod
    def pause(self) -> None:
        """As another controller pauses it; no request is dropped."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def spoil(self) -> None:
        """Change live weights behind everybody's back."""

    @abstractmethod
    def generate(self, prompt: list[int], count: int) -> dict[str, Any]:
        """One request to the end."""

    @abstractmethod
    def stream(
        self, prompt: list[int], count: int, *, on_chunk: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """One streamed request to its end: all tokens, and what its last chunk said.

        `on_chunk` is called with the number of chunks so far. `spans_before_the_last_chunk` counts chunks
        that followed one with spans."""

    def start(self, **environment: str) -> RealServer:
        """Start it and wait until it answers. Raises RuntimeError with the end of its log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, nothing that takes a lock
                env={
                    **os.environ,
                    "PATH": f"{VENV}/bin:{os.environ['PATH']}",
                    **self.environment(),
                    **environment,
                },
            )
        deadline = time.monotonic() + START
        while not self.up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.kind} did not come up:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.25)
        return self

    def kill(self) -> None:
        """End the whole process tree, without a chance to clean up."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=60.0, trust_env=False).json()

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300.0, trust_env=False)

    def answers(self, path: str) -> bool:
        """GET `path` is answered with 200."""
        try:
            return httpx.get(self.url + path, timeout=5.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> list[psutil.Process]:
        """Its processes below the API server."""
        return [] if self.process is None else psutil.Process(self.process.pid).children(recursive=True)

    @contextlib.contextmanager
    def hanging(self, who: str, seconds: float) -> Iterator[None]:
        """`who` ("workers" or "http") stands still from now on, for so long, also after the block."""
        if self.process is None:
            raise RuntimeError("the server is not running")
        stopped = self.workers() if who == "workers" else [psutil.Process(self.process.pid)]
        for process in stopped:
            process.suspend()
        timer = threading.Timer(seconds, lambda: [process.resume() for process in stopped])
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def resident(self) -> int:
        """Bytes of resident memory of all its processes."""
        if self.process is None:
            return 0
        root = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind: the kernel ends the server with it."""
    _LIBC.prctl(1, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
