"""Spans: with marker weights, the token itself says which version sampled it; a replay says which computed
its keys and values.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from generate_world import (
    VOCAB,
    Collector,
    Versions,
    marker_weights,
    paused_at,
    reference_model,
    replay,
    run,
    spans,
    start,
)

from weightline.core.spans import per_token, validate
from weightline.errors import ConflictError, Unavailable

pytestmark = pytest.mark.torch

PROMPT = [5, 9, 2, 44, 61]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def world(request: pytest.FixtureRequest, models: Any, engines: Any, tmp_path: Path) -> Any:
    folder = models("qwen3", marker=True, tie=request.param)
    engine = engines(folder)
    versions = Versions(folder, tmp_path)
    return engine, versions


def markers(final: Any) -> list[int]:
    """The marker that each token's label stands for."""
    return [0 if label == "default" else int(label[1:]) for label in per_token(final.weight_versions)]


def to_version(engine: Any, versions: Versions, k: int) -> None:
    versions.refit(engine, marker_weights(versions.weights["default"], k), label=f"v{k}", version=k)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_keep_splits_one_output_exactly_at_the_swap(world: Any, clear_cache: bool) -> None:
    engine, versions = world
    collector = Collector()
    with paused_at(collector, 4, engine, clear_cache=clear_cache):
        start(engine, PROMPT, collector, max_tokens=10)
    frozen = len(collector.chunks)
    to_version(engine, versions, 3)
    assert len(collector.chunks) == frozen == 4
    engine.resume()
    final = collector.wait()
    assert final.token_ids == (0,) * 4 + (3,) * 6
    assert final.weight_versions == spans(("default", 0, 4), ("v3", 4, 10))
    length = len(PROMPT) + 10 - 1
    if clear_cache:
        assert final.kv_weight_versions == spans(("v3", 0, length))
        assert final.kv_recomputed_at == (4,)
    else:
        # The first new step computes the keys and values of the last old token's position.
        swap = len(PROMPT) + 4 - 1
        assert final.kv_weight_versions == spans(("default", 0, swap), ("v3", swap, length))
        assert final.kv_recomputed_at == ()


def test_there_and_back_again_gives_three_ranges(world: Any) -> None:
    engine, versions = world
    collector = Collector()
    with paused_at(collector, 2, engine):
        start(engine, PROMPT, collector, max_tokens=9)
    to_version(engine, versions, 7)
    with paused_at(collector, 5, engine):
        engine.resume()
    versions.refit(engine, versions.weights["default"], label="default", version=8)
    engine.resume()
    final = collector.wait()
    assert final.token_ids == (0, 0, 7, 7, 7, 0, 0, 0, 0)
    assert final.weight_versions == spans(("default", 0, 2), ("v7", 2, 5), ("default", 5, 9))


def test_requests_that_come_during_a_pause_carry_the_new_label_only(world: Any) -> None:
    engine, versions = world
    engine.pause("keep").result(60)
    waiting = [start(engine, PROMPT[: i + 1]) for i in range(3)]
    to_version(engine, versions, 5)
    assert engine.describe().waiting == 3
    assert not any(c.chunks for c in waiting)
    engine.resume()
    for collector in waiting:
        final = collector.wait()
        assert final.token_ids == (5,) * 8
        assert final.weight_versions == spans(("v5", 0, 8))
        assert {s.version for s in final.kv_weight_versions} == {"v5"}


def test_abort_ends_running_and_waiting_requests_with_what_they_have(models: Any, engines: Any) -> None:
    engine = engines(models("qwen3", marker=True), max_num_seqs=1)
    running, waiting = Collector(), Collector()
    with paused_at(running, 3, engine, mode="abort"):
        start(engine, PROMPT, running, max_tokens=50)
        start(engine, PROMPT, waiting)
    final = running.wait()
    assert (final.finish_reason, final.token_ids) == ("abort", (0, 0, 0))
    assert final.weight_versions == spans(("default", 0, 3))
    last = running.chunks[-1]
    assert last.final is final
    assert last.token_ids == ()
    # Whether the second one was queued before the pause or after it: it never ran.
    engine.abort(None)
    final = waiting.wait()
    assert (final.finish_reason, final.token_ids, final.weight_versions) == ("abort", (), ())
    assert final.kv_weight_versions == ()
    engine.resume()
    assert run(engine, PROMPT).finish_reason == "length"


