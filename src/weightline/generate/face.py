"""The engine's Python face: from a prompt to outputs that say which weights sampled each token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from uuid import uuid4

import msgspec

from weightline.core import spans
from weightline.errors import InvalidInput
from weightline.generate.metrics import Metrics
from weightline.generate.options import EngineOptions
from weightline.generate.outputs import RequestOutput, part_of, whole
from weightline.generate.requests import Chunk, Completion, Request, Sink
from weightline.generate.sampling import SamplingParams, check_sampling, check_vocabulary
from weightline.generate.text import TextTokenizer, load_tokenizer
from weightline.types import WeightVersionSpan

if TYPE_CHECKING:
    from weightline.generate.model import LoadedModel

Prompt = str | Iterable[int]


class Feed:
    """Chunks of one or more requests, from the engine thread to an event loop."""

    def __init__(self, *, final_only: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue()
        self._final_only = final_only

    def sink(self, place: int = 0) -> Sink:
        """A sink for the request at `place`, to be called on the engine thread."""

        def put(chunk: Chunk) -> None:
            if (self._final_only and chunk.final is None) or self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (place, chunk))

        return put

    async def chunks(self, sequences: int) -> AsyncIterator[tuple[int, Chunk]]:
        """Places and chunks, until every one of `sequences` sequences has had its final one."""
        while sequences:
            place, chunk = await self._queue.get()
            sequences -= chunk.final is not None
            yield place, chunk


class Face:
    """Generation for Python callers. `Engine` brings the rest."""

    model: LoadedModel
    options: EngineOptions
    metrics: Metrics
    kv_tokens: int
    call: Callable[[Callable[[], None]], None]
    _enqueue: Callable[[Request], None]
    abort_request: Callable[[Request], Future[int]]

    @classmethod
    def open(cls, folder: Path | str, *, dtype: str = "auto", **options: Any) -> Self:
        """An engine over a Hugging Face folder; `options` are those of `EngineOptions`. Use it as a context
        manager, or call `start` and `stop`. Raises as `load_model`.
        """
        from weightline.generate.model import load_model

        chosen = EngineOptions(**options)
        loaded = load_model(Path(folder), dtype=dtype, max_model_len=chosen.max_model_len)
        return cls(loaded, chosen)  # type: ignore[call-arg]

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        """The model folder's tokenizer, or None when it has none."""
        return load_tokenizer(self.model.folder)

    def needed_tokenizer(self, why: str) -> TextTokenizer:
        """The tokenizer. Raises `InvalidInput` that names `why` when the folder has none."""
        if self.tokenizer is None:
            raise InvalidInput(
                f"{why} needs a tokenizer, and model folder {self.model.folder} has none",
                hint="send token ids and ask for tokens, or add tokenizer.json to the folder",
            )
        return self.tokenizer

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt."""
        if isinstance(prompt, str):
            return tuple(self.needed_tokenizer("a prompt in text").encode(prompt))
        return tuple(prompt)

    def check_prompt(self, tokens: tuple[int, ...], params: SamplingParams) -> None:
        """Raise `InvalidInput` for a request that the engine cannot run."""
        check_sampling(params)
        check_vocabulary(params, self.model.vocabulary)
        limit = self.options.max_model_len
        if not tokens:
            raise InvalidInput("token_ids is empty", hint="a prompt has at least one token")
        if len(tokens) >= limit:
            raise InvalidInput(
                f"token_ids has {len(tokens)} tokens, no room is left of max_model_len {limit}",
                hint="shorten the prompt, or start the engine with a larger max_model_len",
            )
        bad = next((t for t in tokens if not 0 <= t < self.model.vocabulary), None)
        if bad is not None:
            raise InvalidInput(f"token_ids holds {bad}", hint=f"ids are 0 to {self.model.vocabulary - 1}")
        if params.n > self.options.max_num_seqs:
            raise InvalidInput(
                f"sampling_params.n is {params.n}",
                hint=f"n must be at most the engine's max_num_seqs {self.options.max_num_seqs}",
            )

    def submit(
        self,
        prompt: Iterable[int],
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: str = "",
        cache_salt: str | None = None,
    ) -> Request:
        """Queue a request; `sink` hears of every step, on the engine thread. Only requests with the same
        `cache_salt` share cached prefixes.

        Raises `InvalidInput` (empty or too long a prompt, unknown token, bad parameters) and `Unavailable`
        (quarantined, stopping).
        """
        tokens = tuple(prompt)
        self.check_prompt(tokens, params)
        tokenizer = None
        if params.decodes:
            tokenizer = self.needed_tokenizer("sampling_params.stop" if params.stop else "text")
        room = self.options.max_model_len - len(tokens)
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.model.stop_ids
        )
        request = Request(
            tokens,
            params,
            sink,
            external_id=request_id or uuid4().hex,
            max_tokens=min(room, params.max_tokens or room),
            stop_ids=stop_ids,
            cache_salt=cache_salt,
            tokenizer=tokenizer,
            count=self.metrics.watch(len(tokens)),
        )
        most = params.n * (len(tokens) + request.max_tokens)
        if most > self.kv_tokens:
            raise InvalidInput(
                f"n {params.n} with {len(tokens)} prompt tokens and max_tokens {request.max_tokens} may need "
                f"{most} positions, the engine has {self.kv_tokens}",
                hint="ask for less, or start the engine with more kv_tokens",
            )
        self.call(lambda: self._enqueue(request))
        return request

    async def submit_async(
        self, prompt: Iterable[int], params: SamplingParams, sink: Sink, **options: Any
    ) -> Request:
        """`submit`, off the event loop. A task that is cancelled meanwhile leaves no request behind."""
        submitting = asyncio.ensure_future(asyncio.to_thread(self.submit, prompt, params, sink, **options))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(self._abort_submitted)
            raise

    def _abort_submitted(self, submitting: asyncio.Future[Request]) -> None:
        if not submitting.cancelled() and submitting.exception() is None:
            self.abort_request(submitting.result())

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> RequestOutput:
        """Generate, and wait for the end. Raises as `submit`."""
        return self.generate_all([prompt], params, request_ids=[request_id])[0]

    def generate_all(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        request_ids: Iterable[str] | None = None,
    ) -> list[RequestOutput]:
        """Generate for several prompts at once; outputs in order of the prompts."""
        params = params or self._text_params()
        ids = list(request_ids) if request_ids is not None else []
        begun: list[tuple[Request, dict[int, Completion], threading.Event]] = []
        try:
            for i, prompt in enumerate(prompts):
                finals: dict[int, Completion] = {}
                done = threading.Event()
                sink = _gather(finals, params.n, done)
                request_id = ids[i] if i < len(ids) else ""
                request = self.submit(self.prompt_ids(prompt), params, sink, request_id=request_id)
                begun.append((request, finals, done))
            outputs = []
            for request, finals, done in begun:
                done.wait()
                outputs.append(whole(request.external_id, request.prompt, finals.values()))
        except BaseException:
            for request, _, _ in begun:
                self.abort_request(request)
            raise
        return outputs

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Outputs part by part; the last one is `finished`. Leaving the loop aborts the request. Raises as
        `submit`.
        """
        params = params or self._text_params()
        feed = Feed(final_only=False)
        ids = await asyncio.to_thread(self.prompt_ids, prompt)
        request = await self.submit_async(ids, params, feed.sink(), request_id=request_id)
        left = params.n
        try:
            async for _, chunk in feed.chunks(left):
                left -= chunk.final is not None
                yield RequestOutput(
                    request_id=request.external_id,
                    prompt_token_ids=ids,
                    outputs=(part_of(chunk),),
                    finished=left == 0,
                )
        finally:
            if left:
                self.abort_request(request)

    async def generate_async(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str = ""
    ) -> RequestOutput:
        """Generate without blocking the event loop. A cancelled task aborts the request."""
        merged: RequestOutput | None = None
        async for part in self.stream(prompt, params, request_id=request_id):
            merged = part if merged is None else merged.merged(part)
        return cast(RequestOutput, merged)  # a stream has at least its last part

    async def stream_inputs(
        self,
        inputs: AsyncIterable[Prompt],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """A session whose input comes in chunks. Each chunk is answered with up to `max_tokens` tokens; then
        the context goes on with the answer, but for its last token, and the next chunk, as in vLLM.

        The part that ends the answer to a chunk has a finish reason, and spans over all output of the session
        so far; no part is `finished`, since the session ends where its input ends. An aborted answer ends it
        too. `n` is 1, and stop strings are refused, as in vLLM. Keys and values are computed anew for each
        chunk.
        """
        params = params or self._text_params()
        if params.n != 1 or params.stop:
            raise InvalidInput(
                "streaming input with n above 1 or with stop strings",
                hint="use n 1 and stop_token_ids in a session of streamed inputs",
            )
        context: tuple[int, ...] = ()
        said: tuple[WeightVersionSpan, ...] = ()
        name = request_id
        async for prompt in inputs:
            context += await asyncio.to_thread(self.prompt_ids, prompt)
            answer: tuple[int, ...] = ()
            async for part in self.stream(context, params, request_id=name):
                name = part.request_id
                (output,) = part.outputs
                answer += output.token_ids
                if output.weight_versions is not None:
                    said = spans.merge(said, output.weight_versions)
                    output = msgspec.structs.replace(output, weight_versions=said)
                yield msgspec.structs.replace(part, outputs=(output,), finished=False)
            context += answer[:-1]
            if output.finish_reason in ("abort", "error"):
                return

    def _text_params(self) -> SamplingParams:
        return SamplingParams(text=self.tokenizer is not None)


def _gather(finals: dict[int, Completion], sequences: int, done: threading.Event) -> Sink:
    def sink(chunk: Chunk) -> None:
        if chunk.final is not None:
            finals[chunk.index] = chunk.final
            if len(finals) == sequences:
                done.set()

    return sink
