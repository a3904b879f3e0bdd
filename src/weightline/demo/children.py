"""The demo's child processes: started so that none can outlive the demo, watched, and stopped in order.

Every child leads a session of its own (Ctrl-C in the terminal reaches the demo alone, which then stops them
in order), dies with the demo (`launch.py`), and writes to a log file. A child's stdout may carry events, one
JSON object a line; they come out of one queue together with the exits, so that the demo has a single place to
wait.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from weightline.errors import WeightlineError

_HERE = Path(__file__).parent
_TAIL_LINES = 12
_TAIL_BYTES = 16384


class ChildEvent(Struct, frozen=True):
    """One JSON line from a child's stdout."""

    child: str
    fields: dict[str, Any]


class ChildExit(Struct, frozen=True):
    """A child is gone. `code` as in `subprocess`: negative means that many, as a signal."""

    child: str
    code: int


class Child:
    """One running process of the demo."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log: Path, thread: threading.Thread
    ) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.thread = thread
        self.stopping = False
        """It was told to stop: its exit is no failure."""

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send `number` to the child and to whatever it started."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Children:
    """All children of one demo. `close()` leaves none behind; so does the death of this process.

    `start` must be called from a thread that lives until `close` (see `launch.py`); everything else from any
    thread.
    """

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """`ChildEvent`s and `ChildExit`s in the order in which they came; others may put things in, too."""
        self._children: dict[str, Child] = {}
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HERE / "janitor.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def __iter__(self) -> Any:
        return iter(list(self._children.values()))

    def tell_janitor(self, verb: str, value: str | int) -> None:
        """`remove PATH`: that folder must be gone when this process is; `keep PATH` takes it back."""
        if self._janitor.stdin is None or self._janitor.stdin.closed:
            return
        with contextlib.suppress(
            BrokenPipeError
        ):  # somebody killed it; the kernel's own clean-up of children remains
            self._janitor.stdin.write(f"{verb} {value}\n".encode())
            self._janitor.stdin.flush()

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Run `python ARGUMENTS...` as the child `name`; its stdout and stderr go to `logs/NAME.log`.

        Lines of stdout that are JSON objects with an `event` are put into the inbox as `ChildEvent`.
        """
        if name in self._children and self._children[name].running:
            raise WeightlineError(f"{name} already runs", hint="stop it first")
        log = self.logs / f"{name}.log"
        command = [sys.executable, "-I", "-S", str(_HERE / "launch.py"), str(os.getpid())]
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*command, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                start_new_session=True,
            )
        self.tell_janitor("pid", process.pid)
        thread = threading.Thread(
            target=self._read, args=(name, process, log), name=f"read-{name}", daemon=True
        )
        child = self._children[name] = Child(name, process, log, thread)
        thread.start()
        return child

    def _read(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        stdout: IO[bytes] | None = process.stdout
        if stdout is not None:
            with log.open("ab") as out, stdout:
                for line in stdout:
                    out.write(line)
                    out.flush()
                    event = _event_of(line)
                    if event is not None:
                        self.inbox.put(ChildEvent(name, event))
        self.inbox.put(ChildExit(name, process.wait()))

    def stop(self, *names: str, grace: float = 5.0) -> list[str]:
        """SIGTERM to all of `names` at once, then SIGKILL to what still runs after `grace` seconds.

        Returns one sentence for each child that had to be killed.
        """
        targets = [self._children[n] for n in names if n in self._children]
        for child in targets:
            child.stopping = True
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        notes = []
        for child in targets:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.signal(signal.SIGKILL)
                child.process.wait()
                notes.append(f"{child.name} did not stop within {grace:g} s and was killed")
            child.thread.join(timeout=2.0)
        return notes

    def close(self) -> None:
        """Kill whatever still runs and wait until it is gone; then let the janitor do the rest and end.
        Idempotent.
        """
        for child in self._children.values():
            child.stopping = True
            child.signal(signal.SIGKILL)
        for child in self._children.values():
            child.process.wait()
            child.thread.join(timeout=2.0)
        if self._janitor.stdin is not None and not self._janitor.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._janitor.stdin.close()
        self._janitor.wait()

    def failure(self, gone: ChildExit) -> WeightlineError:
        """The error that says which child ended, how, what it last said and where the rest is."""
        log = self._children[gone.child].log
        self._children[gone.child].thread.join(timeout=2.0)
        said = "\n".join(f"    {line}" for line in tail(log))
        last = f"; its last lines:\n{said}" if said else " and said nothing"
        return WeightlineError(
            f"{gone.child} {how_it_ended(gone.code)}{last}", hint=f"the whole log is {log}"
        )


def how_it_ended(code: int) -> str:
    """An exit code of `subprocess` in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    more = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{more}"


def tail(log: Path, lines: int = _TAIL_LINES) -> list[str]:
    """The last lines of a log, without reading all of it."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def _event_of(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("event"), str) else None
