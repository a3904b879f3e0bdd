"""vLLM's JSON: the body of `/inference/v1/generate`, its answers and its error shape."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from weightline.errors import InvalidInput, WeightlineError
from weightline.generate.requests import Chunk, Completion
from weightline.generate.sampling import SamplingParams, TokenLogprobs, parse_sampling

_FLOOR = -9999.0
"""vLLM's stand-in for minus infinity, which JSON cannot hold."""
_TYPES = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError", 503: "ServiceUnavailableError"}


class GenerateBody(Struct, kw_only=True):
    """Body of `POST /inference/v1/generate`, tokens in and tokens out. Other fields of vLLM's (`model`, …)
    change no token.
    """

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool | None = False
    request_id: str | None = None
    output_mode: str | None = None
    cache_salt: str | None = None


class GenerateOrder(Struct, frozen=True):
    """A checked body."""

    token_ids: list[int]
    params: SamplingParams
    stream: bool
    request_id: str | None
    cache_salt: str | None


def parse_generate(raw: bytes) -> GenerateOrder:
    """Raises `InvalidInput` naming the field at fault."""
    try:
        body = msgspec.json.decode(raw, type=GenerateBody)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"request body: {error}", hint='send {"token_ids": [...], "sampling_params": {...}}'
        ) from None
    if body.output_mode not in (None, "tokens"):
        raise InvalidInput(
            f"output_mode {body.output_mode!r} is not known", hint="this engine answers in tokens"
        )
    return GenerateOrder(
        body.token_ids,
        parse_sampling(body.sampling_params),
        bool(body.stream),
        body.request_id,
        body.cache_salt,
    )


def _logprobs(entries: tuple[TokenLogprobs, ...] | None) -> dict[str, Any] | None:
    if entries is None:
        return None

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "logprob": max(logprob, _FLOOR), "bytes": None}

    return {"content": [{**one(*e.top[0]), "top_logprobs": [one(t, p) for t, p in e.top]} for e in entries]}


def _final_fields(final: Completion) -> dict[str, Any]:
    return {
        "weight_versions": msgspec.to_builtins(final.weight_versions),
        "kv_weight_versions": msgspec.to_builtins(final.kv_weight_versions),
        "kv_recomputed_at": list(final.kv_recomputed_at),
        "cached_tokens": final.cached_tokens,
    }


def response_body(request_id: str, completions: list[Completion]) -> dict[str, Any]:
    """The whole answer of a request that does not stream."""
    choices = [
        {
            "index": c.index,
            "logprobs": _logprobs(c.logprobs),
            "finish_reason": c.finish_reason,
            "token_ids": list(c.token_ids),
            **_final_fields(c),
        }
        for c in sorted(completions, key=lambda c: c.index)
    ]
    return {"request_id": request_id, "choices": choices, "prompt_logprobs": None, "kv_transfer_params": None}


def stream_event(request_id: str, chunk: Chunk) -> bytes:
    """One server-sent event. The last of a sequence has the finish reason and the spans, the others have
    neither.
    """
    choice: dict[str, Any] = {
        "index": chunk.index,
        "logprobs": _logprobs(chunk.logprobs),
        "finish_reason": chunk.final.finish_reason if chunk.final else None,
        "token_ids": list(chunk.token_ids),
    }
    if chunk.final is not None:
        choice |= _final_fields(chunk.final)
    return b"data: " + msgspec.json.encode({"request_id": request_id, "choices": [choice]}) + b"\n\n"


STREAM_END = b"data: [DONE]\n\n"


def vllm_error(error: WeightlineError) -> tuple[int, dict[str, Any]]:
    """HTTP status and vLLM's error body; our own `kind` and `hint` ride along."""
    code = error.status.http
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    shape = {"message": message, "type": _TYPES.get(code, "InternalServerError"), "param": None, "code": code}
    return code, {"error": shape, "kind": error.kind, "hint": error.hint}
