"""`weightline serve`: the resident process of one store.

It orders publishes, rings those who watch, keeps the roll of subscribers and cleans in the background. It
owns nothing: every version is in the log before its publish is answered, so a server that is killed is
replaced by starting another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from weightline.errors import InvalidInput, WeightlineError
from weightline.service import wire
from weightline.service.address import (
    SOCKET_NAME,
    Address,
    bracketed,
    check_socket_path,
    default_runtime_dir,
    listen_path,
    loopback,
    make_runtime_dir,
    store_of,
)
from weightline.service.cleaner import Cleaner, check_settings
from weightline.service.host import Host
from weightline.service.presence import SEAT_SECONDS, ServerInfo, ServerLock, clear_stale_socket, seat_of
from weightline.service.rpc import load_grpc
from weightline.store import Store
from weightline.store.opening import local_folder
from weightline.store.run import RUN

log = logging.getLogger("weightline.server")

GRACE_SECONDS = 2.0
"""What a call under way may still take when the server goes down."""

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", wire.MAX_REPLY_BYTES),
    # Without it two servers would share one TCP port, each getting some of the calls.
    ("grpc.so_reuseport", 0),
]


def serve(
    store: str | Path,
    *,
    listen: str | None = None,
    grpc: str | None = None,
    http: str | None = None,
    max_versions: int = 20,
    sync_timeout: float = 30.0,
    cleanup_interval: float = 60.0,
    disk_budget: int | None = None,
    runtime_dir: str | Path | None = None,
    ready: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Serve a store (a folder, `s3://…`, `mirror:…`), which is created when missing, until SIGTERM or SIGINT.

    `listen` is `unix:PATH` (default: `wl.sock` in `runtime_dir`), `grpc` and `http` are `HOST:PORT` with a
    loopback host. `ready` is called with the fields of `ServerInfo` once everything answers. Times are in
    seconds, `disk_budget` in bytes. Raises `AlreadyServing` naming the other server's process and socket,
    `InvalidInput` (an address, a port in use, a socket path too long), `FormatError` for a store of another
    format.
    """
    check_settings(
        max_versions=max_versions,
        disk_budget=disk_budget,
        cleanup_interval=cleanup_interval,
        sync_timeout=sync_timeout,
    )
    where = store_of(store)
    root = local_folder(where) if isinstance(where, str) else where
    if grpc is not None:
        loopback(grpc, what="--grpc")
    if http is not None:
        loopback(http, what="--http")
    folder = (
        Path(runtime_dir).expanduser().absolute() if runtime_dir is not None else default_runtime_dir(root)
    )
    path = listen_path(listen) if listen is not None else check_socket_path(folder / SOCKET_NAME)
    if runtime_dir is None:
        make_runtime_dir(folder.parent)
    make_runtime_dir(folder)
    if not isinstance(where, str) and not (where / RUN).exists():
        _try_doors(path, grpc, http)  # a server that is refused leaves no empty store behind
    opened = Store.open(where, create=True)
    lock = ServerLock.take(root, seat_of(opened, "server", SEAT_SECONDS))
    try:
        clear_stale_socket(path)
        host = Host(opened, sync_timeout=sync_timeout, runtime_dir=folder)
        cleaner = Cleaner(
            where,
            max_versions=max_versions,
            disk_budget=disk_budget,
            interval=cleanup_interval,
            name="server",
            live=host.live,
        )
        asyncio.run(_Serving(host, cleaner, lock, path, folder, grpc, http).run(ready))
    finally:
        lock.release()
        if runtime_dir is None:
            # Ours alone, and empty now that the socket is gone; one that the user named stays.
            with contextlib.suppress(OSError):
                folder.rmdir()


