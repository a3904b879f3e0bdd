"""From the labels of one output to the forward passes that must give its tokens again. Pure.

A *context position* counts prompt and output tokens together from 0; with a prompt of p tokens, output token
i is sampled from the logits at position p - 1 + i, by the pass that also computes the keys and values (KV) at
that position. Hence the label of token i is the label of the KV there, at the time. A swap that keeps the KV
leaves all earlier positions as the old weights computed them, and the new weights' first pass computes
position p - 1 + i on top of them. A swap that clears it has the new weights compute positions 0 to p - 1 + i
anew.
"""

from __future__ import annotations

from msgspec import Struct

from weightline.audit.rollout_file import Choice
from weightline.core.spans import per_token
from weightline.errors import InvalidInput


class Pass(Struct, frozen=True):
    """The weights `label` compute context positions `start` to `end` on top of the KV of positions 0 to
    `start`.

    The logits at positions from `sample_from` on (never below `start`, `end` when there are none) sampled
    tokens.
    """

    label: str
    start: int
    end: int
    sample_from: int


class Replayed(Struct, frozen=True):
    """What one output claims."""

    passes: tuple[Pass, ...]
    contradictions: tuple[int, ...]
    """Output indexes where the label of the token and the label of the KV computed by the same pass differ:
    no weights can make both true.
    """


def passes_of(choice: Choice, prompt: int) -> Replayed:
    """The passes of an output whose prompt has `prompt` tokens, in order. Raises `InvalidInput` for broken
    spans.

    Where the KV provenance is not told, a prompt counts as computed by the weights that sampled the first
    token after it, in one pass.
    """
    labels = per_token(choice.weight_versions)
    if not labels:
        return Replayed((), ())
    told = choice.provenance(prompt)
    kv = per_token(told) if told else None
    if kv is not None and len(kv) != prompt + len(labels) - 1:
        raise InvalidInput(
            f"kv_weight_versions cover {len(kv)} positions, not {prompt + len(labels) - 1}",
            hint="they cover prompt and output, the last output token excepted",
        )
    starts = [0, *(i for i in choice.kv_recomputed_at if i > 0)]
    out: list[Pass] = []
    for begin, stop in zip(starts, [*starts[1:], len(labels)], strict=True):
        first = prompt - 1 + begin
        # Before the last rebuild only the labels tell: the KV of that time is gone.
        known = kv[:first] if kv is not None and begin == starts[-1] else [labels[begin]] * first
        out += _runs(known + labels[begin:stop], first)
    last = starts[-1]
    wrong = (
        () if kv is None else tuple(i for i in range(last, len(labels)) if kv[prompt - 1 + i] != labels[i])
    )
    return Replayed(tuple(out), wrong)


def _runs(labels: list[str], sample_from: int) -> list[Pass]:
    """One pass for each run of equal labels over positions 0, 1, …"""
    out: list[Pass] = []
    start = 0
    for position in range(1, len(labels) + 1):
        if position == len(labels) or labels[position] != labels[start]:
            out.append(Pass(labels[start], start, position, min(position, max(start, sample_from))))
            start = position
    return out
