"""The engine's HTTP face: vLLM's routes, and our control routes under `/weightline/`.

The event loop never computes: state changes go to the engine thread, decoding and digests to worker threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from weightline import __version__
from weightline.errors import InvalidInput, WeightlineError
from weightline.generate.answers import (
    GenerateAnswers,
    decode_body,
    flag,
    json_object,
    parse_generate,
    vllm_error,
)
from weightline.generate.control import control_routes
from weightline.generate.delivery import EventStream, Submission, answer, wire_error
from weightline.generate.engine import ID_PREFIX, Engine, PauseMode
from weightline.generate.openai import ChatAnswers, CompletionAnswers, Order, parse_chat, parse_completion
from weightline.generate.wire import LabelBody

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}


async def on_engine(engine: Engine, command: Callable[[], T]) -> T:
    """Have the engine thread run `command`, without blocking the event loop."""
    return await asyncio.wrap_future(engine.post(command))


class VllmRoutes:
    """The routes that vLLM 0.32 has, as it answers them."""

    def __init__(self, engine: Engine, served_model_name: str | None) -> None:
        self.engine = engine
        self.name = served_model_name or str(engine.model.folder)
        self.strict_name = served_model_name is not None
        self.created = int(time.time())

    def routes(self) -> list[Route]:
        """For `Starlette`."""
        table: tuple[tuple[str, str, Handler], ...] = (
            ("POST", "/inference/v1/generate", self.generate),
            ("POST", "/inference/v1/abort_requests", self.abort_and_say_nothing),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat),
            ("GET", "/v1/models", self.models),
            ("POST", "/pause", self.pause),
            ("POST", "/resume", self.resume),
            ("GET", "/is_paused", self.is_paused),
            ("GET", "/weight_info", self.weight_info),
            ("POST", "/update_weight_version", self.update_weight_version),
            ("POST", "/abort_requests", self.abort_requests),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("POST", "/collective_rpc", self.collective_rpc),
            ("GET", "/get_world_size", self.get_world_size),
            ("GET", "/health", self.health),
            ("GET", "/ping", self.health),
            ("POST", "/ping", self.health),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.metrics),
        )
        return [Route(path, _vllm_errors(handler), methods=[method]) for method, path, handler in table]

    # Generation.

    async def generate(self, request: Request) -> Response:
        """Tokens in; tokens or text out; `stream` for server-sent events."""
        body, params = parse_generate(await _json_body(request))
        self._check_model(body.model)
        if params.text:
            self.engine.needed_tokenizer('output_mode "text"')
        submission = await Submission.of(
            self.engine,
            [body.token_ids],
            params,
            request_id=request.headers.get("X-Request-Id") or body.request_id or "",
            cache_salt=body.cache_salt,
            final_only=not body.stream,
        )
        answers = GenerateAnswers(
            body,
            params,
            request_id=ID_PREFIX + submission.generations[0].external_id,
            model=self.name,
            tokenizer=self.engine.tokenizer if params.text else None,
        )
        if body.stream:
            return EventStream(submission, answers)
        return await answer(submission, request, answers.whole)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions; `return_weight_versions` adds spans."""
        order = await asyncio.to_thread(parse_completion, await _json_body(request), self.engine)
        return await self._openai(request, order, CompletionAnswers, "cmpl-")

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions, through the model's chat template."""
        order = await asyncio.to_thread(parse_chat, await _json_body(request), self.engine)
        return await self._openai(request, order, ChatAnswers, "chatcmpl-")

    async def _openai(
        self,
        request: Request,
        order: Order,
        kind: type[CompletionAnswers] | type[ChatAnswers],
        prefix: str,
    ) -> Response:
        self._check_model(order.body.model)
        id = prefix + (request.headers.get("X-Request-Id") or order.body.request_id or uuid4().hex)
        answers = kind(order, self.engine, id=id, model=order.body.model or self.name)
        stream = bool(order.body.stream)
        submission = await Submission.of(
            self.engine,
            order.prompts,
            order.params,
            request_id=id,
            cache_salt=order.body.cache_salt,
            final_only=not stream,
        )
        if stream:
            return EventStream(submission, answers)
        return await answer(submission, request, answers.whole)

    def _check_model(self, name: str | None) -> None:
        """vLLM serves no other name than its own. Without a name given at the start this engine takes any."""
        if self.strict_name and name not in (None, self.name):
            raise wire_error(
                f"model {name!r} is not served",
                hint=f"the model's name is {self.name!r}",
                name="NotFoundError",
                param="model",
                code=404,
            )

    async def models(self, _request: Request) -> Response:
        """The one model."""
        permission = {
            "id": f"modelperm-{self.engine.instance[:16]}",
            "object": "model_permission",
            "created": self.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "weightline",
            "root": str(self.engine.model.folder),
            "parent": None,
            "max_model_len": self.engine.options.max_model_len,
            "permission": [permission],
        }
        return JSONResponse({"object": "list", "data": [model]})

    # Pausing, labels, aborts.

    async def pause(self, request: Request) -> Response:
        """`mode` abort (default), wait or keep; `clear_cache` true by default."""
        mode = request.query_params.get("mode", "abort")
        if request.query_params.get("wait_for_inflight_requests", "").lower() in ("true", "1"):
            mode = "wait"
        if mode not in _MODES:
            raise wire_error(f"mode is {mode!r}", hint="mode is abort, wait or keep", param="query.mode")
        clear = _query(request, "clear_cache", default=True)
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
        raw = await request.body() or b"{}"
        label = decode_body(raw, LabelBody, 'send {"new_version": "..."}').new_version
        await asyncio.to_thread(self.engine.set_label, label)
        return JSONResponse({"success": True, "new_version": label})

    async def abort_and_say_nothing(self, request: Request) -> Response:
        """vLLM's other route of this purpose: `request_ids` is needed, and the answer is empty."""
        if json_object(await request.body()).get("request_ids") is None:
            raise wire_error("request_ids is missing", hint='send {"request_ids": [...]}')
        await self.abort_requests(request)
        return Response(status_code=200)

    async def abort_requests(self, request: Request) -> Response:
        """`request_ids`, or none for all; unknown ids do nothing. As in vLLM, `aborted` is how many ids were
        asked for, known or not; without ids how many requests were live.
        """
        ids = json_object(await request.body()).get("request_ids")
        if ids is not None and (not isinstance(ids, list) or not all(isinstance(i, str) for i in ids)):
            raise InvalidInput(f"request_ids is {ids!r}", hint="request_ids must be a list of strings")
        live = await asyncio.to_thread(self.engine.abort, ids or None)
        return JSONResponse({"status": "aborted", "aborted": len(ids) if ids else live})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """New requests find nothing of earlier ones; `reset_running_requests` recomputes live ones too."""
        _query(request, "reset_external", default=False)
        running = _query(request, "reset_running_requests", default=False)
        await asyncio.to_thread(self.engine.reset_prefix_cache)
        if running:
            await asyncio.to_thread(self.engine.reset_kv)
        return JSONResponse({"success": True})

    async def collective_rpc(self, request: Request) -> Response:
        """Calls one of a few named methods; no other name reaches the engine."""
        body = json_object(await request.body())
        method, args = body.get("method"), body.get("args") or []
        if method is None:
            raise wire_error("method is missing", hint='send {"method": "check_health"}')
        allowed: dict[str, Callable[[], Awaitable[Any]]] = {
            "check_health": self._check_health,
            "get_weight_version": self._label,
            "weight_digests": lambda: self._digests(args),
        }
        if method not in allowed:
            raise wire_error(
                f"method {method!r} is not allowed", hint=f"allowed are {', '.join(sorted(allowed))}"
            )
        if not isinstance(args, list) or (args and method != "weight_digests") or body.get("kwargs"):
            raise wire_error(f"method {method!r} does not take these arguments", hint="see its documentation")
        return JSONResponse({"results": [await allowed[method]()]})

    async def _check_health(self) -> None:
        await on_engine(self.engine, lambda: None)

    async def _label(self) -> str:
        return self.engine.identity.label

    async def _digests(self, names: list[Any]) -> dict[str, str]:
        found, _ = await asyncio.to_thread(self.engine.digests, [str(n) for n in names] or None)
        return found

    # About the server.

    async def get_world_size(self, request: Request) -> Response:
        """One process, one device."""
        _query(request, "include_dp", default=True)
        return JSONResponse({"world_size": 1})

    async def health(self, _request: Request) -> Response:
        """200 as long as the process can answer: also while paused or quarantined."""
        return Response(status_code=200)

    async def version(self, _request: Request) -> Response:
        """Of Weightline."""
        return JSONResponse({"version": __version__})

    async def metrics(self, _request: Request) -> Response:
        """Prometheus text. Answers while paused."""
        scheduler, prefix = self.engine.scheduler, self.engine.prefix
        gauges = {
            "vllm:num_requests_running": ("Sequences in a cache row.", float(len(scheduler.rows))),
            "vllm:num_requests_waiting": ("Requests in the queue.", float(len(scheduler.queue))),
        }
        counters = {
            "vllm:num_preemptions": ("Requests sent back to wait, for want of KV.", scheduler.preempted),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up.", prefix.queried_tokens),
            "vllm:prefix_cache_hits": ("Prompt tokens whose KV was there.", prefix.hit_tokens),
        }
        text = self.engine.metrics.text(self.name, gauges, counters)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _query(request: Request, name: str, *, default: bool) -> bool:
    return flag(request.query_params.get(name), name, default=default)


async def _json_body(request: Request) -> bytes:
    """The raw body; only what says that it is no JSON is refused for its media type."""
    media = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media != "application/json":
        raise wire_error(f"the body is {media}", hint="only application/json is allowed")
    return await request.body()


def _vllm_errors(handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except WeightlineError as error:
            status, body = vllm_error(error)
            return JSONResponse(body, status_code=status)

    return handle


async def _no_route(_request: Request, error: Exception) -> Response:
    status, detail = (
        (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, str(error))
    )
    return JSONResponse({"detail": detail}, status_code=status)


def build_app(engine: Engine, *, served_model_name: str | None = None) -> Starlette:
    """The ASGI application over a started engine. It does not stop the engine. With `served_model_name` a
    request that names another model is a 404.
    """
    routes = [*VllmRoutes(engine, served_model_name).routes(), *control_routes(engine)]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
