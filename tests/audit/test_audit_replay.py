"""The replay proves true labels, whatever the swaps did to the KV, and refutes false ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from audit_world import PROMPT, World, request_of, sample_greedily, spans_of

from weightline.audit import ReplayReport, replay
from weightline.errors import InvalidInput

pytestmark = pytest.mark.torch

PLAIN = [1] * 40
KEPT = [1] * 13 + [2] * 14 + [3] * 13
BACK = [2] * 9 + [1] * 9 + [2] * 9


def run(world: World, *choices: dict[str, Any], line: Any = None, **fields: Any) -> ReplayReport:
    lines = [request_of(world, f"r{i}", c, **fields) for i, c in enumerate(choices)]
    return replay(line or world.line, world.folder, lines)


@pytest.fixture(scope="module")
def kept(world: World) -> dict[str, Any]:
    return sample_greedily(world, PROMPT, KEPT)


def test_versions_differ_enough_for_the_tests_to_have_teeth(world: World) -> None:
    tokens = [sample_greedily(world, PROMPT, [v] * 20)["token_ids"] for v in (1, 2, 3)]
    assert len({tuple(t) for t in tokens}) == 3
    assert all(len(set(t)) > 5 for t in tokens)


def test_plain_output_is_proved(world: World) -> None:
    report = run(world, sample_greedily(world, PROMPT, PLAIN))
    assert (report.tokens_checked, report.mismatches, report.unchecked) == (40, 0, {})
    assert (report.requests_checked, report.mixed_requests_checked) == (1, 0)
    assert report.by_version[world.labels[1]].tokens == 40


def test_mixed_output_with_kept_kv_is_proved(world: World, kept: dict[str, Any]) -> None:
    report = run(world, kept)
    assert (report.tokens_checked, report.mismatches) == (40, 0)
    assert report.mixed_requests_checked == 1
    assert {label: t.tokens for label, t in report.by_version.items()} == {
        world.labels[1]: 13,
        world.labels[2]: 14,
        world.labels[3]: 13,
    }


def test_logprobs_agree_to_rounding(world: World, kept: dict[str, Any]) -> None:
    report = run(world, kept)
    assert report.max_logprob_error is not None
    assert report.max_logprob_error < 1e-3


@pytest.mark.parametrize("rebuild_at", [(13,), (27,), (13, 27), (20,)])
def test_mixed_output_with_rebuilt_kv_is_proved(world: World, rebuild_at: tuple[int, ...]) -> None:
    report = run(world, sample_greedily(world, PROMPT, KEPT, rebuild_at=rebuild_at))
    assert (report.tokens_checked, report.mismatches) == (40, 0)


def test_return_to_an_older_version_is_proved(world: World) -> None:
    report = run(world, sample_greedily(world, PROMPT, BACK))
    assert (report.tokens_checked, report.mismatches) == (27, 0)


def test_swap_before_the_first_and_before_the_last_token(world: World) -> None:
    for versions in ([1] + [2] * 19, [1] * 19 + [2], [3]):
        report = run(world, sample_greedily(world, PROMPT, versions))
        assert (report.tokens_checked, report.mismatches) == (len(versions), 0)


def test_many_outputs_with_different_swaps_in_one_go(world: World) -> None:
    swaps = [[1] * n + [2] * (18 - n) for n in range(1, 18, 3)]
    report = run(world, *[sample_greedily(world, PROMPT, v) for v in swaps])
    assert (report.tokens_checked, report.mismatches, report.mixed_requests_checked) == (18 * 6, 0, 6)


def test_outputs_longer_than_one_forward_call(world: World) -> None:
    report = run(world, sample_greedily(world, PROMPT, [1] * 300 + [2] * 290, rebuild_at=(295,)))
    assert (report.tokens_checked, report.mismatches) == (590, 0)


def test_kept_kv_replayed_as_rebuilt_is_refuted(world: World, kept: dict[str, Any]) -> None:
    """The KV's provenance matters: the same labels on fresh KV give other tokens."""
    lie = {**kept, "kv_weight_versions": None, "kv_recomputed_at": [13]}
    assert run(world, lie).mismatches > 0


@pytest.mark.parametrize("by", [-1, 1])
def test_labels_shifted_by_one_token_are_refuted(world: World, kept: dict[str, Any], by: int) -> None:
    """As an engine that books a token in flight to the wrong version would say it, KV and all."""
    shifted = [1] * (13 + by) + [2] * 14 + [3] * (13 - by)
    kv = [1] * (len(PROMPT) - 1) + shifted
    lie = {
        **kept,
        "weight_versions": spans_of([world.labels[v] for v in shifted]),
        "kv_weight_versions": spans_of([world.labels[v] for v in kv]),
    }
    report = run(world, lie)
    assert report.mismatches > 0
    assert {m.token for m in report.first_mismatches} >= {13 if by > 0 else 12}


def test_label_shifted_against_its_own_kv_is_refuted_without_replay(
    world: World, kept: dict[str, Any]
) -> None:
    shifted = [1] * 14 + [2] * 13 + [3] * 13
    report = run(world, {**kept, "weight_versions": spans_of([world.labels[v] for v in shifted])})
    reasons = {m.token: m.reason for m in report.first_mismatches}
    assert "contradicts" in reasons[13]


def test_control_shows_what_wrong_labels_look_like(world: World, kept: dict[str, Any]) -> None:
    plain = sample_greedily(world, PROMPT, PLAIN)
    lines = [request_of(world, "m", kept), request_of(world, "p", plain)]
    report = replay(world.line, world.folder, lines, control=True)
    assert (report.tokens_checked, report.mismatches) == (80, 0)
    assert report.control is not None
    assert report.control.tokens == 40
    assert report.control.mismatches > 10
    assert report.logprob_outliers == 0
    assert report.control.logprob_outliers > 30
    assert report.control.max_logprob_error is not None
    assert report.max_logprob_error is not None
    assert report.control.max_logprob_error > 100 * report.max_logprob_error
    assert replay(world.line, world.folder, lines[1:], control=True).control is None


