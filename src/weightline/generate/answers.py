"""vLLM's JSON: the body of `/inference/v1/generate`, its answers and its error shape."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from weightline.errors import WeightlineError
from weightline.generate.delivery import usage, wire_error
from weightline.generate.requests import Chunk, Completion
from weightline.generate.sampling import SamplingParams, TokenLogprobs, parse_sampling
from weightline.generate.text import TextTokenizer

T = TypeVar("T")
_FLOOR = -9999.0
"""vLLM's stand-in for minus infinity, which JSON cannot hold."""
_TYPES = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError", 503: "ServiceUnavailableError"}
_NAMED = frozenset({"temperature", "top_p", "max_tokens", "logprobs", "allowed_token_ids"})
"""Sampling parameters that vLLM names in `param` when their value is out of range."""
_SALT = range(1, 1025)
_UNSUPPORTED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")


class StreamOptions(Struct, frozen=True):
    """`stream_options` of a body."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class GenerateBody(Struct, kw_only=True):
    """Body of `POST /inference/v1/generate`. Fields of vLLM's that are not here change no answer."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    model: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool = True
    """Ours: false leaves spans out, for clients that refuse fields they do not know."""
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


def decode_body(raw: bytes, kind: type[T], hint: str) -> T:
    """A JSON body. Raises `InvalidInput` that names the field at fault the way vLLM names it."""
    try:
        return msgspec.json.decode(raw, type=kind, strict=False)
    except msgspec.DecodeError as error:
        text = str(error)
        path = re.search(r"at `\$(.*?)`", text)
        place = "".join(f".{a or b}" for a, b in re.findall(r"\.?(\w+)|\[(\d+)\]", path[1])) if path else ""
        if missing := re.search(r"missing required field `(\w+)`", text):
            place += f".{missing[1]}"
        elif broken := re.search(r"\(byte (\d+)\)|truncated", text):
            place = f".{broken[1] or len(raw)}"
        raise wire_error(f"request body: {text}", hint=hint, param=f"body{place}") from None


def parse_generate(raw: bytes) -> tuple[GenerateBody, SamplingParams]:
    """The body and its sampling parameters. Raises `InvalidInput` naming the field at fault."""
    body = decode_body(raw, GenerateBody, 'send {"token_ids": [...], "sampling_params": {...}}')
    if not body.token_ids:
        raise wire_error("token_ids is empty", hint="a prompt has at least one token", param="body.token_ids")
    if min(body.token_ids) < 0:
        raise wire_error(
            f"token_ids holds {min(body.token_ids)}", hint="ids are 0 or more", param="body.token_ids"
        )
    check_salt(body.cache_salt)
    for field in _UNSUPPORTED:
        if getattr(body, field):
            raise wire_error(
                f"{field} is not implemented by this engine",
                hint="leave it out",
                name="BadRequestError",
                param=field,
            )
    params = parse_sampling(
        body.sampling_params, text=body.output_mode == "text", weight_versions=body.return_weight_versions
    )
    if body.output_mode == "text" and not params.detokenize:
        raise wire_error(
            'output_mode "text" with detokenize false', hint="text needs detokenize to be true", param="body"
        )
    return body, params


def check_salt(salt: str | None) -> None:
    """Raise `InvalidInput` for a `cache_salt` that vLLM refuses."""
    if salt is not None and len(salt) not in _SALT:
        raise wire_error(
            f"cache_salt has {len(salt)} characters",
            hint=f"cache_salt has {_SALT[0]} to {_SALT[-1]} characters",
            name="BadRequestError",
            param="cache_salt",
        )


# Log-probabilities.