def test_wait_closes_admission_first_and_then_drains(world: Any) -> None:
    engine, versions = world
    collector, late = Collector(), Collector()
    drained: list[Any] = []

    def drain() -> None:
        from concurrent.futures import Future

        done: Future[None] = Future()
        drained.append(done)
        engine.post(lambda: engine._pause("wait", True, done))
        engine.post(asked.set)

    asked = threading.Event()
    collector.on_tokens[2] = drain
    start(engine, PROMPT, collector, max_tokens=60)
    assert asked.wait(60)
    start(engine, PROMPT, late)
    drained[0].result(60)
    assert collector.finals[0].token_ids == (0,) * 60
    assert collector.finals[0].finish_reason == "length"
    assert late.chunks == []
    to_version(engine, versions, 2)
    engine.resume()
    assert late.wait().weight_versions == spans(("v2", 0, 8))


def test_resume_while_draining_tells_the_one_who_waits(models: Any, engines: Any) -> None:
    engine = engines(models("qwen3", marker=True))
    collector = Collector()
    outcome: list[Any] = []
    asked = threading.Event()

    def drain_and_resume() -> None:
        from concurrent.futures import Future

        done: Future[None] = Future()
        outcome.append(done)
        engine.post(lambda: engine._pause("wait", True, done))
        engine.post(engine.resume_now)
        engine.post(asked.set)

    collector.on_tokens[2] = drain_and_resume
    start(engine, PROMPT, collector, max_tokens=40)
    assert asked.wait(60)
    with pytest.raises(ConflictError, match="resumed"):
        outcome[0].result(60)
    assert collector.wait().finish_reason == "length"


def test_pausing_twice_is_one_pause_and_abort_still_aborts(models: Any, engines: Any) -> None:
    engine = engines(models("qwen3", marker=True))
    collector = Collector()
    with paused_at(collector, 2, engine):
        start(engine, PROMPT, collector, max_tokens=50)
    engine.pause("keep", clear_cache=False).result(60)
    engine.pause("wait").result(60)
    assert not collector.done.is_set()
    engine.pause("abort").result(60)
    assert collector.wait().finish_reason == "abort"
    engine.resume()
    engine.resume()
    assert not engine.paused


def test_a_prompt_that_was_half_computed_at_the_swap_is_computed_by_one_version(
    models: Any, engines: Any, tmp_path: Path
) -> None:
    folder = models("qwen3", marker=True)
    engine = engines(folder, prefill_tokens=8)
    versions = Versions(folder, tmp_path)
    early, late = Collector(), Collector()
    long_prompt = [i % VOCAB for i in range(40)]

    with paused_at(early, 3, engine, clear_cache=False):
        early.on_tokens[1] = lambda: engine.post(
            lambda: engine.scheduler.queue.append(_request(late, long_prompt))
        )
        start(engine, PROMPT, early, max_tokens=40)
    assert engine.call(lambda: engine.scheduler.rows[1].computed) == 8
    to_version(engine, versions, 4)
    engine.resume()
    final = late.wait()
    assert final.weight_versions == spans(("v4", 0, 4))
    assert final.kv_weight_versions == spans(("v4", 0, 43))
    assert final.kv_recomputed_at == ()
    early.wait()


def _request(collector: Collector, prompt: list[int]) -> Any:
    from weightline.generate import SamplingParams
    from weightline.generate.requests import Request

    params = SamplingParams(temperature=0.0)
    return Request(tuple(prompt), params, collector, external_id="x", max_tokens=4, stop_ids=frozenset())


def test_an_abort_while_keys_and_values_are_computed_anew_reports_none(models: Any, engines: Any) -> None:
    engine = engines(models("qwen3", marker=True), prefill_tokens=4)
    collector, other = Collector(), Collector()
    with paused_at(collector, 12, engine, clear_cache=True):
        start(engine, PROMPT, other, max_tokens=60)
        start(engine, PROMPT, collector, max_tokens=60)
    # Rows recompute in order, four positions a step: when the first one samples again, the second is under
    # way.
    restarted = threading.Event()
    seen = other.tokens

    def abort() -> None:
        engine.post(lambda: engine._abort(lambda r: r.sink is collector))
        engine.post(restarted.set)

    other.on_tokens[seen + 1] = abort
    engine.resume()
    assert restarted.wait(60)
    final = collector.wait()
    assert final.finish_reason == "abort"
    assert final.kv_weight_versions == ()
    assert final.kv_recomputed_at == ()
    assert len(final.token_ids) == 12
    assert other.wait().finish_reason == "length"


