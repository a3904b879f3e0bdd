from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightline.audit.rollout_file import read
from weightline.core.spans import SpanBuilder, from_tokens, merge, per_token, validate
from weightline.errors import InvalidInput
from weightline.types import WeightVersionSpan as Span

labels = st.lists(st.sampled_from("ABC"), max_size=40)


def test_a_b_a_gives_three_ranges() -> None:
    builder = SpanBuilder()
    for label, count in (("A", 2), ("B", 1), ("A", 3)):
        builder.append(label, count)
    assert builder.spans() == (Span("A", 0, 2), Span("B", 2, 3), Span("A", 3, 6))
    assert len(builder) == 6


def test_adjacent_equal_labels_merge() -> None:
    builder = SpanBuilder()
    for _ in range(5):
        builder.append("A")
    assert builder.spans() == (Span("A", 0, 5),)


def test_no_tokens_is_no_spans() -> None:
    builder = SpanBuilder()
    builder.append("A", 0)
    assert builder.spans() == ()
    assert merge() == merge(()) == ()
    assert per_token(()) == []
    validate((), 0)


def test_a_zero_count_between_equal_labels_does_not_split_them() -> None:
    builder = SpanBuilder()
    builder.append("A", 2)
    builder.append("B", 0)
    builder.append("A", 1)
    assert builder.spans() == (Span("A", 0, 3),)


def test_parts_of_a_resumed_request_follow_each_other() -> None:
    first = (Span("A", 0, 2),)
    second = (Span("A", 0, 1), Span("B", 1, 4))
    assert merge(first, second) == (Span("A", 0, 3), Span("B", 3, 6))


@given(labels)
def test_per_token_and_from_tokens_are_inverse(tokens: list[str]) -> None:
    spans = from_tokens(tokens)
    validate(spans, len(tokens))
    assert per_token(spans) == tokens


@given(st.lists(labels, max_size=4))
def test_merge_of_parts_is_merge_of_the_whole(parts: list[list[str]]) -> None:
    whole = [label for part in parts for label in part]
    assert merge(*(from_tokens(part) for part in parts)) == from_tokens(whole)


@given(labels, st.integers(0, 40))
def test_truncate_keeps_the_first_tokens(tokens: list[str], length: int) -> None:
    builder = SpanBuilder()
    for token in tokens:
        builder.append(token)
    if length > len(tokens):
        with pytest.raises(InvalidInput, match="truncate"):
            builder.truncate(length)
    else:
        builder.truncate(length)
        assert builder.spans() == from_tokens(tokens[:length])
        builder.append("A")
        assert builder.spans() == from_tokens([*tokens[:length], "A"])


@pytest.mark.parametrize(
    ("spans", "length", "fault"),
    [
        ((Span("A", 1, 2),), 2, "follow on from token 0"),
        ((Span("A", 0, 2), Span("B", 3, 4)), 4, "follow on from token 2"),
        ((Span("A", 0, 2), Span("B", 1, 4)), 4, "follow on from token 2"),
        ((Span("A", 0, 0),), 0, "follow on from token 0"),
        ((Span("A", 0, 2), Span("A", 2, 4)), 4, "must be one"),
        ((Span("A", 0, 2),), 3, "cover 2 tokens of 3"),
        ((), 1, "cover 0 tokens of 1"),
    ],
)
def test_a_list_that_is_not_canonical_is_refused_and_says_why(
    spans: tuple[Span, ...], length: int, fault: str
) -> None:
    with pytest.raises(InvalidInput, match=fault):
        validate(spans, length)


def test_merge_refuses_a_range_that_goes_back() -> None:
    with pytest.raises(InvalidInput, match="follow on"):
        merge((Span("A", 0, 3), Span("B", 1, 4)))


def test_append_refuses_a_negative_count() -> None:
    with pytest.raises(InvalidInput, match="negative"):
        SpanBuilder().append("A", -1)


@pytest.mark.parametrize(("start", "end"), [(5, 0), (-1, 3), (0, True), (0.0, 1), ("0", 1), (0, None)])
def test_a_range_that_cannot_be_is_refused_when_it_is_made(start: object, end: object) -> None:
    with pytest.raises(InvalidInput, match="of label 'A' is no range of tokens"):
        Span("A", start, end)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [7, None, b"7"])
def test_a_version_that_is_no_string_is_refused_when_the_span_is_made(version: object) -> None:
    with pytest.raises(InvalidInput, match="not a string"):
        Span(version, 0, 1)  # type: ignore[arg-type]


def test_what_comes_over_the_wire_is_checked_in_the_same_way() -> None:
    span = Span("7@aa", 0, 3)
    assert msgspec.json.decode(msgspec.json.encode(span), type=Span) == span
    with pytest.raises(InvalidInput, match="is no range"):
        msgspec.json.decode(b'{"version": "A", "start": 2, "end": 1}', type=Span)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"version": "A", "start": true, "end": 1}', type=Span)


def test_a_span_that_cannot_be_is_refused_by_the_line_of_the_rollout_file() -> None:
    line = b'{"choices": [{"weight_versions": [{"version": "A", "start": 2, "end": 1}]}]}'
    with pytest.raises(InvalidInput, match=r"^rollout 1: span \[2, 1\)"):
        list(read([line]))
