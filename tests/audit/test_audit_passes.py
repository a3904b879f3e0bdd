"""Passes: every output token is sampled once, by its own label, on KV that was computed before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightline.audit.passes import Pass, passes_of
from weightline.audit.rollout_file import Choice, read
from weightline.core.spans import from_tokens
from weightline.errors import InvalidInput

LABELS = st.lists(st.sampled_from("abc"), min_size=1, max_size=30)


def choice(labels: list[str], kv: list[str] | None = None, rebuilt: tuple[int, ...] = ()) -> Choice:
    return Choice(
        token_ids=tuple(range(len(labels))),
        weight_versions=from_tokens(labels),
        kv_weight_versions=None if kv is None else from_tokens(kv),
        kv_recomputed_at=rebuilt,
    )


@given(labels=LABELS, prompt=st.integers(1, 9), rebuilt=st.sets(st.integers(0, 29)))
def test_each_token_is_sampled_once_by_its_label(labels: list[str], prompt: int, rebuilt: set[int]) -> None:
    at = tuple(sorted(i for i in rebuilt if i < len(labels)))
    claim = passes_of(choice(labels, rebuilt=at), prompt)
    sampled = [
        (position - (prompt - 1), step.label)
        for step in claim.passes
        for position in range(step.sample_from, step.end)
    ]
    assert sampled == list(enumerate(labels))
    assert claim.contradictions == ()


@given(labels=LABELS, prompt=st.integers(1, 9), rebuilt=st.sets(st.integers(0, 29)))
def test_passes_follow_on_and_start_over_only_at_a_rebuild(
    labels: list[str], prompt: int, rebuilt: set[int]
) -> None:
    at = tuple(sorted(i for i in rebuilt if 0 < i < len(labels)))
    steps = passes_of(choice(labels, rebuilt=at), prompt).passes
    covered, restarts = 0, 0
    for step in steps:
        restarts += step.start == 0
        assert step.start in (0, covered)
        assert step.start <= step.sample_from <= step.end
        assert step.start < step.end
        covered = step.end
    assert restarts == 1 + len(at)
    assert covered == prompt + len(labels) - 1


def test_a_kept_swap_begins_with_the_position_of_the_token_before() -> None:
    claim = passes_of(choice(["a", "a", "b"]), 4)
    assert claim.passes == (Pass("a", 0, 5, 3), Pass("b", 5, 6, 5))


def test_a_rebuild_computes_all_positions_anew() -> None:
    claim = passes_of(choice(["a", "a", "b"], rebuilt=(2,)), 4)
    assert claim.passes == (Pass("a", 0, 5, 3), Pass("b", 0, 6, 5))


def test_a_prompt_computed_by_two_versions() -> None:
    """A prefill in chunks that a swap fell into."""
    claim = passes_of(choice(["b", "b"], kv=["a", "a", "b", "b", "b"]), 4)
    assert claim.passes == (Pass("a", 0, 2, 2), Pass("b", 2, 5, 3))


def test_labels_that_their_own_kv_denies() -> None:
    claim = passes_of(choice(["a", "b", "b"], kv=["a"] * 4 + ["a", "b"]), 4)
    assert claim.contradictions == (1,)


def test_kv_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cover 3 positions, not 5"):
        passes_of(choice(["a", "b"], kv=["a"] * 3), 4)


def test_no_tokens_no_passes() -> None:
    assert passes_of(choice([]), 4).passes == ()


def test_kv_of_an_output_that_was_aborted_while_it_was_rebuilt_tells_nothing() -> None:
    aborted = Choice(
        token_ids=(1, 2, 3),
        weight_versions=from_tokens("aab"),
        kv_weight_versions=from_tokens("c"),
        finish_reason="abort",
    )
    assert passes_of(aborted, 4) == passes_of(choice(["a", "a", "b"]), 4)


def test_the_documented_example_is_a_rollout_line() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rollout-file.md").read_text()
    (request,) = read([text.split("```json\n")[1].split("```")[0].replace("\n", "")])
    assert request.mixed
    claim = passes_of(request.choices[0], len(request.prompt_token_ids))
    assert claim.contradictions == ()
    assert [(p.start, p.end) for p in claim.passes] == [(0, 5), (5, 6)]
