"""One server a store: a lock that dies with its owner, and a small file that says who holds it.

The lock is the kernel's (`flock` on `<root>/server.lock`): a SIGKILLed server leaves nothing behind. It only
keeps a second server from starting; the ledger does not rest on it, since every commit is a put-if-absent
whoever makes it. A store that other hosts reach too (S3, a mirror) has a seat besides (`store/seat.py`),
which is renewed while the server lives. `<root>/server.json` names the holder's process and doors; it is a
hint, read only together with the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import time
import uuid
from pathlib import Path

import msgspec
from msgspec import Struct

from weightline.errors import AlreadyServing, InvalidInput, StoreNotFound, Unavailable
from weightline.store import Store
from weightline.store.seat import Seat

log = logging.getLogger("weightline.server")

LOCK_NAME = "server.lock"
INFO_NAME = "server.json"
_LOOK_SECONDS = 0.2
SEAT_SECONDS = 30.0
"""A server that says nothing for so long may be replaced by one on another host."""


class ServerInfo(Struct, frozen=True, kw_only=True):
    """Who serves a store, and where."""

    pid: int
    started_at: float
    run: str
    listen: str
    """unix:///path of its socket."""
    runtime_dir: str
    grpc: str | None = None
    http: str | None = None


class OwnerLock:
    """An exclusive lock on a file, held until `release` or the end of the process, however that comes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path) -> OwnerLock | None:
        """None when somebody else holds it. Raises `StoreNotFound`, `InvalidInput` when it cannot be had at
        all.
        """
        descriptor = _open_lock(path, os.O_RDWR | os.O_CREAT)
        try:
            taken = _lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise InvalidInput(
                f"{path}: this file system refuses locks ({error.strerror})",
                hint="serve the store from a file system with flock, or use it without a server (file:///dir)",
            ) from error
        if not taken:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._descriptor is not None:
            # Unlocked by name, not by closing alone: a child forked meanwhile holds the same open file.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


class ServerLock:
    """Held by the server of one store for as long as it lives."""

    def __init__(self, root: Path, lock: OwnerLock, seat: Seat | None = None) -> None:
        self._root = root
        self._lock = lock
        self._seat = seat
        self._announced = False

    @classmethod
    def take(cls, root: Path, seat: Seat | None = None) -> ServerLock:
        """`seat`: that of the server in a store which other hosts reach too.

        Raises `AlreadyServing` naming the process and its socket.
        """
        lock = OwnerLock.take(root / LOCK_NAME)
        if lock is None:
            raise _already(root)
        if seat is not None:
            try:
                holder = seat.take()
            except Unavailable as error:
                log.warning("cannot tell whether another host serves this store too: %s", error)
                seat = holder = None
            if holder is not None:
                lock.release()
                raise AlreadyServing(
                    f"{holder.by} serves this store" + (f" on {holder.about}" if holder.about else ""),
                    hint="use that one; a server that died on another host gives way after "
                    f"{SEAT_SECONDS:g} s",
                )
        return cls(root, lock, seat)

    def keep(self) -> bool:
        """Say that this server is still there. False when another took its place while it was stopped."""
        try:
            return self._seat is None or self._seat.renew()
        except Unavailable as error:
            log.warning("cannot renew the seat of the server: %s", error)
            return True

    def announce(self, info: ServerInfo) -> None:
        """Write `server.json`, whole or not at all."""
        if self._seat is not None:
            with contextlib.suppress(Unavailable):
                self._seat.renew(info.listen)
        path = self._root / INFO_NAME
        draft = path.with_name(f".{INFO_NAME}.{uuid.uuid4().hex}")
        draft.write_bytes(msgspec.json.encode(info))
        draft.replace(path)
        self._announced = True

    def release(self) -> None:
        """Give the store free for another server. Idempotent."""
        if self._announced:
            self._announced = False
            (self._root / INFO_NAME).unlink(missing_ok=True)
        if self._seat is not None:
            self._seat.release()
        self._lock.release()


def seat_of(store: Store, name: str, ttl: float) -> Seat | None:
    """The seat `name` of a store that other hosts reach too; a folder's locks do for a folder."""
    return None if store.is_here else Seat(store.place, name, ttl=ttl, now=store.leases.now)


def _lock(descriptor: int) -> bool:
    """Takes the lock, or says that somebody has it. A look by `serving` holds it for an instant: that is
    waited out.
    """
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS / 20)
        else:
            return True


def serving(root: Path) -> ServerInfo | None:
    """Who serves the store at `root` now, or None."""
    if not (root / LOCK_NAME).exists():
        return None
    descriptor = _open_lock(root / LOCK_NAME, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _info(root)
    finally:
        os.close(descriptor)
    return None


def _open_lock(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise StoreNotFound(
            f"{path.parent}: no store there", hint="`weightline serve` creates one"
        ) from error
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", hint="serve a store that you may write to") from error


def _info(root: Path) -> ServerInfo | None:
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode((root / INFO_NAME).read_bytes(), type=ServerInfo)
    return None


def _already(root: Path) -> AlreadyServing:
    info = _info(root)
    if info is None:
        return AlreadyServing(
            f"{root}: another server is starting on this store", hint="use that one, or try again"
        )
    return AlreadyServing(
        f"{root}: process {info.pid} serves this store on {info.listen}",
        hint=f"connect to {info.listen}, or stop it with: kill {info.pid}",
    )


def clear_stale_socket(path: Path) -> None:
    """Remove a socket file whose server is gone.

    Raises `AlreadyServing` when somebody still answers there, `InvalidInput` when it is no socket: nothing
    else is ever removed.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidInput(
            f"{path}: {error.strerror}", hint="name another socket with --listen unix:PATH"
        ) from error
    if not stat.S_ISSOCK(mode):
        raise InvalidInput(
            f"{path} exists and is not a socket", hint="name another socket with --listen unix:PATH"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise InvalidInput(
                f"{path}: {error.strerror or error}", hint="name another socket with --listen unix:PATH"
            ) from error
    raise AlreadyServing(
        f"{path}: the server of another store listens there",
        hint="name another socket with --listen unix:PATH",
    )
