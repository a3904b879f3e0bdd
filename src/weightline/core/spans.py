"""Spans: which weights sampled which output tokens.

A list of spans is *canonical* when it covers output tokens 0..n without a gap, holds no empty range and never
has two adjacent ranges with the same label. Every function here returns canonical lists; A -> B -> A stays
three ranges; no tokens is `()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weightline.errors import InvalidInput
from weightline.types import WeightVersionSpan

_HINT = "spans are half-open, start at output token 0, have no gap and cover every returned token once"


class SpanBuilder:
    """Collects the label of each sampled token, in generation order; memory grows with the ranges, not the
    tokens.
    """

    __slots__ = ("_length", "_runs")

    def __init__(self) -> None:
        self._runs: list[tuple[str, int]] = []
        """(label, index of the first token after the range)."""
        self._length = 0

    def __len__(self) -> int:
        """Tokens appended so far."""
        return self._length

    def append(self, label: str, count: int = 1) -> None:
        """`count` more tokens were sampled by the weights labelled `label`; `InvalidInput` for a negative
        count.
        """
        if count < 0:
            raise InvalidInput(f"span of label {label!r} has a negative token count {count}", hint=_HINT)
        if count == 0:
            return
        self._length += count
        if self._runs and self._runs[-1][0] == label:
            self._runs[-1] = (label, self._length)
        else:
            self._runs.append((label, self._length))

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on (a stop string cut them off); `InvalidInput` outside 0..len."""
        if not 0 <= length <= self._length:
            raise InvalidInput(f"cannot truncate {self._length} tokens to {length}", hint=_HINT)
        while self._runs and (self._runs[-2][1] if len(self._runs) > 1 else 0) >= length:
            self._runs.pop()
        if self._runs:
            self._runs[-1] = (self._runs[-1][0], length)
        self._length = length

    def spans(self) -> tuple[WeightVersionSpan, ...]:
        """The canonical list so far."""
        start, out = 0, []
        for label, end in self._runs:
            out.append(WeightVersionSpan(version=label, start=start, end=end))
            start = end
        return tuple(out)


def merge(*parts: Iterable[WeightVersionSpan]) -> tuple[WeightVersionSpan, ...]:
    """The spans of one sequence from those of its consecutive parts, each counting its own tokens from 0.

    With one part: its canonical form. Raises `InvalidInput` for a gap, an overlap or a reversed range.
    """
    builder = SpanBuilder()
    for part in parts:
        position = 0
        for span in part:
            if span.start != position or span.end < span.start:
                raise InvalidInput(_misplaced(span, position), hint=_HINT)
            builder.append(span.version, span.end - span.start)
            position = span.end
    return builder.spans()


def per_token(spans: Iterable[WeightVersionSpan]) -> list[str]:
    """The label of every output token, in order. Raises `InvalidInput` like `merge`."""
    return [span.version for span in merge(spans) for _ in range(span.start, span.end)]


def from_tokens(labels: Iterable[str]) -> tuple[WeightVersionSpan, ...]:
    """The inverse of `per_token`."""
    builder = SpanBuilder()
    for label in labels:
        builder.append(label)
    return builder.spans()


def validate(spans: Sequence[WeightVersionSpan], length: int) -> None:
    """Raises `InvalidInput`, naming the first fault, unless `spans` is canonical over `length` tokens."""
    position, before = 0, None
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise InvalidInput(_misplaced(span, position), hint=_HINT)
        if span.version == before:
            raise InvalidInput(
                f"spans that meet at token {span.start} both have label {before!r} and must be one",
                hint="adjacent ranges with the same label merge: pass the list through spans.merge",
            )
        position, before = span.end, span.version
    if position != length:
        raise InvalidInput(f"spans cover {position} tokens of {length}", hint=_HINT)


def _misplaced(span: WeightVersionSpan, position: int) -> str:
    return (
        f"span [{span.start}, {span.end}) of label {span.version!r} does not follow on from token {position}"
    )
