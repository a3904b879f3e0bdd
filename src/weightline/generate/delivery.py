"""From the engine to one HTTP client: whole answers and server-sent events. A client that goes away ends its
requests at once, also while no token comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weightline.errors import InvalidInput, WeightlineError
from weightline.generate.engine import Engine
from weightline.generate.face import Feed
from weightline.generate.requests import Chunk, Completion
from weightline.generate.requests import Request as Generation
from weightline.generate.sampling import SamplingParams

STREAM_END = b"data: [DONE]\n\n"


class Renderer(Protocol):
    """Turns chunks into the events of one stream; each event is a JSON object."""

    def first(self) -> Iterable[dict[str, Any]]:
        """Events before any chunk."""
        ...

    def event(self, place: int, chunk: Chunk, *, last: bool) -> dict[str, Any]:
        """The event of one chunk of the request at `place`; `last` of all of them."""
        ...

    def after(self) -> Iterable[dict[str, Any]]:
        """Events after all chunks."""
        ...


class Submission:
    """The engine's requests behind one HTTP request."""

    def __init__(self, engine: Engine, feed: Feed) -> None:
        self.engine = engine
        self.feed = feed
        self.generations: list[Generation] = []

    @classmethod
    async def of(
        cls,
        engine: Engine,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str | None,
        final_only: bool,
    ) -> Submission:
        """Queue one request a prompt: all of them, or none and an error as `Engine.submit` raises it."""
        taken = cls(engine, Feed(final_only=final_only))
        try:
            for place, prompt in enumerate(prompts):
                sink = taken.feed.sink(place)
                name = request_id if len(prompts) == 1 else f"{request_id}-{place}"
                generation = await engine.submit_async(
                    prompt,
                    params,
                    sink,
                    request_id=name if request_id else "",
                    cache_salt=cache_salt,
                )
                taken.generations.append(generation)
        except BaseException:
            taken.abort()
            raise
        return taken

    @property
    def sequences(self) -> int:
        """Output sequences of all requests."""
        return sum(len(g.sequences) for g in self.generations)

    def abort(self) -> None:
        """End what still runs."""
        for generation in self.generations:
            self.engine.abort_request(generation)

    async def completions(self, receive: Receive) -> list[tuple[int, Completion]] | None:
        """Every final output with the place of its request, in order; None when the client went away, whose
        requests are aborted then. Raises `WeightlineError` when a step failed.
        """

        async def collect() -> list[tuple[int, Completion]]:
            found = [(p, c.final) async for p, c in self.feed.chunks(self.sequences) if c.final is not None]
            return sorted(found, key=lambda entry: (entry[0], entry[1].index))

        collecting = asyncio.create_task(collect())
        watcher = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({collecting, watcher}, return_when=asyncio.FIRST_COMPLETED)
            finals = collecting.result() if collecting.done() else None
        finally:
            if not collecting.done():
                self.abort()
            collecting.cancel()
            watcher.cancel()
            await asyncio.gather(collecting, watcher, return_exceptions=True)
        if finals is not None and any(final.finish_reason == "error" for _, final in finals):
            raise WeightlineError(
                "a step failed or gave logits that are not finite", hint="see the engine's log"
            )
        return finals


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(
    submission: Submission, request: Request, body: Callable[[list[tuple[int, Completion]]], dict[str, Any]]
) -> Response:
    """The answer that does not stream."""
    finals = await submission.completions(request.receive)
    if finals is None:
        return Response(status_code=499)  # nobody is there to read it
    return Response(msgspec.json.encode(body(finals)), media_type="application/json")


class EventStream(Response):
    """Server-sent events of one submission."""

    media_type = "text/event-stream"

    def __init__(self, submission: Submission, renderer: Renderer) -> None:
        super().__init__()
        self.submission, self.renderer = submission, renderer
        del self.headers["content-length"]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the last event or until the client is gone."""
        sender = asyncio.create_task(self._send(send))
        watcher = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sender.done():
                self.submission.abort()
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        async def event(content: dict[str, Any]) -> None:
            body = b"data: " + msgspec.json.encode(content) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for content in self.renderer.first():
            await event(content)
        left = self.submission.sequences
        async for place, chunk in self.submission.feed.chunks(left):
            left -= chunk.final is not None
            await event(self.renderer.event(place, chunk, last=left == 0))
        for content in self.renderer.after():
            await event(content)
        await send({"type": "http.response.body", "body": STREAM_END, "more_body": False})


def usage(prompt: int, completion: int, *, details: bool) -> dict[str, Any]:
    """Token counts, as vLLM tells them; `details` adds the two fields that are null here."""
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    return told | ({"prompt_tokens_details": None, "completion_tokens_details": None} if details else {})


def wire_error(
    message: str, *, hint: str, name: str = "Bad Request", param: str | None = None, code: int = 400
) -> InvalidInput:
    """A request that vLLM refuses, with the `type` (here `name`), `param` and `code` of its error."""
    error = InvalidInput(message, hint=hint)
    error.__dict__.update(name=name, param=param, code=code)
    return error
