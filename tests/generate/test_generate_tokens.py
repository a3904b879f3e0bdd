"""Tokens: batched, chunked and copied rows give what transformers gives for one request alone."""

from __future__ import annotations

from typing import Any

import pytest
from generate_world import VOCAB, Collector, reference_model, reference_tokens, run, start

pytestmark = pytest.mark.torch

PROMPTS = [
    [(7 * i + 3 * j) % VOCAB for j in range(n)] for i, n in enumerate((3, 40, 1, 17, 64, 5, 2, 33, 16, 15))
]


@pytest.mark.parametrize(
    ("arch", "tie"),
    [
        ("qwen3", False),
        ("qwen3", True),
        ("llama", False),
        ("llama", True),
        ("qwen2", False),
        ("qwen3_moe", False),
    ],
)
def test_greedy_tokens_of_a_mixed_batch_equal_those_of_transformers_alone(
    arch: str, tie: bool, models: Any, engines: Any
) -> None:
    folder = models(arch, tie=tie)
    engine, model = engines(folder), reference_model(folder)
    running = [start(engine, p, max_tokens=6 + 2 * i) for i, p in enumerate(PROMPTS)]
    for i, (prompt, collector) in enumerate(zip(PROMPTS, running, strict=True)):
        final = collector.wait()
        assert list(final.token_ids) == reference_tokens(model, prompt, 6 + 2 * i)
        assert final.finish_reason == "length"


def test_n_sequences_share_one_prefill_and_draw_from_streams_of_their_own(models: Any, engines: Any) -> None:
    engine = engines(models())
    before = engine.stepper.steps
    group = Collector(3)
    start(engine, PROMPTS[3], group, n=3, temperature=1.0, seed=5, max_tokens=1)
    group.wait()
    assert engine.stepper.steps - before == 2, "17 prompt tokens in chunks of 16, once"
    alone = [run(engine, PROMPTS[3], temperature=1.0, seed=5 + i, max_tokens=12).token_ids for i in range(3)]
    group = start(engine, PROMPTS[3], n=3, temperature=1.0, seed=5, max_tokens=12)
    group.wait()
    assert [group.finals[i].token_ids for i in range(3)] == alone
    assert len(set(alone)) > 1


def test_a_seed_gives_the_same_tokens_alone_and_in_company(models: Any, engines: Any) -> None:
    engine = engines(models())
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 11, "max_tokens": 20}
    alone = run(engine, PROMPTS[0], **sampling)
    company = [start(engine, p, temperature=1.0, max_tokens=30) for p in PROMPTS[1:3]]
    assert run(engine, PROMPTS[0], **sampling).token_ids == alone.token_ids
    assert run(engine, PROMPTS[0], **{**sampling, "seed": 12}).token_ids != alone.token_ids
    for collector in company:
        collector.wait()


def test_top_k_and_top_p_keep_what_they_should() -> None:
    import torch

    from weightline.generate.sampling import SamplingParams, generator_for, sample

    row = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for params, allowed in (
        (SamplingParams(top_k=2, seed=1), {0, 1}),
        (SamplingParams(top_p=0.5, seed=1), {0}),
        (SamplingParams(top_p=0.6, seed=1), {0, 1}),
        (SamplingParams(top_k=3, top_p=0.99, seed=1), {0, 1, 2}),
        (SamplingParams(seed=1), {0, 1, 2, 3}),
    ):
        generator = generator_for(params, 0)
        assert {sample(row, params, generator) for _ in range(400)} == allowed


def test_sampling_follows_the_distribution() -> None:
    import torch

    from weightline.generate.sampling import SamplingParams, generator_for, sample

    params = SamplingParams(temperature=2.0, seed=3)
    generator = generator_for(params, 0)
    row = torch.tensor([2.0, 0.0, -2.0])
    counts = torch.zeros(3)
    for _ in range(4000):
        counts[sample(row, params, generator)] += 1
    expected = (row / 2).softmax(-1)
    assert torch.allclose(counts / 4000, expected, atol=0.03)