def test_a_random_life_labels_every_token_and_replays(models: Any, engines: Any, tmp_path: Path) -> None:
    """Requests, groups, aborts, pauses of all kinds and refits at random; then every token against its
    label, and every output by replay.
    """
    folder = models("qwen3", marker=True)
    engine = engines(folder, prefill_tokens=8)
    versions = Versions(folder, tmp_path)
    rng = random.Random(4)
    live: list[tuple[list[int], Collector]] = []
    k = 0
    for _ in range(25):
        for _ in range(rng.randrange(4)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
            n = rng.choice((1, 1, 1, 2, 3))
            collector = start(
                engine, prompt, n=n, max_tokens=rng.randrange(1, 50), logprobs=0, request_id=str(len(live))
            )
            live.append((prompt, collector))
        if rng.random() < 0.3 and live:
            engine.abort([str(rng.randrange(len(live)))])
        mode = rng.choice(("keep", "keep", "keep", "keep", "wait", "abort"))
        engine.pause(mode, clear_cache=rng.random() < 0.5).result(60)
        if rng.random() < 0.9:
            k += rng.randrange(1, 4)
            to_version(engine, versions, k)
        engine.resume()
    finals = []
    for prompt, collector in live:
        collector.wait()
        finals += [(prompt, f) for f in collector.finals.values()]
    model = reference_model(folder)
    for prompt, final in finals:
        validate(final.weight_versions, len(final.token_ids))
        assert [t % VOCAB for t in markers(final)] == list(final.token_ids)
        logs = replay(model, versions.weights, prompt, final)
        assert logs == pytest.approx([e.logprob for e in final.logprobs], abs=2e-3)
    assert any(len(f.weight_versions) > 2 for _, f in finals)
    assert any(f.kv_recomputed_at for _, f in finals)
    assert engine.describe().running == engine.describe().waiting == 0


def test_tokens_do_not_depend_on_what_is_recorded(models: Any, engines: Any) -> None:
    """A label that changes at every token leaves each sampled token as it is."""
    engine = engines(models("llama"))
    sampling = {"temperature": 1.0, "seed": 9, "max_tokens": 20}
    plain = run(engine, PROMPT, **sampling)
    collector = Collector()
    for i in range(2, 20):  # the first step samples two: after the prompt, and with the other rows
        collector.on_tokens[i] = lambda i=i: engine.post(lambda: _relabel(engine, f"x{i}"))
    start(engine, PROMPT, collector, **sampling)
    final = collector.wait()
    assert final.token_ids == plain.token_ids
    assert [s.version for s in final.weight_versions] == ["default", *(f"x{i}" for i in range(2, 20))]


def _relabel(engine: Any, label: str) -> None:
    from weightline.generate.refit import Identity

    engine.identity = Identity(label)


def test_late_and_unknown_aborts_do_nothing_and_ids_can_be_used_again(models: Any, engines: Any) -> None:
    engine = engines(models("qwen3", marker=True))
    assert run(engine, PROMPT, request_id="a").finish_reason == "length"
    assert engine.abort(["a", "never"]) == 0
    collector = Collector()
    with paused_at(collector, 2, engine):
        start(engine, PROMPT, collector, request_id="a", max_tokens=50)
    assert engine.abort(["generate-tokens-a"]) == 1
    assert engine.abort(["a"]) == 0
    assert collector.wait().finish_reason == "abort"
    again = start(engine, PROMPT, request_id="a")
    engine.resume()
    assert again.wait().finish_reason == "length"


def test_stopping_the_engine_ends_every_request(models: Any, engines: Any) -> None:
    engine = engines(models("qwen3", marker=True), max_num_seqs=3)
    first = Collector()
    with paused_at(first, 9, engine):
        start(engine, PROMPT, first, max_tokens=80)
        collectors = [start(engine, PROMPT, max_tokens=80) for _ in range(4)]
    assert len(engine.scheduler.rows) > 1
    engine.stop()
    assert [c.wait().finish_reason for c in (first, *collectors)] == ["abort"] * 5
    with pytest.raises(Unavailable, match="stopping"):
        start(engine, PROMPT)


def test_a_drain_ends_when_its_last_running_request_is_aborted(models: Any, engines: Any) -> None:
    engine = engines(models("qwen3", marker=True), max_num_seqs=1)
    running, waiting = Collector(), Collector()
    started = threading.Event()
    running.on_tokens[2] = started.set
    start(engine, PROMPT, running, max_tokens=80, request_id="one")
    start(engine, PROMPT, waiting, max_tokens=80)
    assert started.wait(60)
    # In one command, so that no step comes in between: the drain begins, and its only request is aborted.
    from concurrent.futures import Future

    done: Future[None] = Future()
    engine.call(lambda: (engine._pause("wait", True, done), engine._abort(lambda r: r.external_id == "one")))
    done.result(30)
    assert engine.paused
    assert running.wait().finish_reason == "abort"
    engine.resume()
    assert waiting.wait().finish_reason == "length"