class _Serving:
    """One run of the server: doors open, wait for a signal, doors shut, in this order."""

    def __init__(
        self,
        host: Host,
        cleaner: Cleaner,
        lock: ServerLock,
        path: Path,
        folder: Path,
        grpc: str | None,
        http: str | None,
    ) -> None:
        self._host = host
        self._cleaner = cleaner
        self._lock = lock
        self._path = path
        self._folder = folder
        self._grpc_at = grpc
        self._http_at = http

    async def run(self, ready: Callable[[dict[str, Any]], None] | None) -> None:
        stop = asyncio.Event()
        with _signals(stop):
            await self._host.open()
            async with contextlib.AsyncExitStack() as doors:
                doors.push_async_callback(self._host.close)
                info = await self._open_doors(doors)
                self._lock.announce(info)
                self._cleaner.start()
                doors.callback(self._cleaner.close)
                for work in (self._host.probe(), self._keep_seat(stop)):
                    doors.push_async_callback(_cancelled, asyncio.create_task(work))
                log.info("serving %s on unix://%s", self._host.store.address, self._path)
                if ready is not None:
                    ready(msgspec.to_builtins(info))
                await stop.wait()
                log.info("going down")

    async def _keep_seat(self, stop: asyncio.Event) -> None:
        while await asyncio.to_thread(self._lock.keep):
            await asyncio.sleep(SEAT_SECONDS / 3)
        log.error("another server took this one's place while it did not answer; going down")
        stop.set()

    async def _open_doors(self, doors: contextlib.AsyncExitStack) -> ServerInfo:
        module = load_grpc()
        server = module.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((_handlers(module, self._host),))
        _bind_unix(server, self._path)
        doors.callback(self._path.unlink, missing_ok=True)
        bound = _bind_tcp(server, self._grpc_at) if self._grpc_at is not None else None
        await server.start()
        doors.push_async_callback(self._stop, server)
        http = await self._open_http(doors) if self._http_at is not None else None
        return ServerInfo(
            pid=os.getpid(),
            started_at=time.time(),
            run=self._host.store.run,
            listen=f"unix://{self._path}",
            runtime_dir=str(self._folder),
            grpc=bound,
            http=http,
        )

    async def _stop(self, server: Any) -> None:
        self._host.shut()
        await server.stop(GRACE_SECONDS)

    async def _open_http(self, doors: contextlib.AsyncExitStack) -> str:
        from weightline.service.status_app import StatusServer

        host, port = loopback(str(self._http_at), what="--http")
        listener = _listener(host, port)
        status = StatusServer(self._host, listener)
        await status.start()
        doors.push_async_callback(status.stop)
        return f"http://{bracketed(host, listener.getsockname()[1])}"


def _bind_unix(server: Any, path: Path) -> None:
    # The socket is for this user only from its first moment on; umask is process-wide, and no thread of ours
    # writes yet.
    previous = os.umask(0o177)
    try:
        server.add_insecure_port(Address("unix", path).target)
    except RuntimeError as error:
        raise InvalidInput(
            f"{path}: cannot listen there ({error})", hint="name another socket with --listen"
        ) from error
    finally:
        os.umask(previous)


def _bind_tcp(server: Any, at: str) -> str:
    host, port = loopback(at, what="--grpc")
    try:
        bound = server.add_insecure_port(bracketed(host, port))
    except RuntimeError as error:
        raise InvalidInput(
            f"--grpc {at}: the port is in use or not ours", hint="give another; 0 takes a free one"
        ) from error
    return f"grpc://{bracketed(host, bound)}"


def _try_doors(path: Path, grpc: str | None, http: str | None) -> None:
    """Raises `InvalidInput` for an address that cannot be listened on now."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidInput(
            f"{path}: cannot listen there, {path.parent} is no folder that this user may write to",
            hint="name another socket with --listen",
        )
    for what, at in (("--grpc", grpc), ("--http", http)):
        if at is None:
            continue
        host, port = loopback(at, what=what)
        if port:
            _listener(host, port, what=what).close()


def _listener(host: str, port: int, *, what: str = "--http") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidInput(
            f"{what} {bracketed(host, port)}: {error.strerror}", hint="give another port; 0 takes a free one"
        ) from error
    return listener


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    # Only the main thread may set handlers; a server in another thread is stopped by its process.
    if threading.current_thread() is not threading.main_thread():
        raise InvalidInput(
            "serve() must run in the main thread of its process", hint="start it as `weightline serve STORE`"
        )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _handlers(grpc: Any, host: Host) -> Any:
    """Generic handlers: bytes in, bytes out; decoding is ours, so that a bad message is a typed answer."""
    methods: dict[str, Any] = {}
    for name, (request, _reply) in wire.METHODS.items():
        work = getattr(host, name.lower())
        if name in wire.STREAMS:
            methods[name] = grpc.unary_stream_rpc_method_handler(_stream(name, request, work))
        else:
            methods[name] = grpc.unary_unary_rpc_method_handler(_unary(name, request, work))
    return grpc.method_handlers_generic_handler(wire.SERVICE, methods)


def _unary(name: str, kind: type[Any], work: Callable[[Any], Awaitable[Any]]) -> Any:
    async def handle(data: bytes, _context: Any) -> bytes:
        try:
            return wire.pack_reply(await work(wire.unpack(data, kind, what=f"request {name}")))
        except WeightlineError as error:
            return wire.pack_error(error)
        except Exception as error:
            log.exception("%s failed", name)
            return wire.pack_error(
                WeightlineError(f"{name}: {type(error).__name__}: {error}", hint="see the server's log")
            )

    return handle


def _stream(name: str, kind: type[Any], work: Callable[[Any], AsyncIterator[Any]]) -> Any:
    async def handle(data: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            message = wire.unpack(data, kind, what=f"request {name}")
        except WeightlineError as error:
            await context.abort(_invalid(), error.message)
            return
        async with contextlib.aclosing(work(message)) as events:  # type: ignore[type-var]
            async for event in events:
                yield wire.pack(event)

    return handle


def _invalid() -> Any:
    return load_grpc().StatusCode.INVALID_ARGUMENT
