"""Tokens to text: characters of several tokens, stop strings in pieces, and what may be told when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

_LOADED: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def tokenizer(tiny: Path) -> Iterator[Any]:
    """A real byte-level tokenizer, in which most characters beyond ASCII take several tokens."""
    from weightline.generate.text import load_tokenizer

    _LOADED.append(load_tokenizer(tiny))
    yield _LOADED[0]
    _LOADED.clear()


def stream(prompt: list[int], **params: Any) -> Any:
    from weightline.generate import SamplingParams
    from weightline.generate.text import TextStream

    return TextStream(_LOADED[0], tuple(prompt), SamplingParams(**params))


def tell(opened: Any, tokens: list[int]) -> tuple[list[str], str | None]:
    """Pushes tokens until a stop string is met; the pieces that were told, the last one included."""
    pieces = []
    for token in tokens:
        met = opened.push(token, stopped=False)
        if met is not None:
            return [*pieces, opened.take(final=True)], met
        pieces.append(opened.take(final=False))
    return [*pieces, opened.take(final=True)], None


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_text_join_to_it_and_hold_no_broken_character(text: str) -> None:
    tokens = _LOADED[0].encode(text)
    whole = _LOADED[0].decode(tokens)
    pieces, met = tell(stream([1]), tokens)
    assert met is None
    assert "".join(pieces) == whole
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_the_last_of_its_tokens(tokenizer: Any) -> None:
    tokens = tokenizer.encode("\U0001f600")
    assert len(tokens) == 4
    pieces, _ = tell(stream([1]), tokens)
    assert pieces == ["", "", "", "\U0001f600", ""]
    assert [tokenizer.token_text(t, tokens[:i]) for i, t in enumerate(tokens)] == ["", "", "", "\U0001f600"]


@given(
    st.text("ab", min_size=1, max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_stop_string_ends_the_text_where_it_first_completes(
    text: str, stops: list[str], keep: bool
) -> None:
    """Against a search of the whole text, one character a token. Nothing told is ever taken back."""
    tokens = [t for c in text for t in _LOADED[0].encode(c)]
    pieces, met = tell(stream([1], stop=tuple(stops), include_stop_str_in_output=keep), tokens)
    ends = [(text.find(s) + len(s), i) for i, s in enumerate(stops) if s in text]
    if not ends:
        assert (met, "".join(pieces)) == (None, text)
        return
    end, which = min(ends)
    assert met == stops[which]
    assert "".join(pieces) == text[: end if keep else end - len(met)]


def test_text_that_a_stop_string_may_claim_is_held_back() -> None:
    tokens = [t for c in "abxabyab" for t in _LOADED[0].encode(c)]
    pieces, met = tell(stream([1], stop=("aby",)), tokens)
    assert met == "aby"
    assert pieces == ["", "", "a", "b", "x", ""]


def test_no_stop_string_is_looked_for_before_min_tokens() -> None:
    tokens = [t for c in "xxayay" for t in _LOADED[0].encode(c)]
    pieces, met = tell(stream([1], stop=("a",), min_tokens=4), tokens)
    assert (met, "".join(pieces)) == ("a", "xxay")


def test_a_stop_token_has_no_text_and_special_tokens_have_it_only_on_request(tokenizer: Any) -> None:
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    for skip, told in ((True, ""), (False, "<|im_end|>")):
        opened = stream([1], skip_special_tokens=skip)
        opened.push(end[0], stopped=False)
        assert opened.take(final=True) == told
        opened.push(end[0], stopped=True)
        assert opened.take(final=True) == ""


def test_the_prompt_decides_how_the_first_token_reads(tokenizer: Any) -> None:
    first, *rest = tokenizer.encode("é")
    opened = stream([1, first])
    pieces, _ = tell(opened, rest)
    assert "".join(pieces) == tokenizer.decode([first, *rest])
