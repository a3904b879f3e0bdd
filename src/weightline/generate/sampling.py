"""From logits to tokens: greedy and seeded sampling, each sequence with a random stream of its own.

Order of the filters is that of vLLM: masks and penalties, temperature, `min_p`, `top_k`, `top_p`.
Log-probabilities are "raw": of the model's own distribution, before any of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from weightline.errors import InvalidInput

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
MAX_LOGPROBS = 20
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "structured_outputs": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (-1,),
    "extra_args": ({},),
    "logprob_token_ids": ([],),
    "spaces_between_special_tokens": (True,),
    "watermarking": (False,),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "trace_decode_token_ids": (),
    "routed_experts_prompt_start": (0,),
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (),
    "stream_interval": (1,),
}
"""Parameters of vLLM that this engine does not implement, with the values that leave the output as it is
(null always does).
"""
_NO_EFFECT = frozenset({"output_kind", "flat_logprobs", "skip_reading_prefix_cache"})
"""Parameters that concern delivery inside vLLM's process only; tokens and answers do not depend on them."""


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How one request is sampled. Defaults are vLLM's, `max_tokens` None means up to the engine's
    `max_model_len`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    """Least probability, relative to that of the most likely token."""
    seed: int | None = None
    """Sequence i of `n` draws from `seed + i`; None or -1 takes a fresh seed from the system."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output; the two others over the output."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    """Output tokens before which no stop token is sampled and no stop string is looked for."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities; k: that of the token and of the k most likely ones."""
    detokenize: bool = True
    """False refuses what needs text."""
    skip_special_tokens: bool = True
    text: bool = False
    """Decode the output; stop strings do so in any case."""
    weight_versions: bool = True
    """False leaves spans out of the output. No token depends on it."""

    @property
    def decodes(self) -> bool:
        """The output is decoded as it comes."""
        return self.text or bool(self.stop)

    @property
    def plain(self) -> bool:
        """Logits are taken as the model gives them."""
        return not (
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
        )


def field_error(field: str, value: object, rule: str, *, shape: bool = False) -> InvalidInput:
    """A sampling parameter at fault: of the wrong type (`shape`), or outside its range."""
    error = InvalidInput(f"sampling_params.{field} is {value!r}", hint=f"{field} {rule}")
    error.__dict__.update(field=field, shape=shape)
    return error


def _number(data: Mapping[str, Any], field: str, kind: type, default: Any) -> Any:
    value = data.get(field, default)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise field_error(field, value, f"must be of type {kind.__name__}", shape=True)
    return value


_KINDS: dict[str, type] = {
    "n": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "min_tokens": int,
    "include_stop_str_in_output": bool,
    "ignore_eos": bool,
    "logprobs": int,
    "detokenize": bool,
    "skip_special_tokens": bool,
}
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "logit_bias")


def parse_sampling(data: object, **more: Any) -> SamplingParams:
    """Sampling parameters from JSON; `more` sets fields that have no name on the wire. Raises `InvalidInput`
    naming the field: a bad value, an unknown name, or one that is not implemented.
    """
    if not isinstance(data, Mapping):
        raise InvalidInput(
            "sampling_params is not an object", hint='send {"sampling_params": {"max_tokens": 16}}'
        )
    for field, value in data.items():
        if field in _KINDS or field in _LISTS or field in _NO_EFFECT or value is None:
            continue
        if field not in _NEUTRAL:
            known = ", ".join(sorted((*_KINDS, *_LISTS)))
            raise field_error(field, value, f"is not a sampling parameter; known are {known}")
        if value not in _NEUTRAL[field]:
            raise field_error(field, value, "is not implemented by this engine; leave it out")
    defaults = SamplingParams()
    fields = {name: _number(data, name, kind, getattr(defaults, name)) for name, kind in _KINDS.items()}
    if fields["seed"] == -1:
        fields["seed"] = None
    allowed = data.get("allowed_token_ids")
    params = SamplingParams(
        **fields,
        stop=_strings(data.get("stop")),
        stop_token_ids=_token_ids("stop_token_ids", data.get("stop_token_ids")),
        allowed_token_ids=None if allowed is None else _token_ids("allowed_token_ids", allowed),
        logit_bias=_biases(data.get("logit_bias")),
        **more,
    )
    if params.temperature < GREEDY_BELOW and params.n > 1:
        raise field_error("n", params.n, "must be 1 when sampling is greedy")
    check_sampling(params)
    return params


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(t, int) and not isinstance(t, bool) for t in value)
    ):
        raise field_error(field, value, "must be a list of token ids", shape=True)
    return tuple(value)


def _strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(s, str) for s in value):
        raise field_error("stop", value, "must be a string or a list of strings", shape=True)
    return tuple(value)


