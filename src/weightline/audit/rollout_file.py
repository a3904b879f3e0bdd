"""Reading rollout files: JSON Lines, one request a line, and choosing what to replay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from weightline.core import spans
from weightline.errors import InvalidInput
from weightline.types import WeightVersionSpan

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's bound)."""
_SHAPING: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "logits_processors": ([],),
}
"""Sampling fields that change which token is the likeliest, with the values that do not (null never does)."""
_HINT = "each line is one request as `docs/rollout-file.md` describes it: prompt_token_ids, sampling, choices"


class Choice(Struct, frozen=True, kw_only=True):
    """One output of a request."""

    token_ids: tuple[int, ...]
    weight_versions: tuple[WeightVersionSpan, ...]
    """Canonical, over output indexes: the label of the weights that sampled each token."""
    logprobs: tuple[float | None, ...] | None = None
    finish_reason: str | None = None
    kv_weight_versions: tuple[WeightVersionSpan, ...] | None = None
    """Over context positions (prompt, then output): whose weights computed the keys and values there, as they
    stood at the end.
    """
    kv_recomputed_at: tuple[int, ...] = ()
    """Output indexes before whose sampling all keys and values were computed anew, by the weights that
    sampled that token.
    """

    @property
    def mixed(self) -> bool:
        """Whether more than one version sampled it."""
        return len(self.weight_versions) > 1

    def provenance(self, prompt: int) -> tuple[WeightVersionSpan, ...] | None:
        """`kv_weight_versions`, where they tell of the KV that sampled the last token.

        None when not recorded, and for an output that ended early while its KV was being computed anew: then
        they cover fewer positions than the prompt (of `prompt` tokens) and the output but its last token.
        """
        kv = self.kv_weight_versions
        covered = kv[-1].end if kv else 0
        if self.finish_reason in ("abort", "error") and covered < prompt + len(self.token_ids) - 1:
            return None
        return kv or None


class RolloutRequest(Struct, frozen=True, kw_only=True):
    """One line of a rollout file."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    run: str | None = None
    sampling: Mapping[str, Any] = {}
    logprobs_mode: str = "raw"

    @property
    def mixed(self) -> bool:
        """Whether one of its choices is."""
        return any(c.mixed for c in self.choices)

    def not_replayable(self) -> str | None:
        """Why no token can be predicted from logits alone; None when each is the likeliest one, or claims to
        be.
        """
        temperature = self.sampling.get("temperature", 1.0)
        if temperature is None or temperature >= GREEDY_BELOW:
            return "sampled at random (temperature above 0)"
        for field, neutral in _SHAPING.items():
            value = self.sampling.get(field)
            if value is not None and value not in neutral:
                return f"sampled with {field}"
        return None


def read(source: Path | Iterable[Any], run: str | None = None) -> Iterator[RolloutRequest]:
    """The requests of a file, or of an iterable of lines (text or bytes) or decoded objects, checked.

    `run`: the run that every request must come from, if it names one. Raises `InvalidInput` naming the file
    and line.
    """
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                yield from _checked(((f"{source}:{i}", line) for i, line in enumerate(file, 1)), run)
        except OSError as error:
            raise InvalidInput(
                f"{source}: cannot be read: {error.strerror}", hint="give a rollout file"
            ) from error
    else:
        yield from _checked(((f"rollout {i}", line) for i, line in enumerate(source, 1)), run)


def _checked(lines: Iterable[tuple[str, Any]], run: str | None) -> Iterator[RolloutRequest]:
    decoder = msgspec.json.Decoder(RolloutRequest)
    for where, line in lines:
        if isinstance(line, str | bytes) and not line.strip():
            continue
        try:
            if isinstance(line, RolloutRequest):
                request = line
            elif isinstance(line, str | bytes):
                request = decoder.decode(line)
            else:
                request = msgspec.convert(line, RolloutRequest)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidInput(f"{where}: {error}", hint=_HINT) from error
        except InvalidInput as error:  # a span that cannot be
            raise InvalidInput(f"{where}: {error.message}", hint=error.hint) from error
        _check(request, where, run)
        yield request


def _check(request: RolloutRequest, where: str, run: str | None) -> None:
    if run is not None and request.run is not None and request.run != run:
        raise InvalidInput(
            f"{where}: request {request.request_id} is of run {request.run}, the store holds run {run}",
            hint="replay a rollout file against the store of its own run",
        )
    if not request.prompt_token_ids:
        raise InvalidInput(f"{where}: prompt_token_ids is empty", hint=_HINT)
    for i, choice in enumerate(request.choices):
        n, p = len(choice.token_ids), len(request.prompt_token_ids)
        name = f"{where}: request {request.request_id}, choice {i}"
        try:
            spans.validate(choice.weight_versions, n)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: weight_versions: {error.message}", hint=error.hint) from error
        kv = choice.provenance(p)
        if kv and n:
            try:
                spans.validate(kv, p + n - 1)
            except InvalidInput as error:
                raise InvalidInput(f"{name}: kv_weight_versions: {error.message}", hint=error.hint) from error
        rebuilt = choice.kv_recomputed_at
        if list(rebuilt) != sorted(set(rebuilt)) or any(not 0 <= i < n for i in rebuilt):
            raise InvalidInput(
                f"{name}: kv_recomputed_at {list(rebuilt)} does not ascend within {n} tokens", hint=_HINT
            )
        if choice.logprobs is not None and len(choice.logprobs) != n:
            raise InvalidInput(f"{name}: {len(choice.logprobs)} logprobs for {n} tokens", hint=_HINT)


def sample(requests: Sequence[RolloutRequest], count: int | None) -> list[RolloutRequest]:
    """`count` requests (None: all), in file order: up to two thirds of them mixed, each kind spread evenly
    over the file.

    Deterministic, so that two audits of one file look at the same requests.
    """
    if count is None or count >= len(requests):
        return list(requests)
    mixed = [i for i, r in enumerate(requests) if r.mixed]
    plain = [i for i, r in enumerate(requests) if not r.mixed]
    most = max(math.ceil(count * 2 / 3), count - len(plain))
    chosen = _spread(mixed, most)
    chosen += _spread(plain, count - len(chosen))
    return [requests[i] for i in sorted(chosen)]


def _spread(items: list[int], count: int) -> list[int]:
    if count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
