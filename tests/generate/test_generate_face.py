"""The Python face: completion objects that carry spans, parts that merge, sessions of streamed inputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from generate_world import Versions, marker_weights, spans

import weightline as wl
from weightline.errors import InvalidInput

pytestmark = pytest.mark.torch

PROMPT = [5, 9, 2, 44, 61]


def params(**sampling: Any) -> Any:
    from weightline.generate import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 6, **sampling})


@pytest.fixture
def engine(models: Any, engines: Any) -> Any:
    return engines(models("qwen3", marker=True))


def test_a_completion_carries_its_spans(models: Any) -> None:
    with wl.generate.Engine.open(models("qwen3", marker=True), max_num_seqs=4, max_model_len=96) as engine:
        done = engine.generate(PROMPT, params(), request_id="mine")
    assert (done.request_id, done.prompt_token_ids, done.finished) == ("mine", tuple(PROMPT), True)
    (output,) = done.outputs
    assert output.token_ids == (0,) * 6
    assert output.finish_reason == "length"
    assert output.weight_versions == spans(("default", 0, 6))


def test_several_prompts_and_several_sequences_each_have_a_list(engine: Any) -> None:
    done = engine.generate_all([PROMPT, PROMPT[:2]], params(temperature=1.0, seed=1, n=2))
    assert [len(d.prompt_token_ids) for d in done] == [5, 2]
    for output in (o for d in done for o in d.outputs):
        assert output.weight_versions == spans(("default", 0, 6))


def test_a_bad_prompt_among_several_leaves_none_running(engine: Any) -> None:
    with pytest.raises(InvalidInput, match="token_ids"):
        engine.generate_all([PROMPT, []], params(max_tokens=80))
    state = engine.describe()
    assert (state.running, state.waiting) == (0, 0)


def test_text_needs_a_tokenizer(engine: Any) -> None:
    with pytest.raises(InvalidInput, match="tokenizer"):
        engine.generate("hello", params())
    with pytest.raises(InvalidInput, match=r"sampling_params\.stop"):
        engine.generate(PROMPT, params(stop=("x",)))


def test_spans_come_with_the_last_part_and_parts_merge_to_the_whole(engine: Any) -> None:
    async def read() -> list[Any]:
        return [part async for part in engine.stream(PROMPT, params(logprobs=1))]

    parts = asyncio.run(read())
    assert [p.outputs[0].weight_versions for p in parts[:-1]] == [None] * 5
    assert [p.finished for p in parts] == [False] * 5 + [True]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merged(part)
    whole = engine.generate(PROMPT, params(logprobs=1), request_id=merged.request_id)
    assert merged == whole


def test_parts_of_two_requests_do_not_merge(engine: Any) -> None:
    one, two = engine.generate(PROMPT, params()), engine.generate(PROMPT, params())
    with pytest.raises(InvalidInput, match="does not go on"):
        one.merged(two)


def test_leaving_a_stream_or_cancelling_aborts_the_request(engine: Any) -> None:
    engine.pause("keep").result(60)

    async def leave() -> None:
        task = asyncio.create_task(engine.generate_async(PROMPT, params(max_tokens=80)))
        while not await asyncio.to_thread(lambda: engine.describe().waiting):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        while await asyncio.to_thread(lambda: engine.describe().waiting):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(leave(), 60))
    engine.resume()


@pytest.fixture
def to_version(engine: Any, models: Any, tmp_path: Path) -> Callable[[int], None]:
    versions = Versions(models("qwen3", marker=True), tmp_path)
    base = versions.weights["default"]

    def go(k: int) -> None:
        engine.pause("keep", clear_cache=False).result(60)
        versions.refit(engine, marker_weights(base, k), label=f"v{k}", version=k)
        engine.resume()

    return go


def test_a_session_of_streamed_inputs_has_spans_over_all_its_output(
    engine: Any, to_version: Callable[[int], None]
) -> None:
    """Two chunks under two versions. The context goes on with the answer but for its last token."""

    async def chunks() -> AsyncIterator[list[int]]:
        yield PROMPT
        await asyncio.to_thread(to_version, 3)
        yield [7, 8]

    async def read() -> list[Any]:
        return [part async for part in engine.stream_inputs(chunks(), params(max_tokens=4))]

    parts = asyncio.run(read())
    assert len({p.request_id for p in parts}) == 1
    assert [t for p in parts for t in p.outputs[0].token_ids] == [0] * 4 + [3] * 4
    ends = [p for p in parts if p.outputs[0].finish_reason]
    assert [p.outputs[0].weight_versions for p in ends] == [
        spans(("default", 0, 4)),
        spans(("default", 0, 4), ("v3", 4, 8)),
    ]
    assert ends[1].prompt_token_ids == (*PROMPT, 0, 0, 0, 7, 8)
    assert not any(p.finished for p in parts)


def test_an_output_merged_past_the_end_of_an_input_chunk_carries_no_stale_spans(
    engine: Any, to_version: Callable[[int], None]
) -> None:
    async def chunks() -> AsyncIterator[list[int]]:
        yield PROMPT
        await asyncio.to_thread(to_version, 3)
        yield [7, 8]

    async def read() -> list[Any]:
        return [part async for part in engine.stream_inputs(chunks(), params(max_tokens=3))]

    parts = asyncio.run(read())
    merged = parts[0]
    for count, part in enumerate(parts[1:], 2):
        merged = merged.merged(part)
        (output,) = merged.outputs
        if count == 3:
            assert output.weight_versions == spans(("default", 0, 3))
        elif count == 6:
            assert output.weight_versions == spans(("default", 0, 3), ("v3", 3, 6))
        else:
            assert (output.weight_versions, output.finish_reason) == (None, None)
        assert len(output.token_ids) == count


def test_an_aborted_answer_ends_the_session(engine: Any) -> None:
    async def chunks() -> AsyncIterator[list[int]]:
        yield PROMPT
        yield [7, 8]

    async def read() -> list[Any]:
        found = []
        async for part in engine.stream_inputs(chunks(), params(max_tokens=80), request_id="s"):
            found.append(part)
            if len(found) == 2:
                await asyncio.to_thread(engine.abort, ["s"])
        return found

    parts = asyncio.run(read())
    last = parts[-1].outputs[0]
    assert last.finish_reason == "abort"
    said = sum(len(p.outputs[0].token_ids) for p in parts)
    assert last.weight_versions == spans(("default", 0, said))


def test_a_session_refuses_what_it_cannot_do(engine: Any) -> None:
    async def nothing() -> AsyncIterator[list[int]]:
        yield PROMPT

    async def read(**sampling: Any) -> None:
        async for _ in engine.stream_inputs(nothing(), params(**sampling)):
            pass

    for sampling in ({"n": 2, "temperature": 1.0}, {"stop": ("x",)}):
        with pytest.raises(InvalidInput, match="streaming input"):
            asyncio.run(read(**sampling))


def test_tokens_are_the_same_bits_with_spans_on_and_off(models: Any, engines: Any) -> None:
    on, off = engines(models("qwen3")), engines(models("qwen3"))
    for sampling in ({}, {"temperature": 1.0, "seed": 5, "n": 2}):
        kept = on.generate(PROMPT, params(logprobs=3, **sampling), request_id="x")
        left = off.generate(PROMPT, params(logprobs=3, weight_versions=False, **sampling), request_id="x")
        for a, b in zip(kept.outputs, left.outputs, strict=True):
            assert (a.token_ids, a.logprobs, a.finish_reason) == (b.token_ids, b.logprobs, b.finish_reason)
            assert a.weight_versions is not None
            assert (b.weight_versions, b.kv_weight_versions, b.kv_recomputed_at) == (None, None, None)


def test_a_stop_on_the_very_token_of_the_swap_belongs_to_the_new_weights(
    engine: Any, models: Any, tmp_path: Path
) -> None:
    """Token 3 is the first one of version 3, and stops the request."""
    from generate_world import Collector, paused_at, start

    versions = Versions(models("qwen3", marker=True), tmp_path)
    collector = Collector()
    with paused_at(collector, 4, engine):
        start(engine, PROMPT, collector, max_tokens=20, stop_token_ids=(3,))
    versions.refit(engine, marker_weights(versions.weights["default"], 3), label="v3", version=3)
    engine.resume()
    final = collector.wait()
    assert (final.token_ids, final.finish_reason, final.stop_reason) == ((0, 0, 0, 0, 3), "stop", 3)
    assert final.weight_versions == spans(("default", 0, 4), ("v3", 4, 5))


def test_a_swap_after_the_last_token_leaves_no_trace(engine: Any, to_version: Callable[[int], None]) -> None:
    from generate_world import Collector, start

    collector = start(engine, PROMPT, Collector(), max_tokens=3)
    final = collector.wait()
    to_version(4)
    assert final.weight_versions == spans(("default", 0, 3))
