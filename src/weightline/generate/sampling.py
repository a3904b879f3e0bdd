"""From logits to tokens: greedy and seeded sampling, each sequence with a random stream of its own.

Order of the filters is that of vLLM: temperature, then `top_k`, then `top_p`. Log-probabilities are "raw":
of the model's own distribution, before any of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from weightline.errors import InvalidInput

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
MAX_LOGPROBS = 20
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_tokens": (0,),
    "stop": ([], ""),
    "bad_words": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (-1,),
    "extra_args": ({},),
    "include_stop_str_in_output": (False,),
    "logprob_token_ids": ([],),
}
"""Parameters of vLLM that this engine does not implement, with the values that leave the output as it is
(null always does).
"""
_NO_EFFECT = frozenset(
    {"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "flat_logprobs"}
)
"""Parameters that concern text or delivery only; tokens do not depend on them."""


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How one request is sampled. Defaults are vLLM's, `max_tokens` None means up to the engine's
    `max_model_len`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    seed: int | None = None
    """Sequence i of `n` draws from `seed + i`; None takes a fresh seed from the system."""
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities; k: that of the token and of the k most likely ones."""


def _refuse(field: str, value: object, rule: str) -> InvalidInput:
    return InvalidInput(f"sampling_params.{field} is {value!r}", hint=f"{field} {rule}")


def _number(data: Mapping[str, Any], field: str, kind: type, default: Any) -> Any:
    value = data.get(field, default)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _refuse(field, value, f"must be of type {kind.__name__}")
    return value


def parse_sampling(data: object) -> SamplingParams:
    """Sampling parameters from JSON. Raises `InvalidInput` naming the field: a bad value, an unknown name,
    or one that is not implemented.
    """
    if not isinstance(data, Mapping):
        raise InvalidInput(
            "sampling_params is not an object", hint='send {"sampling_params": {"max_tokens": 16}}'
        )
    known = set(SamplingParams.__struct_fields__)
    for field, value in data.items():
        if field in known or field in _NO_EFFECT or value is None:
            continue
        if field not in _NEUTRAL:
            raise _refuse(field, value, f"is not a sampling parameter; known are {', '.join(sorted(known))}")
        if value not in _NEUTRAL[field]:
            raise _refuse(field, value, "is not implemented by this engine; leave it out")
    params = SamplingParams(
        n=_number(data, "n", int, 1),
        temperature=_number(data, "temperature", float, 1.0),
        top_p=_number(data, "top_p", float, 1.0),
        top_k=_number(data, "top_k", int, 0),
        seed=_number(data, "seed", int, None),
        max_tokens=_number(data, "max_tokens", int, None),
        stop_token_ids=_token_ids(data.get("stop_token_ids")),
        ignore_eos=_number(data, "ignore_eos", bool, False),
        logprobs=_number(data, "logprobs", int, None),
    )
    check_sampling(params)
    return params


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(
        isinstance(t, int) and not isinstance(t, bool) for t in value
    ):
        raise _refuse("stop_token_ids", value, "must be a list of token ids")
    return tuple(value)


def check_sampling(params: SamplingParams) -> None:
    """Raise `InvalidInput` naming the first field outside its range."""
    rules = (
        ("n", params.n >= 1, "must be at least 1"),
        ("temperature", 0.0 <= params.temperature < float("inf"), "must be a finite number of at least 0"),
        ("top_p", 0.0 < params.top_p <= 1.0, "must be above 0 and at most 1"),
        ("top_k", params.top_k >= -1, "must be -1 (off), 0 (off) or at least 1"),
        ("max_tokens", params.max_tokens is None or params.max_tokens >= 1, "must be at least 1"),
        (
            "logprobs",
            params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS,
            f"must be 0 to {MAX_LOGPROBS}",
        ),
        ("seed", params.seed is None or -(2**63) <= params.seed < 2**63 - params.n, "must fit in 64 bits"),
    )
    for field, good, rule in rules:
        if not good:
            raise _refuse(field, getattr(params, field), rule)


class TokenLogprobs(Struct, frozen=True):
    """Raw log-probabilities (natural logarithm) at one output position: of the sampled token, and of the
    most likely ones.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability): the sampled token first, then by descending probability."""


def generator_for(params: SamplingParams, index: int) -> torch.Generator | None:
    """The random stream of sequence `index` of a request; None when it is greedy and needs none."""
    if params.temperature < GREEDY_BELOW:
        return None
    seed = secrets.randbits(62) if params.seed is None else params.seed + index
    return torch.Generator().manual_seed(seed)


def sample(row: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> int:
    """One token from float logits of shape [vocabulary]. Ties of the greedy choice go to the lowest id, as
    in `argmax`.
    """
    if generator is None:
        return int(row.argmax())
    row = row.float().cpu() / params.temperature
    if 0 < params.top_k < row.numel():
        kth = row.topk(params.top_k).values[-1]
        row = row.masked_fill(row < kth, -torch.inf)
    probabilities = row.softmax(-1)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # A token stays while the mass before it is below top_p, so the most likely one always does.
        ordered = ordered.masked_fill(ordered.cumsum(0) - ordered >= params.top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def raw_logprobs(row: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of `token` and of the `count` most likely tokens under float logits of shape
    [vocabulary].
    """
    logs = row.float().log_softmax(-1)
    own = float(logs[token])
    top: list[tuple[int, float]] = [(token, own)]
    if count:
        values, ids = logs.topk(min(count, logs.numel()))
        top += [(int(i), float(v)) for v, i in zip(values, ids, strict=True) if int(i) != token]
    return TokenLogprobs(logprob=own, top=tuple(top[: max(count, 1)]))