def test_swapped_labels_are_refuted(world: World, kept: dict[str, Any]) -> None:
    swapped = [2] * 13 + [1] * 14 + [3] * 13
    lie = {
        **kept,
        "weight_versions": spans_of([world.labels[v] for v in swapped]),
        "kv_weight_versions": None,
    }
    report = run(world, lie)
    assert report.mismatches > 10


def test_bytes_of_another_version_are_refuted(world: World, kept: dict[str, Any]) -> None:
    class WrongBytes:
        """The same store, but it hands out version 3 for version 2."""

        def __getattr__(self, name: str) -> Any:
            return getattr(world.line, name)

        def load(self, version: int, **options: Any) -> Any:
            return world.line.load(3 if version == 2 else version, **options)

    report = run(world, kept, line=WrongBytes())
    assert report.mismatches > 0
    assert report.by_version[world.labels[1]].mismatches == 0


def test_unknown_label_is_refuted_and_what_follows_is_unchecked(world: World, kept: dict[str, Any]) -> None:
    spans = [{**s, "version": "default"} if s["start"] == 13 else s for s in kept["weight_versions"]]
    report = run(world, {**kept, "weight_versions": spans, "kv_weight_versions": None})
    assert report.mismatches == 14
    assert report.tokens_checked == 27
    assert sum(report.unchecked.values()) == 13
    assert report.mixed_requests_checked == 0


def test_changed_token_is_refuted(world: World, kept: dict[str, Any]) -> None:
    tokens = list(kept["token_ids"])
    tokens[20] = (tokens[20] + 1) % 500
    report = run(world, {**kept, "token_ids": tokens})
    assert 20 in {m.token for m in report.first_mismatches}


def test_near_tie_is_counted_apart(world: World, kept: dict[str, Any]) -> None:
    tokens = list(kept["token_ids"])
    tokens[39] = (tokens[39] + 1) % 500  # the last: nothing after it changes
    lines = [request_of(world, "r", {**kept, "token_ids": tokens})]
    gap = replay(world.line, world.folder, lines).first_mismatches[0].gap
    assert gap is not None
    report = replay(world.line, world.folder, lines, tie_margin=gap * 1.01)
    assert (report.mismatches, report.ties) == (0, 1)
    assert report.max_tie_gap == pytest.approx(gap)
    assert replay(world.line, world.folder, lines, tie_margin=gap * 0.99).mismatches == 1


def test_sampled_and_shaped_requests_are_counted_not_checked(world: World, kept: dict[str, Any]) -> None:
    lines = [
        request_of(world, "hot", kept, sampling={"temperature": 1.0}),
        request_of(world, "penal", kept, sampling={"temperature": 0.0, "repetition_penalty": 1.2}),
        request_of(world, "greedy", kept),
    ]
    report = replay(world.line, world.folder, lines)
    assert (report.requests_checked, report.tokens_checked) == (1, 40)
    assert sum(report.unchecked.values()) == 80


def test_sample_prefers_mixed_requests(world: World, kept: dict[str, Any]) -> None:
    plain = sample_greedily(world, PROMPT, [1] * 5)
    lines = [request_of(world, f"p{i}", plain) for i in range(10)] + [
        request_of(world, f"m{i}", kept) for i in range(2)
    ]
    report = replay(world.line, world.folder, lines, requests=6)
    assert (report.requests_checked, report.mixed_requests_checked) == (6, 2)


def test_file_is_read_and_progress_told(world: World, kept: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(request_of(world, f"r{i}", kept)) + "\n" for i in range(3)))
    seen: list[tuple[int, int]] = []
    report = replay(world.line, world.folder, path, progress=lambda *at: seen.append(at))
    assert report.requests_checked == 3
    assert seen[-1] == (3, 120)


def test_bad_lines_are_named(world: World, kept: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    good = json.dumps(request_of(world, "r0", kept))
    for bad, named in (
        (good[:-9], ":2"),
        (json.dumps(request_of(world, "r1", kept, run="other")), "run other"),
        (
            json.dumps(request_of(world, "r1", {**kept, "weight_versions": kept["weight_versions"][1:]})),
            "weight_versions",
        ),
        (json.dumps(request_of(world, "r1", {**kept, "logprobs": [0.0]})), "1 logprobs for 40"),
        (json.dumps(request_of(world, "r1", {**kept, "kv_recomputed_at": [40]})), "kv_recomputed_at"),
        (json.dumps(request_of(world, "r1", kept, prompt_token_ids=[])), "prompt_token_ids"),
        (json.dumps(request_of(world, "r1", kept, prompt_token_ids=[10**6] * 7)), "token id"),
    ):
        path.write_text(good + "\n" + bad + "\n")
        with pytest.raises(InvalidInput, match=named):
            replay(world.line, world.folder, path)


def test_missing_file_and_wrong_model_are_named(world: World, kept: dict[str, Any], tmp_path: Path) -> None:
    from weightline.demo.models import tiny_model

    with pytest.raises(InvalidInput, match=r"nothing\.jsonl"):
        replay(world.line, world.folder, tmp_path / "nothing.jsonl")
    other = tiny_model(tmp_path / "other", hidden=64)
    with pytest.raises(InvalidInput, match="of another shape"):
        replay(world.line, other, [request_of(world, "r", kept)])
