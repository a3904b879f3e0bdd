"""Spans over whole batches, against a plain loop over tokens."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import weightline as wl
from weightline.core import staleness as lines
from weightline.errors import InvalidInput, VersionNotFound

LABELS = {"1@aa": 1, "2@bb": 2, "3@cc": 3, "4@dd": 4, "5@ee": 5}
# 4 and 5 were made from 2: version 3 was overtaken by a rewind.
LINEAGE = wl.spans.Lineage(LABELS, {1: None, 2: 1, 3: 2, 4: 2, 5: 4})

outputs = st.lists(st.lists(st.sampled_from(sorted(LABELS)), max_size=12), max_size=8)


def spans_of(labels: list[list[str]]) -> list[list[dict[str, Any]]]:
    """As engines send them."""
    out = []
    for each in labels:
        found = wl.spans.from_tokens(each)
        out.append([{"version": s.version, "start": s.start, "end": s.end} for s in found])
    return out


@given(outputs, st.booleans())
def test_versions_staleness_and_masks_are_those_of_a_loop(labels: list[list[str]], typed: bool) -> None:
    flat = [label for each in labels for label in each]
    made = [wl.spans.from_tokens(each) for each in labels] if typed else spans_of(labels)
    batch = wl.spans.batch(made, lengths=[len(each) for each in labels])
    assert len(batch) == len(labels)
    assert batch.offsets.tolist() == [sum(map(len, labels[:i])) for i in range(len(labels) + 1)]
    assert wl.spans.per_token(batch).tolist() == flat
    versions = [LABELS[label] for label in flat]
    assert wl.spans.per_token(batch, LINEAGE).tolist() == versions
    for now in (1, 3, 5):
        steps = [lines.distance(LINEAGE.parents, v, now) for v in versions]
        found = wl.spans.staleness(batch, now, LINEAGE)
        assert found.dtype == np.int64
        assert found.tolist() == steps
        keep = wl.spans.mask(batch, LINEAGE, now=now, at_most=1, versions=[2, 3, 4])
        assert keep.dtype == bool
        assert keep.tolist() == [s <= 1 and v in (2, 3, 4) for s, v in zip(steps, versions, strict=True)]
    only = wl.spans.mask(batch, LABELS, versions={5})
    assert only.tolist() == [v == 5 for v in versions]


@given(outputs)
def test_ages_are_those_of_a_loop(labels: list[list[str]]) -> None:
    now = [1 + i % 5 for i in range(len(labels))]
    found = wl.spans.ages(wl.spans.batch(spans_of(labels)), now, LINEAGE)
    for i, each in enumerate(labels):
        steps = [lines.distance(LINEAGE.parents, LABELS[label], now[i]) for label in each]
        if steps:
            assert (found.min[i], found.max[i]) == (min(steps), max(steps))
            assert found.mean[i] == pytest.approx(sum(steps) / len(steps))
        else:
            assert (found.min[i], found.max[i]) == (-1, -1)
            assert np.isnan(found.mean[i])


@given(outputs, st.integers(1, 4))
def test_split_gives_every_token_once_to_its_version_and_the_rows_that_belong_to_it(
    labels: list[list[str]], prompt: int
) -> None:
    batch = wl.spans.batch(spans_of(labels))
    logprobs = np.arange(batch.tokens, dtype=np.float32)
    sets = [[i, i + 1] for i in range(batch.tokens)]
    experts = [np.arange(max(0, prompt + len(each) - 1)) for each in labels]
    found = wl.spans.split(
        batch,
        LABELS,
        outputs={"logprobs": logprobs, "sampling_mask": sets},
        contexts={"routed_experts": experts},
        prompts=[prompt] * len(labels),
    )
    assert list(found) == sorted(found)
    owner = {}
    for version, segments in found.items():
        for segment in segments:
            assert labels[segment.output][segment.start : segment.end] == [segment.label] * (
                segment.end - segment.start
            )
            assert LABELS[segment.label] == version == segment.version
            assert np.shares_memory(segment.values["logprobs"], logprobs)
            first = int(batch.offsets[segment.output])
            flat = list(range(first + segment.start, first + segment.end))
            assert segment.values["logprobs"].tolist() == flat
            assert segment.values["sampling_mask"] == [sets[i] for i in flat]
            # The pass over context position prompt + i - 1 samples output token i.
            begin = 0 if segment.start == 0 else prompt - 1 + segment.start
            assert segment.values["routed_experts"].tolist() == list(range(begin, prompt - 1 + segment.end))
            owner |= dict.fromkeys(flat, version)
    assert [owner[i] for i in range(batch.tokens)] == wl.spans.per_token(batch, LABELS).tolist()


def test_a_line_resolves_labels_and_its_lineage_counts_rewinds(tmp_path: Any) -> None:
    weights = {"w": np.zeros(64, np.float32)}
    with wl.CheckpointEngine(tmp_path / "store") as engine:
        engine.commit(weights, attachments={"trainer": b"state"})
        for step in range(3):
            weights = {"w": weights["w"] + np.float32(step + 1)}
            engine.commit(weights)
    with wl.CheckpointEngine(tmp_path / "store") as engine:
        assert engine.recover().version == 1
        engine.commit({"w": weights["w"] * 2})  # version 5, made from version 1
        labels = {record.version: record.label for record in engine.versions()}
        spans = [wl.WeightVersionSpan(labels[v], v - 1, v) for v in range(1, 6)]
        assert wl.spans.per_token(spans, engine).tolist() == [1, 2, 3, 4, 5]
        assert wl.spans.staleness(spans, 5, engine).tolist() == [1, 2, 3, 4, 0]


def test_a_mapping_alone_counts_versions_by_number() -> None:
    spans = [wl.WeightVersionSpan("a", 0, 2), wl.WeightVersionSpan("b", 2, 3)]
    assert wl.spans.staleness(spans, 120, {"a": 117, "b": 120}).tolist() == [3, 3, 0]


A, B = {"version": "1@aa", "start": 0, "end": 3}, {"version": "2@bb", "start": 3, "end": 5}


@pytest.mark.parametrize(
    ("spans", "lengths", "message"),
    [
        ([[A], [A, {**B, "start": 4}]], None, r"request 'q1', token 3: gap: span \[4, 5\)"),
        ([[A, {**B, "start": 2}], []], None, r"request 'q0', token 2: overlap: span \[2, 5\)"),
        ([[{**A, "start": 1}], []], None, r"request 'q0', token 0: gap"),
        ([[], [B]], None, r"request 'q1', token 0: gap"),
        ([[A], [A, B]], [3, 6], r"request 'q1', token 5: spans cover 5 tokens of 6"),
        ([[A], [A, B]], [0, 5], r"request 'q0', token 0: spans cover 3 tokens of 0"),
        ([[], [{"version": "1@aa", "start": 0}]], None, r"request 'q1': .* is no span"),
        ([[{**A, "end": 2.0}], []], None, r"request 'q0': .* is no span"),
        ([[{**A, "end": True}], []], None, r"request 'q0': .* is no span"),
        ([[{**A, "start": 3, "end": 0}], []], None, r"request 'q0': .* is no span"),
        ([[7], []], None, r"request 'q0': 7 is no span"),
        ([[A], []], [3], r"lengths has shape \(1,\)"),
        ([[A], []], [3.0, 0.0], r"dtype float64"),
    ],
)
def test_spans_that_do_not_fit_are_refused_by_request_and_token(
    spans: Any, lengths: Any, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        wl.spans.batch(spans, lengths=lengths, ids=["q0", "q1"])


def test_other_input_that_does_not_fit_is_refused_by_name() -> None:
    batch = wl.spans.batch([[A], [A, B]], ids=["q0", "q1"])
    with pytest.raises(VersionNotFound, match=r"request 'q1', token 3: no version has the label '2@bb'"):
        wl.spans.per_token(batch, {"1@aa": 1})
    with pytest.raises(VersionNotFound, match="version 9 is not in the lineage"):
        wl.spans.staleness(batch, 9, LINEAGE)
    with pytest.raises(InvalidInput, match=r"now has shape \(3,\)"):
        wl.spans.staleness(batch, [1, 2, 3], LINEAGE)
    with pytest.raises(InvalidInput, match="now and at_most"):
        wl.spans.mask(batch, LINEAGE)
    with pytest.raises(InvalidInput, match="now and at_most"):
        wl.spans.mask(batch, LINEAGE, now=3)
    with pytest.raises(InvalidInput, match="1 ids for 2 outputs"):
        wl.spans.batch([[A], []], ids=["q0"])
    with pytest.raises(InvalidInput, match="logprobs has 7 rows for 8 tokens"):
        wl.spans.split(batch, LABELS, outputs={"logprobs": np.zeros(7)})
    with pytest.raises(InvalidInput, match="prompts has 0 entries"):
        wl.spans.split(batch, LABELS, contexts={"routed_experts": [[], []]})
    rows = [np.zeros(4), np.zeros(5)]
    with pytest.raises(InvalidInput, match=r"'q1': routed_experts has 5 rows for 6 context positions"):
        wl.spans.split(batch, LABELS, contexts={"routed_experts": rows}, prompts=[2, 2])
    with pytest.raises(InvalidInput, match="like is 'jax'"):
        wl.spans.per_token(batch, LABELS, like="jax")  # type: ignore[arg-type]


def test_an_empty_batch_and_empty_outputs_are_fine() -> None:
    for batch in (wl.spans.batch([]), wl.spans.batch([[], []], lengths=[0, 0])):
        assert wl.spans.per_token(batch, LABELS).tolist() == []
        assert wl.spans.staleness(batch, 5, LINEAGE).tolist() == []
        assert wl.spans.split(batch, LABELS) == {}
        assert wl.spans.ages(batch, 5, LINEAGE).max.tolist() == [-1] * len(batch)


def test_the_numpy_face_loads_without_torch() -> None:
    code = (
        "import sys, weightline.spans as s;"
        "s.staleness(s.batch([[{'version': 'a', 'start': 0, 'end': 3}]]), 2, {'a': 1});"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([[], None], "request 1: its spans are None"),
        (None, "outputs are None"),
        ([[{"version": "a", "start": 0, "end": 2**70}]], "request 0"),
    ],
    ids=["a chunk that is not the last", "nothing", "a number no file has"],
)
def test_what_is_no_list_of_spans_is_refused_by_request(outputs: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        wl.spans.batch(outputs)


def test_a_label_where_a_version_is_asked_is_refused() -> None:
    with pytest.raises(InvalidInput, match="versions holds 'a'"):
        wl.spans.mask(wl.spans.batch([[{"version": "a", "start": 0, "end": 2}]]), {"a": 1}, versions={"a"})
