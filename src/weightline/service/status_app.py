"""`serve --http`: two read-only routes for people and probes, on the server's own event loop.

`GET /health` is 200 while the log can be read, else 503 with the error. `GET /status` tells versions,
subscribers and lags.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import weightline
from weightline.errors import WeightlineError
from weightline.service import wire

if TYPE_CHECKING:
    from weightline.service.host import Host

RECENT = 50
"""Versions that `/status` tells in full unless `?versions=N` asks for another number."""


def status_app(host: Host) -> Starlette:
    """The ASGI app over a running `Host`."""

    async def health(_request: Request) -> Response:
        if host.trouble is not None:
            return _problem(host.trouble)
        return _json({"ok": True, "run": host.store.run, "newest": host.newest, "closing": host.closing})

    async def status(request: Request) -> Response:
        wanted = request.query_params.get("versions", str(RECENT))
        if not (wanted.isascii() and wanted.isdigit()):
            return _json({"kind": "invalid_input", "message": f"versions={wanted!r} is not a number"}, 400)
        try:
            records = (await host.versions(wire.Empty())).records
        except WeightlineError as error:
            return _problem(error)
        seen = await host.subscribers(wire.Empty())
        shown = records[max(0, len(records) - int(wanted)) :]
        return _json(
            {
                "run": host.store.run,
                "root": str(host.store.root),
                "store": host.store.address,
                "degraded": host.store.place.degraded,
                "release": weightline.__version__,
                "pid": os.getpid(),
                "uptime_seconds": time.time() - host.started_at,
                "newest": seen.newest,
                "versions_total": len(records),
                "versions": shown,
                "subscribers": seen.subscribers,
                "trouble": host.trouble.to_dict() if host.trouble is not None else None,
            }
        )

    return Starlette(routes=[Route("/health", health), Route("/status", status)])


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _problem(error: WeightlineError) -> Response:
    return _json(error.to_dict(), error.status.http)


class _Embedded(uvicorn.Server):
    """uvicorn without its own signal handlers: the process has one way down, and that is `serve`'s."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class StatusServer:
    """The status app behind a bound socket, as a task of the running loop."""

    def __init__(self, host: Host, listener: socket.socket) -> None:
        config = uvicorn.Config(
            status_app(host), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._listener = listener
        self._server = _Embedded(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once it answers."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Close the socket and end the task."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()