def _biases(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    try:
        if not isinstance(value, Mapping):
            raise TypeError
        return {int(token): min(100.0, max(-100.0, float(bias))) for token, bias in value.items()}
    except (TypeError, ValueError):
        raise field_error("logit_bias", value, "must map token ids to numbers", shape=True) from None


def check_sampling(params: SamplingParams) -> None:
    """Raise `InvalidInput` naming the first field outside its range."""
    p = params
    limit = p.max_tokens
    rules = (
        ("n", p.n >= 1, "must be at least 1"),
        ("presence_penalty", -2 <= p.presence_penalty <= 2, "must be -2 to 2"),
        ("frequency_penalty", -2 <= p.frequency_penalty <= 2, "must be -2 to 2"),
        ("repetition_penalty", 0 < p.repetition_penalty < float("inf"), "must be a finite number above 0"),
        ("temperature", 0.0 <= p.temperature <= 2.0, "must be 0 to 2"),
        ("top_p", 0.0 < p.top_p <= 1.0, "must be above 0 and at most 1"),
        ("top_k", p.top_k >= -1, "must be -1 (off), 0 (off) or at least 1"),
        ("min_p", 0.0 <= p.min_p <= 1.0, "must be 0 to 1"),
        ("max_tokens", limit is None or limit >= 1, "must be at least 1"),
        ("min_tokens", p.min_tokens >= 0, "must be at least 0"),
        ("min_tokens", limit is None or p.min_tokens <= limit, f"must be at most max_tokens {limit}"),
        ("logprobs", p.logprobs is None or 0 <= p.logprobs <= MAX_LOGPROBS, f"must be 0 to {MAX_LOGPROBS}"),
        ("seed", p.seed is None or -(2**63) <= p.seed < 2**63 - p.n, "must fit in 64 bits"),
        ("stop", all(p.stop), "must not hold an empty string"),
        ("stop", not p.stop or p.detokenize, "needs detokenize to be true"),
        ("allowed_token_ids", p.allowed_token_ids != (), "must not be empty"),
    )
    for field, good, rule in rules:
        if not good:
            raise field_error(field, getattr(params, field), rule)


def check_vocabulary(params: SamplingParams, vocabulary: int) -> None:
    """Raise `InvalidInput` for token ids that a model of `vocabulary` tokens has not."""
    for field in ("allowed_token_ids", "logit_bias"):
        bad = next((t for t in getattr(params, field) or () if not 0 <= t < vocabulary), None)
        if bad is not None:
            raise field_error(field, bad, f"holds token ids 0 to {vocabulary - 1}")


class TokenLogprobs(Struct, frozen=True):
    """Raw log-probabilities (natural logarithm) at one output position: of the sampled token, and of the
    most likely ones.
    """

    logprob: float
    rank: int
    """Of the token, from 1; tokens that are as likely count before it."""
    top: tuple[tuple[int, float], ...]
    """(token, log-probability): the sampled token first, then by descending probability."""

    def ranked(self) -> list[tuple[int, float, int]]:
        """`top` with ranks: (token, log-probability, rank)."""
        others = [r for r in range(1, len(self.top) + 1) if r != self.rank]
        (token, logprob), *rest = self.top
        return [(token, logprob, self.rank), *((t, p, r) for (t, p), r in zip(rest, others, strict=False))]


def generator_for(params: SamplingParams, index: int) -> torch.Generator | None:
    """The random stream of sequence `index` of a request; None when it is greedy and needs none."""
    if params.temperature < GREEDY_BELOW:
        return None
    seed = secrets.randbits(62) if params.seed in (None, -1) else (params.seed or 0) + index
    return torch.Generator().manual_seed(seed)


def sample(row: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> int:
    """One token from float logits of shape [vocabulary]. Ties of the greedy choice go to the lowest id, as
    in `argmax`.
    """
    if generator is None:
        return int(row.argmax())
    row = row.float().cpu() / params.temperature
    if params.min_p:
        probabilities = row.softmax(-1)
        row = row.masked_fill(probabilities < params.min_p * probabilities.max(), -torch.inf)
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


def shaped(
    row: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Iterable[int],
) -> torch.Tensor:
    """Logits of shape [vocabulary] after what acts on them before the temperature, in vLLM's order: allowed
    tokens, `min_tokens`, biases, penalties. `stop_ids` are barred before `min_tokens`.
    """
    row = row.float().clone()
    if params.allowed_token_ids is not None:
        allowed = torch.zeros_like(row, dtype=torch.bool)
        allowed[list(params.allowed_token_ids)] = True
        row = row.masked_fill(~allowed, -torch.inf)
    if len(output) < params.min_tokens:
        row[[t for t in stop_ids if 0 <= t < row.numel()]] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if output and (params.frequency_penalty or params.presence_penalty):
        counts = torch.bincount(torch.tensor(output), minlength=row.numel()).to(row)
        row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return row


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
    return TokenLogprobs(logprob=own, rank=int((logs >= own).sum()), top=tuple(top[: max(count, 1)]))
