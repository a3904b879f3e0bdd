"""The engine's HTTP face: vLLM's RL routes, and our control routes under `/weightline/`.

The event loop never computes: state changes go to the engine thread, decoding and digests to worker threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weightline.errors import InvalidInput, WeightlineError
from weightline.generate.answers import (
    STREAM_END,
    GenerateOrder,
    parse_generate,
    response_body,
    stream_event,
    vllm_error,
)
from weightline.generate.control import control_routes
from weightline.generate.engine import ID_PREFIX, Engine, PauseMode
from weightline.generate.requests import Chunk
from weightline.generate.requests import Request as Generation

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}


async def on_engine(engine: Engine, command: Callable[[], T]) -> T:
    """Have the engine thread run `command`, without blocking the event loop."""
    return await asyncio.wrap_future(engine.post(command))


class Feed:
    """Chunks of one request, from the engine thread to the event loop."""

    def __init__(self, *, final_only: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Chunk] = asyncio.Queue()
        self._final_only = final_only

    def sink(self, chunk: Chunk) -> None:
        """Called on the engine thread."""
        if (self._final_only and chunk.final is None) or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._queue.put_nowait, chunk)

    async def chunks(self, sequences: int) -> AsyncIterator[Chunk]:
        """All chunks, until every one of `sequences` sequences has had its final one."""
        while sequences:
            chunk = await self._queue.get()
            sequences -= chunk.final is not None
            yield chunk


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of one request. When the client goes away the request is aborted at once, also
    while no token comes.
    """

    media_type = "text/event-stream"

    def __init__(self, engine: Engine, generation: Generation, feed: Feed, request_id: str) -> None:
        super().__init__()
        self.engine, self.generation, self.feed, self.request_id = engine, generation, feed, request_id
        del self.headers["content-length"]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the last event or until the client is gone."""
        sender = asyncio.create_task(self._send(send))
        watcher = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sender.done():
                self.engine.abort_request(self.generation)
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self.feed.chunks(len(self.generation.sequences)):
            await send(
                {
                    "type": "http.response.body",
                    "body": stream_event(self.request_id, chunk),
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": STREAM_END, "more_body": False})


class VllmRoutes:
    """The routes that vLLM 0.32 has, as it answers them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def routes(self) -> list[Route]:
        """For `Starlette`."""
        table: tuple[tuple[str, str, Handler], ...] = (
            ("POST", "/inference/v1/generate", self.generate),
            ("POST", "/pause", self.pause),
            ("POST", "/resume", self.resume),
            ("GET", "/is_paused", self.is_paused),
            ("GET", "/weight_info", self.weight_info),
            ("POST", "/update_weight_version", self.update_weight_version),
            ("POST", "/abort_requests", self.abort_requests),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("GET", "/get_world_size", self.get_world_size),
            ("GET", "/health", self.health),
        )
        return [Route(path, _vllm_errors(handler), methods=[method]) for method, path, handler in table]

    async def generate(self, request: Request) -> Response:
        """Tokens in, tokens out; `stream` for server-sent events."""
        order = parse_generate(await request.body())
        base = request.headers.get("X-Request-Id") or order.request_id
        feed = Feed(final_only=not order.stream)
        generation = await self._submit(order, base, feed)
        request_id = ID_PREFIX + generation.external_id
        if order.stream:
            return EventStream(self.engine, generation, feed, request_id)
        return await self._answer(request, generation, feed, request_id)

    async def _submit(self, order: GenerateOrder, base: str | None, feed: Feed) -> Generation:
        return await asyncio.to_thread(
            self.engine.submit,
            order.token_ids,
            order.params,
            feed.sink,
            request_id=base or "",
            cache_salt=order.cache_salt,
        )

    async def _answer(
        self, request: Request, generation: Generation, feed: Feed, request_id: str
    ) -> Response:
        async def collect() -> list[Chunk]:
            return [c async for c in feed.chunks(len(generation.sequences))]

        collecting = asyncio.create_task(collect())
        watcher = asyncio.create_task(_gone(request.receive))
        try:
            await asyncio.wait({collecting, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)  # nobody is there to read it
            completions = [c.final for c in collecting.result() if c.final is not None]
        finally:
            if not collecting.done():
                self.engine.abort_request(generation)
            collecting.cancel()
            watcher.cancel()
            await asyncio.gather(collecting, watcher, return_exceptions=True)
        if any(c.finish_reason == "error" for c in completions):
            raise WeightlineError(
                "a step failed or gave logits that are not finite", hint="see the engine's log"
            )
        return JSONResponse(response_body(request_id, completions))

    async def pause(self, request: Request) -> Response:
        """`mode` abort (default), wait or keep; `clear_cache` true by default."""
        mode = request.query_params.get("mode", "abort")
        if request.query_params.get("wait_for_inflight_requests", "").lower() in ("true", "1"):
            mode = "wait"
        if mode not in _MODES:
            raise InvalidInput(f"mode is {mode!r}", hint="mode is abort, wait or keep")
        clear = _flag(request, "clear_cache", default=True)
        done: Future[None] = await asyncio.to_thread(self.engine.pause, _MODES[mode], clear_cache=clear)
        await asyncio.wrap_future(done)
        return JSONResponse({"status": "paused"})

    async def resume(self, _request: Request) -> Response:
        """Go on. 409 while a refit has written weights and not yet labelled them."""
        await on_engine(self.engine, self.engine.resume_now)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, _request: Request) -> Response:
        """Answers while paused, and while a step runs."""
        return JSONResponse({"is_paused": self.engine.paused})

    async def weight_info(self, _request: Request) -> Response:
        """The label of the next token."""
        return JSONResponse({"weight_version": self.engine.identity.label})

    async def update_weight_version(self, request: Request) -> Response:
        """Sets the label only, whatever the weights; a string, else 400."""
        body = await _json(request)
        label = body.get("new_version")
        if not isinstance(label, str):
            raise InvalidInput(f"new_version is {label!r}", hint="new_version must be a string")
        await asyncio.to_thread(self.engine.set_label, label)
        return JSONResponse({"success": True, "new_version": label})

    async def abort_requests(self, request: Request) -> Response:
        """`request_ids`, or none for all; unknown ids do nothing. As in vLLM, `aborted` is how many ids were
        asked for, known or not; without ids how many requests were live.
        """
        body = await _json(request)
        ids = body.get("request_ids")
        if ids is not None and (not isinstance(ids, list) or not all(isinstance(i, str) for i in ids)):
            raise InvalidInput(f"request_ids is {ids!r}", hint="request_ids must be a list of strings")
        live = await asyncio.to_thread(self.engine.abort, ids or None)
        return JSONResponse({"status": "aborted", "aborted": len(ids) if ids else live})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """New requests find nothing of earlier ones; `reset_running_requests` recomputes live ones too."""
        await asyncio.to_thread(self.engine.reset_prefix_cache)
        if _flag(request, "reset_running_requests", default=False):
            await asyncio.to_thread(self.engine.reset_kv)
        return Response(status_code=200)

    async def get_world_size(self, _request: Request) -> Response:
        """One process, one device."""
        return JSONResponse({"world_size": 1})

    async def health(self, _request: Request) -> Response:
        """200 as long as the process can answer: also while paused or quarantined."""
        return Response(status_code=200)


def _flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    known = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }
    if value.lower() not in known:
        raise InvalidInput(f"{name} is {value!r}", hint=f"{name} is true or false")
    return known[value.lower()]


async def _json(request: Request) -> dict[str, Any]:
    try:
        return msgspec.json.decode(await request.body(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidInput(f"request body: {error}", hint="send a JSON object") from None


def _vllm_errors(handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except WeightlineError as error:
            status, body = vllm_error(error)
            return JSONResponse(body, status_code=status)

    return handle


def build_app(engine: Engine) -> Starlette:
    """The ASGI application over a started engine. It does not stop the engine."""
    return Starlette(routes=[*VllmRoutes(engine).routes(), *control_routes(engine)])