def token_logprobs(entries: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
    """By token id, with ranks."""
    if entries is None:
        return None

    def one(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"token_id": token, "logprob": max(logprob, _FLOOR), "rank": rank}

    tops = [e.ranked() for e in entries]
    return {"content": [{**one(*top[0]), "top_logprobs": [one(*t) for t in top]} for top in tops]}


class TextLogprobs:
    """Log-probabilities of one sequence with tokens as text, chunk after chunk."""

    def __init__(self, tokenizer: TextTokenizer, count: int) -> None:
        self.tokenizer = tokenizer
        self.count = count
        """Most likely tokens to tell of each position."""
        self.before: list[int] = []

    def content(self, entries: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        """The next positions, in the shape of chat completions."""
        if entries is None:
            return None
        return {"content": [self._position(e) for e in entries]}

    def _position(self, entry: TokenLogprobs) -> dict[str, Any]:
        told = [self._one(token, logprob) for token, logprob in entry.top]
        self.before = [*self.before[-3:], entry.top[0][0]]
        return {**told[0], "top_logprobs": told[: self.count]}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.token_text(token, self.before)
        return {"token": text, "logprob": max(logprob, _FLOOR), "bytes": list(text.encode())}


# Answers of /inference/v1/generate.


class GenerateAnswers:
    """Renders one request: as one answer, or as the events of a stream."""

    def __init__(
        self,
        body: GenerateBody,
        params: SamplingParams,
        *,
        request_id: str,
        model: str,
        tokenizer: TextTokenizer | None,
    ) -> None:
        self.body, self.params, self.request_id, self.model = body, params, request_id, model
        self.counts = [0] * params.n
        self._texts: list[TextLogprobs] = []
        if tokenizer is not None and params.text and params.logprobs is not None:
            self._texts = [TextLogprobs(tokenizer, max(params.logprobs, 1)) for _ in range(params.n)]

    def _choice(
        self,
        index: int,
        tokens: tuple[int, ...],
        entries: tuple[TokenLogprobs, ...] | None,
        text: str | None,
        final: Completion | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": final.finish_reason if final else None,
            "stop_reason": final.stop_reason if final else None,
            "token_ids": list(tokens),
            "routed_experts": None,
            "sampling_mask": None,
            "logprobs": self._texts[index].content(entries) if self._texts else token_logprobs(entries),
        }
        if self.params.text:
            choice["text"] = text or ""
        return choice | self._spans(final)

    def _spans(self, final: Completion | None) -> dict[str, Any]:
        if not self.params.weight_versions:
            return {}
        if final is None:
            return {"weight_versions": None}
        return {
            "weight_versions": msgspec.to_builtins(final.weight_versions),
            "kv_weight_versions": msgspec.to_builtins(final.kv_weight_versions),
            "kv_recomputed_at": list(final.kv_recomputed_at or ()),
            "cached_tokens": final.cached_tokens,
        }

    def whole(self, finals: list[tuple[int, Completion]]) -> dict[str, Any]:
        """The answer that does not stream."""
        made = sum(len(c.token_ids) for _, c in finals)
        return {
            "request_id": self.request_id,
            "model": self.model,
            "created": int(time.time()),
            "output_mode": self.body.output_mode,
            "choices": [self._choice(c.index, c.token_ids, c.logprobs, c.text, c) for _, c in finals],
            "usage": usage(len(self.body.token_ids), made, details=True),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self.body.token_ids if self.body.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }

    def first(self) -> list[dict[str, Any]]:
        """No event comes before the first chunk."""
        return []

    def event(self, _place: int, chunk: Chunk, *, last: bool) -> dict[str, Any]:  # noqa: ARG002 - as all renderers
        """One chunk. The last one of a sequence has the finish reason and the spans."""
        fresh = not any(self.counts)
        self.counts[chunk.index] += len(chunk.token_ids)
        told: dict[str, Any] = {
            "request_id": self.request_id,
            "output_mode": self.body.output_mode,
            "choices": [self._choice(chunk.index, chunk.token_ids, chunk.logprobs, chunk.text, chunk.final)],
            "usage": None,
        }
        options = self.body.stream_options
        if options and options.include_usage and options.continuous_usage_stats:
            told["usage"] = usage(len(self.body.token_ids), self.counts[chunk.index], details=False)
        if fresh and self.body.return_token_ids:
            told["prompt_token_ids"] = self.body.token_ids
        return told

    def after(self) -> list[dict[str, Any]]:
        """Token counts, when asked for."""
        if not (self.body.stream_options and self.body.stream_options.include_usage):
            return []
        told = usage(len(self.body.token_ids), sum(self.counts), details=False)
        return [
            {
                "request_id": self.request_id,
                "output_mode": self.body.output_mode,
                "choices": [],
                "usage": told,
            }
        ]


# Errors.


def vllm_error(error: WeightlineError) -> tuple[int, dict[str, Any]]:
    """HTTP status and vLLM's error body; our own `kind` and `hint` ride along."""
    told = error.__dict__
    code = told.get("code", error.status.http)
    kind, param = told.get("name", _TYPES.get(code, "InternalServerError")), told.get("param")
    if told.get("shape"):
        kind, param = "Bad Request", "body.sampling_params"
    elif told.get("field") in _NAMED:
        param = told["field"]
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    shape = {"message": message, "type": kind, "param": param, "code": code}
    return code, {"error": shape, "kind": error.kind, "hint": error.hint}


def flag(value: str | None, name: str, *, default: bool) -> bool:
    """A boolean of the query. Raises `InvalidInput`."""
    if value is None:
        return default
    if value.lower() in ("true", "1", "yes", "on", "t", "y"):
        return True
    if value.lower() in ("false", "0", "no", "off", "f", "n"):
        return False
    raise wire_error(f"{name} is {value!r}", hint=f"{name} is true or false", param=f"query.{name}")


def json_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises `InvalidInput`."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise wire_error(f"request body: {error}", hint="send a JSON object") from None
    if not isinstance(body, dict):
        raise wire_error("request body is not an object", hint="send a JSON object")
    return body
