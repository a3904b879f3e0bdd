"""Owners: which process a staged folder belongs to, and whether that process still lives.

A staging is removed only when its owner is known to be dead: never by age alone, for a slow writer is not a
dead one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

Standing = Literal["alive", "dead", "elsewhere", "unsaid"]
"""Of the process that wrote something. `elsewhere`: on another host, so nobody here can tell."""
_TAG = re.compile(r"(?P<host>[0-9a-f]{16})-(?P<boot>[0-9a-f]{16})-(?P<pid>\d+)-(?P<started>[\d.]+)-")


class Owner(Struct, frozen=True):
    """One process. Two owners are equal only if they are the same incarnation of the same process."""

    host: str
    """Host name and process-id namespace: process ids mean nothing outside."""
    boot: str
    pid: int
    started: str
    """Start time of the process in the unit of this host; tells a reused process id."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host.split('/')[0]}"


def this_process() -> Owner:
    """The owner that this process is (a forked child is another one)."""
    return Owner(_host(), _boot(), os.getpid(), _own_start(os.getpid()))


def is_dead(owner: Owner) -> bool:
    """Is the process certainly gone? False when nobody here can tell (another host)."""
    return standing(owner) == "dead"


def standing(owner: Owner | None) -> Standing:
    """Does the process live? None: nothing says whose it is."""
    if owner is None:
        return "unsaid"
    if owner.host != _host():
        return "elsewhere"
    return _standing_here(owner.boot == _boot(), owner.pid, owner.started)


def tag() -> str:
    """This process in letters of a file name, for a draft that says by its name alone whose it is."""
    owner = this_process()
    return f"{_short(owner.host)}-{_short(owner.boot)}-{owner.pid}-{owner.started}"


def standing_of_name(name: str) -> Standing:
    """The same for a file name that holds the `tag` of a process."""
    found = _TAG.search(name)
    if found is None:
        return "unsaid"
    if found["host"] != _short(_host()):
        return "elsewhere"
    return _standing_here(found["boot"] == _short(_boot()), int(found["pid"]), found["started"])


def encode(owner: Owner) -> bytes:
    return msgspec.json.encode(owner)


def decode(data: bytes) -> Owner | None:
    """None for anything that is not an owner: a torn or foreign file proves nothing."""
    try:
        return msgspec.json.decode(data, type=Owner)
    except msgspec.DecodeError:
        return None


def _standing_here(same_boot: bool, pid: int, started: str) -> Standing:
    return "alive" if same_boot and _started(pid) == started else "dead"


@functools.cache
def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def _own_start(pid: int) -> str:
    return _started(pid) or ""


@functools.cache
def _host() -> str:
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"


@functools.cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return str(int(psutil.boot_time()))


def _started(pid: int) -> str | None:
    """Start time of a living process; None for none, or for one that only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        return _started_elsewhere(pid)
    # The second field is the command in brackets and may hold anything; state and start time follow it
    # (proc(5)).
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _started_elsewhere(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return None
