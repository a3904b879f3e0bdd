"""`/v1/completions` and `/v1/chat/completions` as vLLM answers them: bodies, answers, events of a stream.

Spans are left out unless `return_weight_versions` asks for them; then each choice has `weight_versions`, in a
stream on its last chunk.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Literal

import msgspec
from msgspec import Struct

from weightline import __version__
from weightline.errors import InvalidInput
from weightline.generate.answers import StreamOptions, TextLogprobs, check_salt, decode_body, json_object
from weightline.generate.delivery import usage, wire_error
from weightline.generate.face import Face
from weightline.generate.requests import Chunk, Completion
from weightline.generate.sampling import SamplingParams, TokenLogprobs, parse_sampling

FINGERPRINT = f"weightline-{__version__}"
_SAMPLING = frozenset(SamplingParams.__struct_fields__) - {
    "logprobs",
    "text",
    "weight_versions",
    "max_tokens",
}
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "priority", "add_special_tokens", "request_id"}
)
"""Fields that change no answer of this engine."""
_LACKING: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "kv_transfer_params": (),
    "reasoning_effort": (),
}
"""Fields of vLLM's that this engine does not implement, with the values that change nothing."""


class _Body(Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool = False


class CompletionBody(_Body, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: Any = None
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatBody(_Body, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class Order(Struct, frozen=True, kw_only=True):
    """A checked request of either route."""

    body: CompletionBody | ChatBody
    params: SamplingParams
    prompts: list[list[int]]
    texts: list[str]
    """Of the prompts; only for `echo`."""


def _refuse(message: str, hint: str, param: str | None = None) -> InvalidInput:
    return wire_error(message, hint=hint, name="BadRequestError", param=param)


def _sampling(
    raw: bytes, body: CompletionBody | ChatBody, max_tokens: int | None, face: Face
) -> SamplingParams:
    fields = json_object(raw)
    for name, value in fields.items():
        if name in _SAMPLING or name in body.__struct_fields__ or name in _IGNORED or value is None:
            continue
        if name not in _LACKING:
            raise _refuse(f"{name} is not a field of this route", "leave it out", name)
        if value not in _LACKING[name]:
            raise _refuse(f"{name} is not implemented by this engine", "leave it out", name)
    if body.stream_options is not None and not body.stream:
        raise _refuse("stream_options without stream", "set stream to true", "stream_options")
    limit = face.options.max_model_len
    if max_tokens is not None and max_tokens > limit:
        raise _refuse(
            f"max_tokens {max_tokens} is more than max_model_len {limit}",
            "ask for fewer tokens",
            "max_tokens",
        )
    check_salt(body.cache_salt)
    wanted = {name: value for name, value in fields.items() if name in _SAMPLING}
    logprobs = body.logprobs if isinstance(body, CompletionBody) else None
    if isinstance(body, ChatBody) and body.logprobs:
        logprobs = body.top_logprobs or 0
    wanted |= {"max_tokens": max_tokens, "logprobs": logprobs}
    try:
        return parse_sampling(wanted, text=True, weight_versions=body.return_weight_versions)
    except InvalidInput as error:
        if not error.__dict__.get("shape"):
            raise
        raise wire_error(error.message, hint=error.hint, param=f"body.{error.__dict__['field']}") from None


def parse_completion(raw: bytes, face: Face) -> Order:
    """Checks a body of `/v1/completions`. Raises `InvalidInput` naming the field at fault."""
    body = decode_body(raw, CompletionBody, 'send {"prompt": "..."}')
    tokenizer = face.needed_tokenizer("/v1/completions")
    params = _sampling(raw, body, 16 if body.max_tokens is None else body.max_tokens, face)
    if body.echo and body.logprobs is not None:
        raise _refuse("echo with logprobs is not implemented by this engine", "ask for one of them", "echo")
    prompts: list[list[int]] = []
    for prompt in _prompts(body.prompt):
        ids = (
            prompt if isinstance(prompt, list) else tokenizer.encode(prompt, special=body.add_special_tokens)
        )
        prompts.append(ids)
    texts = []
    if body.echo:
        given = _prompts(body.prompt)
        texts = [g if isinstance(g, str) else tokenizer.decode(g) for g in given]
    return Order(body=body, params=params, prompts=prompts, texts=texts)


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            return [prompt]
        if all(
            isinstance(p, str) or (isinstance(p, list) and all(type(t) is int for t in p)) for p in prompt
        ):
            return list(prompt)
    raise _refuse(
        "prompt is missing, empty or no text and no token ids", "send a text or token ids", "prompt"
    )


def parse_chat(raw: bytes, face: Face) -> Order:
    """Checks a body of `/v1/chat/completions`. Raises `InvalidInput` naming the field at fault."""
    body = decode_body(raw, ChatBody, 'send {"messages": [{"role": "user", "content": "..."}]}')
    tokenizer = face.needed_tokenizer("/v1/chat/completions")
    if body.top_logprobs is not None and not body.logprobs:
        raise _refuse("top_logprobs without logprobs", "set logprobs to true", "top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _sampling(raw, body, limit, face)
    if not body.messages:
        raise _refuse("messages is empty", "send at least one message")
    messages = [_message(m) for m in body.messages]
    text = tokenizer.chat(
        messages, generate=body.add_generation_prompt, options=body.chat_template_kwargs or {}
    )
    return Order(body=body, params=params, prompts=[tokenizer.encode(text, special=False)], texts=[])


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise _refuse(f"a message has role {message.get('role')!r}", "role is a string", "messages")
    if isinstance(content, list):
        texts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(t, str) for t in texts):
            raise _refuse("messages hold content that is not text", "this engine takes text only", "messages")
        return {**message, "content": "\n".join(str(t) for t in texts)}
    return message


class _Answers(ABC):
    """What both routes share: one submission, as one answer or as the events of a stream."""

    kind: Literal["text_completion", "chat.completion"]

    def __init__(self, order: Order, face: Face, *, id: str, model: str) -> None:
        self.order, self.id, self.model = order, id, model
        self.body, self.params = order.body, order.params
        self.created = int(time.time())
        self.prompt_tokens = sum(map(len, order.prompts))
        self.made = 0
        tokenizer = face.needed_tokenizer(self.kind)
        sequences = len(order.prompts) * order.params.n
        self.logprobs = [TextLogprobs(tokenizer, self._tops()) for _ in range(sequences)]
        self.counts = [0] * sequences

    def _tops(self) -> int:
        return self.params.logprobs or 0

    def _place(self, place: int, index: int) -> int:
        return place * self.params.n + index

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _spans(self, final: Completion | None) -> dict[str, Any]:
        if final is None or final.weight_versions is None:
            return {}
        return {"weight_versions": msgspec.to_builtins(final.weight_versions)}

    def _tokens(self, tokens: tuple[int, ...]) -> list[int] | None:
        return list(tokens) if self.body.return_token_ids else None

    def whole(self, finals: list[tuple[int, Completion]]) -> dict[str, Any]:
        """The answer that does not stream."""
        made = sum(len(c.token_ids) for _, c in finals)
        return {
            **self._head(self.kind),
            "choices": [self._choice(place, final) for place, final in finals],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage(self.prompt_tokens, made, details=True),
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }

    def event(self, place: int, chunk: Chunk, *, last: bool) -> dict[str, Any]:
        """One chunk."""
        self.made += len(chunk.token_ids)
        where = self._place(place, chunk.index)
        told = {**self._head(self._stream_kind), "choices": [self._delta(place, chunk)]}
        self.counts[where] += len(chunk.token_ids)
        options = self.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        if wants_usage and options is not None and options.continuous_usage_stats:
            told["usage"] = usage(len(self.order.prompts[place]), self.counts[where], details=False)
        if last and not wants_usage:
            told["system_fingerprint"] = FINGERPRINT
        return told

    def after(self) -> list[dict[str, Any]]:
        """Token counts, when asked for."""
        if not (self.body.stream_options and self.body.stream_options.include_usage):
            return []
        told = usage(self.prompt_tokens, self.made, details=False)
        head = self._head(self._stream_kind)
        return [{**head, "choices": [], "usage": told, "system_fingerprint": FINGERPRINT}]

    @property
    def _stream_kind(self) -> str:
        return self.kind if self.kind == "text_completion" else f"{self.kind}.chunk"

    @abstractmethod
    def _choice(self, place: int, final: Completion) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, place: int, chunk: Chunk) -> dict[str, Any]: ...


class CompletionAnswers(_Answers):
    """Answers of `/v1/completions`."""

    kind = "text_completion"

    def __init__(self, order: Order, face: Face, *, id: str, model: str) -> None:
        super().__init__(order, face, id=id, model=model)
        self.offsets = [0] * len(self.logprobs)

    def _told(self, where: int, entries: tuple[TokenLogprobs, ...] | None) -> dict[str, Any] | None:
        content = self.logprobs[where].content(entries)
        if content is None:
            return None
        told: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for position in content["content"]:
            told["text_offset"].append(self.offsets[where])
            told["token_logprobs"].append(position["logprob"])
            told["tokens"].append(position["token"])
            tops = position["top_logprobs"] or [position]
            told["top_logprobs"].append({t["token"]: t["logprob"] for t in tops})
            self.offsets[where] += len(position["token"])
        return told

    def _choice(self, place: int, final: Completion) -> dict[str, Any]:
        where = self._place(place, final.index)
        echoed = self.order.texts[place] if self.order.texts else ""
        return {
            "index": where,
            "text": echoed + (final.text or ""),
            "logprobs": self._told(where, final.logprobs),
            "finish_reason": final.finish_reason,
            "stop_reason": final.stop_reason,
            "prompt_logprobs": None,
            "prompt_token_ids": self.order.prompts[place] if self.body.return_token_ids else None,
            "token_ids": self._tokens(final.token_ids),
            "routed_experts": None,
            **self._spans(final),
        }

    def first(self) -> list[dict[str, Any]]:
        """No event comes before the first chunk."""
        return []

    def _delta(self, place: int, chunk: Chunk) -> dict[str, Any]:
        where = self._place(place, chunk.index)
        fresh = self.counts[where] == 0
        echoed = self.order.texts[place] if fresh and self.order.texts else ""
        return {
            "index": where,
            "text": echoed + (chunk.text or ""),
            "logprobs": self._told(where, chunk.logprobs),
            "finish_reason": chunk.final.finish_reason if chunk.final else None,
            "stop_reason": chunk.final.stop_reason if chunk.final else None,
            "prompt_token_ids": self.order.prompts[place] if fresh and self.body.return_token_ids else None,
            "token_ids": self._tokens(chunk.token_ids),
            **self._spans(chunk.final),
        }


class ChatAnswers(_Answers):
    """Answers of `/v1/chat/completions`."""

    kind = "chat.completion"

    def _choice(self, place: int, final: Completion) -> dict[str, Any]:
        told = {"role": "assistant", "content": final.text or ""}
        nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        return {
            "index": final.index,
            "message": told | nothing,
            "logprobs": self.logprobs[self._place(place, final.index)].content(final.logprobs),
            "finish_reason": final.finish_reason,
            "stop_reason": final.stop_reason,
            "token_ids": self._tokens(final.token_ids),
            "routed_experts": None,
            **self._spans(final),
        }

    def whole(self, finals: list[tuple[int, Completion]]) -> dict[str, Any]:
        """The answer that does not stream."""
        prompt = self.order.prompts[0] if self.body.return_token_ids else None
        more = {"prompt_logprobs": None, "prompt_token_ids": prompt, "prompt_text": None}
        return super().whole(finals) | more

    def first(self) -> list[dict[str, Any]]:
        """The role of each choice."""
        prompt = self.order.prompts[0] if self.body.return_token_ids else None
        head = {**self._head(self._stream_kind), "prompt_token_ids": prompt, "prompt_text": None}
        said = {"role": "assistant", "content": ""}
        return [
            {**head, "choices": [{"index": i, "delta": said, "logprobs": None, "finish_reason": None}]}
            for i in range(self.params.n)
        ]

    def _delta(self, place: int, chunk: Chunk) -> dict[str, Any]:
        where = self._place(place, chunk.index)
        told = {
            "index": chunk.index,
            "delta": {"content": chunk.text or ""},
            "logprobs": self.logprobs[where].content(chunk.logprobs),
            "finish_reason": chunk.final.finish_reason if chunk.final else None,
            "token_ids": self._tokens(chunk.token_ids),
        }
        if chunk.final is not None:
            told["stop_reason"] = chunk.final.stop_reason
        return told | self._spans(chunk.final)
