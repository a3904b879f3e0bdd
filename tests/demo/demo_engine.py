"""A real embedded engine behind a real HTTP port in this process, whose answers a test can spoil one by
one."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from weightline.generate import Engine, EngineOptions, build_app, load_model

Spoil = Callable[[dict[str, Any]], None]


class Spoiled:
    """ASGI: passes requests to the engine's app; spoils the answer of a chosen `generate` request.

    `faults` maps a request id to "error" (500), "cut" (the connection ends within the body), or a function
    that changes the answer's JSON.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.faults: dict[str, str | Spoil] = {}
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] != "http" or scope["path"] != "/inference/v1/generate":
            await self._app(scope, receive, send)
            return
        message = await receive()
        while message.get("more_body"):
            more = await receive()
            message = {**more, "body": message["body"] + more["body"]}
        request = json.loads(message["body"])["request_id"]
        self.seen.append(request)
        fault = self.faults.get(request)
        sent = False

        async def replay() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return message

        if fault is None:
            await self._app(scope, replay, send)
        elif fault == "error":
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        elif fault == "cut":
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"999")]}
            )
            await send({"type": "http.response.body", "body": b'{"choices":'})
        else:
            await self._changed(scope, replay, send, fault)

    async def _changed(self, scope: Any, receive: Any, send: Any, change: Any) -> None:
        body = b""

        async def keep(message: Any) -> None:
            nonlocal body
            body += message.get("body", b"")

        await self._app(scope, receive, keep)
        answer = json.loads(body)
        change(answer["choices"][0])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


class DemoEngine:
    """`url`, `engine` (the real one) and `spoiled` (its door)."""

    def __init__(self, url: str, engine: Any, spoiled: Spoiled) -> None:
        self.url, self.engine, self.spoiled = url, engine, spoiled


@contextlib.contextmanager
def demo_engine(folder: Path, *, label: str = "", port: int = 0) -> Iterator[DemoEngine]:
    """Started, answering, and gone afterwards."""
    engine = Engine(load_model(folder, max_model_len=256), EngineOptions(max_model_len=256)).start()
    if label:
        engine.set_label(label)
    spoiled = Spoiled(build_app(engine))
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(spoiled, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield DemoEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, spoiled)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        engine.stop()
