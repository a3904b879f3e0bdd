"""One request on its way through the engine: its sequences, what they have sampled, and who hears of it.

A *context position* counts prompt and output tokens together from 0; an *output index* counts output tokens
only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from msgspec import Struct

from weightline.core.spans import SpanBuilder
from weightline.generate.sampling import SamplingParams, TokenLogprobs, generator_for
from weightline.generate.text import TextStream, TextTokenizer
from weightline.types import WeightVersionSpan

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]


class Completion(Struct, frozen=True, kw_only=True):
    """The final output of one sequence."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    text: str | None = None
    """Decoded output, when the request asked for text or has stop strings; without a stop string that ended
    it.
    """
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it."""
    weight_versions: tuple[WeightVersionSpan, ...] | None
    """Canonical, over output indexes: the label live in the step that sampled each token. None when the
    request left spans out, as the two below.
    """
    kv_weight_versions: tuple[WeightVersionSpan, ...] | None
    """Over context positions: the label whose weights computed the keys and values there, as they stood at
    the end. The last output token's were never computed. Empty when the output ended (an abort) while all of
    them were being computed anew.
    """
    kv_recomputed_at: tuple[int, ...] | None
    """Output indexes before whose sampling all keys and values were computed anew, under the label of that
    token.
    """
    cached_tokens: int
    """Context positions whose keys and values came from the prefix cache when the request was first admitted.
    """


class Chunk(Struct, frozen=True, kw_only=True):
    """What one step brought to one sequence. The last chunk of a sequence, and only that one, has `final`."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    text: str | None = None
    """Text since the chunk before; a stop string may hold some of it back."""
    final: Completion | None = None


Sink = Callable[[Chunk], None]
"""Called on the engine thread, in order, with one final chunk per sequence. Must not block or raise."""


class Sequence:
    """One output of a request. Only the engine thread touches it.

    Invariant: keys and values of the first `computed` context positions are in its cache row. A step
    computes those of further positions, and samples when all positions are covered; so prefill, decode and
    recomputation are one rule.
    """

    __slots__ = (
        "cached_tokens",
        "computed",
        "finished",
        "generator",
        "index",
        "kv",
        "logprobs",
        "namespace",
        "output",
        "poisoned",
        "recomputed_at",
        "request",
        "spans",
        "stop_reason",
        "text",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.output: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.spans = SpanBuilder()
        self.kv = SpanBuilder()
        self.recomputed_at: list[int] = []
        self.computed = 0
        self.cached_tokens = 0
        self.namespace = -1
        """Of the prefix cache, in which everything that is computed was computed."""
        self.poisoned = False
        """Its logits were not finite, so its cache row may hold NaN and is cleared when it is left."""
        self.finished = False
        self.stop_reason: int | str | None = None
        self.text: TextStream | None = None
        if request.tokenizer is not None:
            self.text = TextStream(request.tokenizer, request.prompt, request.params)
        self.generator: torch.Generator | None = generator_for(request.params, index)

    @property
    def length(self) -> int:
        """Context positions so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Context positions whose keys and values the next sampling still needs."""
        return self.length - self.computed

    def context(self, start: int, stop: int) -> list[int]:
        """Token ids at context positions `start` to `stop`."""
        prompt = self.request.prompt
        if start >= len(prompt):
            return self.output[start - len(prompt) : stop - len(prompt)]
        return (list(prompt[start:stop]) + self.output[: max(0, stop - len(prompt))])[: stop - start]

    def cover(self, label: str, count: int) -> None:
        """Keys and values of `count` more positions were computed under `label`."""
        self.computed += count
        self.kv.append(label, count)

    def forget_kv(self) -> None:
        """Compute all keys and values anew in the next step; a pass that was under way starts over."""
        if self.output and (not self.recomputed_at or self.recomputed_at[-1] != len(self.output)):
            self.recomputed_at.append(len(self.output))
        self.computed = 0
        self.kv = SpanBuilder()

    def take_kv_of(self, other: Sequence) -> None:
        """The cache row of `other` was copied to this sequence's row."""
        self.computed, self.namespace = other.computed, other.namespace
        self.cached_tokens = other.cached_tokens
        for span in other.kv.spans():
            self.kv.append(span.version, span.end - span.start)

    def accept(self, token: int, label: str, logprobs: TokenLogprobs | None) -> None:
        """A step under `label` sampled `token`."""
        self.output.append(token)
        self.spans.append(label)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def complete(self, reason: FinishReason) -> Completion:
        """The final output, with what was sampled so far."""
        self.finished = True
        told = self.request.params.weight_versions
        return Completion(
            index=self.index,
            token_ids=tuple(self.output),
            logprobs=tuple(self.logprobs) if self.request.params.logprobs is not None else None,
            finish_reason=reason,
            text=None if self.text is None else self.text.text,
            stop_reason=self.stop_reason,
            weight_versions=self.spans.spans() if told else None,
            kv_weight_versions=self._kv_at_the_end() if told else None,
            kv_recomputed_at=tuple(i for i in self.recomputed_at if i < len(self.output)) if told else None,
            cached_tokens=self.cached_tokens,
        )

    def _kv_at_the_end(self) -> tuple[WeightVersionSpan, ...]:
        if self.recomputed_at and self.recomputed_at[-1] == len(self.output):
            return ()
        if self.output and len(self.kv) == self.length:
            # A pass that sampled nothing (its logits were not finite) says nothing about any token.
            self.kv.truncate(self.length - 1)
        return self.kv.spans()


class Request:
    """One prompt with `params.n` sequences. Internal ids are unique; the caller's id may repeat once its
    request has ended, or even before.
    """

    __slots__ = (
        "admitted",
        "cache_salt",
        "count",
        "external_id",
        "id",
        "max_tokens",
        "params",
        "prompt",
        "sequences",
        "sink",
        "stop_ids",
        "tokenizer",
    )

    def __init__(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        sink: Sink,
        *,
        external_id: str,
        max_tokens: int,
        stop_ids: frozenset[int],
        cache_salt: str | None = None,
        tokenizer: TextTokenizer | None = None,
        count: Sink | None = None,
    ) -> None:
        self.id = uuid4().hex
        self.external_id = external_id
        self.prompt = prompt
        self.params = params
        self.sink = sink
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.cache_salt = cache_salt
        """Requests with different salts never share keys and values."""
        self.admitted = 0
        """Its place in the order of admission, from 1; 0: it never ran. A preempted request waits with what
        it has sampled.
        """
        self.count = count
        """Hears of every chunk before `sink` does."""
        self.tokenizer = tokenizer
        """Only when the output is decoded."""
        self.sequences = tuple(Sequence(self, i) for i in range(params.n))

    def deliver(self, chunk: Chunk) -> None:
        """Send a chunk on its way."""
        if self.count is not None:
            self.count(chunk)
        self.sink(chunk)

    @property
    def live(self) -> tuple[Sequence, ...]:
        """Sequences that have not ended."""
        return tuple(s for s in self.sequences if not s.finished)