def test_logprobs_are_those_of_the_model_before_temperature(models: Any, engines: Any) -> None:
    import torch

    folder = models("llama")
    final = run(engines(folder), PROMPTS[1], temperature=0.7, seed=2, logprobs=3, max_tokens=10)
    model = reference_model(folder)
    context = PROMPTS[1] + list(final.token_ids)
    with torch.no_grad():
        logs = model(torch.tensor([context])).logits[0].log_softmax(-1)
    for i, (token, entry) in enumerate(zip(final.token_ids, final.logprobs, strict=True)):
        row = logs[len(PROMPTS[1]) + i - 1]
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.top[0] == (token, entry.logprob)
        best = {int(t) for t in row.topk(3).indices}
        assert {t for t, _ in entry.top} <= best | {token}
        assert len(entry.top) == 3


def test_stop_tokens_end_a_request_and_are_part_of_it(models: Any, engines: Any) -> None:
    folder = models()
    engine = engines(folder)
    free = run(engine, PROMPTS[4], max_tokens=12).token_ids
    stop = free[5]
    final = run(engine, PROMPTS[4], max_tokens=12, stop_token_ids=(stop,))
    assert final.token_ids == free[: free.index(stop) + 1]
    assert final.finish_reason == "stop"


def test_the_models_end_token_stops_unless_ignored(models: Any, engines: Any) -> None:
    folder = models("qwen3", marker=True, eos=0)
    engine = engines(folder)
    stopped = run(engine, PROMPTS[0], ignore_eos=False)
    assert (stopped.token_ids, stopped.finish_reason) == ((0,), "stop")
    assert run(engine, PROMPTS[0], ignore_eos=True).token_ids == (0,) * 8


def test_output_ends_where_the_context_is_full(models: Any, engines: Any) -> None:
    engine = engines(models(), max_model_len=24)
    final = run(engine, PROMPTS[3], max_tokens=None)
    assert len(final.token_ids) == 24 - 17
    assert final.finish_reason == "length"
    assert final.kv_weight_versions[-1].end == 23, "the last token's keys and values are never computed"


def test_a_long_prompt_does_not_hold_up_running_requests(models: Any, engines: Any) -> None:
    engine = engines(models(), prefill_tokens=8)
    early = Collector()
    late = Collector()
    seen: list[int] = []
    early.on_tokens[2] = lambda: engine.post(start_on_thread)
    late.on_tokens[1] = lambda: seen.append(early.tokens)

    def start_on_thread() -> None:
        from weightline.generate import SamplingParams
        from weightline.generate.requests import Request

        params = SamplingParams(temperature=0.0, max_tokens=2)
        prompt = tuple(PROMPTS[4])
        engine.scheduler.queue.append(
            Request(prompt, params, late, external_id="late", max_tokens=2, stop_ids=frozenset())
        )

    start(engine, PROMPTS[0], early, max_tokens=30)
    early.wait()
    late.wait()
    assert seen == [2 + 7], (
        "64 prompt tokens in chunks of 8: the running request got a token in each of the steps between"
    )


def test_a_bad_model_ends_its_requests_as_errors_and_the_next_ones_are_clean(
    models: Any, engines: Any
) -> None:
    folder = models("llama")
    engine = engines(folder)
    good = run(engine, PROMPTS[1]).token_ids
    window = engine.weights.windows["model.layers.0.self_attn.v_proj.weight"]
    kept = window.bits.copy()
    window.bits[:] = 0x7FC00000
    final = run(engine, PROMPTS[1])
    assert (final.finish_reason, final.token_ids, final.weight_versions) == ("error", (), ())
    window.bits[:] = kept
    company = [start(engine, p, max_tokens=20) for p in PROMPTS[:3]]
    assert run(engine, PROMPTS[1]).token_ids == good
    assert all(c.wait().finish_reason == "length" for c in company)
