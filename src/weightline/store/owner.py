"""Owners: which process a staged folder belongs to, and whether that process still lives.

A staging is removed only when its owner is known to be dead: never by age alone, for a slow writer is not a
dead one.
"""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import msgspec
from msgspec import Struct


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
    return Owner(_host(), _boot(), os.getpid(), _started(os.getpid()) or "")


def is_dead(owner: Owner) -> bool:
    """Is the process certainly gone? False when nobody here can tell (another host)."""
    if owner.host != _host():
        return False
    if owner.boot != _boot():
        return True
    return _started(owner.pid) != owner.started


def encode(owner: Owner) -> bytes:
    return msgspec.json.encode(owner)


def decode(data: bytes) -> Owner | None:
    """None for anything that is not an owner: a torn or foreign file proves nothing."""
    try:
        return msgspec.json.decode(data, type=Owner)
    except msgspec.DecodeError:
        return None


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
