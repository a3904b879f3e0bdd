"""Prefix cache and preemption: what is found again, what never is, and that neither changes a token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from generate_world import (
    VOCAB,
    Collector,
    Versions,
    load_weights,
    marker_weights,
    paused_at,
    reference_model,
    reference_tokens,
    replay,
    run,
    spans,
    start,
)

from weightline.errors import InvalidInput

pytestmark = pytest.mark.torch

PROMPT = [5 + i % 60 for i in range(50)]


@pytest.fixture
def line(models: Any, tmp_path: Path) -> Any:
    return lambda folder: Versions(folder, tmp_path)


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen2", "qwen3_moe"])
def test_tokens_are_those_of_a_cold_run_and_of_transformers(arch: str, models: Any, engines: Any) -> None:
    folder = models(arch)
    engine = engines(folder)
    reference = reference_model(folder)
    for prompt in (PROMPT, [*PROMPT[:33], 3, 4, 5], PROMPT[:16], PROMPT, PROMPT[:48]):
        done = run(engine, prompt, max_tokens=10)
        assert list(done.token_ids) == reference_tokens(reference, prompt, 10)
        assert done.kv_weight_versions == spans(("default", 0, len(prompt) + 9))
    assert engine.prefix.hit_tokens == sum((32, 0, 48, 32))


def test_a_conversation_goes_on_from_its_last_answer(models: Any, engines: Any) -> None:
    engine = engines(models())
    first = run(engine, PROMPT, max_tokens=20)
    second = run(engine, [*PROMPT, *first.token_ids, 9, 9], max_tokens=3)
    assert (first.cached_tokens, second.cached_tokens) == (0, (len(PROMPT) + 19) // 16 * 16)


def test_all_sequences_of_a_request_start_from_one_prefix(models: Any, engines: Any) -> None:
    engine = engines(models())
    run(engine, PROMPT, max_tokens=1)
    collector = start(engine, PROMPT, n=3, temperature=1.0, seed=3, max_tokens=6)
    collector.wait()
    assert [collector.finals[i].cached_tokens for i in range(3)] == [48, 48, 48]


def test_salts_keep_requests_apart(models: Any, engines: Any) -> None:
    engine = engines(models())

    def cached(salt: str | None) -> int:
        from weightline.generate import SamplingParams

        collector = Collector()
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        engine.submit(PROMPT, params, collector, cache_salt=salt)
        return int(collector.wait().cached_tokens)

    assert [cached(s) for s in (None, "a", "b", "a", None, "b")] == [0, 0, 0, 48, 48, 48]


def test_nothing_of_an_older_version_is_found(models: Any, engines: Any, line: Any) -> None:
    """Cold, warm, refit, once more: nothing cached, and the tokens of a fresh engine of the new version."""
    folder = models("qwen3")
    engine, versions = engines(folder), line(folder)
    assert [run(engine, PROMPT, max_tokens=4).cached_tokens for _ in range(2)] == [0, 48]
    new = {n: a.copy() for n, a in load_weights(folder).items()}
    values = new["model.layers.0.self_attn.v_proj.weight"]
    values[:] = values[::-1].copy()
    engine.pause("keep", clear_cache=False).result(10)
    versions.refit(engine, new, label="1@new", version=1)
    engine.resume()
    after = run(engine, PROMPT, max_tokens=12)
    fresh = engines(folder)
    fresh.pause("keep", clear_cache=False).result(10)
    line(folder).refit(fresh, new, label="1@new", version=1)
    fresh.resume()
    cold = run(fresh, PROMPT, max_tokens=12)
    assert after.cached_tokens == 0
    assert (after.token_ids, after.kv_weight_versions) == (cold.token_ids, cold.kv_weight_versions)
    assert run(engine, PROMPT, max_tokens=1).cached_tokens == 48


@pytest.mark.parametrize(
    "change",
    [
        lambda e: (e.pause("keep", clear_cache=False).result(10), e.resume()),
        lambda e: (e.pause("keep").result(10), e.resume()),
        lambda e: (e.pause("abort").result(10), e.resume()),
        lambda e: e.set_label("another"),
        lambda e: e.reset_prefix_cache(),
    ],
    ids=["keep", "keep and clear", "abort and clear", "label", "reset"],
)
def test_a_fresh_namespace_after(change: Any, models: Any, engines: Any) -> None:
    engine = engines(models())
    run(engine, PROMPT, max_tokens=1)
    assert run(engine, PROMPT, max_tokens=1).cached_tokens == 48
    change(engine)
    assert run(engine, PROMPT, max_tokens=1).cached_tokens == 0
    assert run(engine, PROMPT, max_tokens=1).cached_tokens == 48


def test_a_pause_that_keeps_no_request_and_no_cleared_cache_keeps_the_prefixes(
    models: Any, engines: Any
) -> None:
    engine = engines(models())
    run(engine, PROMPT, max_tokens=1)
    engine.pause("wait", clear_cache=False).result(10)
    engine.resume()
    assert run(engine, PROMPT, max_tokens=1).cached_tokens == 48


def test_what_a_kept_request_computed_across_a_swap_is_never_found(
    models: Any, engines: Any, line: Any
) -> None:
    folder = models("qwen3", marker=True)
    engine, versions = engines(folder, max_model_len=160), line(folder)
    collector = Collector()
    with paused_at(collector, 10, engine):
        start(engine, PROMPT, collector, max_tokens=60)
    versions.refit(engine, marker_weights(load_weights(folder), 1), label="1@aa", version=1)
    engine.resume()
    done = collector.wait()
    assert done.weight_versions == spans(("default", 0, 10), ("1@aa", 10, 60))
    follow_up = run(engine, [*PROMPT, *done.token_ids], max_tokens=1)
    assert follow_up.cached_tokens == 0
    assert follow_up.kv_weight_versions == spans(("1@aa", 0, len(PROMPT) + 60))


def test_the_oldest_prefix_goes_first_and_the_room_is_kept(models: Any, engines: Any) -> None:
    engine = engines(models(), prefix_tokens=64)
    first, second = PROMPT[:33], [7, *PROMPT[:32]]
    run(engine, first, max_tokens=1)
    run(engine, second, max_tokens=1)
    assert run(engine, first, max_tokens=1).cached_tokens == 32
    run(engine, [8, *PROMPT[:32]], max_tokens=1)
    assert len(engine.prefix) == 4
    assert run(engine, first, max_tokens=1).cached_tokens == 32
    assert run(engine, second, max_tokens=1).cached_tokens == 0


def test_no_room_turns_it_off(models: Any, engines: Any) -> None:
    engine = engines(models(), prefix_tokens=0)
    assert [run(engine, PROMPT, max_tokens=1).cached_tokens for _ in range(2)] == [0, 0]


def test_preempted_requests_go_on_as_if_nothing_had_been(models: Any, engines: Any) -> None:
    folder = models("qwen3")
    roomy, short = engines(folder), engines(folder, kv_tokens=80)
    prompts = [PROMPT[i : i + 20] for i in range(0, 24, 6)]
    expected = [run(roomy, p, max_tokens=40).token_ids for p in prompts]
    collectors = [start(short, p, max_tokens=40) for p in prompts]
    assert [c.wait().token_ids for c in collectors] == expected
    assert short.scheduler.preempted > 0
    for collector, prompt in zip(collectors, prompts, strict=True):
        (final,) = collector.finals.values()
        assert final.weight_versions == spans(("default", 0, 40))
        assert final.kv_weight_versions == spans(("default", 0, len(prompt) + 39))
        assert [i for c in collector.chunks for i in c.token_ids] == list(final.token_ids)
    assert not short.scheduler.rows


def test_several_sequences_of_a_preempted_request_go_on_each_for_itself(models: Any, engines: Any) -> None:
    folder = models("qwen3")
    roomy, short = engines(folder), engines(folder, kv_tokens=110)
    asked = {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 24}
    expected = start(roomy, PROMPT[:30], **asked)
    expected.wait()
    first = start(short, PROMPT[:30], max_tokens=60)
    second = start(short, PROMPT[:30], **asked)
    first.wait()
    second.wait()
    assert short.scheduler.preempted > 0
    for i in range(2):
        assert second.finals[i].token_ids == expected.finals[i].token_ids


def test_a_preempted_request_that_is_aborted_while_it_waits_returns_what_it_has(
    models: Any, engines: Any
) -> None:
    engine = engines(models("qwen3"), kv_tokens=80)
    first, second = Collector(), Collector()
    seen: list[Any] = []

    def look() -> None:
        if engine.scheduler.resuming:
            seen.append(list(engine.scheduler.queue[0].sequences[0].output))
            engine._abort(lambda r: r.external_id == "second")

    for at in range(1, 60):
        first.on_tokens[at] = look
    start(engine, PROMPT[:20], first, max_tokens=56, request_id="first")
    start(engine, PROMPT[:20], second, max_tokens=56, request_id="second", logprobs=0)
    done = second.wait()
    first.wait()
    assert seen
    assert done.finish_reason == "abort"
    assert list(done.token_ids) == seen[0]
    assert len(done.logprobs) == len(seen[0])
    assert done.weight_versions == spans(("default", 0, len(seen[0])))


def test_a_pause_that_waits_lets_preempted_requests_end(models: Any, engines: Any) -> None:
    engine = engines(models("qwen3"), kv_tokens=80)
    running = [start(engine, PROMPT[:20], max_tokens=50) for _ in range(2)]
    done = engine.pause("wait")
    late = start(engine, PROMPT[:20], max_tokens=2)
    done.result(60)
    assert [c.wait().finish_reason for c in running] == ["length", "length"] or not late.done.is_set()
    assert not late.done.is_set()
    engine.resume()
    assert late.wait().finish_reason == "length"


def test_a_request_that_can_never_fit_is_refused(models: Any, engines: Any) -> None:
    engine = engines(models(), kv_tokens=64)
    with pytest.raises(InvalidInput, match="may need 70 positions"):
        start(engine, PROMPT, max_tokens=20)


@pytest.mark.parametrize("seed", range(3))
def test_swaps_prefixes_and_preemption_at_random_leave_every_label_true(
    seed: int, models: Any, engines: Any, line: Any
) -> None:
    """Marker versions: token k means version k, whatever was cached, kept, recomputed or preempted; and each
    output is replayed from its labels."""
    folder = models("qwen3", marker=True)
    engine, versions = engines(folder, kv_tokens=150, prefix_tokens=256), line(folder)
    base, rng = load_weights(folder), random.Random(seed)
    everything: list[tuple[list[int], Collector]] = []
    for k in range(1, 9):
        for _ in range(4):
            prompt = [*PROMPT[: rng.choice((17, 33, 34))], rng.randrange(VOCAB)]
            everything.append((prompt, start(engine, prompt, max_tokens=rng.randrange(1, 40))))
        engine.pause("keep", clear_cache=rng.random() < 0.5).result(10)
        versions.refit(engine, marker_weights(base, k), label=f"{k}@m", version=k)
        engine.resume()
    model = reference_model(folder)
    for prompt, collector in everything:
        done = collector.wait()
        for span in done.weight_versions:
            k = 0 if span.version == "default" else int(span.version.partition("@")[0])
            assert set(done.token_ids[span.start : span.end]) == {k}
        logs = replay(model, versions.weights, prompt, done)
        assert all(log > -0.01 for log in logs)
    assert engine.scheduler.preempted + engine.prefix.hit_tokens > 0
